"""The times of a server's steps: its programs, priced for any number of rows and any state of the cache."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from tpshard.diagnostics.diagnostic import Exit, Mistakes
from tpshard.parallelism.pricing.cost import Device, ServingOverhead
from tpshard.parallelism.pricing.fusion import CacheReads
from tpshard.parallelism.pricing.timeline import price
from tpshard.parallelism.program import Program
from tpshard.plan.server.server_steps import server_of
from tpshard.plan.server.traffic import Room
from tpshard.programs.parts.memo import Memo
from tpshard.programs.server.captured_steps import MOST_ROWS, can_capture
from tpshard.programs.server.serve_setting import Size
from tpshard.programs.server.serving import BLOCK_SIZE, ServingPrograms, build_serving
from tpshard.recipes.keys.schema import Recipe

APART = math.sqrt(2)
"""The ratio of consecutive cache states that are priced; times between them are interpolated."""


@dataclass
class StepPrices:
    """The seconds of a server's steps, by the step's rows and the cache blocks that they read."""

    steps: Mapping[Size, Program]
    """The program of each size, smallest first."""
    device: Device
    per_host: int
    choosing: Callable[[int], Mapping[str, Program]] = lambda _rows: {}
    """The programs that choose the tokens of so many rows (`ServingPrograms.choosing`)."""
    _seconds: dict[tuple[Size, int, int], float] = field(default_factory=dict)
    _choosing_s: dict[int, float] = field(default_factory=dict)

    def __call__(self, rows: int, cached: CacheReads, chunk: bool = False) -> float:
        """Seconds of a step with this many rows, padded to the next program's size; a padding row reads one block."""
        size = next(size for size in self.steps if size.rows >= rows and size.chunk == chunk)
        by_row = (cached.by_row * rows + size.rows - rows) / size.rows
        (b0, b1, b), (r0, r1, r) = _bracket(cached.blocks), _bracket(by_row)
        low = (1 - r) * self._at(size, b0, r0) + r * self._at(size, b0, r1)
        high = (1 - r) * self._at(size, b1, r0) + r * self._at(size, b1, r1)
        return (1 - b) * low + b * high

    def _at(self, size: Size, blocks: int, by_row: int) -> float:
        key = (size, blocks, by_row)
        if key not in self._seconds:
            cached = CacheReads(APART**blocks, APART**by_row)
            device = self._replayed if self._is_captured(size) else self.device
            priced = price(self.steps[size], device, self.per_host, compiled="none", cached=cached)
            self._seconds[key] = priced.run().seconds + self.choosing_s(size.rows)
        return self._seconds[key]

    def choosing_s(self, rows: int) -> float:
        """Seconds in which devices that each have a part of the vocabulary choose the tokens of a step."""
        if rows not in self._choosing_s:
            device = self._replayed if self.device.kind == "gpu" else self.device
            priced = [price(one, device, self.per_host, compiled="none") for one in self.choosing(rows).values()]
            self._choosing_s[rows] = sum(one.run().seconds for one in priced)
        return self._choosing_s[rows]

    def _is_captured(self, size: Size) -> bool:
        """Whether the server replays a step of this size as one CUDA graph."""
        return self.device.kind == "gpu" and size.rows <= MOST_ROWS and can_capture(self.steps[size])

    @property
    def _replayed(self) -> Device:
        """The device, whose host launches no operation of a graph by itself."""
        overhead = self.device.overhead
        return replace(self.device, overhead=replace(overhead, eager_op_s=overhead.op_s))


def _bracket(value: float) -> tuple[int, int, float]:
    """(lower, upper, relative position between them) of the powers of `APART` around a value."""
    power = math.floor(math.log(max(1.0, value), APART) + 1e-9)
    low, high = APART**power, APART ** (power + 1)
    return power, power + 1, min(1.0, max(0.0, (value - low) / (high - low)))


@dataclass(frozen=True)
class PricedServer:
    """A recipe's server before anything is loaded: its programs, its cache, and the times of its steps."""

    recipe: Recipe
    programs: ServingPrograms
    prices: StepPrices
    room: Room
    cache_bytes: int

    @property
    def overhead(self) -> ServingOverhead:
        """The time of the server's host besides the programs."""
        return self.prices.device.overhead.serving

    @property
    def longest(self) -> int:
        """The maximal number of tokens of a request, prompt plus answer."""
        return min(self.programs.setting.max_seq, self.room.blocks * BLOCK_SIZE)

    def fitting(self, tokens: int) -> int:
        """The number of requests with this many tokens that the cache holds at once."""
        return self.room.blocks // -(-tokens // BLOCK_SIZE)


class ServerBuilder:
    """Builds servers of variants of a recipe, and shares their equal programs."""

    def __init__(self) -> None:
        self._memo = Memo()

    def build(self, recipe: Recipe) -> PricedServer:
        """Builds the server of a recipe.

        Raises `Mistakes` (exit 4) where the mesh does not fit the heads, or the weights the device.
        """
        setting, device, per_host = server_of(recipe)
        built = {
            size: self._memo.of("server's step", setting, partial(build_serving, setting, [size]), size,
                                setting.logit_rows(size.rows))
            for size in setting.sizes
        }  # fmt: skip
        by_size = {size: one.by_size[size] for size, one in built.items()}
        programs = replace(next(iter(built.values())), setting=setting, by_size=by_size)
        one_device = device.shared_by(per_host)
        free = one_device.memory_bytes - one_device.context_bytes
        blocks, each = programs.cache_blocks(free), programs.bytes("cache")
        held = (blocks + 1) * each + programs.bytes("state")
        if programs.bytes("parameter") + held > free:
            raise Mistakes.one(
                f"weights of {programs.bytes('parameter') / 2**30:.2f} GiB and a cache of "
                f"{held / 2**30:.2f} GiB do not fit {free / 2**30:.2f} GiB on each {device.name}",
                exit=Exit.FIT, where=recipe.where("serve.mesh"), fix="a larger `serve.mesh`, or `serve.cache_mb`",
            )  # fmt: skip
        settings = recipe.serve
        room = Room(
            blocks, setting.most, setting.logit_rows(setting.most), settings.requests, settings.queue,
            setting.chunks if setting.states else None,
        )  # fmt: skip
        return PricedServer(
            recipe, programs, StepPrices(programs.by_size, one_device, per_host, programs.choosing), room, held
        )
