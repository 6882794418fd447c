"""What a family of models is: its modules with parameters, the dims of everything, and its Hugging Face form.

Plain data, without torch: recipes are checked against it, and modules, folders and servers are made from it.
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
}
"""Every dim that a rule may speak of, and what is counted along it. Modules of users may name others."""

INPUTS: dict[str, Dims] = dict.fromkeys(("tokens", "targets", "documents", "positions"), ("batch", "seq"))
"""The inputs of a training step."""


@dataclass(frozen=True)
class Leaf:
    """A module with parameters: `weight` of `dims`, and perhaps `bias` along the first of them.

    A `linear` maps its last dim to the one before (`experts` are a stack of such), a `table` holds rows to look up.
    """

    kind: Literal["linear", "experts", "table", "rms_norm", "layer_norm"]
    dims: Dims
    bias: bool | str = False
    """Whether there is a bias; text is the number of the configuration that says so."""
    when: str = ""
    """The number of the configuration without which the module is left out; always there if empty."""
    times: str = ""
    """The number of such modules that lie side by side along the dim `mlp`; one if empty."""


@dataclass(frozen=True)
class Named:
    """An activation that a model gives a name."""

    dims: Dims
    when: str = ""
    """The number of the configuration without which there is no such value; always there if empty."""


@dataclass(frozen=True)
class Part:
    """A block of a layer: its leaves, and the activations that it names."""

    name: str
    leaves: Mapping[str, Leaf]
    activations: Mapping[str, Named]


@dataclass(frozen=True)
class Key:
    """A number of a model in config.json.

    `default` is what transformers takes where the file does not say it: a value, or a function of the numbers that
    were read before (by their names here). Without one the file must say it. `read` and `write` translate where the
    two do not mean the same: the file's value and the earlier numbers to ours, and all of our numbers to the file's.
    """

    theirs: str
    ours: str
    default: Any = None
    kind: type = int
    null: Any = None
    """What null means, a value or such a function; the default where that is None."""
    alias: str = ""
    """Another name that some writers give it."""
    read: Callable[[Any, Mapping[str, Any]], Any] | None = None
    write: Callable[[Any], Any] | None = None


@dataclass(frozen=True)
class Windows:
    """How config.json tells which layers attend to a sliding window of positions (the key `sliding_window`)."""

    default: int | None
    """Its size where the file does not say it."""
    switch: bool = False
    """Whether there is none unless `use_sliding_window` is true."""
    first: int | None = None
    """First layer that has one where neither `max_window_layers` nor `layer_types` is said; None: the file has no such
    keys, and all layers have one."""


@dataclass(frozen=True)
class HuggingFace:
    """How transformers stores a family.

    `names` maps the paths of leaves, `*` standing for a layer on both sides. Leaves with one name there share a matrix,
    in the order they stand here: for every KV head the rows of each. `{}` there stands for an expert: a stack of
    matrices here, one by one there.
    """

    model_type: str
    architecture: str
    names: Mapping[str, str]
    keys: tuple[Key, ...]
    theta: float = 10000.0
    """Base of the rotary frequencies where the file does not say it."""
    windows: Windows | None = None
    """None: all layers attend to all positions."""
    derived: Mapping[str, Callable[[Mapping[str, Any]], Any]] = field(default_factory=dict)
    """Numbers of ours that follow from those read, and stand in no file."""
    tensors: Mapping[str, str] = field(default_factory=dict)
    """Parameters that are not called `weight` or `bias` there, and what they are called."""
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Keys of which these values alone are computed; the first is written, and taken where a file is silent."""
    written: Mapping[str, Any] = field(default_factory=dict)
    """Keys that are written and not read: they change no logits."""
    check: Callable[[Any], None] = lambda numbers: None
    """ValueError for numbers that the architecture cannot hold."""


@dataclass(frozen=True)
class Family:
    """What models of one architecture have in common. `*` stands for a layer in the paths of leaves and activations."""

    name: str
    positions: Literal["rotary", "learned"]
    mlp: str
    """Which MLP of `models.mlp` its layers have."""
    leaves: Mapping[str, Leaf]
    activations: Mapping[str, Named]
    numbers: frozenset[str]
    """The optional numbers of a configuration that mean something here."""
    hf: HuggingFace
