"""Every key of a recipe: its type, its default, what it may be. The text under a field is its documentation.

`tpshard recipes keys` prints it, `tpshard recipes schema` as JSON Schema; docs/recipes.md tells the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from tpshard.models.presets import PRESETS
from tpshard.recipes.constraints import Alone, Bytes, Form, GroupSize, NameOrFile, Range, Size
from tpshard.recipes.diagnostic import Diagnostic, Source
from tpshard.recipes.mesh_sizes import mesh_on
from tpshard.recipes.section import Section, derived, section

SCHEMA_VERSION = 1

DEVICES = ("cpu", "a100-40g", "a100-80g", "h100-sxm-80g", "h100-sxm-96g", "h200", "h200-x4", "b200")

if TYPE_CHECKING:
    Preset = str
else:
    Preset = Literal[tuple(PRESETS)]
Count = Annotated[int, Range(least=1, most=10**12)]
CountOrZero = Annotated[int, Range(least=0, most=10**12)]
Positive = Annotated[float, Range(above=0, most=1e12)]
NonNegative = Annotated[float, Range(least=0, most=1e12)]
Share = Annotated[float, Range(least=0, most=1)]
AXES = ("pp", "dp", "fsdp", "ep", "spatial", "tp")
"""Mesh axes that rules may speak of though a mesh does not name them: they have size 1 there."""
Dtype = Literal["fp32", "bf16", "fp16"]
AxisName = Annotated[str, Form(r"[A-Za-z_][A-Za-z0-9_]*", "a name of letters, digits and underscores")]
AxisSize = Annotated[int, Size()]
Axes = Annotated[tuple[AxisName, ...], Alone()]


@section
class Cluster(Section):
    """The machines that the recipe is meant for: what `plan` prices, and `train` checks against the one it is on."""

    paths: ClassVar[tuple[str, ...]] = ("device",)

    device: Annotated[str, NameOrFile(DEVICES, ".yaml")]
    """A kind of device by name, or a file that describes one."""
    nodes: Annotated[int, Range(least=1, most=2**17)] = 1
    """Machines."""
    devices_per_node: Annotated[int, Range(least=1, most=1024)] = derived(default="what the mesh asks for", saved=False)
    """Devices in each of them."""


@section
class RopeScalingSection(Section):
    """Rotary wavelengths stretched as in Llama 3: long ones by `factor`, short ones not."""

    factor: Annotated[float, Range(least=1, most=1e6)]
    """How far."""
    low_freq_factor: Positive = 1.0
    """Wavelengths above original_max_seq / this are stretched whole."""
    high_freq_factor: Positive = 4.0
    """Wavelengths below original_max_seq / this are left alone."""
    original_max_seq: Count = 8192
    """Longest sequence before stretching."""


@section
class Model(Section):
    """What is computed. Exactly one of `preset`, `hf`, `transformers` and `module`; the other keys change its
    dimensions."""

    exclusive: ClassVar[tuple[str, ...]] = ("preset", "hf", "transformers", "module")
    paths: ClassVar[tuple[str, ...]] = ("hf", "transformers")

    preset: Preset | None = None
    """A model known by name. tiny: 4 layers, width 128, 8 heads, 4 KV heads, mlp 384, vocab 2048, seq_len 256, fp32."""
    hf: str | None = None
    """A folder in Hugging Face format (config.json and safetensors), relative to where the command runs."""
    transformers: str | None = None
    """A folder with a config.json, with or without safetensors: transformers' own class for it, as a language model."""
    dims: Mapping[str, tuple[str | None, ...]] = field(default_factory=dict)
    """Names of a `transformers` model's dims by pattern of its parameters, over what its class tells; null is left to
    propagation."""
    module: Annotated[str, Form(r"[\w.]+:[\w.]+", "package:Class")] | None = None
    """A module of your own that names its dims, as package:Class."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of `module`."""
    seq_len: Annotated[int, Range(least=1, most=2**26)] = derived(
        default="the preset's: 256 for tiny ones, 8192 for others; else 2048"
    )
    """Tokens in a sequence."""
    dtype: Dtype = derived(default="the preset's: fp32 for tiny ones; else bf16")
    """Type of the computation."""
    layers: Annotated[int, Range(least=1, most=10_000)] | None = None
    """Transformer blocks."""
    width: Annotated[int, Range(least=1, most=2**20)] | None = None
    """Width of the residual stream."""
    heads: Annotated[int, Range(least=1, most=2**16)] | None = None
    """Query heads."""
    kv_heads: Annotated[int, Range(least=1, most=2**16)] | None = None
    """Key and value heads; fewer than `heads` is grouped-query attention, 1 is multi-query."""
    head_dim: Annotated[int, Range(least=2, most=2**14)] | None = None
    """Width of a head; need not be width / heads."""
    mlp: Annotated[int, Range(least=1, most=2**24)] | None = None
    """Width inside the MLP."""
    vocab: Annotated[int, Range(least=1, most=2**26)] | None = None
    """Rows of the embedding; at least as many as the tokenizer has tokens."""
    experts: Annotated[int, Range(least=1, most=2**16)] | None = None
    """Experts of a layer; for presets that are mixtures."""
    top_k: Annotated[int, Range(least=1, most=2**16)] | None = None
    """Experts that compute each token."""
    shared_experts: Annotated[int, Range(least=0, most=2**10)] | None = None
    """Experts that compute every token."""
    capacity: Annotated[float, Range(above=0, most=2**16)] | None = None
    """Tokens that an expert takes of a sequence, as a multiple of the mean; what is beyond is dropped. Without one
    nothing is dropped."""
    routing: Literal["softmax", "sigmoid"] | None = None
    """What makes scores of the router's logits."""
    norm_top_k: bool | None = None
    """Whether the scores of a token's experts are scaled to sum up to 1."""
    route_scale: Positive | None = None
    """What these scores are multiplied by."""
    balance: Literal["bias", "loss", "none"] | None = None
    """How experts come to get as many tokens: a bias in choosing alone, an auxiliary loss, or nothing."""
    balance_rate: Positive | None = None
    """Step of the bias, or weight of the loss."""
    tie_embeddings: bool | None = None
    """Whether the output projection is the embedding."""
    rope_theta: Annotated[float, Range(above=0, most=1e15)] | None = None
    """Base of the rotary frequencies."""
    rope_scaling: RopeScalingSection | None = None
    """Llama 3's stretching of long rotary wavelengths."""
    max_seq: Annotated[int, Range(least=1, most=2**30)] | None = None
    """Longest sequence that positions are made for."""
    attention_bias: bool | None = None
    """Whether the projections of attention add a bias."""
    mlp_bias: bool | None = None
    """Whether the projections of the MLP add a bias."""
    window: Annotated[int, Range(least=1, most=2**30)] | None = None
    """Positions, its own included, that a token attends to (sliding-window attention)."""
    full_layers: tuple[CountOrZero, ...] | None = None
    """Layers, counted from 0, that attend to all positions in spite of `window`."""
    norm_eps: Annotated[float, Range(above=0, most=1)] | None = None
    """Added under the root of the normalisation."""

    def overrides(self) -> dict[str, Any]:
        """The dimensions that the recipe changes, by the names of `ModelConfig`."""
        others = (*self.exclusive, "dims", "args", "seq_len", "dtype")
        values = {name: getattr(self, name) for name in self.stored() if name not in others}
        if self.rope_scaling is not None:
            values["rope_scaling"] = {name: getattr(self.rope_scaling, name) for name in self.rope_scaling.stored()}
        return {name: value for name, value in values.items() if value is not None}


@section
class ShardingSection(Section):
    """Annotate a little; the rest is propagated."""

    rules: Mapping[str, Axes] = field(
        default_factory=lambda: {
            "batch": ("dp", "fsdp"), "vocab": ("tp",), "heads": ("tp",), "mlp": ("tp",)
        }
    )  # fmt: skip
    """Logical axis of a tensor to mesh axes (a list is outer to inner). Absent or null: left to propagation. Where the
    mesh has an axis `ep` and no rules are given, they are also {batch: [dp, fsdp, ep], expert: ep}."""
    annotate: Mapping[str, tuple[str | None, ...]] = field(default_factory=dict)
    """Logical axes for tensors or activations by name pattern; null is left to propagation."""
    pin: Mapping[str, tuple[Axes, ...]] = field(default_factory=dict)
    """The paper's dims_mapping: exact mesh axes per dim, no rule applies; null is replicated, read as ()."""
    on_uneven: Literal["error", "pad"] = "error"
    """A computed dim (heads, mlp, vocab, batch, ...) that its axes do not divide. Storage over `fsdp` may be uneven."""
    on_reshard: Literal["error", "warn", "allow"] = "warn"
    """A collective that nothing in the recipe asks for."""

    def cuts(self, dims: Sequence[str]) -> list[tuple[str, ...]]:
        """The axes that rules cut a tensor's dims over; columns of experts over those that the experts leave."""
        taken = self.rules.get("expert", ()) if "expert" in dims else ()
        return [tuple(a for a in self.rules.get(d, ()) if d != "mlp" or a not in taken) for d in dims]


@section
class BucketSize(Section):
    """Merge neighbours up to a size."""

    mb: Positive
    """Megabytes (10^6 bytes) a bucket."""


@section
class BucketFile(Section):
    """Buckets from a file, such as a plan saves."""

    file: str
    """A JSON file: a list of lists of parameter names."""


@section
class Accumulate(Section):
    """How gradient accumulation treats sharded parameters."""

    gather: Literal["microbatch", "step"] = "microbatch"
    """Parameters are gathered for each micro-batch, or once a step and kept."""
    reduce: Literal["each", "last"] = "each"
    """Gradients are reduced after each micro-batch, or kept unsharded and reduced after the last."""
    dtype: Dtype = "fp32"
    """Type in which gradients are summed."""


@section
class Fsdp(Section):
    """SimpleFSDP: parameters, gradients and optimizer state stored in shards, gathered where they are used."""

    axis: AxisName = "fsdp"
    """The mesh axis they are sharded over; hybrid with dp > 1."""
    wrap: tuple[str | tuple[str, ...], ...] = ("layers.*", ("tok_embed",), ("norm", "output"))
    """The units: one all-gather each (a list shares one)."""
    bucket: Literal["none", "wrap", "greedy", "auto"] | BucketSize | BucketFile | tuple[tuple[str, ...], ...] = "auto"
    """Which collectives are merged: a policy, a size, or lists of name patterns."""
    memory_limit: Annotated[int, Bytes()] | None = None
    """Bytes per device (text such as 70GiB is read); null: the device's memory less a reserve."""
    prefetch: Annotated[int, Range(least=0, most=10_000)] = 1
    """Units gathered ahead."""
    reshard_after_forward: bool | Literal["auto"] = True
    """Whether a unit is given back after forward; auto keeps it gathered while memory_limit allows, and says so."""
    master_dtype: Dtype = "fp32"
    """Type of parameters and optimizer state at rest."""
    param_dtype: Dtype = derived(default="model.dtype")
    """Type in which parameters are gathered."""
    reduce_dtype: Dtype = "fp32"
    """Type in which gradients are reduced."""
    accumulate: Accumulate = field(default_factory=Accumulate)
    """How gradient accumulation treats sharded parameters."""


@section
class RematEvery(Section):
    """Recompute some of the layers."""

    every: Count
    """Every n-th layer is recomputed."""


@section
class Pipeline(Section):
    """Layers in stages, each on the devices with one index on the mesh axis `pp`."""

    schedule: Literal["gpipe", "circular", "1f1b", "interleaved_1f1b", "zero_bubble"] = "1f1b"
    """Order of forward and backward passes: all forward first, in one round or several (circular); one of each in turn,
    with one stage a device or several (interleaved_1f1b); the same with the backward pass in two (zero_bubble)."""
    stages: Annotated[int, Range(least=2, most=1024)] | None = None
    """Devices in a row; by default, and always, the size of mesh.pp."""
    rounds: Annotated[int, Range(least=1, most=64)] | None = None
    """Stages of each device (i is on device i mod `stages`); by default 2 for circular and interleaved_1f1b, else 1."""
    micro_batches: Count | None = None
    """Micro-batches of a step; by default what batch.per_device makes, else four for each of the `stages`, or more."""
    split: tuple[Count, ...] | None = None
    """Layers of each of the `stages` x `rounds` stages; by default those whose slowest device is the fastest, by the
    plan's own prices of layers, embedding, head and loss."""

    @property
    def each(self) -> int:
        """Stages of each device."""
        return self.rounds or (2 if self.schedule in ("circular", "interleaved_1f1b") else 1)


@section
class Data(Section):
    """Where the text comes from."""

    paths: ClassVar[tuple[str, ...]] = ("source", "tokenizer")

    source: str = "sample"
    """c4, a directory or glob of C4-format *.json.gz, or sample (made on this machine)."""
    tokenizer: str | None = derived(default='its own for sample, else "${oc.env:TOKENIZER_DIR}"')
    """Folder of a Hugging Face tokenizer, resolved when a command needs it; null for the sample's own."""
    bad_rows: Share = 0.01
    """Share of unreadable rows that stops the run."""


@section
class Batch(Section):
    """How many sequences a step takes. Gradient accumulation is derived, and printed."""

    global_sequences: Annotated[int, Range(least=1, most=2**30)] = 128
    """Sequences a step, over all devices."""
    per_device: Annotated[int, Range(least=1, most=2**20)] | None = None
    """Sequences of one micro-batch on one data rank. Default: the largest divisor of global_sequences / data ranks
    that is at most 8."""


@section
class Optimizer(Section):
    """How gradients become updates."""

    name: Literal["adamw"] = "adamw"
    """The algorithm."""
    lr: NonNegative = 3.0e-4
    """Peak learning rate."""
    betas: tuple[Annotated[float, Range(least=0, below=1)], Annotated[float, Range(least=0, below=1)]] = (0.9, 0.95)
    """Decay of the first and second moments."""
    eps: Positive = 1.0e-8
    """Added to the root of the second moment."""
    weight_decay: NonNegative = 0.1
    """Decoupled decay of matrices; norms and biases are not decayed."""


@section
class Schedule(Section):
    """The learning rate over the steps."""

    name: Literal["cosine", "constant"] = "cosine"
    """Shape after the warm-up."""
    warmup_steps: CountOrZero = derived(default="min(2000, train.steps / 10)")
    """Steps of linear warm-up."""
    min_lr_ratio: Share = 0.1
    """Learning rate at the end, as a share of the peak."""


@section
class Train(Section):
    """The loop."""

    steps: Count = 200_000
    """Optimizer steps."""
    clip_grad_norm: Positive | None = 1.0
    """Global gradient norm that updates are scaled down to; null: off."""
    on_nonfinite: Literal["stop", "skip", "rollback"] = "stop"
    """What a loss or gradient that is not finite does, on all ranks alike and before any update."""


@section
class Evaluate(Section):
    """Loss on held-out text."""

    every_steps: CountOrZero = 500
    """Steps between evaluations; 0 never. A run also evaluates at its end."""
    sequences: Count = 64
    """Held-out sequences an evaluation reads."""


@section
class Timeout(Section):
    """Seconds after which a worker that does not answer is lost."""

    start: Positive = 600
    """Until the first step is done."""
    step: Positive = 600
    """Between steps."""


@section
class Launch(Section):
    """The workers that `train` starts by itself, on one host."""

    restarts: Annotated[int, Range(least=0, most=1000)] = 1
    """How often they are started again from the last checkpoint after one of them crashed (SIGSEGV, SIGABRT, SIGBUS);
    at least 100 steps after the crash before."""


@section
class Run(Section):
    """Where a run leaves its files."""

    paths: ClassVar[tuple[str, ...]] = ("dir",)

    dir: str = "runs/${name}"
    """Folder of the run, relative to where the command runs; ${name} is the recipe's name, and ~ and $NAME are what a
    shell makes of them."""


@section
class Checkpoint(Section):
    """Saving and resuming."""

    every_steps: CountOrZero = 500
    """Steps between checkpoints; 0 saves none."""
    keep_last: Count = 3
    """Checkpoints kept."""
    resume: Literal["auto", "never", "force"] = "auto"
    """auto continues a stopped run, never refuses to touch one, force continues whatever changed in the recipe."""
    on_error: Literal["warn", "stop"] = "warn"
    """What a checkpoint that cannot be written does."""


@section
class Wandb(Section):
    """Weights & Biases, a sink that can never stop a run."""

    project: str = "tpshard"
    """Project the run goes to."""
    entity: str | None = None
    """Team or user; null: the login's own."""
    mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    """auto is online with a login and offline without."""


@section
class Logging(Section):
    """What a run says while it runs. The first and the last step are always logged."""

    every_steps: Count = 10
    """Steps between rows of metrics.jsonl."""
    wandb: Wandb | None = field(default_factory=Wandb)
    """Weights & Biases; null: off."""


@section
class Calibration(Section):
    """What a quantizer looks at."""

    sequences: Count = 128
    """Sequences of the training text."""


@section
class Quantize(Section):
    """What `tpshard quantize` does."""

    method: Literal["gptq"] = "gptq"
    """The algorithm."""
    bits: Literal[2, 3, 4, 8] = 4
    """Bits a weight."""
    group_size: Annotated[int, GroupSize()] = 128
    """Rows that share a scale; -1: all."""
    order: Literal["global", "head_local", "none"] = "head_local"
    """Act-order over all rows, within heads (so that o_proj's order can be absorbed into V), or none."""
    sym: bool = True
    """Symmetric: the zero point is the middle."""
    calibration: Calibration = field(default_factory=Calibration)
    """What the quantizer looks at."""


@section
class Serve(Section):
    """What `tpshard serve` does."""

    paths: ClassVar[tuple[str, ...]] = ("checkpoint",)

    checkpoint: str = "latest"
    """latest of this run; or a directory in Hugging Face format, GPTQ or not."""
    mesh: Mapping[AxisName, AxisSize] = field(default_factory=lambda: {"tp": 4})
    """Axes and sizes to serve on."""
    dtype: Dtype | None = None
    """What it computes in; null: the checkpoint's, for quantized weights on a CPU fp32, where bf16 multiplies them as
    codes."""
    layout: Literal["tp_aware", "local_sort", "naive"] = "tp_aware"
    """How act-ordered GPTQ weights are laid out over `tp`."""
    batch_invariant: bool | None = None
    """Whether a request's tokens do not depend on what runs beside it; default: true on a CPU."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Annotated[int, Range(least=0, most=65535)] = 8000
    """Port to listen on; 0 takes a free one."""
    api_key: str | None = None
    """Key that clients must send, best as "${oc.env:NAME}"; null: $TPSHARD_API_KEY, and without one only loopback is
    served."""
    cache_mb: Annotated[int, Range(least=1)] | None = None
    """MiB per device for keys and values; null: what `requests` of full length need, at most a quarter of the memory
    that is free, on a GPU three quarters of what the weights leave."""
    requests: Annotated[int, Range(least=1, most=1024)] = 64
    """Answers computed at once."""
    step_tokens: Annotated[int, Range(least=8, most=65536)] | None = None
    """Most tokens computed in one step; a longer prompt takes several. null: 64 on a CPU, 2048 on a GPU, and at least
    `requests`."""
    queue: Annotated[int, Range(least=0, most=100000)] = 256
    """Answers that may wait for that; more are refused with 429."""
    request_s: Annotated[float, Range(above=0)] = 600.0
    """Longest a request may take, waiting included, in seconds."""
    grace_s: Annotated[float, Range(least=0)] = 30.0
    """Time that running requests have to end after SIGTERM, in seconds."""


@section
class Recipe(Section):
    """What a user writes, complete. Everything but `model` has a default."""

    schema: int = SCHEMA_VERSION
    """Version of these keys."""
    name: Annotated[str, Form(r"[^/\\\x00-\x1f]+", "a name without slashes")] = derived(default="the file's name")
    """Name of the run."""
    seed: Annotated[int, Range(least=0, most=2**63 - 1)] = 42
    """Of initialisation, data order and sampling."""
    cluster: Cluster | None = None
    """The machines it is meant for. Default: this machine, as many devices as the mesh asks for."""
    mesh: Mapping[AxisName, AxisSize] = field(default_factory=lambda: {"dp": 1, "fsdp": -1, "tp": 1})
    """axis: size, outer to inner; -1 is the rest. dp, fsdp and tp have size 1 where they are left out."""
    model: Model
    """What is computed."""
    task: Annotated[str, Form(r"lm|mlm|frames|volumes|[\w.]+:[\w.]+", "lm, mlm, frames, volumes or package:Class")] = (
        "lm"
    )
    """What it is trained for: the next token, masked tokens, classes of frames, classes of voxels, or a task of your
    own, as package:Class; frames and volumes are made on the machine, seq_len long."""
    sharding: ShardingSection = field(default_factory=ShardingSection)
    """How it is spread."""
    fsdp: Fsdp = field(default_factory=Fsdp)
    """Sharded parameters."""
    remat: Literal["none", "full", "selective"] | RematEvery | tuple[str, ...] = "selective"
    """What is recomputed in the backward pass: nothing, everything, all but matmul and attention outputs, every n-th
    layer, or all but a list of operations to keep."""
    compile: Literal["inductor", "blocks", "eager"] = "inductor"
    """What torch's compiler sees of a device's program: all of it; its layers, while the rest (the loss, the optimizer)
    runs operation by operation; or nothing."""
    pipeline: Pipeline | None = None
    """Layers in stages; needs a mesh axis `pp`."""
    data: Data = field(default_factory=Data)
    """Where the text comes from."""
    batch: Batch = field(default_factory=Batch)
    """How many sequences a step takes."""
    optimizer: Optimizer = field(default_factory=Optimizer)
    """How gradients become updates."""
    schedule: Schedule = field(default_factory=Schedule)
    """The learning rate over the steps."""
    train: Train = field(default_factory=Train)
    """The loop."""
    evaluate: Evaluate = field(default_factory=Evaluate)
    """Loss on held-out text."""
    timeout_s: Timeout = field(default_factory=Timeout)
    """Seconds after which a worker is lost."""
    launch: Launch = field(default_factory=Launch)
    """Workers that crash."""
    run: Run = field(default_factory=Run)
    """Where a run leaves its files."""
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    """Saving and resuming."""
    logging: Logging = field(default_factory=Logging)
    """What a run says."""
    quantize: Quantize = field(default_factory=Quantize)
    """What `tpshard quantize` does."""
    serve: Serve = field(default_factory=Serve)
    """What `tpshard serve` does."""

    _places: ClassVar[Mapping[str, tuple[Source, Source]]] = {}
    _file: ClassVar[str] = ""
    _warnings: ClassVar[tuple[Diagnostic, ...]] = ()

    @property
    def warnings(self) -> tuple[Diagnostic, ...]:
        """What is odd about the recipe without being wrong."""
        return self._warnings

    def where(self, key: str) -> Source:
        """Where a key got its value: the value itself where it is short, the key where it spans lines. For a key that
        nobody wrote, a source without a line that names the default."""
        if key in self._places:
            name, value = self._places[key]
            return value if value.line == name.line and value.text == name.text else name
        return Source(f"<default {key}>", 0, 0, key)

    @property
    def file(self) -> str:
        """The file the recipe was read from."""
        return self._file

    def to_yaml(self, *, resolved: bool = False) -> str:
        """The recipe as a file that loads to the same: complete, interpolations kept, or `resolved` to the values that
        are known here; secrets masked."""
        from tpshard.recipes.write import to_yaml

        return to_yaml(self, resolved)

    def pinned(self, pins: Mapping[str, Sequence[Sequence[str]]]) -> str:
        """As `to_yaml`, with these pins beside those that are there."""
        from tpshard.recipes.write import to_yaml

        return to_yaml(self, pins=pins)

    def mesh_on(self, devices: int) -> dict[str, int]:
        """The mesh with -1 replaced by what is left of `devices`. Raises `Mistakes` (exit 5) when they do not fit."""
        return mesh_on(self.mesh, devices, self.where("mesh"))
