"""Turning the reasons of shardings and collectives (`parallelism.why`) into text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tpshard.diagnostics.diagnostic import plural
from tpshard.parallelism.why import TIE, Demand, Explanation, Hop, SourcePlace, Through

Name = Callable[[str], str]
"""A function that returns the displayed name of a value: its own, or a pattern."""

IN_SEQUENCE = "groups in sequence"
"""What stands between a quantized weight without an order and weights that have one."""
MIB = 2**20


def unasked_reshards(comms: Sequence[Any]) -> str:
    """A sentence on collectives (`program.collectives`) that no annotation asks for; "" if there are none."""
    unasked = [comm for comm in comms if not comm.requested]
    if not unasked:
        return ""
    verb = "moves" if len(unasked) == 1 else "move"
    moved = f"{plural(len(unasked), 'reshard')} that nothing asks for {verb} {size(sum(c.bytes for c in unasked))}"
    return f"{moved}; the first: {unasked[0].reason}"


def size(n: int) -> str:
    """Bytes as text: MiB with a decimal, or KiB or B where that is none."""
    return f"{n / MIB:.1f} MiB" if n >= MIB / 10 else f"{n / 1024:.1f} KiB" if n >= 1024 else f"{n} B"


def axes_text(axes: Sequence[Any]) -> str:
    """Axes in the public form as text, outer to inner: `dp+tp`, and `tp:(1)2` for a sub-axis."""
    return "+".join(a if isinstance(a, str) else f"{a[0]}:({a[1]}){a[2]}" for a in axes)


def place(written_at: SourcePlace) -> str:
    """A source as text: `recipe.yaml:3:4 (heads: tp)`"""
    at = f"{written_at.source}:{written_at.line}:{written_at.col}" if written_at.line else written_at.source
    return f"{at} ({written_at.says})" if written_at.says else at


def places(written_at: Iterable[SourcePlace]) -> str:
    """Several places as text, each as `place` gives it."""
    return "; ".join(map(place, written_at))


def op(through: Through) -> str:
    """An op as text: its kind and its name, which begins with its module: contract `layers.0.mlp.up.mm`"""
    if through == TIE:
        return "a sharding group (parameter, gradient and optimizer state)"
    return f"{through.target} `{through.name}`"


def link(step: Hop) -> str:
    """A step of an axis's propagation as text."""
    subject = f"{step.axis} on dim {step.dim} of {step.value}"
    if step.through is None:
        return f"{subject}: annotated at {places(step.written_at)}"
    return f"{subject}: from dim {step.source_dim} of {step.source} through {op(step.through)}"


def explanation(reasons: Explanation) -> list[str]:
    """The reasons of a value's sharding as lines, one per step; the last of each chain names the annotation."""
    lines = [f"annotated {reasons.annotated} at {places(reasons.written_at)}"] if reasons.written_at else []
    return [*lines, *map(link, reasons.links)] or ["replicated: no annotation reaches it"]


def cause(need: Demand, name: Name = str) -> str:
    """The need behind a collective, as a short text."""
    if need.kind == "sum":
        return f"`{name(need.op.name)}` sums over a sharded dim"
    if need.kind == "given":
        return f"`{name(need.value)}` is given as a sum over devices"
    if need.kind == "storage":
        return f"stored sharded, used whole by `{name(need.op.module or need.op.name)}`"
    if need.kind == "neighbours":
        return f"`{name(need.op.name)}` reads its neighbours' `{name(need.value)}`"
    if need.kind == "others":
        return f"`{name(need.op.name)}` compares what all devices along the dim have"
    if need.kind in ("sent", "received"):
        verb = "read on" if need.kind == "sent" else "sent by"
        return f"`{name(need.op.name)}` of {name(need.op.module or 'the model')} is {verb} stage {need.stage}"
    if need.mixes:
        return f"the act-order of {name(need.mixes.removesuffix('.order'))} mixes shards"
    return f"`{name(need.op.name)}` needs it"


def way(need: Demand) -> str:
    """The two layouts of a resharded value, and the annotation behind the moved axis, as text."""
    moved = f"{need.value}{need.before} -> {need.after}" if need.before else ""
    return moved + (f"; {need.axis} from {places(need.written_at)}" if need.written_at else "")


def reason(needs: Sequence[Demand]) -> str:
    """The reason of a collective as text; for a bucket, the first member's."""
    if not needs:
        return ""
    first = ": ".join(filter(None, (cause(needs[0]), way(needs[0]))))
    return first if len(needs) == 1 else f"bucket of {len(needs)}: {first}"
