"""The keys below `sharding`, `fsdp`, `remat` and `pipeline`: how the model is spread over devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Annotated, Literal

from tpshard.recipes.keys.constraints import ALONE, BYTES, Axes, AxisName, Count, Dtype, Positive, limits
from tpshard.recipes.text.section import Section, derived


class DroplessSection(Section):
    """How tokens of a mixture without a capacity travel to the devices of their experts; nothing is ever dropped."""

    form: Literal["auto", "gather", "all_to_all"] = "auto"
    """gather: every token goes to every device with experts. all_to_all: a token goes to the devices of its experts, in
    as many slots as the step's load needs; where some find none, these are gathered too. auto: the gather, unless the
    other's collectives take less than 0.8 of its time."""
    slack: Annotated[float, limits(above=0, most=2**16)] = 1.5
    """The most slots of a device for tokens of another one, as a multiple of those that even routing sends there."""


class ShardingSection(Section):
    """How tensors are sharded: annotate a few, the rest is propagated."""

    rules: Mapping[str, Axes] = field(
        default_factory=lambda: {"batch": ("dp", "fsdp"), "vocab": ("tp",), "heads": ("tp",), "mlp": ("tp",)}
    )
    """For each dim name, the mesh axes that shard it (a list is outer to inner). Absent or null: left to propagation.
    If the mesh has an axis `ep`, the defaults also have {batch: [dp, fsdp, ep], expert: ep}; if `serve.mesh` has one,
    {expert: ep}."""
    annotate: Mapping[str, tuple[str | None, ...]] = field(default_factory=dict)
    """Dim names for parameters or activations by name pattern; null: left to propagation."""
    priority: Mapping[str, Annotated[int, limits(least=0, most=100)]] = field(default_factory=dict)
    """For each dim name that has a rule, the round of propagation in which the rule takes part, as `p1` in the text of
    `mesh_split`: where shardings conflict, the lower number wins. Default: 0 for parameters and the batch, 1 for
    activations."""
    pin: Mapping[str, tuple[Axes, ...]] = field(default_factory=dict)
    """Exact mesh axes per dim by name pattern, as the paper's dims_mapping, without rules; null: replicated."""
    dropless: DroplessSection = field(default_factory=DroplessSection)
    """Experts without a capacity."""
    on_uneven: Literal["error", "pad"] = "error"
    """What happens if axes do not divide a computed dim (heads, mlp, vocab, batch, ...). Storage over `fsdp` may be
    uneven."""
    overlap: bool = True
    """Whether products that need nothing of it are computed while activations travel between devices of tensor or
    expert parallelism. Off as in stacks that wait for each exchange, and to hold less."""
    on_reshard: Literal["error", "warn", "allow"] = "warn"
    """What happens if a collective is needed that nothing in the recipe asks for."""

    def cuts(self, dims: Sequence[str]) -> list[tuple[str, ...]]:
        """The axes over which the rules shard each dim of a tensor; `mlp` of experts gets only axes that `expert`
        leaves."""
        of_experts = self.rules.get("expert", ()) if "expert" in dims else ()
        return [tuple(a for a in self.rules.get(d, ()) if d != "mlp" or a not in of_experts) for d in dims]


class BucketSize(Section):
    """Buckets of neighbouring collectives up to a size."""

    mb: Positive
    """Megabytes (10^6 bytes) per bucket."""


class BucketFile(Section):
    """Buckets from a file, such as a plan saves."""

    file: str
    """A JSON file: a list of lists of parameter names."""


class Accumulate(Section):
    """How gradient accumulation treats sharded parameters."""

    gather: Literal["microbatch", "step"] = "microbatch"
    """Whether parameters are gathered for each micro-batch, or once per step and kept."""
    reduce: Literal["each", "last"] = "each"
    """Whether gradients are reduced after each micro-batch, or kept unsharded and reduced after the last."""
    dtype: Dtype = "fp32"
    """dtype in which gradients are summed."""


class Fsdp(Section):
    """SimpleFSDP: parameters, gradients and optimizer state stored in shards, gathered where they are used."""

    axis: AxisName | tuple[AxisName, ...] = "fsdp"
    """The mesh axis that shards them, or several, outer to inner, such as [fsdp, cp]; with dp > 1 this is hybrid
    sharding. What an axis shards already, such as experts over ep, is sharded over the others."""
    wrap: tuple[str | tuple[str, ...], ...] = ("layers.*", ("tok_embed",), ("norm", "output"))
    """The units, gathered by one all-gather each (a list is one unit)."""
    bucket: Literal["none", "wrap", "greedy", "auto"] | BucketSize | BucketFile | tuple[tuple[str, ...], ...] = "auto"
    """Which collectives are merged: a policy, a size, or lists of name patterns."""
    memory_limit: Annotated[int, BYTES] | None = None
    """Bytes per device, or text such as 70GiB; null: the device's memory less a reserve."""
    prefetch: Annotated[int, limits(least=0, most=10_000)] = 1
    """Units gathered ahead of their use."""
    reshard_after_forward: bool | Literal["auto"] = True
    """Whether a unit is freed after the forward pass; auto keeps it gathered while memory_limit allows, and says so."""
    master_dtype: Dtype = "fp32"
    """dtype of stored parameters and optimizer state."""
    param_dtype: Dtype = derived(default="model.dtype; with fp8: bf16")
    """dtype in which parameters are gathered."""
    reduce_dtype: Dtype = "fp32"
    """dtype in which gradients are reduced."""
    accumulate: Accumulate = field(default_factory=Accumulate)
    """How gradient accumulation treats sharded parameters."""

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes of `axis`, outer to inner."""
        return (self.axis,) if isinstance(self.axis, str) else self.axis


class RematEvery(Section):
    """Recomputation of some layers."""

    every: Count = 1
    """Every n-th layer is recomputed."""
    first: Count | None = None
    """Of so many layers, counted from the model's first; null: of all."""
    modules: Annotated[tuple[str, ...], ALONE] = ()
    """Of these layers only what modules compute, by name pattern, such as layers.*.mlp; empty: all."""


class OffloadFirst(Section):
    """Activations of some layers in the host's memory."""

    first: Count
    """Of so many layers, counted from the model's first."""


class Pipeline(Section):
    """Pipeline parallelism: the layers in stages along the mesh axis `pp`."""

    schedule: Literal["gpipe", "circular", "1f1b", "interleaved_1f1b", "zero_bubble"] = "1f1b"
    """Order of forward and backward passes. gpipe: all forward first; circular: the same in several rounds; 1f1b: one
    of each in turn; interleaved_1f1b: with several stages per device; zero_bubble: with the backward pass in two
    parts."""
    form: Literal["staged", "vectorized"] = "staged"
    """staged: each device runs programs of its own stages. vectorized (gpipe and circular): all devices run one
    program, whose layers are stacked along a dim that is sharded over `pp`; stages need equally many layers."""
    stages: Annotated[int, limits(least=2, most=1024)] | None = None
    """Number of devices along the pipeline; must be the size of mesh.pp, which is the default."""
    rounds: Annotated[int, limits(least=1, most=64)] | None = None
    """Stages per device (stage i is on device i mod `stages`). Default: 2 for circular and interleaved_1f1b, else 1."""
    micro_batches: Count | None = None
    """Micro-batches per step. Default: what batch.per_device gives, else at least four per device."""
    split: tuple[Count, ...] | None = None
    """Layers of each of the `stages` x `rounds` stages. Default: the split with the fastest slowest device, by the
    plan's prices of layers, embedding, head and loss."""

    @property
    def stages_per_device(self) -> int:
        """Stages per device."""
        return self.rounds or (2 if self.schedule in ("circular", "interleaved_1f1b") else 1)

    @property
    def vectorized(self) -> bool:
        """Whether all devices run one program, of stacked layers."""
        return self.form == "vectorized"
