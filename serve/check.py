"""What serving would take, said before anything is loaded: memory, cache, kernels, collectives."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from tpshard.kernels.layouts import Layout
from tpshard.models import build
from tpshard.models.config import ModelConfig
from tpshard.parallelism.mesh import Mesh
from tpshard.parallelism.program import Program
from tpshard.programs.layouts import Arrangement
from tpshard.programs.padding import note, padded
from tpshard.programs.served import Quantization
from tpshard.programs.serving import BLOCK_SIZE, step
from tpshard.programs.setting import DTYPES

_MEANING = {
    "naive": "activations of all ranks gathered before each row-parallel one",
    "local_sort": "sorted within each rank",
    "tp_aware": "written by the products before",
}


@dataclass(frozen=True)
class Need:
    """What one device of a server holds and does."""

    tp: int
    dtype: str
    blocks: int
    parameter_bytes: int
    cache_bytes: int
    collectives: tuple[dict[str, Any], ...]
    """Per step of one token."""
    kernels: dict[str, str]
    padding: str = ""
    """What the program is wider by than the model, in words."""

    @property
    def cache_tokens(self) -> int:
        return self.blocks * BLOCK_SIZE

    def as_json(self) -> dict[str, Any]:
        return {
            "tp": self.tp, "dtype": self.dtype,
            "memory": {"parameters": self.parameter_bytes, "cache": self.cache_bytes},
            "cache": {"blocks": self.blocks, "block_size": BLOCK_SIZE, "tokens": self.cache_tokens},
            "kernels": self.kernels, "collectives_per_token": list(self.collectives), "padding": self.padding,
        }  # fmt: skip

    def __str__(self) -> str:
        lines = [
            f"on each of {self.tp} devices, in {self.dtype}:" if self.tp > 1 else f"on one device, in {self.dtype}:",
            f"  parameters {self.parameter_bytes / 2**20:,.1f} MiB",
            f"  cache      {self.cache_bytes / 2**20:,.1f} MiB: {self.blocks} blocks of {BLOCK_SIZE}, "
            f"{self.cache_tokens:,} tokens",
            *(f"  {what}: {kernel}" for what, kernel in self.kernels.items()),
            *([f"  {self.padding}"] if self.padding else []),
        ]
        for c in self.collectives:
            lines.append(f"  per token {c['count']} {c['kind']} over {c['axes']}, {c['bytes']:,} bytes each")
        return "\n".join(lines + ([] if self.collectives else ["  no collectives"]))


def need(
    config: ModelConfig, tp: int, dtype: str, blocks: int, device: str, batch_invariant: bool,
    quantized: Quantization | None = None, layout: Layout = "tp_aware",
) -> Need:  # fmt: skip
    """Prices one device (cpu or cuda) of a server from the program that would run.

    ValueError where tp does not fit the model.
    """
    wider = padded(config, tp, 1 if quantized is None else quantized.shared)
    model = build(wider, dtype=DTYPES[dtype])
    orders = {} if quantized is None else quantized.orders
    made = step(
        model, wider, Mesh({"tp": tp}), rows=1, wanted=1, blocks=blocks, block_size=BLOCK_SIZE, orders=orders,
        layout=layout,
    )  # fmt: skip
    kind = "cpu" if device == "cpu" else "gpu"
    program = made.program if quantized is None else quantized.held(made, kind)
    parameters = {name for name, _ in model.named_parameters()}
    held = sum(port.local_bytes for port in program.inputs if port.name in parameters)
    cache = sum(port.local_bytes for port in program.inputs if ".cache." in port.name)
    kernels = _kernels(dtype, device, batch_invariant)
    if quantized is not None:
        kernels["quantized weights"] = f"tpshard::quantized_matmul, {quantized}; {_meaning(made.arrangement, layout)}"
    return Need(tp, dtype, blocks, held, cache, _collectives(program), kernels, note(config, wider, tp))


def _meaning(arrangement: Arrangement, layout: str) -> str:
    """What a layout makes of the act-order, in words."""
    if not arrangement.rows:
        return "in order as they come"
    local = [name for name in arrangement.of if arrangement.rows[name].blocks > 1]
    if layout == "tp_aware" and local:
        return f"{layout}: written by the products before, {len(local)} sorted within each rank"
    return f"{layout}: {_MEANING[layout]}"


def _collectives(program: Program) -> tuple[dict[str, Any], ...]:
    counted = Counter((c.kind, ", ".join(map(str, c.axes)), c.bytes) for c in program.collectives)
    return tuple(
        {"kind": kind, "axes": axes, "bytes": size, "count": count} for (kind, axes, size), count in counted.items()
    )


def _kernels(dtype: str, device: str, batch_invariant: bool) -> dict[str, str]:
    from tpshard.kernels.rows_linear import TILE

    if not batch_invariant:
        products = "the library's choice by number of rows"
    elif device == "cpu" and dtype in ("fp32", "bf16") and torch.backends.mkldnn.is_available():
        products = f"{TILE} rows at a time, weights packed for oneDNN"
    else:
        products = f"{TILE} rows at a time"
    return {"attention": "tpshard::paged_attention, a row's bits its own", "products": products}
