"""One model in numbers, and all that follows from them: names, dims, shapes, counts. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TypeVar

from tpshard.models.catalog import FAMILIES
from tpshard.models.family import Dims, Family, Leaf, Named

DTYPES = ("fp32", "bf16", "fp16")

_Value = TypeVar("_Value")


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's stretching of rotary wavelengths (the "llama3" rope type): long ones by `factor`, short ones not."""

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_seq: int = 8192


class Contradiction(ValueError):
    """Numbers that no model can have; `names` are those at fault, the likeliest first."""

    def __init__(self, message: str, *names: str):
        super().__init__(message)
        self.names = names


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
    """Columns inside the MLP, or inside one expert."""
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

    experts: int | None = None
    """Experts of a layer, of which `top_k` compute each token."""
    top_k: int | None = None
    shared_experts: int = 0
    """Experts that compute every token."""
    capacity: float | None = None
    """Tokens that an expert takes of a sequence, as a multiple of what it would get if all got as many; the rest is
    dropped. None: it takes all that are sent to it."""
    routing: str = "softmax"
    """What makes scores of the router's logits: softmax or sigmoid."""
    norm_top_k: bool = True
    """Whether the scores of a token's experts are scaled to sum up to 1."""
    route_scale: float = 1.0
    """What these scores are multiplied by."""
    balance: str = "none"
    """How experts come to get as many tokens: `bias` adds to the scores, in choosing alone, a bias that falls where an
    expert gets more than the mean and rises where it gets less; `loss` adds an auxiliary loss; or none."""
    balance_rate: float = 0.001
    """Step of such a bias; weight of such a loss."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "full_layers", tuple(self.full_layers))  # JSON has lists
        for name in ("layers", "width", "heads", "kv_heads", "head_dim", "mlp", "vocab", "max_seq", "seq_len"):
            size = getattr(self, name)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise Contradiction(f"`{name}: {size!r}` is not a positive integer", name)
        if self.family not in FAMILIES:
            raise ValueError(f"there is no model family `{self.family}`; families: {', '.join(FAMILIES)}")
        for name in OPTIONAL - self.described.numbers:
            if getattr(self, name) != DEFAULTS[name]:
                raise Contradiction(f"`{name}` has no meaning in the {self.family} family", name)
        if self.dtype not in DTYPES:
            raise Contradiction(f"`dtype: {self.dtype}` is not one of {', '.join(DTYPES)}", "dtype")
        if self.heads % self.kv_heads:
            raise Contradiction(f"{self.heads} heads cannot share {self.kv_heads} KV heads evenly", "kv_heads", "heads")
        if self.described.positions == "rotary" and self.head_dim % 2:
            raise Contradiction(f"`head_dim: {self.head_dim}` is odd; rotary positions turn pairs", "head_dim")
        if self.full_layers and self.window is None:
            told = "`full_layers` are the layers that no `window` bounds, and there is none"
            raise Contradiction(told, "full_layers")
        if self.window is not None and self.window < 1:
            raise Contradiction(f"`window: {self.window}` holds not even a token's own position", "window")
        if self.described.mlp == "moe":
            self._check_experts()
        if not (self.norm_eps > 0 and self.rope_theta > 0):
            raise Contradiction("`norm_eps` and `rope_theta` must be positive", "norm_eps", "rope_theta")

    def _check_experts(self) -> None:
        if self.experts is None or self.top_k is None or not 1 <= self.top_k <= self.experts:
            told = f"`top_k: {self.top_k}` of `experts: {self.experts}`: a token needs some of them"
            raise Contradiction(told, "top_k", "experts")
        if self.capacity is not None and not self.capacity > 0:
            told = f"`capacity: {self.capacity}` leaves no expert any token; it must be above 0, or null"
            raise Contradiction(told, "capacity")
        for name, known in (("routing", ("softmax", "sigmoid")), ("balance", ("bias", "loss", "none"))):
            if getattr(self, name) not in known:
                raise Contradiction(f"`{name}: {getattr(self, name)}` is not one of {', '.join(known)}", name)
        if self.shared_experts < 0 or not (self.balance_rate > 0 and self.route_scale > 0):
            told = "`balance_rate` and `route_scale` must be positive, and `shared_experts` at least 0"
            raise Contradiction(told, "balance_rate", "route_scale", "shared_experts")

    @property
    def balanced_by_bias(self) -> bool:
        return self.balance == "bias"

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
            "mlp": self.mlp, "vocab": self.vocab, "positions": self.max_seq, "expert": self.experts or 0,
            "choice": self.experts or 0,
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
        described = self._all(self.described.leaves)
        found = {path: replace(leaf, bias=self._says(leaf.bias)) for path, leaf in described if self._has(leaf)}
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
        leaves = {name: self.leaves[name.rpartition(".")[0]] for name in self.parameters}
        return {n: tuple(self.size(dim, leaves[n]) for dim in dims) for n, dims in self.parameters.items()}

    def size(self, dim: str, leaf: Leaf) -> int:
        """Size of a dim of a leaf's parameters: heads lie side by side in one, and so may experts."""
        side_by_side = self.head_dim if dim in ("heads", "kv_heads") else 1
        if dim == "mlp" and leaf.times:
            side_by_side = getattr(self, leaf.times)
        return self.pieces[dim] * side_by_side

    @property
    def count(self) -> int:
        """Number of parameters, tied ones counted once."""
        return sum(map(math.prod, self.shapes.values()))

    @cached_property
    def activations(self) -> dict[str, Dims]:
        """Name -> dims of every activation that the model names."""
        return {path: named.dims for path, named in self._all(self.described.activations) if self._has(named)}

    def cached(self, ways: int = 1) -> int:
        """Numbers that a server's cache keeps for a token, in all layers, on each of `ways` devices."""
        return 2 * self.layers * max(1, self.kv_heads // ways) * self.head_dim

    def _says(self, flag: bool | str) -> bool:
        return flag if isinstance(flag, bool) else bool(getattr(self, flag))

    def _has(self, what: Leaf | Named) -> bool:
        return not what.when or bool(getattr(self, what.when))

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
