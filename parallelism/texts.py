"""Text forms of what a step is at each stage: its captured graph, its shardings, and the program of one device.

A line is an input, an operation or a result: `NAME[SHAPE] DTYPE = OP(OPERANDS)`. What follows `  # ` in it says
why, and is no part of the comparison of two texts.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import SequenceMatcher
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import fx
from tpshard.kernels.dtypes import dtype_name
from tpshard.parallelism import words
from tpshard.parallelism.depth import REPEATED, Depth
from tpshard.parallelism.graph import Graph, Op, Value, map_refs
from tpshard.parallelism.node_info import INFO, Collective, Info, Port, operand_shapes
from tpshard.parallelism.rules.control_flow import CONTROL_FLOW, runs_text
from tpshard.parallelism.sharding import Layout, show_axis

if TYPE_CHECKING:
    from tpshard.parallelism.program import Program
    from tpshard.parallelism.propagated import Shardings

Of = Callable[[str], bool]
"""Whether the operations and values of a module, or one that is so named, are shown."""
NEAR = 2
"""Unchanged lines beside a changed one in a comparison."""


class TextLine(NamedTuple):
    """A line of a text, with the value that it makes and those that it reads."""

    phase: str
    about: tuple[str, ...]
    """The names by which it is found: its value's, its module's, and those of parameters that it moves."""
    makes: tuple[str, ...]
    reads: Mapping[str, str]
    """The values that it reads, each with its type."""
    text: str


def graph_text(graph: Graph, of: Of | None = None, depth: Depth | None = None) -> str:
    """The text of a captured graph, with global shapes. depth: the deep model for which its model stands."""
    shown = Shown(lambda value: _typed("", value.shape, value.dtype))
    return _excerpt(_graph_lines(graph, shown, of, depth), of)


def shardings_text(shardings: Shardings, of: Of | None = None, depth: Depth | None = None) -> str:
    """The text of a propagated graph: each value with its sharding and global shape, and where each axis comes from."""
    mesh = shardings.mesh

    def shown(value: Value) -> str:
        sharding = shardings.of[value]
        layout = Layout(sharding.dims, sharding.unreduced).notation(mesh, value.dims)
        return f"{layout} {dtype_name(value.dtype)} {_size(value.shape)}".rstrip()

    def why(value: Value, name: words.Name) -> str:
        own, reasons = shardings.annotated.get(value), []
        if own is not None and own.written_at:
            reasons.append(f"annotated {own.sharding.notation(mesh, value.dims)}")
        for dim in range(value.rank):
            for axis, cause in shardings.causes.get((value, dim), ()):
                source = words.places(cause.written_at)
                if cause.source is not None and cause.op is not None:
                    operation = cause.op.target.partition(".")[0]
                    source = f"dim {cause.source_dim} of {name(cause.source.name)} through {operation}"
                reasons.append(f"{show_axis(axis, mesh)} from {source}")
        return "; ".join(reasons)

    return _excerpt(_graph_lines(shardings.graph, Shown(shown, why), of, depth), of)


def program_text(program: Program, of: Of | None = None) -> str:
    """The text of one device's program, with local shapes; collectives with their bytes and reasons."""
    return _excerpt(list(_program_lines(program)), of)


def collectives_table(collectives: Sequence[Collective]) -> str:
    """Collectives as a table in the order of their issue, with the reason of each; `none` without any."""
    if not collectives:
        return "none"
    rows = [("kind", "axes", "bytes", "dtype", "of", "reason")]
    rows += [(c.kind, words.axes_text(c.axes), f"{c.bytes:,}", c.dtype, c.of, c.reason) for c in collectives]
    wide = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    cells = ([cell.rjust(n) if i == 2 else cell.ljust(n) for i, (cell, n) in enumerate(zip(row, wide))] for row in rows)
    return "\n".join("  ".join(row).rstrip() for row in cells)


def difference(before: str, after: str) -> list[str]:
    """The lines in which two texts differ, with those beside them: ` ` in both, `-` only before, `+` only after.

    The reasons in lines are not compared. Empty if nothing else differs.
    """
    old, new = before.splitlines(), after.splitlines()
    bare_old, bare_new = ([line.partition("  # ")[0] for line in lines] for lines in (old, new))
    if bare_old == bare_new:
        return []
    out: list[str] = []
    for group in SequenceMatcher(None, bare_old, bare_new, autojunk=False).get_grouped_opcodes(NEAR):
        out += ["..."] if out else []
        for kind, i, j, k, m in group:
            if kind == "equal":
                out += [f"  {line}" for line in new[k:m]]
            else:
                out += [*(f"- {line}" for line in old[i:j]), *(f"+ {line}" for line in new[k:m])]
    return out


def _excerpt(lines: Sequence[TextLine], of: Of | None) -> str:
    """The lines that `of` selects under their phases, behind those that make what they read; "" if there are none."""
    chosen = [line for line in lines if of is None or any(map(of, line.about))]
    made = {value for line in chosen for value in line.makes}
    read = {value: typed for line in chosen for value, typed in line.reads.items() if value not in made}
    out = [f"read {typed}" for typed in read.values()]
    phase = ""
    for line in chosen:
        if line.phase != phase:
            out += [f"{line.phase}:"] if line.phase else []
            phase = line.phase
        out.append(line.text)
    return "\n".join([*out, ""]) if chosen else ""


def _typed(name: str, shape: Sequence[Any], dtype: torch.dtype) -> str:
    return f"{name}[{', '.join(map(str, shape))}] {dtype_name(dtype)}"


def _size(shape: Sequence[Any]) -> str:
    return "x".join(map(str, shape))


def _call(name: str, args: Iterable[Any], kwargs: dict[str, Any]) -> str:
    return f"{name}({', '.join([*map(_argument, args), *(f'{k}={_argument(v)}' for k, v in kwargs.items())])})"


class _Named(str):
    """The name of a value among arguments, which is shown without quotes."""


def _argument(argument: Any) -> str:
    if isinstance(argument, _Named):
        return argument
    if isinstance(argument, (list, tuple)):
        return f"[{', '.join(map(_argument, argument))}]"
    return dtype_name(argument) if isinstance(argument, torch.dtype) else repr(argument)


def _operation(target: Any) -> str:
    """The name of an operation: `mul` of aten, `all_gather` of the collectives, else as in `tpshard.boundary`."""
    if not isinstance(target, torch._ops.OpOverload):
        return getattr(target, "__name__", str(target))
    library, _, name = str(target.overloadpacket).rpartition(".")
    if library == "_c10d_functional":
        return name.removesuffix("_tensor").removesuffix("_into")
    return name if library == "aten" else f"{library}.{name}"


# ---- graphs ----------------------------------------------------------------------------------------------------------
class Shown(NamedTuple):
    """What the text of a graph says of its values."""

    type: Callable[[Value], str]
    why: Callable[[Value, words.Name], str] = lambda value, name: ""


def _graph_lines(graph: Graph, shown: Shown, of: Of | None, depth: Depth | None) -> list[TextLine]:
    """The lines of a graph; of the layers for which one stands, the first that `of` selects."""
    held = [*graph.inputs, *(value for value, _ in graph.constants.values())]
    lines = [_selected(of, (_input_line(value, shown, name) for name in _namings(depth, value.name))) for value in held]
    for op in graph.ops:
        op, inner = _bare(op, shown, depth)
        line = _selected(of, (_op_line(op, shown, name) for name in _namings(depth, op.name)))
        lines += [line, *(each._replace(phase=op.phase, about=(*line.about, *each.about)) for each in inner)]
    if of is None:
        results = (out.name if isinstance(out, Value) else repr(out) for out in graph.outputs)
        lines.append(TextLine("", (), (), {}, f"return {', '.join(results)}"))
    groups: dict[str, str] = {}  # numbered in this graph: a process counts the groups of all

    def renumber(match: re.Match[str]) -> str:
        return match[1] + groups.setdefault(match[2], str(len(groups)))

    return [line._replace(text=re.sub(r"(tpshard\.grouped\(\S+, )(\d+)", renumber, line.text)) for line in lines]


def _bare(op: Op, shown: Shown, depth: Depth | None) -> tuple[Op, list[TextLine]]:
    """An operation without its bodies, if it is control flow, and their lines."""
    shapes = [value.shape for value in op.operands]
    args, lines = _without_bodies(op.target, op.args, shapes, lambda graph: _graph_lines(graph, shown, None, depth))
    return (replace(op, args=args) if lines else op), lines


def _namings(depth: Depth | None, name: str) -> Iterator[words.Name]:
    """Yields how names read in an operation: in a deep model one way for each layer that its layer stands for."""
    layer = None if depth is None else depth.layer(name)
    if depth is None:
        yield str
    elif layer is None or depth.block(layer) != REPEATED:
        yield partial(depth.shift_name, by=None if layer is None else depth.shift_of(layer))
    else:
        yield from (partial(depth.shift_name, by=by) for by in range(0, depth.skipped + 1, depth.period))


def _selected(of: Of | None, lines: Iterator[TextLine]) -> TextLine:
    first = next(lines)
    return next((line for line in chain((first,), lines) if of is not None and any(map(of, line.about))), first)


def _input_line(value: Value, shown: Shown, name: words.Name) -> TextLine:
    own, role = name(value.name), f", {value.role}" if value.role else ""
    return TextLine("", (own,), (own,), {}, _commented(f"input {own}{shown.type(value)}{role}", shown.why(value, name)))


def _op_line(op: Op, shown: Shown, name: words.Name) -> TextLine:
    operands = [_Named(name(value.name)) for value in op.operands]
    args = map_refs([name(a) if type(a) is str else a for a in op.args], lambda ref: operands[ref.index])
    kwargs = {key: map_refs(arg, lambda ref: operands[ref.index]) for key, arg in op.kwargs.items()}
    results = tuple(name(value.name) for value in op.results)
    left = ", ".join(f"{result}{shown.type(value)}" for result, value in zip(results, op.results))
    why = "; ".join(filter(None, (shown.why(value, name) for value in op.results)))
    about = (name(op.name), name(op.module), *results, *(name(value.label) for value in op.results))
    reads = {str(each): f"{each}{shown.type(value)}" for each, value in zip(operands, op.operands)}
    return TextLine(
        op.phase, about, results, reads, _commented(f"{left} = {_call(_operation(op.target), args, kwargs)}", why)
    )


def _commented(text: str, why: str) -> str:
    return f"{text}  # {why}" if why else text


# ---- programs --------------------------------------------------------------------------------------------------------
def _without_bodies(
    target: Any, args: Sequence[Any], shapes: Sequence[Sequence[int]], lines_of: Callable[[Any], Iterable[TextLine]]
) -> tuple[tuple[Any, ...], list[TextLine]]:
    """The arguments of control flow with names for its bodies, and the lines of these; else the arguments alone."""
    names, lines = CONTROL_FLOW.get(target, ()), list[TextLine]()
    for name, body in zip(names, args):
        runs = f", {runs_text(target, args, shapes)}" if name == names[-1] else ""
        lines.append(TextLine("", (), (), {}, f"  {name}{runs}:"))
        lines += [line._replace(text=f"    {line.text}", reads={}) for line in lines_of(body)]
    return (*map(_Named, names), *args[len(names) :]), lines


def _program_lines(program: Program) -> Iterator[TextLine]:
    names = dict(_names(program))
    inputs = iter(program.inputs)
    taken = {out: program.inputs[source].name for out, source in program.donated.items()}
    for node in program.graph.nodes:
        info: Info = node.meta.get(INFO, Info(()))
        args, inner = _without_bodies(node.target, node.args, operand_shapes(node), _program_lines)
        named = (
            fx.map_arg(args, lambda n: _Named(names[n])),
            fx.map_arg(dict(node.kwargs), lambda n: _Named(names[n])),
        )
        reads = {names[n]: f"{names[n]}{_types(n)}" for n in node.all_input_nodes}
        if node.op == "placeholder":
            port = next(inputs)
            yield TextLine("", (port.name,), (names[node],), {}, f"input {names[node]}{_port(program, port)}")
        elif node.op == "output":
            tensors = [arg for arg in node.args[0] if isinstance(arg, fx.Node)]
            for i, (tensor, port) in enumerate(zip(tensors, program.outputs)):
                into = f", into {taken[i]}" if i in taken else ""
                text = f"return {port.name}{_port(program, port)}{into} = {names[tensor]}"
                own = {names[tensor]: f"{names[tensor]}{_types(tensor)}"}
                yield TextLine("", (port.name,), (), own, text)
        else:
            moved = () if info.comm is None else info.comm.value
            about = (info.origin, info.module, *moved)
            text = f"{names[node]}{_types(node)} = {_call(_operation(node.target), *named)}"
            why = "" if info.comm is None else f"{info.comm.bytes:,} bytes over {words.axes_text(info.comm.axes)}"
            reason = f": {info.comm.reason}" if info.comm is not None and info.comm.why else ""
            yield TextLine(info.phase, about, (names[node],), reads, _commented(text, why + reason))
            yield from (line._replace(phase=info.phase, about=(*about, *line.about)) for line in inner)


def _types(node: fx.Node) -> str:
    info: Info = node.meta.get(INFO, Info(()))
    return " and ".join(_typed("", spec.shape, spec.dtype) for spec in info.specs)


def _port(program: Program, port: Port) -> str:
    """An input or output: its shape on one device, and the global value of which that is a part."""
    record = program.records.get(port.name)
    shape = ["*" if dim in port.free else size for dim, size in enumerate(port.shape)]
    local = ["*" if dim in port.free else size for dim, size in enumerate(port.local)]
    layout = port.layout.notation(program.mesh, () if record is None else record.dims)
    whole = f" of {layout} {_size(shape)}" if port.layout.axes or port.layout.partial else ""
    held = "" if port.held is None else f" held as {port.held.form}"
    return f"{_typed('', local, port.dtype)}{whole}, {port.kind}{held}"


def _names(program: Program) -> Iterator[tuple[fx.Node, str]]:
    """Yields each node with a name that other programs of the same model share: the operation of the global graph that
    it comes from and, unless that says it, its own."""
    seen: Counter[str] = Counter()
    for node in program.graph.nodes:
        info: Info = node.meta.get(INFO, Info(()))
        own = _operation(node.target)
        if node.op in ("placeholder", "get_attr"):
            name = info.origin or node.name
        elif re.sub(r"_\d+$", "", info.origin.rpartition(".")[2]) == own:
            name = info.origin
        else:
            name = f"{info.origin}/{own}"
        seen[name] += 1
        yield node, name if seen[name] == 1 else f"{name}#{seen[name]}"
