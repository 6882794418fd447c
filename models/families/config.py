"""A model's configuration as numbers, and what follows from them: parameter names, dims, shapes, counts. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TypeVar

from tpshard.models.families.catalog import FAMILIES
from tpshard.models.families.family import Dims, Family, Leaf, Named

DTYPES = ("fp32", "bf16", "fp16")

_Value = TypeVar("_Value")


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's scaling of rotary wavelengths (rope type "llama3"): long ones grow by `factor`, short ones stay."""

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_seq: int = 8192


class Contradiction(ValueError):
    """Numbers of a recipe or a config.json that contradict each other; `names` are those at fault, the likeliest
    first. Values that the checks of recipes and config.json exclude already raise a plain ValueError."""

    def __init__(self, message: str, *names: str):
        super().__init__(message)
        self.names = names


@dataclass(frozen=True)
class ModelConfig:
    """The configuration of one transformer. All sizes are global. ValueError for contradicting numbers."""

    family: str
    """A family of `models.catalog`, such as `llama` (RMSNorm, rotary positions, SwiGLU) or `granite` (GPTBigCode:
    LayerNorm, learned positions, GELU)."""
    layers: int
    width: int
    """Size of the residual stream, the dim `embed`."""
    heads: int
    kv_heads: int
    """Key and value heads: `heads` for multi-head attention, fewer for grouped-query, 1 for multi-query attention."""
    head_dim: int
    """Size of a head; it need not be width / heads."""
    mlp: int
    """Hidden size of the MLP, or of one expert."""
    vocab: int
    max_seq: int
    """The longest sequence that the positions support."""
    seq_len: int
    """Sequence length of training where the recipe names none."""
    dtype: str = "bf16"
    """dtype of the computation where the recipe names none: fp32, bf16 or fp16."""
    tie_embeddings: bool = False
    """Whether the head shares the matrix of the embedding table."""
    pad_token: int | None = None
    """The token whose row of the embedding table gets no gradient from lookups."""
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    window: int | None = None
    """How many positions, including its own, a token attends to; None: all up to its own."""
    full_layers: tuple[int, ...] = ()
    """Layers that ignore `window` and attend to all positions."""
    attention_bias: bool = False
    """Whether wq, wk, wv and wo add a bias."""
    mlp_bias: bool = False
    """Whether the linear layers of the MLP add a bias."""

    experts: int | None = None
    """Routed experts per layer, of which `top_k` compute each token."""
    top_k: int | None = None
    shared_experts: int = 0
    """Experts per layer that compute every token."""
    capacity: float | None = None
    """Tokens that an expert accepts of a sequence, as a multiple of an even share; the rest are dropped. None: experts
    accept all tokens."""
    routing: str = "softmax"
    """How the router's logits become scores: softmax or sigmoid."""
    norm_top_k: bool = True
    """Whether the scores of a token's experts are normalized to sum to 1."""
    route_scale: float = 1.0
    """Factor of these scores."""
    balance: str = "none"
    """How the load of experts is balanced. `bias`: a bias, used only to choose experts, falls for experts above the
    mean load and rises for those below. `loss`: an auxiliary loss. `none`: not at all."""
    balance_rate: float = 0.001
    """Step of the bias, or weight of each layer's auxiliary loss, which is 1 where the load is even: a folder's
    `router_aux_loss_coef` * top_k / layers."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "full_layers", tuple(self.full_layers))  # JSON has lists
        for name in ("layers", "width", "heads", "kv_heads", "head_dim", "mlp", "vocab", "max_seq", "seq_len"):
            size = getattr(self, name)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"`{name}: {size!r}` is not a positive integer")
        if self.family not in FAMILIES:
            raise ValueError(f"there is no model family `{self.family}`; families: {', '.join(FAMILIES)}")
        for name in OPTIONAL - self.family_entry.numbers:
            if getattr(self, name) != DEFAULTS[name]:
                raise Contradiction(f"the {self.family} family does not have `{name}`", name)
        if self.dtype not in DTYPES:
            raise ValueError(f"`dtype: {self.dtype}` is not one of {', '.join(DTYPES)}")
        if self.heads % self.kv_heads:
            raise Contradiction(f"{self.heads} heads cannot share {self.kv_heads} KV heads evenly", "kv_heads", "heads")
        if self.family_entry.positions == "rotary" and self.head_dim % 2:
            raise Contradiction(f"`head_dim: {self.head_dim}` is odd; rotary positions rotate pairs", "head_dim")
        if self.full_layers and self.window is None:
            contradiction = "`full_layers` are the layers that ignore `window`, but no `window` is set"
            raise Contradiction(contradiction, "full_layers", "window")
        if self.window is not None and self.window < 1:
            raise ValueError(f"`window: {self.window}` must be at least 1, a token's own position")
        if self.pad_token is not None and not 0 <= self.pad_token < self.vocab:
            raise Contradiction(f"`pad_token: {self.pad_token}` is none of {self.vocab} tokens", "pad_token", "vocab")
        if self.family_entry.mlp == "moe":
            self._check_experts()
        if not (self.norm_eps > 0 and self.rope_theta > 0):
            raise ValueError("`norm_eps` and `rope_theta` must be positive")

    def _check_experts(self) -> None:
        if self.experts is None or self.top_k is None or not 1 <= self.top_k <= self.experts:
            contradiction = f"`top_k: {self.top_k}` must be between 1 and `experts: {self.experts}`"
            raise Contradiction(contradiction, "top_k", "experts")
        if self.capacity is not None and not self.capacity > 0:
            raise ValueError(f"`capacity: {self.capacity}` gives experts no tokens; it must be above 0, or null")
        for name, choices in (("routing", ("softmax", "sigmoid")), ("balance", ("bias", "loss", "none"))):
            if getattr(self, name) not in choices:
                raise ValueError(f"`{name}: {getattr(self, name)}` is not one of {', '.join(choices)}")
        if self.shared_experts < 0 or not (self.balance_rate >= 0 and self.route_scale > 0):
            raise ValueError("`route_scale` must be positive, `balance_rate` and `shared_experts` at least 0")

    @property
    def balanced_by_bias(self) -> bool:
        """Whether each expert has a bias that balances the load, and is stepped by its token count."""
        return self.balance == "bias"

    @property
    def family_entry(self) -> Family:
        """The description of the config's family."""
        return FAMILIES[self.family]

    def window_of(self, layer: int) -> int | None:
        """The number of positions to which a token of a layer attends; None: all up to its own."""
        return None if layer in self.full_layers else self.window

    # ---- dims ------------------------------------------------------------------------------------------------------
    @cached_property
    def pieces(self) -> dict[str, int]:
        """The number of indivisible units of each parameter dim: heads count as heads, not as columns."""
        return {
            "embed": self.width, "heads": self.heads, "kv_heads": self.kv_heads, "head_dim": self.head_dim,
            "mlp": self.mlp, "vocab": self.vocab, "positions": self.max_seq, "expert": self.experts or 0,
            "choice": self.experts or 0,
        }  # fmt: skip

    def divides(self, dim: str, ways: int) -> bool:
        """Whether a dim can be sharded over `ways` devices in equal parts.

        KV heads may be fewer than devices: each is then held by several devices, and `ways` must be a multiple of them.
        Query heads are sharded with the KV heads that they read.
        """
        if dim == "heads" and self.kv_heads % ways and ways % self.kv_heads:
            return False
        return self.pieces[dim] % ways == 0 or (dim == "kv_heads" and ways % self.kv_heads == 0)

    # ---- parameters and activations --------------------------------------------------------------------------------
    @cached_property
    def leaves(self) -> dict[str, Leaf]:
        """Every module with parameters by path, in the order of a forward pass, with `bias` as a bool."""
        described = self._all(self.family_entry.leaves)
        expanded = {path: replace(leaf, bias=self._flag(leaf.bias)) for path, leaf in described if self._has(leaf)}
        if self.tie_embeddings:
            del expanded["output"]
        return expanded

    @cached_property
    def parameters(self) -> dict[str, Dims]:
        """The dims of every parameter by name; tied parameters once."""
        named: dict[str, Dims] = {}
        for path, leaf in self.leaves.items():
            named[f"{path}.weight"] = leaf.dims
            if leaf.bias:
                named[f"{path}.bias"] = leaf.dims[:1]
        return named

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every parameter by name; tied parameters once."""
        leaves = {name: self.leaves[name.rpartition(".")[0]] for name in self.parameters}
        return {n: tuple(self.size(dim, leaves[n]) for dim in dims) for n, dims in self.parameters.items()}

    def size(self, dim: str, leaf: Leaf) -> int:
        """The size of a dim of a leaf's parameters: heads, and some experts, are side by side in one dim."""
        side_by_side = self.head_dim if dim in ("heads", "kv_heads") else 1
        if dim == "mlp" and leaf.times:
            side_by_side = getattr(self, leaf.times)
        return self.pieces[dim] * side_by_side

    @property
    def count(self) -> int:
        """The number of parameters; tied ones count once."""
        return sum(map(math.prod, self.shapes.values()))

    @cached_property
    def activations(self) -> dict[str, Dims]:
        """The dims of every activation that the model names."""
        return {path: named.dims for path, named in self._all(self.family_entry.activations) if self._has(named)}

    def _flag(self, flag: bool | str) -> bool:
        return flag if isinstance(flag, bool) else bool(getattr(self, flag))

    def _has(self, what: Leaf | Named) -> bool:
        return not what.when or bool(getattr(self, what.when))

    def _all(self, patterns: Mapping[str, _Value]) -> list[tuple[str, _Value]]:
        """Pairs of path and value; a pattern with `*` occurs once per layer, layer by layer."""
        each = {path: value for path, value in patterns.items() if "*" in path}
        expanded, last = [], list(each)[-1]
        for path, value in patterns.items():
            if path not in each:
                expanded.append((path, value))
            elif path == last:
                expanded += [(p.replace("*", str(n)), v) for n in range(self.layers) for p, v in each.items()]
        return expanded


DEFAULTS = {field.name: field.default for field in fields(ModelConfig)}
OPTIONAL = frozenset[str]().union(*(family.numbers for family in FAMILIES.values()))
"""Numbers that only some families have."""
