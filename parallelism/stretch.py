"""Building the program of a deep model from that of a shallow one with equal layers, by repeating one layer.

Capturing, propagating and partitioning would give the same for each of these layers. This is checked, not assumed: a
layer is repeated only if it and the previous one are the same program, node by node.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import fx
from tpshard.parallelism.program import INFO, Collective, Info, Port, Program, info

FEW = 4
"""The number of layers of the shallow program: the first, the last, and two between them that are compared."""
SAME, ALIKE, LAST = 1, 2, 3
"""The numbers of the compared layer, the repeated one, and the last one."""


def stretch_program(program: Program, stack: str, layers: int) -> Program | None:
    """Turns a partitioned step of `FEW` layers `stack.N`, before any pass, into that of `layers` layers.

    `layers` is at least `FEW`. Returns None if the layers between the ends differ. Values have the names of the deep
    model's program; `records` and explanations remain those of the shallow one.
    """
    try:
        return _Stretch(program, stack, layers).run()
    except _Unlike:
        return None


class _Unlike(Exception):
    """Raised where two layers differ in more than their number."""


@dataclass(frozen=True)
class _Run:
    """Consecutive nodes of the repeated layer."""

    nodes: tuple[fx.Node, ...]
    rising: bool
    """Whether layers come in ascending order, as in the forward pass."""


class _Stretch:
    """Compares the layers of a shallow program, and builds the deep one."""

    def __init__(self, program: Program, stack: str, layers: int):
        self.program, self.stack = program, stack
        self.copies = layers - FEW + 1
        self.nodes = list(program.graph.nodes)
        feeds = [node for node in self.nodes if node.op == "placeholder"]
        self.port = dict(zip(feeds, program.inputs, strict=True))
        self.layer = self._layers()
        self.twin: dict[fx.Node, fx.Node] = {}
        """The node of the repeated layer that corresponds to each node of the compared one."""
        self.back: dict[fx.Node, fx.Node] = {}
        """The node of the repeated layer that corresponds to each node of the last layer that it reads."""
        self.runs = self._runs()
        for node, other in self.twin.items():
            self._compare(node, other)
        self._check_readers()

    # ---- the layers of nodes -----------------------------------------------------------------------------------------
    def _layers(self) -> dict[fx.Node, int | None]:
        """The layer of every node, by its place, its parameter, or its operands; None outside of layers."""
        layers: dict[fx.Node, int | None] = {}
        for node in self.nodes:
            layer = info(node).place.layer if node.op == "call_function" else None
            if layer is not None and layer.stack == self.stack:
                layers[node] = layer.number
            elif node in self.port:
                number = self.port[node].name.removeprefix(f"{self.stack}.").partition(".")[0]
                own = self.port[node].name.startswith(f"{self.stack}.") and number.isdigit()
                layers[node] = int(number) if own else None
            else:
                read = {layers[operand] for operand in node.all_input_nodes} - {None}
                layers[node] = read.pop() if len(read) == 1 and node.op == "call_function" else None
        return layers

    def _runs(self) -> list[_Run]:
        """The runs of the repeated layer; each has a run of the compared layer on one side."""
        cut: list[tuple[int | None, list[fx.Node]]] = []
        for node in self.nodes:
            if not cut or cut[-1][0] != self.layer[node]:
                cut.append((self.layer[node], []))
            cut[-1][1].append(node)
        runs = []
        for i, (layer, nodes) in enumerate(cut):
            if layer != ALIKE:
                continue
            around = [cut[j][0] if 0 <= j < len(cut) else None for j in (i - 1, i + 1)]
            if SAME not in around:
                raise _Unlike
            rising = around[0] == SAME
            same = cut[i - 1 if rising else i + 1][1]
            if len(same) != len(nodes) or any(node in self.twin for node in same):
                raise _Unlike
            self.twin.update(zip(same, nodes))
            runs.append(_Run(tuple(nodes), rising))
        if len(self.twin) != sum(layer == SAME for layer in self.layer.values()):
            raise _Unlike
        return runs

    # ---- comparing two layers ----------------------------------------------------------------------------------------
    def _compare(self, node: fx.Node, other: fx.Node) -> None:
        if (node.op, node.target) != (other.op, other.target) and node.op != "placeholder":
            raise _Unlike
        if node in self.port:
            if self._port(self.port[node], SAME, ALIKE) != self.port[other]:
                raise _Unlike
        elif self._without_origin(self._info(info(node), SAME, ALIKE)) != self._without_origin(info(other)):
            raise _Unlike
        self._compare_args((node.args, node.kwargs), (other.args, other.kwargs))

    def _compare_args(self, mine: Any, theirs: Any) -> None:
        if isinstance(mine, fx.Node) and isinstance(theirs, fx.Node):
            self._compare_read(mine, theirs)
        elif isinstance(mine, (list, tuple)) and isinstance(theirs, (list, tuple)):
            if len(mine) != len(theirs):
                raise _Unlike
            for a, b in zip(mine, theirs):
                self._compare_args(a, b)
        elif isinstance(mine, Mapping) and isinstance(theirs, Mapping):
            if mine.keys() != theirs.keys():
                raise _Unlike
            for key in mine:
                self._compare_args(mine[key], theirs[key])
        elif mine != theirs:
            raise _Unlike

    def _compare_read(self, mine: fx.Node, theirs: fx.Node) -> None:
        """Compares the operands of a node and its twin: they must be equal, or correspond in the next layer."""
        layer, other = self.layer[mine], self.layer[theirs]
        if mine is theirs and layer not in (SAME, ALIKE, LAST):
            return
        if layer is None or other != layer + 1:
            raise _Unlike
        if layer == SAME and self.twin.get(mine) is not theirs:
            raise _Unlike
        if layer == ALIKE and self.back.setdefault(theirs, mine) is not mine:
            raise _Unlike
        if layer != SAME and self._specs(mine) != self._specs(theirs):
            raise _Unlike

    def _check_readers(self) -> None:
        """Checks that only neighbours and results read the repeated layer, and that no layer reads past it."""
        for node in self.nodes:
            layer = self.layer[node]
            for operand in node.all_input_nodes if node.op != "output" else ():
                away = self.layer[operand]
                if away == ALIKE and layer not in (SAME, ALIKE, LAST):
                    raise _Unlike
                if {layer, away} == {SAME, LAST} or ((layer, away) == (ALIKE, LAST) and operand not in self.back):
                    raise _Unlike

    def _specs(self, node: fx.Node) -> Any:
        return self.port[node].local if node in self.port else info(node).specs

    @staticmethod
    def _without_origin(metadata: Info) -> Info:
        """The metadata without its origin."""
        comm = metadata.comm
        if comm is not None:
            comm = replace(comm, why=(), value=tuple(map(_bare_name, comm.value)))
        return replace(metadata, origin="", comm=comm)

    # ---- the deep program --------------------------------------------------------------------------------------------
    def run(self) -> Program:
        graph = fx.Graph()
        copies: dict[tuple[fx.Node, int], fx.Node] = {}
        inputs: list[tuple[fx.Node, int]] = []
        following = {run.nodes[0]: run for run in self.runs}
        inside = {node for run in self.runs for node in run.nodes}

        def add_copy(node: fx.Node, copy: int) -> None:
            new = graph.node_copy(node, lambda operand: copies[self._read(node, operand, copy)])
            copies[node, copy] = new
            if node in self.port:
                inputs.append((node, copy))
            metadata = node.meta.get(INFO)
            if metadata is not None:
                new.meta[INFO] = self._info(metadata, *self._numbers(node, copy))

        outputs: list[tuple[int, int]] = []
        for node in self.nodes:
            if node.op == "output":
                outputs = self._outputs(node)
                results = list(node.args[0])  # type: ignore[arg-type]
                end = graph.output(tuple(copies[results[i], copy] for i, copy in outputs))
                end.meta[INFO] = Info(())
            elif node in following:
                run = following[node]
                for copy in range(self.copies) if run.rising else reversed(range(self.copies)):
                    for one in run.nodes:
                        add_copy(one, copy)
            elif node not in inside:
                add_copy(node, 0)
        at = {key: i for i, key in enumerate(inputs)}
        feeds = list(self.port)
        donated = {
            i: at[feeds[self.program.donated[k]], copy]
            for i, (k, copy) in enumerate(outputs) if k in self.program.donated
        }  # fmt: skip
        results = list(self.nodes[-1].args[0])  # type: ignore[arg-type]
        return replace(
            self.program, graph=graph, donated=donated,
            inputs=tuple(self._port(self.port[node], *self._numbers(node, copy)) for node, copy in inputs),
            outputs=tuple(
                self._port(self.program.outputs[k], *self._numbers(results[k], copy)) for k, copy in outputs
            ),
        )  # fmt: skip

    def _read(self, node: fx.Node, operand: fx.Node, copy: int) -> tuple[fx.Node, int]:
        """The copy of an operand that a node's copy reads."""
        layer, away = self.layer[node], self.layer[operand]
        if layer == ALIKE:
            if away == ALIKE:
                return operand, copy
            if away == SAME:
                return (operand, 0) if copy == 0 else (self.twin[operand], copy - 1)
            if away == LAST:
                return (operand, 0) if copy == self.copies - 1 else (self.back[operand], copy + 1)
        if away == ALIKE and layer == LAST:
            return operand, self.copies - 1
        return operand, 0

    def _outputs(self, node: fx.Node) -> list[tuple[int, int]]:
        """The results of the deep program in order: the index of each in the shallow program, and the copy."""
        layers = [self.layer[result] for result in node.args[0]]  # type: ignore[index,union-attr]
        mine = [i for i, layer in enumerate(layers) if layer == ALIKE]
        if not mine:
            return [(i, 0) for i in range(len(layers))]
        first, last = mine[0], mine[-1]
        if mine != list(range(first, last + 1)):
            raise _Unlike
        return [
            *((i, 0) for i in range(first)),
            *((i, copy) for copy in range(self.copies) for i in mine),
            *((i, 0) for i in range(last + 1, len(layers))),
        ]

    def _numbers(self, node: fx.Node, copy: int) -> tuple[int, int]:
        """The number of a node's layer in the shallow program, and that of its copy in the deep one."""
        layer = self.layer[node]
        if layer == ALIKE:
            return ALIKE, ALIKE + copy
        return (LAST, LAST + self.copies - 1) if layer == LAST else (0, 0)

    def _name(self, name: str, old: int, new: int) -> str:
        before = f"{self.stack}.{old}"
        if name != before and not name.startswith(f"{before}."):
            return name
        return f"{self.stack}.{new}{name[len(before) :]}"

    def _port(self, port: Port, old: int, new: int) -> Port:
        return replace(port, name=self._name(port.name, old, new))

    def _info(self, metadata: Info, old: int, new: int) -> Info:
        if old == new:
            return metadata
        place, comm = metadata.place, metadata.comm
        if place.layer is not None and place.layer == (self.stack, old):
            place = place._replace(module=self._name(place.module, old, new), layer=place.layer._replace(number=new))
        if comm is not None:
            comm = self._rename(comm, old, new)
        return replace(metadata, place=place, comm=comm)

    def _rename(self, comm: Collective, old: int, new: int) -> Collective:
        return replace(comm, value=tuple(self._name(name, old, new) for name in comm.value))


def _bare_name(name: str) -> str:
    """The name of a parameter or an activation; "" for a value named after its operation, which has another number."""
    return name if "." in name else ""
