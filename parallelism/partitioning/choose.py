"""Choosing how each op is sharded: the sharding of its factors with the least communication and computation."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from tpshard.parallelism import factors
from tpshard.parallelism.factors import WHOLE, Cut
from tpshard.parallelism.graph import Op, Value
from tpshard.parallelism.mesh import Axes, Axis, merge, overlap, size_of, starts_with
from tpshard.parallelism.resharding import halo
from tpshard.parallelism.resharding.reshard import cost, redistribution
from tpshard.parallelism.rules.rule import Dim, Kind, Rule
from tpshard.parallelism.sharding import Layout, even, even_grains, local_size, padded_behind

aten = torch.ops.aten
FLOPS_PER_BYTE = 1000.0
"""FLOPs that cost as much as sending one byte, in the comparison of replicated work with resharding."""

Choice = dict[int, Cut]
"""How an op is computed: the cut (axes and grain) of each sharded factor."""


NEEDY = (Kind.WHOLE, Kind.PERMUTE)
"""Kinds of factors that cost communication if they are sharded."""

INTENT = 100.0
"""Multiplier of the cost of resharding an annotated operand, so that parameters keep their annotated layout."""


def choose(
    op: Op,
    rule: Rule,
    homes: Sequence[Layout],
    targets: Sequence[Layout],
    fixed: Sequence[bool],
    fetched: Sequence[Collection[Layout]],
    sharers: Sequence[Mapping[Layout, Collection[Op]]],
    latency: int,
) -> tuple[Rule, Choice]:
    """Chooses the rule by which an op is computed, and the cut of each of its factors; returns both.

    If the layouts of all tensors agree, they are the choice. Otherwise every tensor's sharding, completed by those of
    the others, is a candidate, and the cheapest wins. A factor that needs its whole dim gives its axes to a free batch
    dim where that is cheaper than gathering and replicated computing.

    homes: the layouts of the operands. targets: the propagated layouts of the results. fixed: which operands an
    annotation places. fetched: for each operand, layouts to which another op reshards it anyway. sharers: for each
    operand, the ops that reshard it to a layout; they share its cost, or all readers without `sharers`. latency: the
    cost of starting a collective, in bytes.
    """
    candidates: list[tuple[Rule, Choice]] = []
    for way in (rule, *rule.others):
        projected = [factors.cuts(layout, dims, way.sizes) for layout, dims in zip((*homes, *targets), way.tensors)]
        busy = [axis for h in homes for axis in h.partial]
        agreed = _agree(way, projected, busy) if way is rule else None
        if agreed is not None and len(homes) == len(op.operands) and computable(op, way, agreed) == agreed:
            return way, agreed
        for choice in _candidates(op, way, projected, busy, _reorder_cuts(way, (*homes, *targets))):
            if (way, choice) not in candidates:
                candidates.append((way, choice))
    if len(candidates) == 1:
        return candidates[0]
    return min(candidates, key=lambda c: _cost(op, c[0], c[1], homes, targets, fixed, fetched, sharers, latency))


def _candidates(
    op: Op, rule: Rule, projected: Sequence[Mapping[int, Cut]], busy: Sequence[Axis],
    reordered: Mapping[int, Mapping[int, Cut]],
) -> Iterator[Choice]:  # fmt: skip
    order = sorted(range(len(projected)), key=lambda t: (-[*op.operands, *op.results][t].bytes, t))
    leads = [(t, projected[t]) for t in order] + list(reordered.items())
    bases = [_merge(rule, [cuts, *(projected[t] for t in order if t != lead)], busy) for lead, cuts in leads]
    least = 1.0
    for i, base in enumerate((*bases, *_combinations(rule, [projected[t] for t in order], busy))):
        whole = {f: cut for f, cut in base.items() if rule.kinds[f] is not Kind.PERMUTE}
        for choice in (base, whole, *_move_axes(rule, whole, projected)):
            sane = computable(op, rule, choice)
            if i < len(bases):
                least = min(least, share(rule, sane))
                yield sane
            elif share(rule, sane) <= least:  # never reduce communication by more replicated work
                yield sane


def _reorder_cuts(rule: Rule, layouts: Sequence[Layout]) -> dict[int, dict[int, Cut]]:
    """The cuts of tensors whose dims' axes divide the factors only in another order, or not at all: then they cut the
    major-most factor. By the index of the tensor."""
    out: dict[int, dict[int, Cut]] = {}
    for t, (layout, dims) in enumerate(zip(layouts, rule.tensors)):
        for d, (axes, members) in enumerate(zip(layout.dims, dims)):
            if len(members) < 2 or not axes or layout.grain(d) > 1:
                continue
            parts = factors.reorder_to_fill(axes, members, rule.sizes) or {members[0]: axes}
            if parts != factors.project((axes,), (members,), rule.sizes):
                cuts = out.setdefault(t, dict(factors.cuts(layout, dims, rule.sizes)))
                cuts.update({f: Cut(part) for f, part in parts.items()})
    return out


TRIED = 32
"""The largest number of combinations that are tried for one op."""


def _combinations(rule: Rule, projected: Sequence[Mapping[int, Cut]], busy: Sequence[Axis]) -> list[Choice]:
    """The choices that cut each factor by a prefix of the axes that some tensor has for it, or not at all.

    No axis is used twice; at most `TRIED` choices are returned.
    """
    cuts: dict[int, list[Cut]] = {}
    for tensor in projected:
        for f, (axes, grain) in tensor.items():
            for n in range(len(axes), 0, -1) if rule.kinds[f] is not Kind.WHOLE else ():
                options = cuts.setdefault(f, [])
                if Cut(axes[:n], grain) not in options:
                    options.append(Cut(axes[:n], grain))
    out: list[Choice] = [{}]
    for f, options in cuts.items():
        more = [
            {**choice, f: cut} for cut in options for choice in out
            if not any(overlap(a, busy) or overlap(a, b.axes) for a in cut.axes for b in (*choice.values(), WHOLE))
        ]  # fmt: skip
        out = (more + out)[:TRIED]
    return out


def _agree(rule: Rule, projected: Sequence[Mapping[int, Cut]], busy: Sequence[Axis]) -> Choice | None:
    """The choice that all tensors' layouts already have; None where two contradict each other."""
    out: Choice = {}
    used: list[Axis] = list(busy)
    for tensor in projected:
        for f, cut in tensor.items():
            if not cut.axes:
                continue
            previous = out.get(f)
            if previous is None:
                if rule.kinds[f] in NEEDY or any(overlap(a, used) for a in cut.axes):
                    return None
                out[f] = cut
                used.extend(cut.axes)
            elif previous != cut:
                return None
    return out


def _merge(rule: Rule, projected: Sequence[Mapping[int, Cut]], busy: Sequence[Axis]) -> Choice:
    """Merges the cuts of all tensors into one choice, in their order.

    The first factor to use an axis keeps it; a longer list of axes for a factor extends a shorter one.
    """
    out: Choice = {}
    for tensor in projected:
        for f, cut in tensor.items():
            if not cut.axes or rule.kinds[f] is Kind.WHOLE:
                continue
            others = [a for g, other in out.items() if g != f for a in other.axes] + list(busy)
            held_cut = out.get(f, WHOLE)
            if not starts_with(cut.axes, held_cut.axes):
                continue
            fitting: list[Axis] = []
            for axis in cut.axes:
                if overlap(axis, others):
                    break
                fitting.append(axis)
            if size_of(fitting) > size_of(held_cut.axes):
                out[f] = Cut(merge(fitting), held_cut.grain if held_cut.axes else cut.grain)
    return out


def _move_axes(rule: Rule, base: Choice, projected: Sequence[Mapping[int, Cut]]) -> list[Choice]:
    """Choices in which the axes of a factor that must be whole, or is summed, shard a free factor instead.

    The summed factor of a matrix product keeps its axes: the products of the gradients read the same operands in place.
    """
    moving = (*NEEDY, Kind.REDUCE) if not rule.flops else NEEDY
    out: list[Choice] = []
    for tensor in projected:
        for f, (axes, _) in tensor.items():
            if rule.kinds[f] not in moving or not axes:
                continue
            rest = {g: cut for g, cut in base.items() if not any(overlap(a, axes) for a in cut.axes)}
            for g, kind in enumerate(rule.kinds):
                free_cut = rest.get(g, WHOLE)
                if kind is Kind.PASS and rule.sizes[g] % (size_of(free_cut.axes) * size_of(axes)) == 0:
                    out.append({**rest, g: Cut(merge((*free_cut.axes, *axes)), free_cut.grain)})
    if len(out) > 1:
        out.append(_spread_axes(rule, base, projected))
    return out


def _spread_axes(rule: Rule, base: Choice, projected: Sequence[Mapping[int, Cut]]) -> Choice:
    """The choice in which each axis of a factor that must be whole shards the first free factor that it divides."""
    out = dict(base)
    for tensor in projected:
        for f, (axes, _) in tensor.items():
            for axis in axes if rule.kinds[f] in NEEDY else ():
                if any(overlap(axis, cut.axes) for cut in out.values()):
                    continue
                for g, kind in enumerate(rule.kinds):
                    free_cut = out.get(g, WHOLE)
                    if kind is Kind.PASS and rule.sizes[g] % (size_of(free_cut.axes) * axis.size) == 0:
                        out[g] = Cut(merge((*free_cut.axes, axis)), free_cut.grain)
                        break
    return out


def computable(op: Op, rule: Rule, choice: Choice) -> Choice:
    """Removes the axes of a choice that an op cannot compute with, and returns the rest.

    Factors that must be whole are not cut. Within a dim, no factor is cut after one that is not fully sharded.
    """
    out: Choice = {}
    for f, (axes, grain) in choice.items():
        if not _may_cut(op, rule, f, axes, grain):
            continue
        fitting: list[Axis] = []
        for axis in axes:
            size = rule.sizes[f] // grain
            if rule.even and not even(size, (*fitting, axis)):
                break
            if f in rule.trailing and not padded_behind(size, (*fitting, axis)):
                break
            fitting.append(axis)
        if fitting:
            out[f] = Cut(merge(fitting), grain)
    merged = [members for dims in rule.tensors for members in dims if len(members) > 1]
    while any(_drop_hidden(out, rule, members) for members in merged):
        pass  # a cut that is removed for one dim may hide factors of another dim, so all dims are checked again
    return out


def choice_for(op: Op, rule: Rule, result: int, layout: Layout) -> Choice | None:
    """The choice in which an op computes a result in this layout, without other cuts; None if it cannot."""
    dims = rule.results[result]
    choice = {f: cut for f, cut in factors.cuts(layout, dims, rule.sizes).items() if cut.axes}
    fits = computable(op, rule, choice) == choice and layout_of(rule, dims, choice, True) == layout
    return choice if fits else None


def _drop_hidden(choice: Choice, rule: Rule, members: Dim) -> bool:
    """Removes the cuts of a dim's factors after one that is not fully sharded; returns whether there were any."""
    if choice.keys().isdisjoint(members):
        return False
    full = True
    outer: Axes = ()
    before = len(choice)
    for f in members:
        axes, grain = choice.get(f, WHOLE)
        joined = len(merge((*outer, *axes))) < len(outer) + len(axes)
        # adjacent parts of one axis join into one cut; with padding its shards begin elsewhere
        if not full or (joined and not even(rule.sizes[f] // grain, axes)):
            choice.pop(f, None)
        outer, grain = choice.get(f, WHOLE)
        full = full and size_of(outer) == rule.sizes[f] and grain == 1
    return len(choice) < before


def _may_cut(op: Op, rule: Rule, f: int, axes: Axes, grain: int) -> bool:
    """Whether a factor can be sharded over these axes at all."""
    windows = [window for g, window in rule.windows if g == f]
    if rule.kinds[f] is Kind.WHOLE or (rule.kinds[f] is Kind.PERMUTE and not windows):
        return False
    return not windows or (
        grain == 1 and (rule.moving or all(halo.halo_in(op, axes, window) is not None for window in windows))
    )


def past_padding(op: Op, rule: Rule, choice: Choice, rules: Mapping[Op, Rule]) -> tuple[Op, Rule]:
    """Rewrites an op on a padded operand to read the unpadded source, so that one halo exchange serves both.

    Returns the op and its rule, unchanged for other ops. The padding must be along the window's dim alone, and nothing
    else may read the padded tensor.
    """
    reader = op
    for i, (f, window) in enumerate(rule.windows):
        if f not in choice or window.read >= len(op.operands) or len(op.results) != 1:
            continue
        value = op.operands[window.read]
        pad = value.producer
        if (rule.moving and window.scale > 1) or window.places:
            continue
        if pad is None or pad.target is not aten.constant_pad_nd.default or value.users != [reader]:
            continue
        windows = rules[pad].windows
        if [inner.dim for _, inner in windows] != [window.dim]:
            continue
        inner = windows[0][1]
        source, size = pad.operands[0], value.shape[window.dim]
        positions = (*op.operands, *op.results)[window.reader].shape[window.reader_dim] // window.scale
        last = window.first + (positions - 1) * window.stride + window.span
        if window.first < 0 or last > size:
            continue
        joined = replace(window, first=window.first + inner.first, fill=inner.fill)
        if halo.halo_of(source.shape[window.dim], positions, choice[f].axes, joined) is None:
            continue
        op = replace(op, operands=[source if v is value else v for v in op.operands])
        rule = replace(rule, windows=(*rule.windows[:i], (f, joined), *rule.windows[i + 1 :]), moving=False)
    return op, rule


def layout_of(rule: Rule, dims: tuple[Dim, ...], choice: Choice, result: bool) -> Layout:
    """The layout of a tensor under a choice; a result is partial over the axes of the factors that the op sums."""
    layout = factors.layout_of(dims, choice, rule.sizes)
    if not result:
        return layout
    own_factors = {f for members in dims for f in members}
    partial = [
        a for f, cut in choice.items() if rule.kinds[f] is Kind.REDUCE and f not in own_factors for a in cut.axes
    ]
    return layout.as_sum(merge(sorted(partial)), rule.reduction)


def share(rule: Rule, choice: Choice) -> float:
    """The share of the op's work that one device does, padding included."""
    part = 1.0
    for f in rule.work:
        if f in choice:
            part *= local_size(rule.sizes[f], *choice[f]) / max(rule.sizes[f], 1)
    return part


def _cost(
    op: Op,
    rule: Rule,
    choice: Choice,
    homes: Sequence[Layout],
    targets: Sequence[Layout],
    fixed: Sequence[bool],
    fetched: Sequence[Collection[Layout]],
    sharers: Sequence[Mapping[Layout, Collection[Op]]],
    latency: int,
) -> float:
    total = 0.0

    def moving(value: Value, source: Layout, target: Layout) -> float:
        size = value.dtype.itemsize
        return cost(redistribution(value.shape, source, target, size, latency), value.shape, size, latency)

    for i, (value, home, dims) in enumerate(zip(op.operands, homes, rule.operands)):
        needed_layout = layout_of(rule, dims, choice, False)
        if home.partial and not any(overlap(axis, home.partial) for axis in needed_layout.axes):
            needed_layout = needed_layout.as_sum(home.partial, home.kind)
        if home != needed_layout and needed_layout not in fetched[i] and not made_for(value, op):
            moved = moving(value, home, needed_layout)
            if fixed[i]:
                total += moved * INTENT
            elif sharers and not rule.windows:
                total += moved / len({op, *sharers[i].get(needed_layout, ())})
            else:
                total += moved / readers(value, op if rule.windows else None)
    for value, target_layout, dims in zip(op.results, targets, rule.results):
        if not value.users:
            continue
        computed = layout_of(rule, dims, choice, True)
        target_layout = with_grains(value.shape, target_layout, computed)
        if computed != target_layout:
            total += moving(value, computed, target_layout)
    for exchange in rule.exchanged:
        if exchange.factor in choice:
            rest = {f: cut for f, cut in choice.items() if f != exchange.factor}
            members = size_of(choice[exchange.factor].axes)
            if exchange.way == "swap":
                total += exchange.collectives * latency + exchange.bytes / members * share(rule, rest)
            elif exchange.way == "ring":  # one hop per other device, each overlapped with computing a part
                hop_bytes = (members - 1) / members * exchange.bytes * share(rule, rest)
                hidden = rule.flops * share(rule, choice) / FLOPS_PER_BYTE
                total += (members - 1) * exchange.collectives * latency + max(0.0, hop_bytes - hidden)
            else:
                total += exchange.collectives * latency + (members - 1) * exchange.bytes * share(rule, rest)
    total += halo.price(op, rule, choice, max(latency, 1))  # of equal bytes, the fewest collectives
    work = rule.flops or sum(v.numel for v in op.results)
    return total + work * share(rule, choice) * busiest(rule, choice) / FLOPS_PER_BYTE


def made_for(value: Value, reader: Op) -> bool:
    """Whether a value is made from nothing for one op, as zeros to which it adds: in any layout at no cost."""
    return value.producer is not None and not value.producer.operands and value.users == [reader]


def busiest(rule: Rule, choice: Choice) -> float:
    """How many times the mean work the busiest device does."""
    members = math.prod(size_of(choice[f].axes) for f in rule.uneven if f in choice)
    return (2 * members - 1) / members


def with_grains(shape: Sequence[int], propagated: Layout, computed: Layout) -> Layout:
    """The propagated layout with the computed one's grains, on dims where the axes of one begin with the other's."""
    if not computed.grains:
        return propagated
    fitting = [starts_with(a, b) or starts_with(b, a) for a, b in zip(propagated.dims, computed.dims)]
    grains = [g if fits else 1 for g, fits in zip(computed.grains, fitting)]
    return propagated._replace(grains=even_grains(shape, propagated.dims, grains))


def readers(value: Value, shift: Op | None = None) -> int:
    """The number of ops that share the cost of resharding a value.

    For an op that reads its neighbours' elements (`shift`) only ops of the same kind: others read the value in place.
    """
    return max(1, len({user for user in value.users if shift is None or user.target is shift.target}))
