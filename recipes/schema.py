"""All keys of a recipe with type, default and allowed values. The docstring below a field is its documentation.

`tpshard recipes keys` prints it, `tpshard recipes schema` as JSON Schema; docs/recipes.md explains recipes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from tpshard.models.presets import PRESETS
from tpshard.recipes.constraints import ALONE, BYTES, GROUP_SIZE, SIZE, form, limits, name_or_file
from tpshard.recipes.diagnostic import Diagnostic, Source
from tpshard.recipes.mesh_sizes import mesh_on
from tpshard.recipes.section import Section, derived

SCHEMA_VERSION = 1

DEVICES = ("cpu", "a100-40g", "a100-80g", "h100-sxm-80g", "h100-sxm-96g", "h200", "h200-x4", "b200")

if TYPE_CHECKING:
    Preset = str
else:
    Preset = Literal[tuple(PRESETS)]
Count = Annotated[int, limits(least=1, most=10**12)]
CountOrZero = Annotated[int, limits(least=0, most=10**12)]
Positive = Annotated[float, limits(above=0, most=1e12)]
NonNegative = Annotated[float, limits(least=0, most=1e12)]
Share = Annotated[float, limits(least=0, most=1)]
AXES = ("pp", "dp", "fsdp", "ep", "spatial", "tp")
"""Mesh axes that rules may name even if the mesh does not have them: they then have size 1."""
Dtype = Literal["fp32", "bf16", "fp16"]
Computed = Literal["fp32", "bf16", "fp16", "fp8"]
AxisName = Annotated[str, form(r"[A-Za-z_][A-Za-z0-9_]*", "a name of letters, digits and underscores")]
AxisSize = Annotated[int, SIZE]
Axes = Annotated[tuple[AxisName, ...], ALONE]


class Cluster(Section):
    """The machines that the recipe is for: `plan` prices them, and `train` compares its machine with them."""

    paths: ClassVar[tuple[str, ...]] = ("device",)

    device: Annotated[str, name_or_file(DEVICES, ".yaml")]
    """The name of a device, or a file that describes one."""
    nodes: Annotated[int, limits(least=1, most=2**17)] = 1
    """Number of hosts."""
    devices_per_node: Annotated[int, limits(least=1, most=1024)] = derived(default="what the mesh needs", saved=False)
    """Devices per host."""


class RopeScalingSection(Section):
    """Llama 3's scaling of rotary wavelengths: long ones grow by `factor`, short ones stay."""

    factor: Annotated[float, limits(least=1, most=1e6)]
    """Factor of the long wavelengths."""
    low_freq_factor: Positive = 1.0
    """Wavelengths above original_max_seq / this grow by the whole factor."""
    high_freq_factor: Positive = 4.0
    """Wavelengths below original_max_seq / this do not change."""
    original_max_seq: Count = 8192
    """Longest sequence without scaling."""


class Model(Section):
    """The model. Exactly one of `preset`, `hf`, `transformers` and `module`; the other keys change its dimensions."""

    exclusive: ClassVar[tuple[str, ...]] = ("preset", "hf", "transformers", "module")
    paths: ClassVar[tuple[str, ...]] = ("hf", "transformers")

    preset: Preset | None = None
    """The name of a model. tiny: 4 layers, width 128, 8 heads, 4 KV heads, mlp 384, vocab 2048, seq_len 256, fp32."""
    hf: str | None = None
    """A folder in Hugging Face format (config.json and safetensors), relative to the working directory."""
    transformers: str | None = None
    """A folder with a config.json, with or without safetensors, whose model transformers' own class computes."""
    dims: Mapping[str, tuple[str | None, ...]] = field(default_factory=dict)
    """Dim names of a `transformers` model by parameter pattern, in addition to its class's; null: left to
    propagation."""
    module: Annotated[str, form(r"[\w.]+:[\w.]+", "package:Class")] | None = None
    """Your own module that names its dims, as package:Class."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of `module`."""
    seq_len: Annotated[int, limits(least=1, most=2**26)] = derived(
        default="the preset's: 256 for tiny ones, 8192 for others; else 2048"
    )
    """Tokens per sequence."""
    dtype: Computed = derived(default="the preset's: fp32 for tiny ones; else bf16")
    """dtype of the computation. fp8: products of the blocks' linear layers, forward and backward, in e4m3 with a scale
    per 128 elements, and all else in `fsdp.param_dtype`; for training tpshard's own dense families."""
    layers: Annotated[int, limits(least=1, most=10_000)] | None = None
    """Number of transformer blocks."""
    width: Annotated[int, limits(least=1, most=2**20)] | None = None
    """Width of the residual stream."""
    heads: Annotated[int, limits(least=1, most=2**16)] | None = None
    """Number of query heads."""
    kv_heads: Annotated[int, limits(least=1, most=2**16)] | None = None
    """Number of key and value heads; fewer than `heads` is grouped-query attention, 1 is multi-query."""
    head_dim: Annotated[int, limits(least=2, most=2**14)] | None = None
    """Size of a head; need not be width / heads."""
    mlp: Annotated[int, limits(least=1, most=2**24)] | None = None
    """Hidden size of the MLP."""
    vocab: Annotated[int, limits(least=1, most=2**26)] | None = None
    """Size of the vocabulary; at least as many as the tokenizer has tokens."""
    experts: Annotated[int, limits(least=1, most=2**16)] | None = None
    """Routed experts per layer; for mixture presets."""
    top_k: Annotated[int, limits(least=1, most=2**16)] | None = None
    """Routed experts that compute each token."""
    shared_experts: Annotated[int, limits(least=0, most=2**10)] | None = None
    """Experts that compute every token."""
    capacity: Annotated[float, limits(above=0, most=2**16)] | None = None
    """Tokens that an expert accepts of a sequence, as a multiple of the mean; the rest are dropped. null: none are
    dropped."""
    routing: Literal["softmax", "sigmoid"] | None = None
    """How the router's logits become scores."""
    norm_top_k: bool | None = None
    """Whether the scores of a token's experts are normalized to sum to 1."""
    route_scale: Positive | None = None
    """Factor of these scores."""
    balance: Literal["bias", "loss", "none"] | None = None
    """How the experts' load is balanced: by a bias used only to choose, by an auxiliary loss, or not at all."""
    balance_rate: Positive | None = None
    """Step of the bias, or weight of the loss."""
    tie_embeddings: bool | None = None
    """Whether the output projection shares the embedding's matrix."""
    rope_theta: Annotated[float, limits(above=0, most=1e15)] | None = None
    """Base of the rotary frequencies."""
    rope_scaling: RopeScalingSection | None = None
    """Llama 3's scaling of long rotary wavelengths."""
    max_seq: Annotated[int, limits(least=1, most=2**30)] | None = None
    """Longest sequence that the positions support."""
    attention_bias: bool | None = None
    """Whether attention's projections have a bias."""
    mlp_bias: bool | None = None
    """Whether the MLP's projections have a bias."""
    window: Annotated[int, limits(least=1, most=2**30)] | None = None
    """Positions, its own included, that a token attends to (sliding-window attention)."""
    full_layers: tuple[CountOrZero, ...] | None = None
    """Layers, counted from 0, that ignore `window` and attend to all positions."""
    norm_eps: Annotated[float, limits(above=0, most=1)] | None = None
    """Added under the root of the normalization."""

    def overrides(self) -> dict[str, Any]:
        """The dimensions that the recipe changes, by the names in `ModelConfig`."""
        others = (*self.exclusive, "dims", "args", "seq_len", "dtype")
        values = {name: getattr(self, name) for name in self.stored() if name not in others}
        if self.rope_scaling is not None:
            values["rope_scaling"] = {name: getattr(self.rope_scaling, name) for name in self.rope_scaling.stored()}
        return {name: value for name, value in values.items() if value is not None}


class ShardingSection(Section):
    """How tensors are sharded: annotate a few, the rest is propagated."""

    rules: Mapping[str, Axes] = field(
        default_factory=lambda: {
            "batch": ("dp", "fsdp"), "vocab": ("tp",), "heads": ("tp",), "mlp": ("tp",)
        }
    )  # fmt: skip
    """For each dim name, the mesh axes that shard it (a list is outer to inner). Absent or null: left to propagation.
    If the mesh has an axis `ep`, the defaults also have {batch: [dp, fsdp, ep], expert: ep}."""
    annotate: Mapping[str, tuple[str | None, ...]] = field(default_factory=dict)
    """Dim names for parameters or activations by name pattern; null: left to propagation."""
    pin: Mapping[str, tuple[Axes, ...]] = field(default_factory=dict)
    """Exact mesh axes per dim by name pattern, as the paper's dims_mapping, without rules; null: replicated."""
    on_uneven: Literal["error", "pad"] = "error"
    """What happens if axes do not divide a computed dim (heads, mlp, vocab, batch, ...). Storage over `fsdp` may be
    uneven."""
    on_reshard: Literal["error", "warn", "allow"] = "warn"
    """What happens if a collective is needed that nothing in the recipe asks for."""

    def cuts(self, dims: Sequence[str]) -> list[tuple[str, ...]]:
        """The axes over which rules shard a tensor's dims; columns of experts use those that the experts leave."""
        of_experts = self.rules.get("expert", ()) if "expert" in dims else ()
        return [tuple(a for a in self.rules.get(d, ()) if d != "mlp" or a not in of_experts) for d in dims]


class BucketSize(Section):
    """Merge neighbouring collectives up to a size."""

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

    axis: AxisName = "fsdp"
    """The mesh axis that shards them; with dp > 1 this is hybrid sharding."""
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


class RematEvery(Section):
    """Recompute some of the layers."""

    every: Count
    """Every n-th layer is recomputed."""


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
    def each(self) -> int:
        """Stages per device."""
        return self.rounds or (2 if self.schedule in ("circular", "interleaved_1f1b") else 1)

    @property
    def vectorized(self) -> bool:
        """Whether all devices run one program, of stacked layers."""
        return self.form == "vectorized"


class Data(Section):
    """Where the text comes from."""

    paths: ClassVar[tuple[str, ...]] = ("source", "tokenizer")

    source: str = "sample"
    """c4, a directory or glob of C4-format *.json.gz, or sample (generated on this machine)."""
    tokenizer: str | None = derived(default='its own for sample, else "${oc.env:TOKENIZER_DIR}"')
    """Folder of a Hugging Face tokenizer, read when a command needs it; null: the sample's own."""
    bad_rows: Share = 0.01
    """Share of unreadable rows that stops the run."""


class Batch(Section):
    """The batch of a step. The number of micro-batches follows from it."""

    global_sequences: Annotated[int, limits(least=1, most=2**30)] = 128
    """Sequences per step, over all devices."""
    per_device: Annotated[int, limits(least=1, most=2**20)] | None = None
    """Sequences of one micro-batch on one data rank. Default: the largest divisor of global_sequences / data ranks up
    to 8."""


class Optimizer(Section):
    """The optimizer."""

    name: Literal["adamw", "lion"] = "adamw"
    """The algorithm; lion keeps one moment of each parameter, adamw two."""
    lr: NonNegative = 3.0e-4
    """Peak learning rate."""
    betas: tuple[Annotated[float, limits(least=0, below=1)], Annotated[float, limits(least=0, below=1)]] = (0.9, 0.95)
    """Decay of the first and second moments; of lion: in the update and in the moment."""
    eps: Positive = 1.0e-8
    """Added to the root of the second moment; lion has none."""
    weight_decay: NonNegative = 0.1
    """Decoupled decay of matrices; norms and biases are not decayed."""
    state_dtype: Dtype = derived(default="fsdp.master_dtype")
    """Type of the moments at rest; they are computed in fp32."""


class Schedule(Section):
    """The learning rate schedule."""

    name: Literal["cosine", "constant"] = "cosine"
    """Shape after the warm-up."""
    warmup_steps: CountOrZero = derived(default="min(2000, train.steps / 10)")
    """Steps of linear warm-up."""
    min_lr_ratio: Share = 0.1
    """Learning rate at the end, as a share of the peak."""


class Train(Section):
    """The training loop."""

    steps: Count = 200_000
    """Optimizer steps."""
    clip_grad_norm: Positive | None = 1.0
    """Global norm to which gradients are clipped; null: off."""
    on_nonfinite: Literal["stop", "skip", "rollback"] = "stop"
    """What happens if a loss or gradient is not finite; decided on all ranks alike, before any update."""


class Evaluate(Section):
    """Loss on held-out text."""

    every_steps: CountOrZero = 500
    """Steps between evaluations; 0: never. A run also evaluates at its end."""
    sequences: Count = 64
    """Held-out sequences per evaluation."""


class Timeout(Section):
    """Seconds after which a worker that does not answer counts as lost."""

    start: Positive = 600
    """Until the first step is done."""
    step: Positive = 600
    """Between steps."""


class Launch(Section):
    """The workers that `train` starts on one host."""

    restarts: Annotated[int, limits(least=0, most=1000)] = 1
    """How often workers are restarted from the last checkpoint after one crashed (SIGSEGV, SIGABRT, SIGBUS), at least
    100 steps after the previous crash."""


class Run(Section):
    """Where a run leaves its files."""

    paths: ClassVar[tuple[str, ...]] = ("dir",)

    dir: str = "runs/${name}"
    """Folder of the run, relative to the working directory; ${name} is the recipe's name, ~ and $NAME are expanded as
    by a shell."""


class Checkpoint(Section):
    """Saving checkpoints and resuming from them."""

    every_steps: CountOrZero = 500
    """Steps between checkpoints; 0: none are saved."""
    keep_last: Count = 3
    """Number of checkpoints kept."""
    resume: Literal["auto", "never", "force"] = "auto"
    """auto resumes a stopped run, never refuses to continue an existing run, force resumes despite any change."""
    on_error: Literal["warn", "stop"] = "warn"
    """What happens if a checkpoint cannot be written."""


class Wandb(Section):
    """Weights & Biases; its failures never stop a run."""

    project: str = "tpshard"
    """Project of the run."""
    entity: str | None = None
    """Team or user; null: the login's default."""
    mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    """auto is online with a login and offline without."""


class Logging(Section):
    """What a run logs. The first and the last step are always logged."""

    every_steps: Count = 10
    """Steps between rows of metrics.jsonl."""
    wandb: Wandb | None = field(default_factory=Wandb)
    """Weights & Biases; null: off."""


class Calibration(Section):
    """The calibration text of quantization."""

    sequences: Count = 128
    """Sequences of the training text."""


class Quantize(Section):
    """The settings of `tpshard quantize`."""

    method: Literal["gptq"] = "gptq"
    """The algorithm."""
    bits: Literal[2, 3, 4, 8] = 4
    """Bits per weight."""
    group_size: Annotated[int, GROUP_SIZE] = 128
    """Inputs that share a scale; -1: all."""
    order: Literal["global", "head_local", "none"] = "head_local"
    """Act-order over all inputs (global), within heads, so that wo's order can be absorbed into V (head_local), or
    none."""
    sym: bool = True
    """Whether the zero point is the middle code (symmetric quantization)."""
    calibration: Calibration = field(default_factory=Calibration)
    """The calibration text."""


class Serve(Section):
    """The settings of `tpshard serve`."""

    paths: ClassVar[tuple[str, ...]] = ("checkpoint",)

    checkpoint: str = "latest"
    """latest: this run's newest checkpoint; or a checkpoint's folder, or a Hugging Face folder, GPTQ or not."""
    mesh: Mapping[AxisName, AxisSize] = field(default_factory=lambda: {"tp": 4})
    """Mesh axes and sizes of the server."""
    dtype: Dtype | None = None
    """Compute dtype; null: the checkpoint's. For quantized weights on a CPU null is fp32; with bf16 they are multiplied
    as codes."""
    layout: Literal["tp_aware", "local_sort", "naive"] = "tp_aware"
    """How act-ordered GPTQ weights are laid out over `tp`."""
    batch_invariant: bool | None = None
    """Whether a request's tokens do not depend on other requests; default: true on a CPU."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Annotated[int, limits(least=0, most=65535)] = 8000
    """Port to listen on; 0 chooses a free one."""
    api_key: str | None = None
    """Key that clients must send, best written as "${oc.env:NAME}"; null: $TPSHARD_API_KEY. Without a key only loopback
    is served."""
    cache_mb: Annotated[int, limits(least=1)] | None = None
    """MiB per device for the KV cache; null: what `requests` of full length need, up to a quarter of the free memory,
    or on a GPU three quarters of what the weights leave."""
    requests: Annotated[int, limits(least=1, most=1024)] = 64
    """Answers computed at once."""
    step_tokens: Annotated[int, limits(least=8, most=65536)] | None = None
    """Maximal tokens computed in one step; a longer prompt takes several. null: 64 on a CPU, 2048 on a GPU, and at
    least `requests`."""
    queue: Annotated[int, limits(least=0, most=100000)] = 256
    """Answers that may wait; more are refused with 429."""
    request_s: Annotated[float, limits(above=0)] = 600.0
    """Maximal duration of a request in seconds, waiting included."""
    grace_s: Annotated[float, limits(least=0)] = 30.0
    """Seconds that running requests have to finish after SIGTERM."""


class Recipe(Section):
    """A complete recipe. Everything except `model` has a default."""

    schema: int = SCHEMA_VERSION
    """Version of these keys."""
    name: Annotated[str, form(r"[^/\\\x00-\x1f]+", "a name without slashes")] = derived(default="the file's name")
    """Name of the run."""
    seed: Annotated[int, limits(least=0, most=2**63 - 1)] = 42
    """Seed of initialization, data order and sampling."""
    cluster: Cluster | None = None
    """The machines it is for. Default: this machine, with as many devices as the mesh needs."""
    mesh: Mapping[AxisName, AxisSize] = field(default_factory=lambda: {"dp": 1, "fsdp": -1, "tp": 1})
    """The size of each mesh axis, outer to inner; -1: all remaining devices. Omitted dp, fsdp and tp have size 1."""
    model: Model
    task: Annotated[str, form(r"lm|mlm|frames|volumes|[\w.]+:[\w.]+", "lm, mlm, frames, volumes or package:Class")] = (
        "lm"
    )
    """The training task: next token, masked tokens, classes of frames, classes of voxels, or your own task as
    package:Class. Frames and volumes are generated, seq_len long."""
    sharding: ShardingSection = field(default_factory=ShardingSection)
    fsdp: Fsdp = field(default_factory=Fsdp)
    remat: Literal["none", "full", "selective"] | RematEvery | tuple[str, ...] = "selective"
    """What is recomputed in the backward pass: nothing, everything, everything except matmul and attention outputs,
    every n-th layer, or everything except a list of operations."""
    compile: Literal["inductor", "blocks", "eager"] = "inductor"
    """What is compiled of a device's program: all of it; only its layers, while the rest (the loss, the optimizer) runs
    eagerly; or nothing."""
    pipeline: Pipeline | None = None
    """Pipeline stages; needs a mesh axis `pp`."""
    data: Data = field(default_factory=Data)
    batch: Batch = field(default_factory=Batch)
    optimizer: Optimizer = field(default_factory=Optimizer)
    schedule: Schedule = field(default_factory=Schedule)
    train: Train = field(default_factory=Train)
    evaluate: Evaluate = field(default_factory=Evaluate)
    timeout_s: Timeout = field(default_factory=Timeout)
    launch: Launch = field(default_factory=Launch)
    run: Run = field(default_factory=Run)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    logging: Logging = field(default_factory=Logging)
    quantize: Quantize = field(default_factory=Quantize)
    serve: Serve = field(default_factory=Serve)

    _places: ClassVar[Mapping[str, tuple[Source, Source]]] = {}
    _file: ClassVar[str] = ""
    _origin: ClassVar[Any] = None
    """What it was loaded from: the trees of its file and of what that extends, the overrides, the default name."""
    _warnings: ClassVar[tuple[Diagnostic, ...]] = ()

    @property
    def warnings(self) -> tuple[Diagnostic, ...]:
        """Diagnostics for suspicious settings that are not errors."""
        return self._warnings

    def where(self, key: str) -> Source:
        """The place where a key got its value: the value, or the key if the value spans lines.

        For a default, a source without a line that names it.
        """
        if key in self._places:
            name, value = self._places[key]
            return value if value.line == name.line and value.text == name.text else name
        return Source(f"<default {key}>", 0, 0, key)

    @property
    def file(self) -> str:
        """The file from which the recipe was read."""
        return self._file

    def to_yaml(self, *, resolved: bool = False, pins: Mapping[str, Any] | None = None) -> str:
        """The recipe as YAML that loads to the same: complete, with interpolations, or `resolved` to known values.

        `pins` are added to those of `sharding.pin`. Secrets are masked.
        """
        from tpshard.recipes.write import to_yaml

        return to_yaml(self, resolved, pins)

    @property
    def staged(self) -> bool:
        """Whether devices run programs of their own stages."""
        return self.pipeline is not None and not self.pipeline.vectorized

    def mesh_on(self, devices: int) -> dict[str, int]:
        """The mesh with -1 replaced by the remaining `devices`. Raises `Mistakes` (exit 5) when they do not fit."""
        return mesh_on(self.mesh, devices, self.where("mesh"))
