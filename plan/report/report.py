"""The `Report` of a plan as plain data. Screen, JSON, page and pictures are views of it."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tpshard.diagnostics.diagnostic import Exit, Mistakes, plural
from tpshard.parallelism import words
from tpshard.parallelism.why import SourcePlace
from tpshard.plan.report.screen import screen
from tpshard.plan.step.expert_routing import Skew
from tpshard.plan.step.figures import Bucket, Line, StepFigures
from tpshard.plan.step.forecast import Conditions, Forecast, forecast
from tpshard.plan.step.time_range import time_range
from tpshard.plan.step.units import SCHEMA, round_figure, round_figures
from tpshard.programs.fit.trained_parts import TrainedParts
from tpshard.programs.setting.stacking import Stacking

_COUNTS = 0.01
"""The least share of a step's time at which the constants of a kind of work affect the label of the time."""


@dataclass(frozen=True)
class PlannedJob:
    """The planned job: settings as text and numbers that need no program."""

    name: str
    recipe: str
    """The file or name it was read from."""
    what: str
    """train, prefill or decode."""
    model: str
    params: int
    seq_len: int
    dtype: str
    mesh: Mapping[str, int]
    nodes: int
    devices_per_node: int
    global_sequences: int
    per_device: int
    micro_batches: int
    tokens: int
    """Tokens of a step on all devices."""
    compiled: str
    """The recipe's `compile`."""
    remat: str = ""
    offload: str = ""
    """What waits in the host's memory."""
    device_assumed: bool = False
    """Whether the recipe names no device, so that the shipped CPU is priced."""
    weights: str = ""
    """Where the weights come from."""
    quantized: str = ""
    """How served weights are quantized and laid out; empty for dense ones."""
    experts: str = ""
    """How tokens travel to sharded experts without a capacity, and why; empty for other models."""
    stacking: Stacking | None = None
    """The stacked layers of a vectorized pipeline."""
    steps: int = 0
    """Steps of the recipe's run; 0 for a server, and where `data.epochs` says how long a run is."""
    save_every: int = 0
    """Steps between its checkpoints; 0: none."""
    checkpoint_bytes: float = 0.0


@dataclass(frozen=True)
class Tensor:
    """A tensor of the program with its sharding and the reasons for it."""

    name: str
    shape: tuple[int, ...]
    sharding: tuple[Any, ...]
    written_at: tuple[SourcePlace, ...]
    """The sources of the axes that shard it; empty where it is replicated."""
    kind: str
    annotated: bool
    stored: tuple[Any, ...] | None = None
    dims: tuple[str, ...] = ()
    """Names of its dims, where they have any."""

    @property
    def reason(self) -> str:
        if not any(self.sharding):
            return "replicated: no annotation shards it"
        return words.places(self.written_at) or "inferred"


@dataclass(frozen=True)
class Annotations:
    """What the rules and patterns of a recipe's `sharding` lead to (GSPMD, section 1: few annotations decide all)."""

    written: int | None
    """Entries of `sharding`, and `fsdp.axis`, that a recipe writes and that shard a tensor; defaults are not counted.
    None for a program that was read from a file, which has no reasons."""
    tensors: int
    """Parameters, inputs and activations that they shard, those of each layer counted; of a program without reasons all
    that are annotated."""
    by_default: int
    """Those that defaults alone shard."""
    inferred: int
    """Values of the program whose sharding propagation inferred."""

    def __str__(self) -> str:
        by = ""
        if self.written is not None:
            by = f" by {plural(self.written, 'line')}" if self.written else " by defaults"
        count, also = self.tensors, ""
        if self.written and self.by_default:
            also = f", {self.by_default:,} by defaults"
        else:
            count += self.by_default
        return f"{plural(count, 'tensor')} annotated{by}{also} (*), {self.inferred:,} inferred"


@dataclass(frozen=True)
class Edit:
    """A change of the recipe with its predicted effect."""

    change: str
    needed_bytes: int
    step_s: float
    """Seconds for the same number of tokens, unless the change affects how many a server computes at once."""
    fits: bool
    peak_bytes: int | None = None
    """The peak of a step, where the recipe has a limit for it."""


@dataclass
class Report:
    """A plan of a step as plain data: the job, its price, shardings, collectives, warnings and suggestions. What needs
    programs is asked of a `Planned`.

    `provenance` says which figures are `exact` (counted on the program), `calibrated` or `roofline`."""

    job: PlannedJob
    pricing: StepFigures
    tensors: list[Tensor]
    lines: list[Line]
    annotations: Annotations
    buckets: list[Bucket]
    warnings: list[str]
    reshards: list[dict[str, Any]]
    losses: list[dict[str, Any]]
    """Operations that more devices than needed compute, which lower the FLOP efficiency."""
    edits: list[Edit] = field(default_factory=list)
    suggestions: list[Edit] = field(default_factory=list)
    searched: dict[str, int] | None = None
    """The counts of `plan --suggest`: variants planned, refused and too large; None without the option."""
    search_summary: str = ""
    accuracy: str = ""
    fingerprint: str = ""
    programs: list[dict[str, Any]] = field(default_factory=list)
    """The programs of a server: rows and fingerprint of each."""
    act_orders: list[dict[str, Any]] = field(default_factory=list)
    """What became of the order of a server's act-ordered linears (`order_rows`)."""
    forecast: Forecast | None = None
    """The forecast of the whole run, if requested."""
    trained: TrainedParts | None = None
    """What is trained, where the recipe's patterns say so."""
    skew: Skew | None = None
    """The effect of uneven routing to experts, if requested."""

    # ---- figures --------------------------------------------------------------------------------------------------
    @property
    def devices(self) -> int:
        """Number of devices of the mesh."""
        return math.prod(self.job.mesh.values())

    @property
    def fits(self) -> bool:
        """Whether a step fits the device's memory and keeps the recipe's limit."""
        return self.pricing.fits

    @property
    def spare_bytes(self) -> int:
        """Device memory left over; negative where the step does not fit."""
        return self.pricing.device.memory_bytes - self.pricing.needed_bytes

    @property
    def tokens_per_s_per_device(self) -> float:
        """Tokens of a step / (step time x devices)."""
        return self.job.tokens / self.pricing.step_s / self.devices if self.pricing.step_s else 0.0

    @property
    def peak_rate(self) -> float:
        """FLOP/s of a device in the compute dtype, by its data sheet."""
        return self.pricing.device.rate(self.job.dtype)

    @property
    def flop_efficiency(self) -> float:
        """FLOPs of the whole step / (devices x FLOPs of one device's program); below 1 where devices repeat work."""
        local = self.pricing.local_flops
        return self.pricing.useful_flops / (self.devices * local) if local else 1.0

    @property
    def mfu(self) -> float:
        """Useful FLOPs / (devices x peak rate x step time)."""
        seconds = self.pricing.step_s * self.devices * self.peak_rate
        return self.pricing.useful_flops / seconds if seconds else 0.0

    @property
    def bottleneck(self) -> str:
        """What takes most of a step's time, as a phrase."""
        times = self.pricing
        work = times.work_s
        copies_s = 0.0 if times.offloaded is None else times.offloaded.exposed_s
        shares = {
            "waiting for communication": times.exposed_s - copies_s,
            "waiting for copies to the host's memory and back": copies_s,
            "waiting for other stages": times.idle_s,
            "matrix products and attention": work["matmul"] + work["attention"],
            "memory-bound operations": work["stream"],
            "the host's loop": times.fixed_s,
        }
        name = max(shares, key=lambda key: shares[key])
        return f"{name}, {100 * shares[name] / max(times.step_s, 1e-12):.0f}% of the step"

    @property
    def step_range_s(self) -> tuple[float, float] | None:
        """Seconds of the shortest and the longest step on a device of which only the data sheet is known; else None."""
        return time_range(self.pricing)

    @property
    def provenance(self) -> dict[str, str]:
        """The basis of each figure: exact, calibrated or roofline."""
        times = self._label("time")
        peak = "exact" if self.job.compiled == "eager" else "roofline"
        return {
            "params": "exact",
            "memory.parameters": "exact",
            "memory.gradients": "exact",
            "memory.optimizer": "exact",
            "memory.peak_bytes": peak,
            "memory.reserved_bytes": "replayed" if self.pricing.device.kind == "gpu" else peak,
            "collectives.count": "exact",
            "collectives.bytes": "exact",
            "collectives.time_s": self._label("collectives.time_s"),
            "flop_efficiency": "exact",
            "time": times,
            "tokens_per_s_per_device": times,
            "mfu": times,
        }

    def _label(self, figure: str) -> str:
        """`calibrated` where every constant behind a figure was fitted on this device for this kind of step.

        A GPU's constants were fitted to training steps, so that a server's figures are never calibrated there.
        """
        server_on_gpu = self.job.what != "train" and self.pricing.device.kind == "gpu"
        return "roofline" if self.unfitted_constants[figure] or server_on_gpu else "calibrated"

    @property
    def unfitted_constants(self) -> dict[str, tuple[str, ...]]:
        """For each figure, the constants of the device that it depends on and that were not fitted, by name."""
        times, device = self.pricing, self.pricing.device
        kinds = {"matmul": "matmul", "attention": "attention", "stream": "streaming"}
        works = ["fp8"] * (self.job.dtype == "fp8")  # the efficiency of products was fitted to those in bf16
        works += [kinds[kind] for kind, work_s in times.work_s.items() if work_s > _COUNTS * times.step_s]
        links = [line.wire for line in self.lines if line.wire != "none"]
        used = sorted(set(links))
        bus = ["bus"] if times.offloaded is not None else []
        return {
            "time": device.unfitted_constants([*works, *used, *bus]),
            "collectives.time_s": device.unfitted_constants(used),
        }

    def forecast_under(self, conditions: Conditions) -> Forecast:
        """The forecast of the whole run whose step this is."""
        if not self.job.steps and conditions.tokens is None:
            raise Mistakes.one(
                "how long a run with data.epochs is follows from its text, which `plan` does not read",
                exit=Exit.USAGE, fix="--tokens: those of all epochs",
            )  # fmt: skip
        return forecast(
            self.pricing.step_s, self.job.tokens, self.job.steps, self.devices, self.job.nodes,
            self.job.checkpoint_bytes, self.job.save_every, self.provenance["time"], conditions,
        )  # fmt: skip

    # ---- a notebook -----------------------------------------------------------------------------------------------
    def _repr_html_(self) -> str:
        """What the screen shows, for notebooks."""
        return f"<pre>{html.escape(screen(self))}</pre>"

    # ---- JSON -----------------------------------------------------------------------------------------------------
    def _pipeline(self) -> dict[str, Any] | None:
        if (stacking := self.job.stacking) is not None:
            return stacking.to_json()
        return None if self.pricing.pipeline is None else self.pricing.pipeline.to_json()

    def to_json(self) -> dict[str, Any]:
        """The plan as the JSON of `plan --json`; the same recipe gives the same bytes."""
        times, memory = self.pricing, self.pricing.worst
        return {
            "schema": SCHEMA,
            "name": self.job.name,
            "what": self.job.what,
            "fits": self.fits,
            "spare_bytes": self.spare_bytes,
            "params": self.job.params,
            "quantized": self.job.quantized,
            "experts": self.job.experts,
            "mesh": dict(self.job.mesh),
            "device": {
                "name": times.device.name,
                "memory_bytes": times.device.memory_bytes,
                "context_bytes": times.device.context_bytes,
                "nodes": self.job.nodes,
                "devices_per_node": self.job.devices_per_node,
                "peak_flops": self.peak_rate,
            },
            "batch": {
                "global_sequences": self.job.global_sequences,
                "per_device": self.job.per_device,
                "micro_batches": self.job.micro_batches,
                "seq_len": self.job.seq_len,
                "tokens": self.job.tokens,
            },
            "memory": {
                "peak_bytes": memory.peak_bytes,
                "reserved_bytes": times.reserved_bytes,
                "segmented_bytes": times.segmented_bytes,
                "needed_bytes": times.needed_bytes,
                "limit_bytes": times.limit,
                "by_category": dict(sorted(memory.at_peak.items())),
                "static_bytes": dict(times.static_bytes),
                "peak_at": times.peak_at,
                "largest": [{"value": v, "category": c, "bytes": b} for v, c, b in memory.largest],
                **({} if times.offloaded is None else {"offloaded": round_figures(asdict(times.offloaded))}),
            },
            "time": {
                "step_s": round_figure(times.step_s),
                "step_range_s": None if self.step_range_s is None else [*map(round_figure, self.step_range_s)],
                "compute_s": round_figure(times.compute_s),
                "comm_s": round_figure(times.comm_s),
                "exposed_comm_s": round_figure(times.exposed_s),
                "slowed_s": round_figure(times.slowed_s),
                "idle_s": round_figure(times.idle_s),
                "by_part": [{"part": p.name, "times": p.times, "seconds": round_figure(p.each_s)} for p in times.parts],
                "by_work": {k: round_figure(v) for k, v in times.work_s.items()},
            },
            "tokens_per_s_per_device": round_figure(self.tokens_per_s_per_device),
            "mfu": round_figure(self.mfu),
            "flop_efficiency": round_figure(self.flop_efficiency),
            "flops_lost": self.losses,
            "bottleneck": self.bottleneck,
            "collectives": [
                {
                    "kind": line.kind,
                    "axes": [a if isinstance(a, str) else list(a) for a in line.axes],  # type: ignore[call-overload]
                    "count": line.count,
                    "bytes": line.bytes,
                    "wire_bytes": line.wire_bytes,
                    "time_s": round_figure(line.time_s),
                    "exposed_s": round_figure(line.exposed_s),
                    "of": line.of,
                    "phase": line.phase,
                    "dtype": line.dtype,
                    "link": line.level,
                    "algorithm": line.algorithm,
                    "members": line.members,
                    "asked": line.requested,
                    "reason": line.reason,
                }
                for line in self.lines
            ],
            "shardings": [
                {
                    "name": t.name,
                    "shape": list(t.shape),
                    "sharding": _plain(t.sharding),
                    "stored": None if t.stored is None else _plain(t.stored),
                    "kind": t.kind,
                    "annotated": t.annotated,
                    "reason": t.reason,
                }
                for t in self.tensors
            ],
            "buckets": [round_figures(asdict(bucket)) for bucket in self.buckets],
            "pipeline": self._pipeline(),
            "annotations": {
                "written": self.annotations.written,
                "given": self.annotations.tensors,
                "by_default": self.annotations.by_default,
                "inferred": self.annotations.inferred,
            },
            "reshards": self.reshards,
            "edits": [asdict(e) for e in self.edits],
            "suggestions": [asdict(e) for e in self.suggestions],
            **({"searched": self.searched} if self.searched is not None else {}),
            "warnings": self.warnings,
            "provenance": self.provenance,
            "unfitted": {figure: list(constants) for figure, constants in self.unfitted_constants.items()},
            "accuracy": self.accuracy,
            "fingerprint": self.fingerprint,
            **({"programs": self.programs} if self.programs else {}),
            **({"act_orders": self.act_orders} if self.act_orders else {}),
            **({"forecast": self.forecast.to_json()} if self.forecast is not None else {}),
            **({"trained": self.trained.to_json()} if self.trained is not None else {}),
            **({"skew": self.skew.to_json()} if self.skew is not None else {}),
        }


def _plain(sharding: Sequence[Any]) -> list[Any]:
    return [list(dim) if isinstance(dim, tuple) else dim for dim in sharding]
