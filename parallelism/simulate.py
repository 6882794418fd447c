"""Running a program for all devices in one process, node by node; real processes give the same bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.utils import _pytree as pytree
from tpshard.parallelism.draws import SEED, mix_seeds, step_seed
from tpshard.parallelism.mesh import Axis, Mesh
from tpshard.parallelism.node_info import Port, offset, parse_group, programs_in
from tpshard.parallelism.resharding.lower import pick, transfers, valid
from tpshard.parallelism.rules.control_flow import CONTROL_FLOW, Ranks, Run, numbers
from tpshard.parallelism.sharding import Layout, local_size

if TYPE_CHECKING:
    from tpshard.parallelism.program import Program

funcol = torch.ops._c10d_functional
ISSUING = {
    funcol.all_gather_into_tensor.default, funcol.all_reduce.default, funcol.reduce_scatter_tensor.default,
    funcol.all_to_all_single.default,
}  # fmt: skip

RANKED = (offset, transfers, valid, pick)
"""Node targets whose result depends on the rank; all other nodes are the same on every rank."""


def evaluate(target: Any, args: tuple[Any, ...], mesh: Mesh, rank: int) -> Any:
    """The value of a `RANKED` function on a rank."""
    axes = tuple(Axis(*a) for a in args[0])
    if target is offset:
        return sum(mesh.index(axis, rank) * stride for axis, stride in zip(axes, args[1]))
    if target is valid:
        return block((args[1],), Layout((axes,), grains=(args[2],)), mesh, rank)[0][1]
    if target is pick:
        return args[1][mesh.linear_index(axes, rank)]
    assert target is transfers
    _, table, length, receive = args
    me = mesh.linear_index(axes, rank)
    if receive:
        return [length if table[other] == me else 0 for other in range(len(table))]
    return [length if other == table[me] else 0 for other in range(len(table))]


def simulate(
    program: Program, global_args: Sequence[Any], seed: int | torch.Tensor | None = None
) -> list[torch.Tensor]:
    """Runs a program for all devices on their shards of the arguments, and joins the results into global tensors."""
    mesh = program.mesh
    seed = torch.initial_seed() if seed is None else seed
    arguments = [local_arguments(program, rank, global_args, seed) for rank in range(mesh.ranks)]
    results = run_lockstep(program, arguments)
    return [join(port, mesh, [result[i] for result in results]) for i, port in enumerate(program.outputs)]


@torch.no_grad()
def run_lockstep(
    program: Program,
    arguments: list[list[torch.Tensor]],
    observe: Callable[[fx.Node, list[Any], list[Any]], None] | None = None,
    ranks: Sequence[int] | None = None,
) -> list[list[torch.Tensor]]:
    """Runs a program node by node, each on all devices; returns the local results of every device.

    arguments: the local arguments of every device. observe(node, operands, results): called for every node that issues
    a collective, with the tensors of all ranks. ranks: the ranks that run the program, if not all do (as for a pipeline
    stage); arguments and results are theirs.
    """
    mesh = program.mesh
    ranks = range(mesh.ranks) if ranks is None else ranks
    last = _last_uses(program.graph)
    env: dict[fx.Node, list[Any]] = {}
    feeds = iter(range(len(program.inputs)))
    groups: dict[str, list[list[int]]] = {}
    for node in program.graph.nodes:
        if node.op == "placeholder":
            i = next(feeds)
            env[node] = [of_rank[i] for of_rank in arguments]
        elif node.op == "get_attr":
            env[node] = [program.constants[str(node.target)]] * len(ranks)
        elif node.op == "output":
            flat = [o for o in node.args[0] if isinstance(o, fx.Node)]  # type: ignore[union-attr]
            return [[env[o][i] for o in flat] for i in range(len(ranks))]
        elif node.target in RANKED:
            env[node] = [evaluate(node.target, node.args, mesh, rank) for rank in ranks]
        elif node.target in CONTROL_FLOW:
            env[node] = _run_bodies(node, env, observe, ranks)
        else:
            env[node] = _run(node, env, mesh, groups, ranks)
            if observe is not None and node.target in ISSUING:
                observe(node, env[node.args[0]], env[node])  # type: ignore[index]
        for dead in last.get(node, ()):
            env.pop(dead, None)
    raise AssertionError("a program ends in an output")


def _run_bodies(
    node: fx.Node, env: dict[fx.Node, list[Any]], observe: Callable[[fx.Node, list[Any], list[Any]], None] | None,
    ranks: Sequence[int],
) -> Ranks:  # fmt: skip
    """Runs control flow, each node of its bodies on all devices."""

    def lockstep(body: Any) -> Run:
        return lambda arguments: run_lockstep(body, arguments, observe, ranks)

    operands = [env[arg] for arg in node.args if isinstance(arg, fx.Node)]
    arguments = [[values[i] for values in operands] for i in range(len(ranks))]
    return node.target(list(map(lockstep, programs_in(node))), numbers(node.args), arguments)  # type: ignore[operator]


def _last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """The operands of each node that no later node reads."""
    read: set[fx.Node] = set()
    out: dict[fx.Node, list[fx.Node]] = {}
    for node in reversed(graph.nodes):
        for operand in node.all_input_nodes:
            if operand not in read:
                read.add(operand)
                out.setdefault(node, []).append(operand)
    return out


def _run(
    node: fx.Node, env: dict[fx.Node, list[Any]], mesh: Mesh, groups: dict[str, list[list[int]]], ranks: Sequence[int]
) -> list[Any]:
    def arguments(i: int) -> tuple[Any, Any]:
        return fx.node.map_arg((node.args, node.kwargs), lambda n: env[n][i])  # type: ignore[return-value]

    op = node.target
    if getattr(op, "namespace", "") != "_c10d_functional":
        out = []
        for i in range(len(ranks)):
            args, kwargs = arguments(i)
            out.append(op(*args, **kwargs))  # type: ignore[operator]
        return out
    if op is funcol.wait_tensor.default:
        return env[node.args[0]]  # type: ignore[index]
    name = str(node.args[-1])
    if name not in groups:
        place = {rank: i for i, rank in enumerate(ranks)}
        groups[name] = [[place[r] for r in group] for group in mesh.groups(parse_group(name)) if group[0] in place]
    out = [None] * len(ranks)
    for group in groups[name]:
        group_args = [arguments(i)[0] for i in group]
        for i, result in zip(group, _collective(op, group_args)):
            out[i] = result
    return out


def _collective(op: Any, group_args: list[Any]) -> list[torch.Tensor]:
    tensors = [args[0] for args in group_args]
    n = len(tensors)
    if op is funcol.all_gather_into_tensor.default:
        whole = torch.cat([t.contiguous() for t in tensors])
        return [whole] * n
    if op is funcol.all_reduce.default:
        total = combine(tensors, group_args[0][1])
        return [total] * n
    if op is funcol.reduce_scatter_tensor.default:
        parts = [t.chunk(n) for t in tensors]
        return [combine([p[i] for p in parts], group_args[0][1]) for i in range(n)]
    if op is funcol.all_to_all_single.default:
        pieces = [list(t.split(list(args[2]))) for t, args in zip(tensors, group_args)]
        return [torch.cat([pieces[source][i] for source in range(n)]) for i in range(n)]
    raise AssertionError(f"no simulation of {op}")


_REDUCTIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add, "product": torch.mul, "max": torch.maximum, "min": torch.minimum
}  # fmt: skip


def combine(tensors: Sequence[torch.Tensor], how: str) -> torch.Tensor:
    """Reduces tensors (`how`: sum, product, max or min) in their order, so that every rank gets the same bits."""
    return reduce(_REDUCTIONS[how], tensors)


# ---- global <-> local -----------------------------------------------------------------------------------------
def local_arguments(
    program: Program, rank: int, global_args: Sequence[Any], seed: int | torch.Tensor | None = None
) -> list[torch.Tensor]:
    """The local arguments of device `rank`: its shards of the tensors in `global_args`, padded where they are uneven.

    Of a sum over axes, their first device holds all and the others zeros. If the program draws random numbers, its seed
    is the last one. Raises ValueError for tensors that are not those that the program was made for.
    """
    leaves = [leaf for leaf in pytree.tree_leaves(tuple(global_args)) if isinstance(leaf, torch.Tensor)]
    own = [port for port in program.inputs if port.kind != SEED]
    if len(leaves) != len(own):
        raise ValueError(f"{len(leaves)} tensors were given to a program with {len(own)} inputs")
    for leaf, port in zip(leaves, own):
        sizes = zip(leaf.shape, port.shape) if leaf.dim() == len(port.shape) else [(0, 1)]
        if any(actual != size for dim, (actual, size) in enumerate(sizes) if dim not in port.free):
            expected = f"`{port.name}` is {list(port.shape)} in the program"
            raise ValueError(f"{expected}; a tensor {list(leaf.shape)} was given")
    parts = [_summand(leaf, port.layout, program.mesh, rank) for leaf, port in zip(leaves, own)]
    if not draws(program):
        return parts
    if isinstance(seed, torch.Tensor):
        return [*parts, seed]
    seed = _seed() if seed is None else seed
    plain = program.inputs[-1].shape == ()
    return [*parts, torch.tensor(mix_seeds(seed)) if plain else step_seed(seed, 0, 1 << 31, 0)]


def draws(program: Program) -> bool:
    """Whether a program draws random numbers, so that its last input is a seed."""
    return bool(program.inputs) and program.inputs[-1].kind == SEED


def _seed() -> int:
    """The default seed, that of the last `torch.manual_seed`. Raises ValueError if other processes may have another."""
    if (
        torch.distributed.is_available()
        and torch.distributed.is_initialized()
        and torch.distributed.get_world_size() > 1
    ):
        raise ValueError("the program draws random numbers: give `seed`, the same on every rank")
    return torch.initial_seed()


def _summand(tensor: torch.Tensor, layout: Layout, mesh: Mesh, rank: int) -> torch.Tensor:
    """One device's shard of a global tensor, in a layout that may be an unreduced sum."""
    part = cut(tensor, layout, mesh, rank)
    first = all(mesh.index(axis, rank) == 0 for axis in layout.partial)
    return part if first or layout.kind != "sum" else torch.zeros_like(part)


def cut(tensor: torch.Tensor, layout: Layout, mesh: Mesh, rank: int) -> torch.Tensor:
    """Cuts one device's shard out of a global tensor; padding is zeros."""
    for dim, axes in enumerate(layout.dims):
        for axis in axes:
            size = local_size(tensor.shape[dim], (axis,), layout.grain(dim))
            start = mesh.index(axis, rank) * size
            part = tensor.narrow(dim, min(start, tensor.shape[dim]), max(0, min(size, tensor.shape[dim] - start)))
            if part.shape[dim] < size:
                missing = list(part.shape)
                missing[dim] = size - part.shape[dim]
                part = torch.cat([part, part.new_zeros(missing)], dim)
            tensor = part
    return tensor.contiguous()


def join(port: Port, mesh: Mesh, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Joins the shards of all devices into the global tensor, and reduces what the layout leaves unreduced."""
    out, partial = parts[0].new_zeros(port.shape), port.layout.partial
    summed: set[object] = set()
    for rank in range(mesh.ranks):
        blocks = block(port.shape, port.layout, mesh, rank)
        view = out
        shard = parts[rank]
        for dim, (start, size) in enumerate(blocks):
            view = view.narrow(dim, start, size)
            shard = shard.narrow(dim, 0, size)
        summand = (blocks, tuple(mesh.index(axis, rank) for axis in partial))
        if not any(summand[1]):  # the first of its group, as a lower rank has a lower index
            view.copy_(shard)
        elif summand not in summed:
            view.copy_(combine([view, shard], port.layout.kind))
        summed.add(summand)
    return out


def block(shape: Sequence[int], layout: Layout, mesh: Mesh, rank: int) -> tuple[tuple[int, int], ...]:
    """The part of the global tensor that a device holds, without padding: (start, size) for each dim."""
    out = []
    for dim, (size, axes) in enumerate(zip(shape, layout.dims)):
        start, piece, end = 0, size, size
        for axis in axes:  # the next axis divides the padded piece, as in `cut` and `local_size`
            piece = local_size(piece, (axis,), layout.grain(dim))
            start += mesh.index(axis, rank) * piece
            end = min(end, start + piece)
        out.append((min(start, size), max(0, end - start)))
    return tuple(out)
