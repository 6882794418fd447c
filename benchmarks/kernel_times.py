"""Times the kernels of docs/kernels.md on one GPU, on the shapes of `kernel_limits.py`, beside torch's own.

    python benchmarks/kernel_times.py [--only WORD ...] [--docs] [--record] [--json]

Calls are captured in one CUDA graph that is replayed, each over operands of its own, so that none of them lies in the
cache; the median of five. `share` is of the limit: the longer of bytes over the bandwidth of the data sheet and FLOPs
over its tensor cores' rate. `peer` is what torch has for the same numbers, measured in the same run: a product in bf16
(of dense weights, where ours are of 4 bits), its attention over contiguous keys, `torch._scaled_mm`, fused AdamW.
A case that fails is told and leaves the others. `--docs` writes docs/gpu.md's table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from tpshard.devices.measuring.measure_gpu import nearest
from tpshard.devices.read import device
from tpshard.kernels import triton_launch
from tpshard.kernels.attention import triton_paged
from tpshard.kernels.experts.triton_experts import SortedChoices, chosen_by
from tpshard.kernels.fp8 import fp8_launch
from tpshard.kernels.quantized.packed import Packed, pack
from tpshard.kernels.quantized.quantized import Quantized
from tpshard.kernels.triton_device import capability_of

from kernels import Product, copies, microseconds, random_codes
from record import Record, close_with_table, in_one_line, parser_of

Calls = list[Callable[[], Any]]


@dataclass(frozen=True)
class Timed:
    """A kernel at work on one shape of `kernel_limits.py`, and what does the same in torch."""

    kernel: str
    shape: str
    bytes: float
    flops: float
    calls: Calls
    peer: tuple[str, Calls] | None = None
    rate: str = "bf16"
    error: float | None = None
    """The relative error of the result, where it was compared."""


def bf16(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


# ---- products of 4 bits ----------------------------------------------------------------------------------------------
def dense(x: Tensor, inputs: int, columns: int) -> tuple[str, Calls]:
    weights = [bf16(columns, inputs) for _ in range(copies(2 * inputs * columns))]
    return "dense bf16", [partial(F.linear, x, weight) for weight in weights]


def w4a16(name: str, rows: int, inputs: int, columns: int, gated: bool = False) -> Iterator[Timed]:
    """The tile that is chosen without measuring, and what measuring chooses where that is another one."""
    first = random_codes(Product("", "", 1, inputs, columns, gated))
    yield from of_packed(name, rows, columns, gated, first, inputs * columns / 2 + inputs * columns / 64)


def of_packed(name: str, rows: int, columns: int, gated: bool, first: Packed, nbytes: float) -> Iterator[Timed]:
    weights = [first, *(replace(first, words=first.words.clone()) for _ in range(copies(first.nbytes) - 1))]
    x = bf16(rows, first.inputs)
    guess = triton_launch.tiles(rows, first, gated, 132, capability_of(x))[0]
    outputs = columns // 2 if gated else columns
    sizes = nbytes + 2 * rows * (first.inputs + outputs), 2.0 * rows * first.inputs * columns
    peer, shape = dense(x, first.inputs, columns), f"{rows} x {first.inputs} x {columns}"
    yield Timed(name, shape, *sizes, [partial(triton_launch.matmul, x, w, gated, guess) for w in weights], peer)
    best = triton_launch.TileChoice().tile(x, first, gated)
    if best is None:
        yield Timed(f"{name}, dequantized", shape, *sizes,
                    [partial(triton_launch.dense_matmul, x, w, gated) for w in weights], peer)  # fmt: skip
    elif best != guess:
        yield Timed(f"{name}, {best}", shape, *sizes,
                    [partial(triton_launch.matmul, x, w, gated, best) for w in weights], peer)  # fmt: skip


def ragged(name: str, inputs: int, columns: int, groups: int) -> Iterator[Timed]:
    """A rank's part of act-ordered inputs: some rows of every group of the whole."""
    draw = torch.Generator().manual_seed(0)
    each = 128 * groups // inputs
    whole = torch.arange(inputs * each) // 128
    group = whole[torch.randperm(inputs * each, generator=draw)[:inputs]].sort().values.int()
    codes = torch.randint(0, 16, (inputs, columns), generator=draw, dtype=torch.uint8)
    scales = (torch.rand(groups, columns, generator=draw) * 0.01 + 0.01).half()
    packed = pack(Quantized(codes, scales, torch.full((groups, columns), 8, dtype=torch.uint8), group, 4))
    on_gpu = {key: value.cuda() for key, value in vars(packed).items() if isinstance(value, Tensor)}
    yield from of_packed(name, 1, columns, False, replace(packed, **on_gpu), packed.nbytes)


# ---- attention -------------------------------------------------------------------------------------------------------
def paged(name: str, rows: int, sequences: int, context: int, heads: int = 32, kv: int = 8, head: int = 128) -> Timed:
    each, blocks = rows // sequences, context // 16
    count = max(2, copies(4 * sequences * context * kv * head))
    tables = torch.randperm(sequences * blocks, device="cuda").reshape(sequences, blocks)
    positions = torch.arange(context - each, context, device="cuda").repeat(sequences)
    owners = torch.arange(sequences, device="cuda").repeat_interleave(each)
    calls: Calls = []
    theirs: Calls = []
    for _ in range(count):
        k, v, q = (
            bf16(sequences * blocks, 16, kv, head),
            bf16(sequences * blocks, 16, kv, head),
            bf16(rows, heads, head),
        )
        calls.append(partial(triton_paged.paged_attention, q, k, v, positions, owners, tables, head**-0.5))
        keys, values = (x.view(sequences, context, kv, head).transpose(1, 2) for x in (k, v))
        if each > 1:  # torch's causal kernel for the last queries of longer keys takes as many KV heads as heads
            keys, values = (x.repeat_interleave(heads // kv, 1) for x in (keys, values))
        theirs.append(partial(attend, q.view(sequences, each, heads, head).transpose(1, 2), keys, values))
    seen = context - (each - 1) / 2
    return Timed(
        name, f"{rows} rows of {sequences}, {context} keys",
        4 * sequences * context * kv * head + 4 * rows * heads * head, 4 * rows * heads * seen * head, calls,
        ("contiguous keys", theirs),
    )  # fmt: skip


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of the last queries by torch, whose FlashAttention aligns causal masks at the end."""
    if q.shape[2] == 1:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]
    return out


# ---- experts ---------------------------------------------------------------------------------------------------------
def even(tokens: int, count: int, k: int) -> Tensor:
    """The experts of each token, all equally often."""
    return (torch.arange(tokens * k, device="cuda") % count).view(tokens, k)


def experts(name: str, tokens: int, count: int, k: int, width: int, hidden: int, fixed: bool = False) -> Timed:
    """As it is chosen; by torch's grouped product, whose rows are sorted before."""
    chosen = chosen_by(even(tokens, count, k), count, (hidden, width), torch.bfloat16, fixed)
    used, weight = min(count, tokens * k), bf16(count, hidden, width)
    x = chosen.rows(bf16(tokens, width))
    own = [bf16(tokens * k // used, width) for _ in range(used)]
    return Timed(
        name, f"{tokens} tokens, {k} of {count}, {width} x {hidden}",
        2 * used * width * hidden + 2 * tokens * (width + k * hidden), 2.0 * tokens * k * width * hidden,
        [partial(chosen.linear, x, weight)],
        ("a product each", [lambda: [F.linear(rows, matrix) for rows, matrix in zip(own, weight)]]),
    )  # fmt: skip


def outer(name: str, tokens: int, count: int, k: int, width: int, hidden: int) -> Timed:
    chosen = chosen_by(even(tokens, count, k), count, (hidden, width), torch.bfloat16, False)
    x, dout, each = chosen.rows(bf16(tokens, width)), bf16(tokens * k, hidden), tokens * k // count
    pairs = [(bf16(each, hidden), bf16(each, width)) for _ in range(count)]
    return Timed(
        name, f"{tokens} tokens, {k} of {count}, {width} x {hidden}",
        2 * count * width * hidden + 2 * tokens * k * (width + hidden), 2.0 * tokens * k * width * hidden,
        [partial(chosen.outer, dout, x)], ("a product each", [lambda: [a.T @ b for a, b in pairs]]),
    )  # fmt: skip


def quantized_experts(name: str, tokens: int, inputs: int, columns: int, count: int, k: int, gated: bool) -> Timed:
    parts = [random_codes(Product("", "", 1, inputs, columns)) for _ in range(count)]
    stack = replace(
        parts[0], words=torch.cat([one.words for one in parts]), scales=torch.cat([one.scales for one in parts])
    )
    used = min(count, tokens * k)
    each = tokens * k // used
    tile = triton_launch.tiles(each, stack, gated, 132 // min(count, 8))[0]
    chosen = SortedChoices(even(tokens, count, k), count, torch.bfloat16, True, tile.rows)
    x, weights = bf16(tokens, inputs), [bf16(columns, inputs) for _ in range(used)]
    own, outputs = bf16(each, inputs), columns // 2 if gated else columns
    nbytes = used * (inputs * columns / 2 + inputs * columns / 64) + 2 * (tokens * inputs + used * each * outputs)
    return Timed(
        name, f"{tokens} tokens, {k} of {count}, {inputs} x {columns}", nbytes, 2.0 * used * each * inputs * columns,
        [partial(triton_launch.matmul, x, stack, gated, tile, chosen)],
        ("dense bf16, a product each", [lambda: [F.linear(own, matrix) for matrix in weights]]),
    )  # fmt: skip


# ---- fp8, optimizers -------------------------------------------------------------------------------------------------
def fp8(m: int, n: int, k: int) -> Iterator[Timed]:
    a, b = (fp8_launch.quantize(bf16(size, k), False) for size in (m, n))
    x, weight = bf16(m, k), bf16(n, k)
    sizes = f"{m} x {k} x {n}", m * k + n * k + 2 * m * n, 2.0 * m * n * k
    peer = "bf16", list[Callable[[], Any]]([partial(F.linear, x, weight)])
    library = fp8_launch.by_library
    yield Timed("fp8 product, cuBLAS", *sizes, [partial(fp8_launch.multiply, *a, *b, torch.bfloat16)], peer, "fp8")
    fp8_launch.by_library = lambda *_: False  # type: ignore[assignment]
    try:
        yield Timed("fp8 product", *sizes, [partial(fp8_launch.multiply, *a, *b, torch.bfloat16)], peer, "fp8")
    finally:
        fp8_launch.by_library = library
    yield Timed("fp8 blocks", f"{m} x {k}", 3.0 * m * k, 0, [partial(fp8_launch.quantize, x, False)])


def adamw(size: int) -> Timed:
    param, grad, first, second = (torch.rand(size, device="cuda") for _ in range(4))
    finite, one = torch.tensor(True, device="cuda"), torch.tensor(1.0, device="cuda")
    call = partial(triton_launch.adamw_step_, param, grad, first, second, finite, one, one * 1e-4, one * 3,
                   0.9, 0.99, 1e-8, 0.1)  # fmt: skip
    step = torch.tensor(3.0, device="cuda")
    theirs = partial(
        torch._fused_adamw_, [param], [grad], [first], [second], [], [step], lr=1e-4, beta1=0.9, beta2=0.99,
        weight_decay=0.1, eps=1e-8, amsgrad=False, maximize=False,
    )  # fmt: skip
    return Timed("AdamW", f"{size:,} in fp32", 28.0 * size, 0, [call], ("fused", [theirs]))


Cases = list[Callable[[], Timed | Iterator[Timed]]]
CASES: Cases = [
    *(partial(w4a16, "W4A16", rows, 8192, 8192) for rows in (1, 16, 64)),
    partial(w4a16, "W4A16, gate and up of 70B, tp 8", 1, 8192, 7168, True),
    partial(ragged, "W4A16, ragged groups, tp 2", 4096, 8192, 64),
    partial(ragged, "W4A16, ragged groups, tp 8", 3584, 8192, 224),
    *(partial(paged, "paged attention, decode", *of) for of in ((1, 1, 32768), (16, 16, 8192), (64, 64, 1024))),
    *(partial(paged, "paged attention, prefill", *of) for of in ((512, 1, 8192), (2048, 1, 2048))),
    partial(paged, "paged attention, prefill, tp 8", 2048, 1, 8192, 4, 1),
    partial(paged, "paged attention, prefill, heads of 256", 2048, 1, 2048, 16, 8, 256),
    partial(experts, "experts, decode", 16, 8, 2, 4096, 14336, True),
    partial(quantized_experts, "quantized experts, gate and up", 16, 4096, 28672, 8, 2, True),
    partial(quantized_experts, "quantized experts, down", 32, 14336, 4096, 8, 1, False),
    partial(experts, "experts, training", 16384, 8, 2, 4096, 14336),
    partial(outer, "experts, gradients", 16384, 8, 2, 4096, 14336),
    partial(fp8, 8192, 4096, 4096),
    partial(adamw, 100_000_000),
]


def measured(case: Timed, bandwidth: float, rates: dict[str, float]) -> dict[str, Any]:
    limit = 1e6 * max(case.bytes / bandwidth, case.flops / rates[case.rate])
    time = microseconds(case.calls)
    row = {"name": f"{case.kernel}: {case.shape}", "kernel": case.kernel, "shape": case.shape, "limit_us": limit,
           "time_us": time, "share": limit / time}  # fmt: skip
    if case.peer is not None:
        row |= {"peer": case.peer[0], "peer_us": microseconds(case.peer[1])}
    return row


def of_case(make: Callable[[], Timed | Iterator[Timed]], record: Record, bandwidth: float, rates: Any) -> None:
    made = make()
    for case in [made] if isinstance(made, Timed) else made:
        row = measured(case, bandwidth, rates)
        record.rows.append(row)
        record.say(f"{row['name']:<70} {row['time_us']:>9.1f} us {row['share']:>5.0%}  {row.get('peer', '')} "
                   f"{row.get('peer_us', math.nan):.1f}")  # fmt: skip


def table(record: Record) -> str:
    lines = ["| kernel | shape | us | of the limit | torch has | its us |", "|---|---|---|---|---|---|"]
    for row in record.rows:
        if "error" not in row:
            peer = f"{row['peer']} | {row['peer_us']:.1f}" if "peer" in row else "- | -"
            lines.append(f"| {row['kernel']} | {row['shape']} | {row['time_us']:.1f} | {row['share']:.0%} | {peer} |")
    return "\n".join(lines)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--docs", action="store_true", help="write the table of docs/gpu.md")
    parser.add_argument("--only", nargs="*", default=[""], help="cases whose arguments have one of these words")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a GPU")
    properties = torch.cuda.get_device_properties(0)
    record, on = Record("kernel_times", quiet=options.json), device(nearest(properties.name, properties.total_memory))
    record.say(f"# shares are of {on.name}: {on.memory_bandwidth / 1e12:.2f} TB/s")
    for make in CASES:
        if not any(word in str(make) for word in options.only):
            continue
        try:
            of_case(make, record, on.memory_bandwidth, dict(on.rates))
        except Exception as error:
            record.rows.append({"name": str(make), "error": in_one_line(error)})
            record.say(f"{record.rows[-1]}")
        torch.cuda.empty_cache()
    close_with_table(record, table(record), "gpu.md", options)


if __name__ == "__main__":
    main()
