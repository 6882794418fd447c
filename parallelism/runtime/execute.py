"""Executing a `Program` on this rank: runs its graph; collectives run asynchronously until their waits."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Sequence
from functools import cache
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx
from tpshard.parallelism.node_info import programs_in
from tpshard.parallelism.pricing.fusion import Compiled, compiled_as
from tpshard.parallelism.program import Collective, Program, info
from tpshard.parallelism.resharding.exchange import runs_as_exchange
from tpshard.parallelism.resharding.lower import is_first
from tpshard.parallelism.rules.control_flow import numbers
from tpshard.parallelism.rules.table import entry_of
from tpshard.parallelism.runtime.compiled import compile_graph
from tpshard.parallelism.runtime.context import Context
from tpshard.parallelism.runtime.gloo import all_gather
from tpshard.parallelism.runtime.host_copies import host_copies
from tpshard.parallelism.runtime.mail import Mail, positions
from tpshard.parallelism.runtime.regions import box, with_blocks
from tpshard.parallelism.runtime.step_profile import StepProfile
from tpshard.parallelism.runtime.watchdog import Doing, as_doing
from tpshard.parallelism.sharding import show_axis
from tpshard.parallelism.simulate import RANKED, combine, evaluate
from tpshard.parallelism.transfer import HOST_COPIES, recv, send

aten = torch.ops.aten
funcol = torch.ops._c10d_functional

COMPUTING = Doing("computing")


class Executor:
    """Runs this rank's part of a program.

    `executor(*inputs)` takes the local tensors of `program.inputs` and returns those of `program.outputs`, in order.
    Results overwrite the inputs that are donated to them; other results are new tensors.

    On a CPU reduce-scatters and small all-reduces are sent as an all-to-all and summed locally, in rank order (see
    `parallelism.resharding.exchange`); `exchange=False` leaves them to the backend. `compiled`: "all" compiles the
    whole graph, or pieces of one with control flow, "layers" its layers (see `regions`), "none" nothing, "auto" what
    suits its size. `mail` sends and receives for a pipeline stage: at the graph's nodes, or for a compiled graph before
    and after it.
    """

    def __init__(
        self, program: Program, context: Context, *, exchange: bool | None = None, compiled: Compiled = "none",
        mail: Mail | None = None,
    ):  # fmt: skip
        self.program, self.context, self.mail = program, context, mail
        self.waited_s = 0.0
        """Seconds spent waiting for collectives; waits on a CUDA device are not included."""
        context.groups.ensure(comm.refs for comm in program.collectives if comm.kind not in ("send", "recv"))
        context.watchdog.describe = describe
        if exchange is None:
            exchange = context.device.type == "cpu"
        compiled = compiled_as(program, compiled)
        whole = compiled == "all"
        self.module = localize(program, context.rank, context.device, None if whole else self.wait, exchange,
                               self.transfer if mail is not None and not whole else None)  # fmt: skip
        if compiled in ("layers", "pieces"):
            self.module = with_blocks(self.module, rest=compiled == "pieces")
        self.received, self.sent = positions(program) if mail is not None and whole else ((), ())
        self.run: Callable[..., list[Tensor]] | None = None if whole else self.module
        """The function of the rank; None before the first call, which compiles it for tensors like its inputs."""
        self.profile: StepProfile | None = None
        """What records the operations of each call; None where nothing does."""
        self.part = ""
        """The program's part of a step, as in plans."""

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        with torch.no_grad():
            for i, node in self.received:
                self.transfer(inputs[i], node)
            if self.run is None:
                run = compile_graph(self.module, inputs)
                self.run = lambda *tensors: run(box(*tensors))
            if self.profile is None:
                results = self.run(*inputs)
            else:
                graph = self.module if self.run is self.module else None
                results = self.profile.run(graph, self.run, self.part, inputs)
            for i, node in self.sent:
                self.transfer(results[i], node)
            return results

    def transfer(self, value: Tensor, node: fx.Node) -> Tensor:
        """Starts to send a value, or waits for a received one; the watchdog can name what it waits for."""
        assert self.mail is not None
        if node.target is send:
            return self.mail.start(value, node)
        mail = self.mail
        return self._watch_wait(node, lambda: mail.wait(value))

    def wait(self, started: Tensor, node: fx.Node) -> Tensor:
        """Waits for a collective, which the watchdog can name."""
        return self._watch_wait(node, lambda: funcol.wait_tensor.default(started))

    def _watch_wait(self, node: fx.Node, wait: Callable[[], Tensor]) -> Tensor:
        """Runs a wait, counts its seconds, and lets the watchdog know the node that it is for."""
        self.context.watchdog.doing = node
        begun = time.perf_counter()
        done = wait()
        ended = time.perf_counter()
        self.waited_s += ended - begun
        if self.profile is not None:
            comm = info(node).comm
            self.profile.waited(node, begun, ended, over(comm) if comm is not None else "stages")
        self.context.watchdog.progress += 1
        self.context.watchdog.doing = COMPUTING
        if (outstanding := self.context.watchdog.outstanding) is not None:
            outstanding.add(node)
        return done


def describe(doing: object) -> Doing:
    """Converts the watchdog's `doing` (a node that is waited for, or a `Doing`) to a `Doing` with text for a report."""
    if isinstance(doing, fx.Node):
        metadata = info(doing)
        if metadata.comm is not None:
            moved = ", ".join(metadata.comm.value) or metadata.origin
            action = f"{metadata.comm.kind} over {over(metadata.comm)} ({moved})"
            return Doing(action, metadata.module or "the step", waiting=True)
        return Doing(str(doing.target), metadata.module)
    return as_doing(doing)


def over(comm: Collective) -> str:
    """The axes of a collective as text: `fsdp, tp`."""
    return ", ".join(show_axis(axis) for axis in comm.refs)


def localize(
    program: Program,
    rank: int,
    device: torch.device,
    wait: Callable[[Tensor, fx.Node], Tensor] | None,
    exchange: bool,
    transfer: Callable[[Tensor, fx.Node], Tensor] | None = None,
) -> fx.GraphModule:
    """Specializes a program's graph for one rank and a device.

    Numbers that depend on the rank become constants; waits call `wait`, sends and receives call `transfer`. Without
    `wait` the graph is for a compiler: waits are unchanged, and nothing is done in place. Without `transfer` it neither
    sends nor receives. exchange: whether some collectives run as an all-to-all (see `parallelism.resharding.exchange`).
    """
    graph = fx.Graph()
    local: dict[fx.Node, Any] = {}
    in_place = _in_place(program) if wait is not None else {}
    overwritten = _overwrites(program, in_place) if wait is not None else {}
    for node in program.graph.nodes:
        if node.op == "call_function" and node.target in RANKED:
            local[node] = evaluate(node.target, node.args, program.mesh, rank)
            continue
        if node.target is is_first:  # of a number that is known here
            local[node] = is_first(*fx.map_arg(node.args, local.__getitem__))
            continue
        if node.op == "output":
            graph.output([o for o in fx.map_arg(node.args[0], lambda n: local[n]) if o is not None])
            continue
        if inside := programs_in(node):
            parts = [localize(body, rank, device, wait, exchange, transfer) for body in inside]
            operands = tuple(local[arg] for arg in node.args if isinstance(arg, fx.Node))
            local[node] = graph.call_function(_bind_bodies(node, parts), operands)
            continue
        if node.op == "call_function" and node.target in (send, recv):
            value = local[node.args[0]]  # type: ignore[index]
            local[node] = value if transfer is None else graph.call_function(_bind(transfer, node), (value,))
            continue
        if node.op == "call_function" and node.target is funcol.wait_tensor.default:
            local[node] = _localize_wait(graph, node, local, wait, exchange)
            continue
        if node.target is getitem and node.args[0] in in_place:
            local[node] = local[in_place[node.args[0]][node.args[1]]]  # type: ignore[index]
            continue
        if node.target in HOST_COPIES and device.type == "cuda":
            target = getattr(host_copies(device), node.target.__name__)  # type: ignore[union-attr]
            local[node] = graph.call_function(target, fx.map_arg(node.args, local.__getitem__))
            continue
        copy = graph.node_copy(node, lambda n: local[n])
        local[node] = copy
        if "device" in copy.kwargs or _creates(copy):
            copy.kwargs = {**copy.kwargs, "device": device}
        if node in in_place:
            copy.target = in_place_form(node.target)
        if info(node).comm is not None:
            copy.meta["program_node"] = node
            _localize_issue(graph, copy, exchange)
            if device.type == "cpu" and copy.target is funcol.all_gather_into_tensor.default:
                copy.target = all_gather
        if node in overwritten:
            storage = local[overwritten[node]]
            local[node] = graph.call_function(aten.copy_.default, (storage, copy))
    graph.lint()
    constants = {name: tensor.to(device) for name, tensor in program.constants.items()}
    return fx.GraphModule(constants, graph)


def _creates(node: fx.Node) -> bool:
    """Whether a node calls an op that makes a tensor from numbers alone, on the device that its `device` says.

    Such an op says no device where a program was captured or lowered, and would then run on the CPU.
    """
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    arguments = node.target._schema.arguments
    return any(a.name == "device" for a in arguments) and not any("Tensor" in str(a.type) for a in arguments)


def _localize_issue(graph: fx.Graph, node: fx.Node, exchange: bool) -> None:
    """Makes the input of a collective contiguous, and turns some collectives into an all-to-all."""
    source = node.args[0]
    exchange = exchange and _is_exchange(node)
    with graph.inserting_before(node):
        if exchange and node.target is funcol.all_reduce.default:
            packed = graph.call_function(copies, (source, _members(node)))
        else:
            packed = graph.call_function(aten.contiguous.default, (source,))
        node.args = (packed, *node.args[1:])
        if exchange:
            pieces = graph.call_function(piece_sizes, (packed, _members(node)))
            node.target = funcol.all_to_all_single.default
            node.args = (packed, pieces, pieces, node.args[-1])


def _members(node: fx.Node) -> int:
    comm = info(node).comm
    assert comm is not None, "only what issues a collective has members"
    return comm.size


def _is_exchange(node: fx.Node) -> bool:
    comm = info(node).comm
    return comm is not None and runs_as_exchange(comm.kind, comm.bytes, comm.size)


def _localize_wait(
    graph: fx.Graph, node: fx.Node, local: dict[fx.Node, Any], wait: Callable[[Tensor, fx.Node], Tensor] | None,
    exchange: bool,
) -> fx.Node:  # fmt: skip
    started = node.args[0]
    assert isinstance(started, fx.Node)
    target = funcol.wait_tensor.default if wait is None else _bind(wait, started)
    done = graph.call_function(target, (local[started],))
    if exchange and _is_exchange(started):
        done = graph.call_function(reduce_pieces, (done, _members(started), started.args[1]))
        if started.target is funcol.all_reduce.default:
            done = graph.call_function(aten.reshape.default, (done, list(info(started).specs[0].shape)))
    return done


def _bind(function: Callable[[Tensor, fx.Node], Tensor], node: fx.Node) -> Callable[[Tensor], Tensor]:
    """`function` with its node bound: a function of a tensor alone, which has a name as graphs require."""

    def bound(tensor: Tensor) -> Tensor:
        return function(tensor, node)

    return bound


def _bind_bodies(node: fx.Node, parts: Sequence[fx.GraphModule]) -> Callable[..., list[Tensor]]:
    """Control flow as a function of its operands on this rank."""
    flow: Any = node.target
    runs = [lambda ranks, part=part: [list(part(*ranks[0]))] for part in parts]

    def bound(*operands: Tensor) -> list[Tensor]:
        return flow(runs, numbers(node.args), [list(operands)])[0]  # type: ignore[no-any-return]

    return bound


def piece_sizes(tensor: Tensor, count: int) -> list[int]:
    """Lengths of `count` equal pieces of dim 0."""
    return [tensor.shape[0] // count] * count


def copies(tensor: Tensor, count: int) -> Tensor:
    """Returns `count` copies of a flattened tensor of n elements, one for each rank: [...] -> [count * n]"""
    return tensor.reshape(1, -1).expand(count, -1).reshape(-1)


def reduce_pieces(tensor: Tensor, count: int, how: str) -> Tensor:
    """Reduces the pieces of all ranks in rank order, like the simulation: [count * n, ...] -> [n, ...]"""
    return combine(tensor.chunk(count), how)


@cache
def in_place_form(target: Any) -> Any:
    """The op that writes the results of another over its operands: `add_` for `add`; None if there is none."""
    if not isinstance(target, torch._ops.OpOverload):
        return None
    packet = getattr(getattr(torch.ops, target.namespace), f"{target.overloadpacket.__name__}_", None)
    form = getattr(packet, target._overloadname, None)
    same = form is not None and [a.name for a in form._schema.arguments] == [a.name for a in target._schema.arguments]
    return form if same and entry_of(target).view is None else None


def _in_place(program: Program) -> dict[fx.Node, list[fx.Node]]:
    """The operations that can be done in place, each with the donated inputs that its results overwrite, in order.

    Nothing else reads these inputs, and every result of the operation is the output to which its input is donated.
    """
    feeds = [node for node in program.graph.nodes if node.op == "placeholder"]
    outputs = _results(program.graph)
    donor = {outputs[output]: feeds[source] for output, source in program.donated.items()}
    in_place = {}
    for node in program.graph.nodes:
        form = in_place_form(node.target) if node.op == "call_function" else None
        if form is None or node.kwargs:
            continue
        operands = [node.args[i] for i, argument in enumerate(form._schema.arguments) if _is_written(argument)]
        results = [node] if len(operands) == 1 else sorted(node.users, key=lambda user: user.args[1])
        if [donor.get(result) for result in results] != operands:
            continue
        alike = all(info(result).specs == info(operand).specs for result, operand in zip(results, operands))
        if alike and all(list(x.users) == [node] and node.args.count(x) == 1 for x in operands):
            in_place[node] = operands
    return in_place


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _overwrites(program: Program, in_place: Container[fx.Node]) -> dict[fx.Node, fx.Node]:
    """The results that overwrite a donated input after its last reader, such as new weights over old ones.

    An update then needs no second copy of all parameters and moments.
    """
    feeds = [node for node in program.graph.nodes if node.op == "placeholder"]
    position = {node: i for i, node in enumerate(program.graph.nodes)}
    results = _results(program.graph)
    overwritten = {}
    for output, source in program.donated.items():
        node, feed = results[output], feeds[source]
        if node.op != "call_function" or node in in_place or info(node).specs[0] != info(feed).specs[0]:
            continue
        still_read = any(position[user] > position[node] or _is_view(user) for user in feed.users)
        if not still_read and not _is_view(node):
            overwritten[node] = feed
    return overwritten


def _is_view(node: fx.Node) -> bool:
    """Whether a node's result shares an input's storage."""
    return entry_of(node.target).view is not None


def _results(graph: fx.Graph) -> Sequence[Any]:
    (output,) = (node for node in graph.nodes if node.op == "output")
    return [o for o in output.args[0] if isinstance(o, fx.Node)]  # type: ignore[union-attr]
