"""Entries of operations that passes insert after partitioning: only the cost model reads them."""

from __future__ import annotations

from tpshard.parallelism.rules.entry import Entry, Table
from tpshard.parallelism.transfer import fetch, offload

product = Entry(work="matmul")
packed = Entry(work="matmul", packed=True)

OPS: Table = {
    "linear": product,
    "fixed_rows_linear": packed,
    "int4_linear": packed,
    "parts_linear": packed,
    "quantized_linear": product,
    "quantized_gate": product,
    "fixed_rows_experts": Entry(work="matmul", routed=3),
    "fixed_rows_expert_linear": Entry(work="matmul", routed=1),
    "quantized_experts": product,
    "tpshard.rms_norm_permuted": Entry(calls=6),
    "tpshard.add_rms_norm": Entry(calls=7),
    "tpshard.rotate": Entry(calls=8),
    "tpshard.largest": Entry(calls=2),
    "tpshard.fp8_quantize": product,  # bound by memory, but a kernel of its own, with which no stream fuses
    "tpshard.fp8_multiply": product,
    "tpshard.add_parts": Entry(),
    offload: Entry(work="free"),
    fetch: Entry(work="free"),
}
