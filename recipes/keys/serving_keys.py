"""The keys below `quantize` and `serve`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, ClassVar, Literal

from tpshard.recipes.keys.adapter_keys import Rank
from tpshard.recipes.keys.constraints import ALONE, GROUP_SIZE, AxisName, AxisSize, Count, Dtype, form, limits
from tpshard.recipes.text.section import Section

Origin = Annotated[
    str,
    form(
        r"\*|[a-z][a-z0-9+.-]*://[^/\s,?#@A-Z]+", 'an origin, as https://chat.example or http://localhost:3000, or "*"'
    ),
]


ModelName = Annotated[
    str, form(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,199}", "a name of at most 200 letters, digits and any of . _ : / -")
]


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

    paths: ClassVar[tuple[str, ...]] = ("checkpoint", "adapters", "adapter_root")
    folders: ClassVar[tuple[str, ...]] = ("checkpoint", "adapters")

    checkpoint: str = "latest"
    """latest: this run's newest checkpoint; or another run, for its newest, a checkpoint's folder, or a Hugging Face
    folder, GPTQ or not."""
    adapters: Mapping[ModelName, str] = field(default_factory=dict)
    """Low-rank adapters by the names by which requests ask for them, each a folder in PEFT's format."""
    adapter_root: str | None = None
    """Folder from whose folders clients may load further adapters while the server runs; null: none."""
    max_loras: Annotated[int, limits(least=1, most=1024)] | None = None
    """Adapters held at once; null: those of `adapters`, and 4 more with `adapter_root`."""
    max_lora_rank: Rank | None = None
    """Largest rank of an adapter; null: that of `adapters`, and at least 16 with `adapter_root`."""
    mesh: Mapping[AxisName, AxisSize] = field(default_factory=lambda: {"tp": 4})
    """Mesh axes and sizes of the server; default: tp 4, or 2 or 1 where `mesh` has fewer devices."""
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
    cors: Annotated[tuple[Origin, ...], ALONE] = ()
    """Origins whose pages may send requests from a browser, such as https://chat.example; "*" is any."""
    generation_defaults: Literal["model", "none"] = "model"
    """Whether sampling settings that a request does not set come from the model's generation_config.json."""
    cache_mb: Annotated[int, limits(least=1)] | None = None
    """MiB per device for the KV cache; null: what `requests` of full length need, up to a quarter of the free memory,
    or on a GPU three quarters of what the weights leave."""
    requests: Annotated[int, limits(least=1, most=1024)] = 64
    """Answers computed at once."""
    step_tokens: Annotated[int, limits(least=8, most=65536)] | None = None
    """Maximal tokens computed in one step; a longer prompt takes several. null: 128 on a CPU, 2048 on a GPU, and at
    least `requests`."""
    queue: Annotated[int, limits(least=0, most=100000)] = 256
    """Answers that may wait; more are refused with 429."""
    request_s: Annotated[float, limits(above=0)] = 600.0
    """Maximal duration of a request in seconds, waiting included."""
    grace_s: Annotated[float, limits(least=0)] = 30.0
    """Seconds that running requests have to finish after SIGTERM."""
