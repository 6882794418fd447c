"""The description of a model family: its modules with parameters, the names of all dims, and its Hugging Face form.

Plain data, without torch. Recipes are checked against it; modules, folders and servers are built from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Dims = tuple[str, ...]

DIMS = {
    "batch": "sequences of a step",
    "seq": "tokens of a sequence",
    "embed": "columns of the residual stream",
    "heads": "heads",
    "kv_heads": "KV heads",
    "head_dim": "numbers of a head",
    "mlp": "columns of the MLP",
    "vocab": "tokens of the vocabulary",
    "expert": "experts",
    "rank": "ranks of adapters",
    "stage": "stages of a vectorized pipeline",
}
"""The dims that a sharding rule may name, with the unit counted along each. Users' modules may name others."""

INPUTS: dict[str, Dims] = dict.fromkeys(("tokens", "targets", "documents", "positions"), ("batch", "seq"))
"""The inputs of a training step."""


@dataclass(frozen=True)
class Leaf:
    """A module with parameters: `weight` with `dims`, and optionally `bias` along the first of them.

    A `linear` maps its last dim to the one before; `experts` are a stack of linears; a `table` is an embedding.
    """

    kind: Literal["linear", "experts", "table", "rms_norm", "layer_norm"]
    dims: Dims
    bias: bool | str = False
    """Whether it has a bias; a string names the field of the configuration that decides."""
    when: str = ""
    """The field of the configuration without which the module does not exist; empty: it always exists."""
    times: str = ""
    """The field that says how many such modules are side by side along the dim `mlp`; empty: one."""


@dataclass(frozen=True)
class Named:
    """An activation that a model names."""

    dims: Dims
    when: str = ""
    """The field of the configuration without which the activation does not exist; empty: it always exists."""


@dataclass(frozen=True)
class Part:
    """A block of a layer: its modules with parameters, and the activations that it names."""

    name: str
    leaves: Mapping[str, Leaf]
    activations: Mapping[str, Named]


class Weight(float):
    """A number that is at least 0; a key of kind float is above 0."""


@dataclass(frozen=True)
class Key:
    """The mapping between a key of config.json and a field of the configuration.

    `default` is transformers' value for a missing key: a value, or a function of the fields read so far. Without a
    default the key is required. `read` converts the file's value and the earlier fields to ours; `write` converts all
    our fields to the file's value.
    """

    theirs: str
    ours: str
    default: Any = None
    kind: type = int
    null: Any = None
    """The meaning of null, a value or a function like `default`; None: the default."""
    alias: str = ""
    """Another spelling of the key."""
    read: Callable[[Any, Mapping[str, Any]], Any] | None = None
    write: Callable[[Any], Any] | None = None


@dataclass(frozen=True)
class Windows:
    """How config.json says which layers use a sliding window (the key `sliding_window`)."""

    default: int | None
    """The window's size where the key is missing."""
    switch: bool = False
    """Whether windows are off unless `use_sliding_window` is true."""
    first: int | None = None
    """The first layer with a window where neither `max_window_layers` nor `layer_types` is set; None: the format has no
    such keys, and all layers have a window."""


@dataclass(frozen=True)
class HuggingFace:
    """The format in which transformers stores a family.

    `names` maps the paths of our modules to the folder's, with `*` for a layer on both sides. Several modules with one
    name share a fused matrix, which holds for each KV head the rows of each module in the order of `names`. `{}` stands
    for an expert's number: one stacked tensor here is one matrix per expert there.
    """

    model_type: str
    architecture: str
    names: Mapping[str, str]
    keys: tuple[Key, ...]
    theta: float = 10000.0
    """Base of the rotary frequencies where the key is missing."""
    pads: bool = True
    """Whether the row of `pad_token_id` gets no gradient from lookups."""
    windows: Windows | None = None
    """None: all layers attend to all positions."""
    derived: Mapping[str, Callable[[Mapping[str, Any]], Any]] = field(default_factory=dict)
    """Fields computed from those read, which no file holds."""
    biases: Mapping[str, str] = field(default_factory=dict)
    """The folder's names of biases, by module, that it does not call `bias`."""
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Keys with only these supported values; the first is written, and assumed for a missing key."""
    written: Mapping[str, Any] = field(default_factory=dict)
    """Keys that are written but not read, because they do not change the logits."""
    check: Callable[[Any], None] = lambda numbers: None
    """Raises ValueError for numbers that the architecture cannot represent."""


@dataclass(frozen=True)
class Family:
    """The description shared by all models of one architecture; `*` stands for a layer in paths."""

    name: str
    positions: Literal["rotary", "learned"]
    mlp: str
    """The name of its MLP in `models.mlp`."""
    leaves: Mapping[str, Leaf]
    activations: Mapping[str, Named]
    numbers: frozenset[str]
    """The optional fields of a configuration that this family has."""
    hf: HuggingFace
