"""One model in numbers, and all that follows from them: names, dims, shapes, counts. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TypeVar

from tpshard.models.catalog import FAMILIES
from tpshard.models.family import Dims, Family, Leaf

DTYPES = ("fp32", "bf16", "fp16")

_Value = TypeVar("_Value")


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's stretching of rotary wavelengths (the "llama3" rope type): long ones by `factor`, short ones not."""

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_seq: int = 8192


@dataclass(frozen=True)
class ModelConfig:
    """One transformer. Sizes are global: nothing here knows of devices. ValueError for numbers that make no model."""

    family: str
    """A family of `models.catalog`: `llama` (RMSNorm, rotary positions, SwiGLU) or `granite` (GPTBigCode: LayerNorm,
    learned positions, GELU)."""
    layers: int
    width: int
    """Size of the residual stream, the dim `embed`."""
    heads: int
    kv_heads: int
    """Key and value heads: `heads` for plain attention, fewer for grouped queries, 1 for multi-query."""
    head_dim: int
    """Size of a head; independent of width / heads."""
    mlp: int
    vocab: int
    max_seq: int
    """Longest sequence the positions are made for."""
    seq_len: int
    """Sequence length to train with where a recipe names none."""
    dtype: str = "bf16"
    """dtype of the computation where a recipe names none: fp32, bf16 or fp16."""
    tie_embeddings: bool = False
    """Whether the head multiplies by the embedding table instead of a matrix of its own."""
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    window: int | None = None
    """How many positions, its own included, a token attends to; None: all up to its own."""
    full_layers: tuple[int, ...] = ()
    """Layers that attend to all positions in spite of `window`."""
    attention_bias: bool = False
    """Whether wq, wk, wv and wo add a bias."""
    mlp_bias: bool = False
    """Whether the linear layers of the MLP add a bias."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "full_layers", tuple(self.full_layers))  # JSON has lists
        for name in ("layers", "width", "heads", "kv_heads", "head_dim", "mlp", "vocab", "max_seq", "seq_len"):
            size = getattr(self, name)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"`{name}: {size!r}` is not a positive integer")
        if self.family not in FAMILIES:
            raise ValueError(f"there is no model family `{self.family}`; families: {', '.join(FAMILIES)}")
        for name in OPTIONAL - self.described.numbers:
            if getattr(self, name) != DEFAULTS[name]:
                raise ValueError(f"`{name}` has no meaning in the {self.family} family")
        if self.dtype not in DTYPES:
            raise ValueError(f"`dtype: {self.dtype}` is not one of {', '.join(DTYPES)}")
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} heads cannot share {self.kv_heads} KV heads evenly")
        if self.described.positions == "rotary" and self.head_dim % 2:
            raise ValueError(f"`head_dim: {self.head_dim}` is odd; rotary positions turn pairs")
        if self.full_layers and self.window is None:
            raise ValueError("`full_layers` are the layers that no `window` bounds, and there is none")
        if self.window is not None and self.window < 1:
            raise ValueError(f"`window: {self.window}` holds not even a token's own position")
        if not (self.norm_eps > 0 and self.rope_theta > 0):
            raise ValueError("`norm_eps` and `rope_theta` must be positive")

    @property
    def described(self) -> Family:
        return FAMILIES[self.family]

    def window_of(self, layer: int) -> int | None:
        """How many positions a token attends to in a layer; None: all up to its own."""
        return None if layer in self.full_layers else self.window

    # ---- dims ------------------------------------------------------------------------------------------------------
    @cached_property
    def pieces(self) -> dict[str, int]:
        """Dim of a parameter -> into how many parts it can be cut. Heads count as heads, not as columns."""
        return {
            "embed": self.width, "heads": self.heads, "kv_heads": self.kv_heads, "head_dim": self.head_dim,
            "mlp": self.mlp, "vocab": self.vocab, "positions": self.max_seq,
        }  # fmt: skip

    def divides(self, dim: str, ways: int) -> bool:
        """Whether a dim can be dealt to `ways` devices in equal parts.

        Each of fewer KV heads is held by several devices, so that `ways` may be their multiple; query heads go with
        the KV heads they read.
        """
        if dim == "heads" and self.kv_heads % ways and ways % self.kv_heads:
            return False
        return self.pieces[dim] % ways == 0 or (dim == "kv_heads" and ways % self.kv_heads == 0)

    # ---- parameters and activations --------------------------------------------------------------------------------
    @cached_property
    def leaves(self) -> dict[str, Leaf]:
        """Every module with parameters, by its path, in the order of a forward pass; `bias` is settled."""
        found = {path: replace(leaf, bias=self._says(leaf.bias)) for path, leaf in self._all(self.described.leaves)}
        if self.tie_embeddings:
            del found["output"]
        return found

    @cached_property
    def parameters(self) -> dict[str, Dims]:
        """Name -> dims of every parameter; tied ones once."""
        named: dict[str, Dims] = {}
        for path, leaf in self.leaves.items():
            named[f"{path}.weight"] = leaf.dims
            if leaf.bias:
                named[f"{path}.bias"] = leaf.dims[:1]
        return named

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every parameter; tied ones once."""
        return {name: tuple(map(self.size, dims)) for name, dims in self.parameters.items()}

    def size(self, dim: str) -> int:
        """Size of a parameter's dim: heads lie side by side in one."""
        return self.pieces[dim] * (self.head_dim if dim in ("heads", "kv_heads") else 1)

    @property
    def count(self) -> int:
        """Number of parameters, tied ones counted once."""
        return sum(map(math.prod, self.shapes.values()))

    @cached_property
    def activations(self) -> dict[str, Dims]:
        """Name -> dims of every activation that the model names."""
        return dict(self._all(self.described.activations))

    def cached(self, ways: int = 1) -> int:
        """Numbers that a server's cache keeps for a token, in all layers, on each of `ways` devices."""
        return 2 * self.layers * max(1, self.kv_heads // ways) * self.head_dim

    def _says(self, flag: bool | str) -> bool:
        return flag if isinstance(flag, bool) else bool(getattr(self, flag))

    def _all(self, patterns: Mapping[str, _Value]) -> list[tuple[str, _Value]]:
        """Paths for the patterns, those with a `*` once for every layer, layer by layer."""
        each = {path: value for path, value in patterns.items() if "*" in path}
        found, last = [], list(each)[-1]
        for path, value in patterns.items():
            if path not in each:
                found.append((path, value))
            elif path == last:
                found += [(p.replace("*", str(n)), v) for n in range(self.layers) for p, v in each.items()]
        return found


DEFAULTS = {field.name: field.default for field in fields(ModelConfig)}
OPTIONAL = frozenset[str]().union(*(family.numbers for family in FAMILIES.values()))
"""The numbers that mean something in some families alone."""
