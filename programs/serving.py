"""The programs of a server: one step over a paged cache, for a number of rows, partitioned like a training step.

    step(tokens, positions, slots, sequences [1,rows], tables [m,w], wanted [n], pools, parameters) -> logits [n, vocab]

A step's rows are tokens of any number of sequences: chunks of prompts and next tokens alike, so prefill and decode are
the same program in two sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from tpshard.kernels.layouts import Layout
from tpshard.kernels.paged_attention import paged_attention
from tpshard.models.config import ModelConfig
from tpshard.models.dims import param_dims
from tpshard.parallelism.capture import Trail, capture
from tpshard.parallelism.graph import Graph
from tpshard.parallelism.mesh import Mesh
from tpshard.parallelism.partitioner import partition_captured
from tpshard.parallelism.program import Program
from tpshard.programs.layouts import ActOrder, Arrangement, arrange
from tpshard.programs.setting import DTYPES

Pools = list[tuple[Tensor, Tensor]]
"""Per layer the blocks of keys and of values, each [blocks, block_size, kv_heads, head_dim]."""
BLOCK_SIZE = 16
"""Positions of a block of the cache: what is planned, checked and served."""
ROWS = ("tokens", "positions", "slots", "sequences", "tables", "wanted")
"""The inputs that every step brings, in order; pools and parameters follow."""


@dataclass
class PagedCache:
    """What a model's attention layers see of the paged cache.

    Only the wanted rows go on once the last layer has stored its keys and values: of a prompt mostly one.
    """

    pools: Pools
    positions: Tensor
    slots: Tensor
    sequences: Tensor
    tables: Tensor
    wanted: Tensor

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        k_pool, v_pool = self.pools[layer]
        attended = paged_attention(
            q, k, v, k_pool, v_pool, self.positions, self.slots, self.sequences, self.tables,
            window=window,
        )  # fmt: skip
        return self.needed(layer, attended)

    def needed(self, layer: int, x: Tensor) -> Tensor:
        return x.index_select(1, self.wanted) if layer == len(self.pools) - 1 else x


def step_function(model: nn.Module) -> Callable[..., Tensor]:
    """`step` as above."""

    def step(
        tokens: Tensor, positions: Tensor, slots: Tensor, sequences: Tensor, tables: Tensor, wanted: Tensor,
        pools: Pools, parameters: dict[str, Tensor],
    ) -> Tensor:  # fmt: skip
        cache = PagedCache(pools, positions, slots, sequences, tables, wanted)
        logits = torch.func.functional_call(
            model, parameters, (tokens,), {"positions": positions, "cache": cache}, tie_weights=True
        )
        return logits.squeeze(0)

    return step


def make_pools(
    config: ModelConfig, blocks: int, block_size: int, dtype: torch.dtype, device: torch.device | str, kv_heads: int = 0
) -> Pools:
    """Zeroed pools of `blocks` usable blocks, and block 0; of `kv_heads` heads where a device holds a part."""
    shape = (blocks + 1, block_size, kv_heads or config.kv_heads, config.head_dim)
    return [
        (torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device))
        for _ in range(config.layers)
    ]


@dataclass(frozen=True)
class Step:
    """A server's step for one device, and how the parameters that it takes lie."""

    program: Program
    arrangement: Arrangement


def step_program(
    model: nn.Module, config: ModelConfig, mesh: Mesh, *, rows: int, wanted: int, blocks: int, block_size: int
) -> Program:
    """The step of `model` (on meta, in the dtype it computes in) for one device of `mesh`, whose axis is `tp`.

    Heads, mlp (see `programs.padding`) and vocab, where tp divides it, are spread over `tp`, and the cache with its
    heads; logits come out whole on every device.
    Its first inputs are ROWS, then the pools (`layers.N.cache.k`, `.v`), then the parameters by name. ValueError where
    tp fits neither heads nor KV heads.
    """
    return step(model, config, mesh, rows=rows, wanted=wanted, blocks=blocks, block_size=block_size).program


def step(
    model: nn.Module, config: ModelConfig, mesh: Mesh, *, rows: int, wanted: int, blocks: int, block_size: int,
    orders: Mapping[str, ActOrder] | None = None, layout: Layout = "tp_aware",
) -> Step:  # fmt: skip
    """`step_program` for weights of which some are act-ordered, in a layout: the orders that the program still takes
    inputs in come after the parameters."""
    tp = mesh.axes.get("tp", 1)
    graph, arrangement = _captured(model, config, tp, rows, wanted, blocks, block_size, orders or {}, layout)
    axes, dims = _axes(config, tp), param_dims(model)
    shardings: list[Any] = [
        *((None,) * 2 for _ in range(5)),
        (None,),
        *((None, None, axes["kv_heads"], None) for _ in range(2 * config.layers)),
        *(tuple(axes.get(dim) for dim in dims[name]) for name, _ in model.named_parameters()),
        *(("tp" if taken.blocks == tp > 1 else None,) for taken in arrangement.inputs.values()),
    ]
    spread = {dim: f"serve.mesh ({dim}: {_show(axis)})" for dim, axis in axes.items() if axis is not None}
    cache = [spread.get("kv_heads", "")] * (2 * config.layers)
    why = ["; ".join(spread[d] for d in dims[name] if d in spread) for name, _ in model.named_parameters()]
    why = ["a step's rows are whole"] * len(ROWS) + cache + why
    return Step(partition_captured(graph, mesh, shardings, [(None, None)], why), arrangement)


def _show(axis: Any) -> str:
    return axis if isinstance(axis, str) else f"{axis[0]}:({axis[1]}){axis[2]}"


def arrangement_on_one(
    model: nn.Module, config: ModelConfig, orders: Mapping[str, ActOrder], layout: Layout
) -> Arrangement:
    """What the step expects of parameters where one device holds them all."""
    return _captured(model, config, 1, 8, 8, 1, BLOCK_SIZE, orders, layout)[1] if orders else Arrangement()


def _captured(
    model: nn.Module, config: ModelConfig, tp: int, rows: int, wanted: int, blocks: int, block_size: int,
    orders: Mapping[str, ActOrder], layout: Layout,
) -> tuple[Graph, Arrangement]:  # fmt: skip
    """The step as a graph of global shapes, its act-ordered weights in a layout."""
    axes, dims = _axes(config, tp), param_dims(model)
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    first = next(iter(parameters.values()))
    pools = make_pools(config, blocks, block_size, first.dtype, "meta")
    row = [torch.zeros(1, rows, dtype=torch.int64, device="meta") for _ in range(4)]
    tables = torch.zeros(rows + 1, blocks, dtype=torch.int64, device="meta")
    inputs: list[Any] = [*row, tables, torch.zeros(wanted, dtype=torch.int64, device="meta"), pools, parameters]
    names = [*ROWS, *(f"layers.{i}.cache.{x}" for i in range(config.layers) for x in "kv"), *parameters]
    trail = Trail()
    with torch.no_grad(), trail.watch(model):
        graph = capture(step_function(model), inputs, names, trail)
    inner = {name: dims[name][1] for name in orders if dims[name][1] in ("heads", "mlp")}
    spread = {name: tp if axes.get(dim) is not None else 1 for name, dim in inner.items()}
    return graph, arrange(graph, orders, layout, spread, parameters)


def _axes(config: ModelConfig, tp: int) -> dict[str, Any]:
    """Dim name -> the axes it is spread over. More devices than KV heads hold them several times."""
    if tp == 1:
        return {"kv_heads": None}
    if not config.divides("heads", tp):
        fit = [n for n in range(1, config.heads + 1) if config.divides("heads", n)]
        raise ValueError(
            f"tp {tp} does not fit {config.heads} heads and {config.kv_heads} KV heads; these do: "
            f"{', '.join(map(str, fit))}"
        )
    kv: Any = "tp" if config.kv_heads % tp == 0 else ("tp", 1, config.kv_heads) if config.kv_heads > 1 else None
    assert config.divides("mlp", tp), "programs.padding makes the MLP divide"
    spread = {"heads": "tp", "kv_heads": kv, "mlp": "tp"}
    return spread | ({"vocab": "tp"} if config.divides("vocab", tp) else {})


def block_bytes(config: ModelConfig, tp: int, dtype: str) -> int:
    """Bytes of one cache block (keys and values of all layers) on one device."""
    return BLOCK_SIZE * config.cached(tp) * DTYPES[dtype].itemsize


def weight_bytes(config: ModelConfig, tp: int, dtype: str, bits: int | None = None) -> int:
    """About what the weights take on one device; quantized ones (all but the tables) half a bit more than `bits`."""
    size = DTYPES[dtype].itemsize
    tables = (1 if config.tie_embeddings else 2) * config.vocab * config.width
    rest = config.count - tables
    return (tables * size + (rest * size if bits is None else rest * (2 * bits + 1) // 16)) // tp


def cache_blocks(
    config: ModelConfig, tp: int, dtype: str, requests: int, given_mb: int | None, free_bytes: int, device: str,
    bits: int | None = None,
) -> int:  # fmt: skip
    """Blocks of a server's cache on one device (`cpu` or `gpu`) with `free_bytes`: those of `given_mb` MiB, else what
    `requests` of the model's longest length need, within a quarter of a CPU's free memory, which is not the server's
    alone, or three quarters of what the weights (of `bits`, where quantized) leave of a GPU's. At least one sequence's
    worth of 256 tokens.

    Ranks on a CPU share its memory: the caller divides.
    """
    each = block_bytes(config, tp, dtype)
    if given_mb is not None:
        return max(1, given_mb * 2**20 // each)
    wanted = requests * -(-config.max_seq // BLOCK_SIZE)
    room = free_bytes // 4
    if device != "cpu":
        room = 3 * max(0, free_bytes - weight_bytes(config, tp, dtype, bits)) // 4
    return max(256 // BLOCK_SIZE, min(wanted, room // each))
