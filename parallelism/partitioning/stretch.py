"""Builds the program of a deep model from that of a shallow one, by repeating one block of layers.

Equal blocks need not each be captured, propagated and partitioned. A block is repeated only if it and the previous one
are the same program, node by node.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from torch import fx
from torch.utils import _pytree as pytree
from tpshard.parallelism.depth import COMPARED, LAST, REPEATED, Depth
from tpshard.parallelism.partitioning.reasons import PropagatedReasons
from tpshard.parallelism.program import INFO, Info, Port, Program, ValueRecord, info
from tpshard.parallelism.resharding.lower import is_first
from tpshard.parallelism.resharding.new_nodes import copy_node, identifier


def stretch_program(program: Program, depth: Depth) -> Program | None:
    """Turns a partitioned step of the shallow model of `depth`, before any pass, into that of the deep model.

    It is the deep model's own program: names, records, explanations and warnings included. Returns None if the blocks
    between the ends differ, or a warning that is not about repeated work names a layer.
    """
    stretch = _Stretch.of(program, depth)
    return None if stretch is None else stretch.run()


def stretched_records(program: Program, depth: Depth) -> dict[str, ValueRecord] | None:
    """The records of the program that `stretch_program` returns, without building its graph; None if that is None."""
    stretch = _Stretch.of(program, depth)
    return None if stretch is None else stretch.records()


def renumbered(program: Program, depth: Depth, by: int) -> Program:
    """The program of layers that are `by` further, of one that is alike but for the layers' numbers.

    It is what partitioning their own graph gives, without the reasons of its shardings.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    stack = identifier(f"{depth.stack}.")

    def moved(name: str) -> str:
        number, _, rest = name.removeprefix(stack).partition("_")
        return f"{stack}{int(number) + by}_{rest}" if name.startswith(stack) and number.isdigit() else name

    for node in program.graph.nodes:
        if node.op == "placeholder":
            copies[node] = graph.placeholder(moved(node.name))
            copies[node].meta.update(node.meta)
        else:
            copies[node] = copy_node(graph, node, copies.__getitem__)
        if INFO in node.meta:
            copies[node].meta[INFO] = depth.info(info(node), by)
    records = [
        replace(one, name=depth.shift_name(one.name, by), label=depth.shift_name(one.label, by))
        for one in program.records.values()
    ]
    inputs, outputs = (
        tuple(replace(port, name=depth.shift_name(port.name, by)) for port in ports)
        for ports in (program.inputs, program.outputs)
    )
    return replace(
        program, graph=graph, inputs=inputs, outputs=outputs, records={one.name: one for one in records}, reasons=None
    )


class _Unlike(Exception):
    """An error for two blocks that differ in more than the numbers of their layers; `_Stretch.of` catches it."""


@dataclass(frozen=True)
class _Run:
    """Consecutive nodes of the repeated block."""

    nodes: tuple[fx.Node, ...]
    rising: bool
    """Whether blocks come in ascending order, as in the forward pass."""


class _Stretch:
    """Compares the blocks of a shallow program, and builds the deep program by repeating one of them."""

    def __init__(self, program: Program, depth: Depth):
        self.program, self.depth, self.copies = program, depth, depth.copies
        self.nodes = list(program.graph.nodes)
        feeds = [node for node in self.nodes if node.op == "placeholder"]
        self.port = dict(zip(feeds, program.inputs, strict=True))
        self.block = self._blocks()
        self.twin: dict[fx.Node, fx.Node] = {}
        """The node of the repeated block that corresponds to each node of the compared one."""
        self.back: dict[fx.Node, fx.Node] = {}
        """The node of the repeated block that corresponds to each node of the last block that it reads."""
        self.runs = self._runs()
        for node, other in self.twin.items():
            self._compare(node, other)
        self._check_readers()
        self.outputs = self._outputs()
        self.reasons, self.warnings = self._reasons_and_warnings()

    @staticmethod
    def of(program: Program, depth: Depth) -> _Stretch | None:
        """Compares the blocks of a shallow program; None if repeating one does not give the deep program."""
        try:
            return _Stretch(program, depth)
        except _Unlike:
            return None

    # ---- the blocks of nodes -----------------------------------------------------------------------------------------
    def _blocks(self) -> dict[fx.Node, int | None]:
        """Finds the block of every node, from its layer, its parameter, operands or readers; None outside of layers."""
        blocks: dict[fx.Node, int | None] = {}
        for node in self.nodes:
            layer = info(node).place.layer if node.op == "call_function" else None
            if layer is not None and layer.stack == self.depth.stack:
                blocks[node] = self.depth.block(layer.number)
            elif node in self.port:
                blocks[node] = self.depth.block(self.depth.layer(self.port[node].name))
            else:
                read = {blocks[operand] for operand in node.all_input_nodes} - {None}
                blocks[node] = read.pop() if len(read) == 1 and node.op == "call_function" else None
        for node in self.nodes:
            if node.target is is_first and len(readers := {blocks[user] for user in node.users}) == 1:
                blocks[node] = readers.pop()  # it reads the device's place alone
        return blocks

    def _runs(self) -> list[_Run]:
        """Returns the runs of the repeated block's nodes, and records the twin of each node of the compared block."""
        cut = [(block, list(nodes)) for block, nodes in groupby(self.nodes, key=self.block.__getitem__)]
        runs = []
        for i, (block, nodes) in enumerate(cut):
            if block != REPEATED:
                continue
            around = [cut[j][0] if 0 <= j < len(cut) else None for j in (i - 1, i + 1)]
            if COMPARED not in around:
                raise _Unlike
            rising = around[0] == COMPARED
            same = cut[i - 1 if rising else i + 1][1]
            if len(same) != len(nodes) or any(node in self.twin for node in same):
                raise _Unlike
            self.twin.update(zip(same, nodes))
            runs.append(_Run(tuple(nodes), rising))
        if len(self.twin) != sum(block == COMPARED for block in self.block.values()):
            raise _Unlike
        return runs

    # ---- comparing the blocks ----------------------------------------------------------------------------------------
    def _compare(self, node: fx.Node, other: fx.Node) -> None:
        if (node.op, node.target) != (other.op, other.target) and node.op != "placeholder":
            raise _Unlike
        if node in self.port:
            if self._port(self.port[node], self.depth.period) != self.port[other]:
                raise _Unlike
        elif self.depth.info(info(node), self.depth.period) != info(other):
            raise _Unlike
        args, tree = pytree.tree_flatten((node.args, node.kwargs))
        next_args, next_tree = pytree.tree_flatten((other.args, other.kwargs))
        if tree != next_tree:
            raise _Unlike
        for arg, next_arg in zip(args, next_args):
            if isinstance(arg, fx.Node) and isinstance(next_arg, fx.Node):
                self._compare_read(arg, next_arg)
            elif arg != next_arg:
                raise _Unlike

    def _compare_read(self, read: fx.Node, next_read: fx.Node) -> None:
        """Checks that a node and its twin read the same node, or nodes that correspond in consecutive blocks."""
        block, block_of_theirs = self.block[read], self.block[next_read]
        if read is next_read and block not in (COMPARED, REPEATED, LAST):
            return
        if block is None or block_of_theirs != block + 1:
            raise _Unlike
        if block == COMPARED and self.twin.get(read) is not next_read:
            raise _Unlike
        if block == REPEATED and self.back.setdefault(next_read, read) is not read:
            raise _Unlike
        if block != COMPARED and self._specs(read) != self._specs(next_read):
            raise _Unlike

    def _check_readers(self) -> None:
        """Checks that only the repeated block, its neighbours and the results read it, and that no block skips it."""
        for node in self.nodes:
            block = self.block[node]
            for operand in node.all_input_nodes if node.op != "output" else ():
                away = self.block[operand]
                if away == REPEATED and block not in (COMPARED, REPEATED, LAST):
                    raise _Unlike
                skips = (block, away) == (REPEATED, LAST) and operand not in self.back
                if skips or {block, away} == {COMPARED, LAST}:
                    raise _Unlike

    def _reasons_and_warnings(self) -> tuple[PropagatedReasons, list[str]]:
        """The reasons and warnings of the deep program. Raises _Unlike if a warning that is not about repeated work
        names a layer."""
        reasons = self.program.reasons
        if not isinstance(reasons, PropagatedReasons) or reasons.work is None:
            raise _Unlike
        shallow = reasons.work.warnings()
        others = [text for text in self.program.warnings if text not in shallow]
        if any(self.depth.names_a_layer(text) for text in others):  # the deep model may have one for each layer
            raise _Unlike
        return replace(reasons, depth=self.depth), [*others, *reasons.work.warnings(self.depth)]

    def _specs(self, node: fx.Node) -> Any:
        return self.port[node].local if node in self.port else info(node).specs

    # ---- building the deep program -----------------------------------------------------------------------------------
    def run(self) -> Program:
        graph = fx.Graph()
        copies: dict[tuple[fx.Node, int], fx.Node] = {}
        inputs: list[tuple[fx.Node, int]] = []
        following = {run.nodes[0]: run for run in self.runs}
        inside = {node for run in self.runs for node in run.nodes}

        def add_copy(node: fx.Node, copy: int) -> None:
            layer_shift = self._by(node, copy)
            if node.op == "placeholder":
                new = graph.placeholder(identifier(self.depth.shift_name(self.port[node].name, layer_shift)))
            else:
                new = copy_node(graph, node, lambda operand: copies[self._read(node, operand, copy)])
            copies[node, copy] = new
            if node in self.port:
                inputs.append((node, copy))
            metadata = node.meta.get(INFO)
            if metadata is not None:
                new.meta[INFO] = self.depth.info(metadata, layer_shift)

        results = list(self.nodes[-1].args[0])  # type: ignore[arg-type]
        for node in self.nodes:
            if node.op == "output":
                end = graph.output(tuple(copies[results[i], copy] for i, copy in self.outputs))
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
            for i, (k, copy) in enumerate(self.outputs) if k in self.program.donated
        }  # fmt: skip
        return replace(
            self.program, graph=graph, donated=donated, records=self.records(), reasons=self.reasons,
            warnings=self.warnings,
            inputs=tuple(self._port(self.port[node], self._by(node, copy)) for node, copy in inputs),
            outputs=tuple(
                self._port(self.program.outputs[k], self._by(results[k], copy)) for k, copy in self.outputs
            ),
        )  # fmt: skip

    def _read(self, node: fx.Node, operand: fx.Node, copy: int) -> tuple[fx.Node, int]:
        """Returns which operand, and which copy of it, copy number `copy` of a node reads."""
        block, away = self.block[node], self.block[operand]
        if block == REPEATED:
            if away == REPEATED:
                return operand, copy
            if away == COMPARED:
                return (operand, 0) if copy == 0 else (self.twin[operand], copy - 1)
            if away == LAST:
                return (operand, 0) if copy == self.copies - 1 else (self.back[operand], copy + 1)
        if away == REPEATED and block == LAST:
            return operand, self.copies - 1
        return operand, 0

    def _outputs(self) -> list[tuple[int, int]]:
        """The results of the deep program in order: the index of each in the shallow program, and the copy."""
        blocks = [self.block[result] for result in self.nodes[-1].args[0]]  # type: ignore[index,union-attr]
        runs = [(block, list(run)) for block, run in groupby(range(len(blocks)), key=blocks.__getitem__)]
        if [block for block, _ in runs].count(REPEATED) > 1:
            raise _Unlike
        return [(i, copy) for block, run in runs for copy in self._copies_of(block) for i in run]

    def _copies_of(self, block: int | None) -> range:
        return range(self.copies if block == REPEATED else 1)

    def _by(self, node: fx.Node, copy: int) -> int | None:
        """The number of layers by which the copy of a node is shifted; None outside of layers."""
        return self._by_block(self.block[node], copy)

    def _by_block(self, block: int | None, copy: int) -> int | None:
        return None if block is None else {REPEATED: copy * self.depth.period, LAST: self.depth.skipped}.get(block, 0)

    def _port(self, port: Port, by: int | None) -> Port:
        return replace(port, name=self.depth.shift_name(port.name, by))

    def records(self) -> dict[str, ValueRecord]:
        """The records of the deep model's values, in its order."""
        runs = groupby(self.program.records.values(), key=lambda one: self.depth.block(self.depth.layer(one.name)))
        records_of_deep: dict[str, ValueRecord] = {}
        previous = None
        for block, run in runs:
            records, copies = list(run), self._copies_of(block)
            for copy in reversed(copies) if previous == LAST else copies:  # blocks come in descending order
                for record in records:
                    layer_shift = self._by_block(block, copy)
                    name = self.depth.shift_name(record.name, layer_shift)
                    records_of_deep[name] = replace(
                        record, name=name, label=self.depth.shift_name(record.label, layer_shift)
                    )
            previous = block
        return records_of_deep
