"""Cutting the program of a training step into pipeline stages at the boundaries of layers.

The whole step is captured, propagated and partitioned once, as if every device held all layers. Each stage then gets
the nodes of its layers, with separate programs for forward and backward. Values that cross a cut are sent; values of
the forward pass that the backward pass reads are saved. A stage's programs run on the devices with its index on the
pipeline's axis.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import fx
from tpshard.parallelism.draws import SEED
from tpshard.parallelism.mesh import Axis
from tpshard.parallelism.passes.recompute import layer_of
from tpshard.parallelism.pricing.flow import info_of
from tpshard.parallelism.program import INFO, Info, Port, Program, Spec, info, make_collective
from tpshard.parallelism.resharding.new_nodes import copy_node
from tpshard.parallelism.rules.table import entry_of
from tpshard.parallelism.sharding import local_shape, replicated
from tpshard.parallelism.simulate import RANKED
from tpshard.parallelism.transfer import recv, send
from tpshard.parallelism.why import Demand, Through

aten = torch.ops.aten
Run = Literal["F", "B", "I", "W"]
MANY = -1
"""The index of a node with several results."""


@dataclass(frozen=True)
class Stage:
    """The programs of one stage. An output of one program is the input of the same name of another.

    Inputs of kind `received` come from the previous stage (in `backward` from the next one), those of kind `saved` from
    an earlier program of the same stage. Outputs have the kinds `sent` and `saved`.
    """

    index: int
    blocks: tuple[str, ...]
    """Its layers: `layers.0`, ..."""
    forward: Program
    """In a step without stages, forward and backward."""
    backward: tuple[Program, ...]
    """One program; two if gradients of inputs and of weights are separate; none without training."""

    @property
    def programs(self) -> tuple[Program, ...]:
        return (self.forward, *self.backward)

    @property
    def parameters(self) -> list[str]:
        """The parameters of its programs, in the order of the whole program."""
        names = (p.name for program in self.programs for p in program.inputs if p.kind == "parameter")
        return list(dict.fromkeys(names))


def blocks_of(program: Program) -> list[str]:
    """The repeated layers of a program in execution order: `layers.0`, `layers.1`, ..."""
    layers = (_block_of(n) for n in program.graph.nodes if n.op == "call_function" and info(n).phase == "forward")
    return list(dict.fromkeys(block for block in layers if block))


def cut(program: Program, axis: Axis, layers: Sequence[int], *, split_backward: bool = False) -> tuple[Stage, ...]:
    """Cuts a program into stages, after recomputation and before bucketing and scheduling.

    layers: how many of `blocks_of` each stage has; earlier operations belong to the first stage, later ones to the
    last. axis: the mesh axis of the stages, which shards nothing in the program. Raises ValueError if a stage would
    read a value that a later one computes.
    """
    blocks = blocks_of(program)
    if sum(layers) != len(blocks):
        raise ValueError(f"{list(layers)} are {sum(layers)} layers, but the program has {len(blocks)}")
    stage_of: dict[str, int] = {}
    parts = []
    for stage, count in enumerate(layers):
        stage_blocks = tuple(blocks[len(stage_of) : len(stage_of) + count])
        stage_of.update(dict.fromkeys(stage_blocks, stage))
        parts.append(stage_blocks)
    return _Cutter(program, axis, stage_of, len(layers), split_backward).run(parts)


class _Home(NamedTuple):
    """The stages in which a node is computed."""

    run: Run
    stages: tuple[int, ...]
    """One stage; several for the sum of a gradient to which several stages contribute."""


@dataclass
class _Part:
    """The nodes of one program of one stage, and the values that it receives, sends and saves."""

    run: Run
    stage: int
    own: list[fx.Node]
    nodes: set[fx.Node] = field(default_factory=set)
    """Its nodes, including recomputed ones."""
    reads: set[fx.Node] = field(default_factory=set)
    """The values that it reads and other programs compute."""
    received: list[fx.Node] = field(default_factory=list)
    sent: list[fx.Node] = field(default_factory=list)
    saved: list[fx.Node] = field(default_factory=list)


class _Cutter:
    """Assigns every node to a stage, finds the values that cross cuts, and builds the programs."""

    def __init__(self, program: Program, axis: Axis, stage_of: Mapping[str, int], stages: int, split: bool):
        self.program, self.axis, self.stage_of, self.stages = program, axis, stage_of, stages
        self.nodes = _live(program.graph)
        feeds = [n for n in program.graph.nodes if n.op == "placeholder"]
        self.port = dict(zip(feeds, program.inputs, strict=True))
        output = self.nodes[-1]
        self.results = [o for o in output.args[0] if isinstance(o, fx.Node)]  # type: ignore[union-attr]
        self.floating = self._floating()
        self.home: dict[fx.Node, _Home] = {}
        for node in self.nodes[:-1]:
            if node not in self.floating:
                self.home[node] = self._home_of(node)
        trained = any(home.run != "F" for home in self.home.values())
        self.runs: tuple[Run, ...] = ("F",) if not trained else ("F", "I", "W") if split else ("F", "B")
        if split:
            self._split()

    # ---- where nodes belong ------------------------------------------------------------------------------------------
    def _floating(self) -> set[fx.Node]:
        """Finds inputs, and values computed only from the batch, only from parameters, or only from gradient sums.

        They belong to no stage, and are computed wherever they are read.
        """
        kinds: dict[fx.Node, str] = {}
        for node in self.nodes[:-1]:
            if node in self.port:
                kinds[node] = self.port[node].kind
                continue
            read = {kinds.get(n, "") for n in node.all_input_nodes} - {"constant"}
            if len(read) <= 1 and "" not in read:
                kinds[node] = next(iter(read), "constant")
        return set(kinds)

    def _home_of(self, node: fx.Node) -> _Home:
        """The stage of a node: its layer's, else that of its latest forward or its earliest backward operand."""
        phase, block = info(node).phase, _block_of(node)
        before = [self.home[n] for n in node.all_input_nodes if n in self.home]
        run: Run = "F" if phase == "forward" else "B"
        if block:
            return _Home(run, (self.stage_of[block],))
        behind = [home.stages for home in before if home.run == "B"]
        if phase != "backward" or not behind:
            return _Home(run, (max((home.stages[-1] for home in before), default=0),))
        summed = self._is_sum(node)
        if summed and node.target is aten.add.Tensor:
            return _Home(run, tuple(sorted({stage for stages in behind for stage in stages})))
        return _Home(run, min(behind) if summed else min(behind)[:1])

    def _is_sum(self, node: fx.Node) -> bool:
        """Whether a node only adds parts of one parameter's gradient, or carries their sum to its storage.

        Each contributing stage can then sum its own part.
        """
        current = node
        if node.target is not aten.add.Tensor and len(node.all_input_nodes) != 1:
            return False
        while len(current.users) == 1:
            user = next(iter(current.users))
            if user.op == "output":
                return True
            adds = user.target is aten.add.Tensor
            stored = adds and any(n in self.floating and n in self.port for n in user.all_input_nodes)
            if not (stored or len(user.all_input_nodes) == 1 or (adds and layer_of(user) is None)):
                return False
            current = user
        return False

    def _split(self) -> None:
        """Divides the backward nodes into `W`, which lead only to one parameter's gradient and can wait, and `I`."""
        reach: dict[fx.Node, int] = {}
        for i, result in enumerate(self.results):
            reach[result] = i if result not in reach else MANY
        for node in reversed(self.nodes[:-1]):
            home = self.home.get(node)
            for operand in node.all_input_nodes:
                operand_home = self.home.get(operand)
                if home is None or operand_home is None:
                    continue
                to = reach.get(node, MANY) if set(home.stages) & set(operand_home.stages) else MANY
                reach[operand] = to if reach.get(operand, to) == to else MANY
        for node, home in self.home.items():
            if home.run == "B" and node.target is operator.getitem:  # one of several results of an op
                self.home[node] = self.home[node.all_input_nodes[0]]
            elif home.run == "B":
                self.home[node] = home._replace(run="I" if reach.get(node, MANY) == MANY else "W")

    # ---- what crosses ------------------------------------------------------------------------------------------------
    def run(self, blocks: Sequence[tuple[str, ...]]) -> tuple[Stage, ...]:
        parts: dict[tuple[Run, int], _Part] = {}
        for stage in range(self.stages):
            for run in self.runs:
                own = [n for n, home in self.home.items() if home.run == run and stage in home.stages]
                part = parts[run, stage] = _Part(run, stage, own)
                if run == "F" and stage == self.stages - 1:
                    own += [n for n in self.results if n in self.floating]  # such as the number of tokens
                self._close(part, parts.get(("F", stage)))
        self._connect(parts)
        stages = []
        for stage in range(self.stages):
            programs = [self._program(parts[run, stage]) for run in self.runs]
            stages.append(Stage(stage, blocks[stage], programs[0], tuple(programs[1:])))
        return tuple(stages)

    def _operands(self, node: fx.Node, stage: int) -> list[fx.Node]:
        """The operands of a node on a stage; of the parts of a gradient, only those of that stage."""
        home = self.home.get(node)
        if home is None or len(home.stages) == 1:
            return node.all_input_nodes
        return [n for n in node.all_input_nodes if n not in self.home or stage in self.home[n].stages]

    def _close(self, part: _Part, forward: _Part | None) -> None:
        """Determines the nodes that a part recomputes, and the values it reads from others."""
        part.nodes.update(part.own)
        stack = list(part.own)
        while stack:
            for operand in self._operands(stack.pop(), part.stage):
                if operand in part.nodes or operand in part.reads:
                    continue
                saved = part.run != "F" and forward is not None and operand in forward.nodes
                floats = operand in self.floating and operand.op == "call_function" and operand.target not in RANKED
                again = operand.op == "get_attr" or operand.target in RANKED or _is_whole_view(operand)
                if operand not in self.port and (again or (floats and not saved)):
                    part.nodes.add(operand)
                    stack.append(operand)
                else:
                    part.reads.add(operand)

    def _connect(self, parts: Mapping[tuple[Run, int], _Part]) -> None:
        """Determines what each program sends, receives and saves.

        Values read on another stage pass through all stages between. Forward values that the backward pass of the same
        stage reads are saved.
        """
        back: Run = self.runs[1] if len(self.runs) > 1 else "F"
        crossing: dict[tuple[Run, int], set[fx.Node]] = {}
        keeping: dict[tuple[Run, int], set[fx.Node]] = {}
        for (run, stage), part in parts.items():
            for node in part.reads:
                if node in self.port:
                    continue
                home = self.home.get(node)
                source = _Home("F", (stage,)) if home is None else home
                (start,) = source.stages
                carrier: Run = "F" if source.run == "F" else back
                if start > stage if carrier == "F" else start < stage:
                    raise ValueError(
                        f"`{info(node).origin}` of stage {start} is read on stage {stage}: a pipeline's stages pass "
                        f"values on in one direction"
                    )
                way = range(start, stage) if carrier == "F" else range(start, stage, -1)
                for sender in way:
                    crossing.setdefault((carrier, sender), set()).add(node)
                if run != carrier or (start == stage and source.run != run):
                    held: Run = carrier if start != stage else source.run
                    keeping.setdefault((held, stage), set()).add(node)
        step = {"F": 1, back: -1 if back != "F" else 1}
        for (run, stage), part in parts.items():
            part.sent = sorted(crossing.get((run, stage), ()))
            if run in step:
                part.received = sorted(crossing.get((run, stage - step[run]), ()))
            part.saved = sorted(keeping.get((run, stage), ()))

    # ---- programs ----------------------------------------------------------------------------------------------------
    def _program(self, part: _Part) -> Program:
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        order = {kind: i for i, kind in enumerate(("parameter", "gradient", "batch", SEED))}
        inputs: list[Port] = []

        def feed(node: fx.Node, port: Port) -> None:
            copies[node] = graph.placeholder(node.name)
            spec = Spec(port.local, port.dtype)
            copies[node].meta[INFO] = Info((spec,), origin=port.name)
            inputs.append(port)

        ports_read = [node for node in self.port if node in part.reads]
        for node in sorted(ports_read, key=lambda n: order.get(self.port[n].kind, len(order))):
            feed(node, self.port[node])
        for node in part.received:
            feed(node, self._port(node, "received"))
        for node in sorted(part.reads.difference(ports_read, part.received)):
            feed(node, self._port(node, "saved"))
        sends: dict[fx.Node, fx.Node] = {}
        for node in part.received:
            copies[node] = self._transfer(graph, recv, copies[node], node, part)
        for node in part.received:
            if node in part.sent:
                sends[node] = self._transfer(graph, send, copies[node], node, part)
        for node in self.nodes:
            if node not in part.nodes:
                continue
            operands = self._operands(node, part.stage)
            if len(operands) < len(node.all_input_nodes):
                copies[node] = copies[operands[0]]
                continue
            copies[node] = copy_node(graph, node, copies.__getitem__)
            if node in part.sent:
                sends[node] = self._transfer(graph, send, copies[node], node, part)
        return self._finish(part, graph, copies, sends, inputs)

    def _finish(
        self, part: _Part, graph: fx.Graph, copies: Mapping[fx.Node, fx.Node], sends: Mapping[fx.Node, fx.Node],
        inputs: Sequence[Port],
    ) -> Program:  # fmt: skip
        names = {port.name: i for i, port in enumerate(inputs)}
        outputs: list[tuple[fx.Node, Port]] = []
        donated: dict[int, int] = {}
        own = set(part.own)
        for i, (result, port) in enumerate(zip(self.results, self.program.outputs, strict=True)):
            if result not in own:
                continue
            if i in self.program.donated:
                donated[len(outputs)] = names[port.name]
            outputs.append((copies[result], port))
        outputs += [(sends[node], self._port(node, "sent")) for node in part.sent]
        outputs += [(copies[node], self._port(node, "saved")) for node in part.saved]
        end = graph.output(tuple(node for node, _ in outputs))
        end.meta[INFO] = Info(())
        whole = self.program
        used = {node.target for node in graph.nodes if node.op == "get_attr"}
        constants = {name: tensor for name, tensor in whole.constants.items() if name in used}
        return Program(
            whole.mesh, graph, tuple(inputs), tuple(port for _, port in outputs), whole.records, donated, constants,
            reasons=whole.reasons,
        )  # fmt: skip

    def _transfer(self, graph: fx.Graph, target: Any, value: fx.Node, node: fx.Node, part: _Part) -> fx.Node:
        source = info(node)
        (spec,) = source.specs
        ahead = (part.run == "F") == (target is send)
        other = part.stage + (1 if ahead else -1)
        op = Through(source.origin, str(getattr(node.target, "__name__", node.target)), source.module)
        demand = Demand("sent" if target is send else "received", op, node.name, stage=other)
        moved = graph.call_function(target, (value, other - part.stage))
        comm = make_collective(
            self.program.mesh, "send" if target is send else "recv", (self.axis,), spec.bytes, spec.dtype,
            why=(demand,), value=(node.name,), of="activation",
        )  # fmt: skip
        moved.meta[INFO] = Info((spec,), source.origin, source.place, comm=comm)
        return moved

    def _port(self, node: fx.Node, kind: str) -> Port:
        """The port of a value; where its layout is not that of its record, the port describes only a device's shard."""
        (spec,) = info(node).specs
        record = self.program.records.get(info(node).origin)
        if record is not None and not record.layout.partial and local_shape(record.shape, record.layout) == spec.shape:
            return Port(node.name, record.shape, spec.dtype, record.layout, kind)
        return Port(node.name, spec.shape, spec.dtype, replicated(len(spec.shape)), kind)


def _block_of(node: fx.Node) -> str:
    """The layer of a node; "" outside of layers."""
    layer = layer_of(node)
    return "" if layer is None else str(layer)


def _live(graph: fx.Graph) -> list[fx.Node]:
    """The nodes whose results are read, in order."""
    needed: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.op in ("output", "placeholder") or node in needed:
            needed.add(node)
            needed.update(node.all_input_nodes)
    return [node for node in graph.nodes if node in needed]


def _is_whole_view(node: fx.Node) -> bool:
    """Whether a node is a view of its whole operand. Such a view is repeated where it is read, and never sent."""
    if node.op != "call_function" or entry_of(node.target).view is None or len(node.all_input_nodes) != 1:
        return False
    source = info_of(node.all_input_nodes[0])
    if source.comm is not None or len(source.specs) != 1 or len(info_of(node).specs) != 1:
        return False
    return math.prod(source.specs[0].shape) <= math.prod(info_of(node).specs[0].shape)
