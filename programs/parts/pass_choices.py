"""Chooses recomputation, buckets and resharding after the forward pass: the recipe's, or else by estimated cost.

Time and memory of the program that would run are estimated for the recipe's device; this machine is never inspected.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import fx
from tpshard.diagnostics.diagnostic import Mistakes
from tpshard.diagnostics.patterns import covers, unit_of
from tpshard.files.folder_json import read_regular
from tpshard.parallelism.mesh import Axes
from tpshard.parallelism.passes import buckets
from tpshard.parallelism.passes.recompute import Keep, keep_all, keep_layer_inputs, keep_selected
from tpshard.parallelism.pricing.cost import Device, collective
from tpshard.parallelism.pricing.fusion import Compiled, Kernel, kernels, seconds
from tpshard.parallelism.pricing.liveness import liveness
from tpshard.parallelism.pricing.network import Topology
from tpshard.parallelism.pricing.timeline import price
from tpshard.parallelism.program import Program, info
from tpshard.programs.parts.ahead import ahead
from tpshard.programs.parts.held import beside
from tpshard.programs.setting import cluster
from tpshard.programs.setting.setting import Setting
from tpshard.recipes.keys.parallel_keys import BucketFile, BucketSize, RematEvery
from tpshard.recipes.keys.schema import Recipe

Groups = buckets.Groups

CLEARLY = 0.98
"""Greedy buckets are chosen if their step takes less than this share of the time with a bucket per unit, or of its
memory where neither fits."""
BISECTIONS = 4
"""Programs that are built to find the largest buckets within a memory limit that the first ones exceed."""
RESERVE = 0.08
"""Share of a device's memory reserved for the allocator and the communication library."""


class Choices(NamedTuple):
    """The settings of the passes: whether gathered parameters are freed after the forward pass, and the buckets."""

    reshard_after_forward: bool
    buckets: tuple[tuple[str, ...], ...]
    """Parameter names of each bucket, in order of use."""


def choose(
    chooser: Chooser, recomputed: Callable[[bool], Program], program_with: Callable[[Choices], Program]
) -> Choices:
    """Chooses the passes' settings for a step, by estimating the time and memory of programs with candidate settings.

    recomputed: returns the program before buckets, with or without gathered parameters freed after the forward pass.
    program_with: returns the program that runs. Raises Mistakes for a file or pattern of buckets that is invalid.
    """
    reshard = chooser.setting.recipe.fsdp.reshard_after_forward

    def with_reshard(again: bool) -> Choices:
        def with_buckets(groups: Groups) -> Choices:
            return Choices(again, tuple(map(tuple, groups)))

        chosen = _buckets(chooser, recomputed(again), lambda groups: program_with(with_buckets(groups)))
        return with_buckets(chosen)

    if reshard != "auto":
        return with_reshard(reshard)
    if chooser.fits(recomputed(False)) and chooser.fits(program_with(kept := with_reshard(False))):
        return kept
    return with_reshard(True)


def compiled_by(recipe: Recipe) -> Compiled:
    """Which parts of the recipe's programs are compiled."""
    parts: dict[str, Compiled] = {"auto": "auto", "inductor": "all", "blocks": "layers", "eager": "none"}
    return parts[recipe.compile]


def keep_of(setting: Setting) -> Keep:
    """The values that the recipe's `remat` keeps for the backward pass."""
    remat = setting.recipe.remat
    if remat == "none":
        return keep_all
    if remat == "full":
        return keep_layer_inputs()
    if remat == "selective":
        return keep_selected()
    if isinstance(remat, RematEvery):
        return keep_layer_inputs(remat.every, remat.first, remat.modules)
    return keep_selected(tuple(remat))


def _buckets(chooser: Chooser, program: Program, program_with: Callable[[Groups], Program]) -> Groups:
    """The recipe's buckets. Raises Mistakes for an invalid file or pattern."""
    setting, policy = chooser.setting, chooser.setting.recipe.fsdp.bucket
    used = buckets.in_order_of_use(program)
    ports = [port for port in program.inputs if port.kind == "parameter"]
    names = used + [port.name for port in ports if port.name not in used]
    if policy == "none":
        return [[name] for name in names]
    if isinstance(policy, BucketSize):
        return buckets.by_size(names, _gathered_bytes(setting, program), policy.mb * 1e6)
    if isinstance(policy, BucketFile):
        return _from_file(setting, policy.file, names)
    if isinstance(policy, tuple):
        return [g for patterns in policy if (g := [n for n in names if any(covers(p, n) for p in patterns)])]
    by_unit = buckets.by_unit(names, lambda name: unit_of(name, setting.recipe.fsdp.wrap))
    if policy == "greedy":
        return chooser.least(chooser.greedy(program, program_with), by_unit, program_with)
    return chooser.best(program, by_unit, program_with) if policy == "auto" else by_unit


def _gathered_bytes(setting: Setting, program: Program) -> dict[str, int]:
    """Bytes of each parameter when it is gathered."""
    itemsize = setting.param_dtype.itemsize
    return {port.name: math.prod(port.shape) * itemsize for port in program.inputs if port.kind == "parameter"}


BUCKETS = 'give a JSON file such as [["tok_embed.weight"], ["norm.weight", "output.weight"]]'


def _from_file(setting: Setting, path: str, names: list[str]) -> Groups:
    where = setting.recipe.where("fsdp.bucket.file")
    try:
        read = json.loads(read_regular(path))
    except (OSError, ValueError, RecursionError) as error:
        raise Mistakes.one(f"buckets cannot be read from {path}", where=where, why=str(error), fix=BUCKETS) from error
    rows: Any = read.get("buckets") if isinstance(read, dict) else read
    lists = isinstance(rows, list) and all(isinstance(row, list) for row in rows)
    if not lists or not all(isinstance(n, str) for row in rows for n in row):
        raise Mistakes.one(f"{path} is not a list of lists of parameter names", where=where, fix=BUCKETS)
    unknown = [n for row in rows for n in row if n not in names]
    if unknown:
        message = f"{path} names parameters that the model does not have: {', '.join(unknown[:5])}"
        raise Mistakes.one(message, where=where, fix="`tpshard plan` lists the names of parameters")
    return list(rows)


@dataclass(frozen=True)
class _Times(buckets.SendTimes):
    """The times of collectives over FSDP's axes on the recipe's device."""

    chooser: Chooser
    axes: Axes

    def gather(self, size: int) -> float:
        return self._seconds("all_gather", size)

    def reduce(self, size: int) -> float:
        return self._seconds("reduce_scatter", size)

    def _seconds(self, kind: str, size: int) -> float:
        device, topology = self.chooser.device, self.chooser.topology
        return collective(device, topology, kind, self.axes, size).seconds + device.overhead.issue_s if size else 0.0


class Chooser:
    """Prices variants of the programs of one setting."""

    def __init__(self, setting: Setting, fork: bool = False, stored: Mapping[str, int] | None = None):
        """stored: bytes by category that a device stores (`held.stored_bytes`); by default those of a program's own
        inputs, with moments. fork: whether a second process may price some programs."""
        self.setting, recipe, self.fork, self.stored = setting, setting.recipe, fork, stored
        whole, _, self.per_host = cluster.device_of(recipe)
        self.device: Device = whole.shared_by(self.per_host)
        self.compiled = compiled_by(recipe)
        self.topology = Topology(setting.mesh, self.per_host)
        limit = recipe.fsdp.memory_limit
        self.memory = limit if limit is not None else int(self.device.memory_bytes * (1 - RESERVE))
        self._peaks: dict[fx.Graph, int] = {}
        """The peak of each program that was asked for, which several choices ask for."""

    def seconds(self, program: Program) -> float:
        """Seconds of one run of a program on the recipe's device."""
        return price(program, self.device, self.per_host, compiled=self.compiled).run().seconds

    def kernels(self, program: Program) -> list[Kernel]:
        return kernels(program, compiled=self.compiled)

    def peak(self, program: Program) -> int:
        """Peak bytes of the step, with what the device stores beside the program."""
        if program.graph not in self._peaks:
            self._peaks[program.graph] = self._peak_of(program)
        return self._peaks[program.graph]

    def _peak_of(self, program: Program) -> int:
        if self.stored is not None:
            return self.peak_beside(program, beside(self.stored, program))
        params = [port for port in program.inputs if port.kind == "parameter" and port.name in self.setting.trained]
        elements = {port.name: math.prod(port.local) for port in params}
        return self.peak_beside(program, {"optimizer": self.setting.moment_bytes(elements)})

    def peak_beside(self, program: Program, always: Mapping[str, int]) -> int:
        """Peak bytes of a program beside others, by category."""
        return liveness(program, self.kernels(program), always=always, device=self.device).peak_bytes

    # ---- buckets --------------------------------------------------------------------------------------------
    def pieces(self, program: Program) -> list[buckets.Piece]:
        """Every parameter in order of use, with the computation between its first use and the next one's."""
        costs = [
            (seconds(kernel, self.device), info(kernel.node).phase == "forward") for kernel in self.kernels(program)
        ]

        def computing_s(forward: bool) -> dict[str, float]:
            starts = sorted((at, name) for name, at in buckets.first_uses(program, forward=forward).items())
            ends = [*(at for at, _ in starts[1:]), len(costs)]
            return {
                name: sum(s for s, ahead in costs[at:end] if ahead is forward) for (at, name), end in zip(starts, ends)
            }

        sent: dict[str, Counter[str]] = {"all_gather": Counter(), "reduce_scatter": Counter()}
        for comm in program.collectives:
            if comm.of in ("parameter", "gradient") and comm.kind in sent:
                sent[comm.kind].update(dict.fromkeys(comm.value, comm.bytes))
        sizes, forward_s, backward_s = _gathered_bytes(self.setting, program), computing_s(True), computing_s(False)
        return [
            buckets.Piece(
                name, sizes[name], forward_s[name], max(0, sent["all_gather"][name] - sizes[name]),
                sent["reduce_scatter"][name], backward_s.get(name, 0.0),
            )
            for name in buckets.in_order_of_use(program)
        ]  # fmt: skip

    def greedy(self, program: Program, program_with: Callable[[Groups], Program]) -> Groups:
        """Buckets by SimpleFSDP's greedy auto-wrapping under time and memory limits.

        What gathered parameters may hold is at first the memory that the step leaves. The gradients and copies of
        larger buckets take memory too: if the program that runs exceeds the limit, the largest share of it that keeps
        the limit is found by bisection; if none does, each parameter is a bucket, if that helps (`least`).
        """
        axes = self.setting.fsdp_axes
        if not axes or not buckets.in_order_of_use(program):
            return [[port.name] for port in program.inputs if port.kind == "parameter"]

        pieces, times = self.pieces(program), _Times(self, axes)
        total = sum(piece.bytes for piece in pieces)
        least, room = float(max(piece.bytes for piece in pieces)), min(float(total), self.memory - self.peak(program))
        groups = buckets.greedy(pieces, times, max(least, room))
        if self.fits(program_with(groups)):
            return groups
        groups = buckets.greedy(pieces, times, least)
        if room <= least or not self.fits(program_with(groups)):
            groups, least, room = [[piece.name] for piece in pieces], 0.0, least
        for _ in range(BISECTIONS if self.fits(program_with(groups)) else 0):
            between = (least + room) / 2
            if self.fits(program_with(larger := buckets.greedy(pieces, times, between))):
                groups, least = larger, between
            else:
                room = between
        return groups

    def best(self, program: Program, by_unit: Groups, program_with: Callable[[Groups], Program]) -> Groups:
        """The buckets of a step's collectives: one per unit, unless greedy ones are clearly faster and fit, or only
        they fit. Where neither fits, those that clearly need less memory; beyond the recipe's limit, where nothing
        runs, those that need the least.
        """
        nothing_gathered = not buckets.in_order_of_use(program)
        if not self.setting.fsdp_axes or (nothing_gathered and self.fits(program_with(by_unit))):
            return by_unit

        def merged() -> tuple[Groups, bool, float]:
            groups = self.greedy(program, program_with)
            return groups, *self._measured(program_with(groups))

        with ahead(merged, self.fork) as of_greedy:
            plain_fits, plain = self._measured(program_with(by_unit))
            greedy, fits, measured = of_greedy()
        if fits != plain_fits:
            return greedy if fits else by_unit
        refused = not fits and self.setting.recipe.fsdp.memory_limit is not None
        return greedy if measured < (1 if refused else CLEARLY) * plain else by_unit

    def least(self, greedy: Groups, by_unit: Groups, program_with: Callable[[Groups], Program]) -> Groups:
        """Greedy buckets, unless the step exceeds the memory with them and one bucket per unit needs less."""
        if self.fits(program_with(greedy)):
            return greedy
        return min(greedy, by_unit, key=lambda groups: self.peak(program_with(groups)))

    def _measured(self, program: Program) -> tuple[bool, float]:
        """Whether a step fits, and what is compared: its seconds, or the peak bytes of one that does not fit."""
        fits = self.fits(program)
        return fits, self.seconds(program) if fits else self.peak(program)

    def fits(self, program: Program) -> bool:
        """Whether the memory of a step fits the device."""
        return self.peak(program) <= self.memory
