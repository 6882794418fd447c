"""What each hot kernel is expected to reach of a GPU's limit, from its compiled binary: no GPU is needed.

    python benchmarks/kernel_limits.py [--docs] [--record] [--json]

Every kernel is compiled for sm_90 with the sizes that its launcher chooses. From the binary come registers, shared
memory and the instructions of a turn of the main loop; from the shapes bytes and FLOPs; from the device's file the
rates of its data sheet. The limit is the longer of bytes over the memory's bandwidth and FLOPs over the tensor cores'
rate. The time is that of the waves of programs, one after another. A wave takes the longest of

- its bytes from memory, at the bandwidth or at what the copies in flight allow (their bytes over `LATENCY`);
- its bytes from the L2 cache, at `L2_CYCLE`;
- on the multiprocessor with the most programs, instructions (one a cycle for each of four schedulers; on half of the
  integer units two cycles, on the units of exp and of conversions eight) and products of the tensor cores, at once
  where two programs share it, else one after the other.

`RAMP` is added once, for the first copies to arrive and the last to leave, and twice where a last program adds up what
others computed. Waiting inside a turn (for a barrier, or for a product that is read at once) is not seen in a count of
instructions: what is measured will be less, and the share says what is possible. `--docs` writes docs/kernels.md's
table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from tpshard.devices.read import Device, device
from tpshard.kernels import triton_launch, triton_optimizer
from tpshard.kernels.attention import triton_paged
from tpshard.kernels.attention.attention_mask import CausalMask
from tpshard.kernels.experts import triton_experts
from tpshard.kernels.fp8 import fp8_launch, triton_fp8
from tpshard.kernels.fp8.fp8_blocks import SMALLEST
from tpshard.kernels.quantized import triton_quantized
from tpshard.kernels.quantized.packed import Packed, ragged_chunk
from tpshard.kernels.triton_device import programs_at_once

from compiled_kernel import Compiled, compile_flash, compile_kernel
from record import Record, close_with_table, parser_of

MULTIPROCESSORS, SCHEDULERS, LANES = 132, 4, 32
"""Of an H100 or H200 (NVIDIA H100 white paper); their products take 4096 FLOPs in bf16 a cycle and multiprocessor."""
CYCLE_FLOPS = {"bf16": 4096, "fp8": 8192}
LATENCY, RAMP, L2_CYCLE = 0.8e-6, 1.6e-6, 27.5
"""Assumed: seconds from a copy's issue to its arrival under load, twice that, and bytes that the L2 cache gives a
multiprocessor in a cycle (5.5 TB/s were measured by others on an H100 PCIe, of 114 multiprocessors at 1.755 GHz)."""
HALF = (
    "LOP3",
    "SHF",
    "ISETP",
    "PRMT",
    "SEL",
    "LEA",
    "IADD3",
    "VIADD",
    "IMNMX",
    "VIMNMX",
    "SGXT",
    "BFE",
    "PLOP3",
    "P2R",
    "FMNMX",
    "FSETP",
    "FSEL",
    "F2FP",
)
EIGHTH = ("MUFU", "F2F", "I2F", "F2I", "I2FP", "POPC")


@dataclass(frozen=True)
class Case:
    """A kernel at work on one shape."""

    kernel: str
    shape: str
    compiled: Compiled
    programs: int
    """With work to do."""
    turns: float
    """Of a program's main loop."""
    elements: float
    """Weights, scores or parameters that a program computes in a turn."""
    bytes: float
    """Read from and written to memory by all programs, but for the results that they leave for the last one."""
    flops: float = 0
    """That the result needs; those of a tile's padding are not counted."""
    tile_flops: float = 0
    """Of a program's products in a turn, padding included; counted in the binary where it has Hopper's products."""
    cached: float = 0
    """Bytes that a program copies in a turn, from memory or from the cache."""
    rate: str = "bf16"
    masked: float = 1
    """The share of turns that compute what a jump of the loop skips, such as the masks of tiles on the diagonal."""
    left: float = 0
    """Bytes of the results that programs write, and the last of them reads to add them up, all through the cache."""


@dataclass(frozen=True)
class Expected:
    """What a case is expected to take on a device, in seconds."""

    resident: int
    """Programs that a multiprocessor holds at once."""
    waves: float
    limit_s: float
    time_s: float
    bound: str
    """What most of the time goes to."""
    alone_s: Mapping[str, float]
    """What it would take if nothing but this took time."""

    @property
    def share(self) -> float:
        return self.limit_s / self.time_s


def _cycles(loop: Counter[str]) -> int:
    """Of a scheduler, for one warp's instructions."""
    return max(sum(loop.values()), 2 * sum(loop[name] for name in HALF), 8 * sum(loop[name] for name in EIGHTH))


def expected(case: Case, on: Device) -> Expected:
    code = case.compiled
    resident = programs_at_once(code.registers, code.shared, code.warps, (9, 0))
    clock = on.rates["bf16"] / (MULTIPROCESSORS * CYCLE_FLOPS["bf16"])
    limit = max(case.bytes / on.memory_bandwidth, case.flops / on.rates[case.rate])
    a_turn = case.bytes / case.programs / case.turns
    ahead = max(1, code.stages - 1) if "LDGSTS" in code.main_loop else 1
    always = Counter(code.main_loop) - Counter(code.skipped)
    cycles = _cycles(always) + case.masked * (_cycles(Counter(code.main_loop)) - _cycles(always))
    issue = case.turns * cycles * code.warps / SCHEDULERS / clock
    product = code.product_flops or case.tile_flops
    product *= case.turns / (CYCLE_FLOPS[case.rate] * clock)
    l2 = L2_CYCLE * MULTIPROCESSORS * clock
    times, alone = Counter[str](), Counter[str]()
    left, full = case.programs, resident * MULTIPROCESSORS
    while left > 0:
        now = min(left, full)
        left -= now
        busiest = -(-now // MULTIPROCESSORS)
        flying = now * a_turn * ahead / LATENCY
        wave = {
            "memory" if flying >= on.memory_bandwidth else "copies in flight":
                now * a_turn * case.turns / min(on.memory_bandwidth, flying),
            "L2 cache": now * (case.cached * case.turns + case.left / case.programs) / l2,
            "instructions": busiest * issue,
            "products": busiest * product,
        }  # fmt: skip
        alone.update(wave)
        if busiest < 2 and product > 0:
            wave["instructions, then products"] = issue + product
        longest = max(wave, key=wave.__getitem__)
        times[longest] += wave[longest]
    times["first and last copies"] = alone["first and last copies"] = RAMP * (2 if case.left else 1)
    bound = max(times, key=times.__getitem__)
    return Expected(resident, case.programs / full, limit, sum(times.values()), bound, alone)


# ---- the kernels ---------------------------------------------------------------------------------------------------
def packed_like(inputs: int, columns: int, chunk: int = 128, chunks: int = 0) -> Packed:
    """The shape of a packed symmetric weight of 4 bits without its values; of ragged groups where `chunks` is given."""
    empty, bits, ragged = torch.empty(0), 4, chunks > 0
    words = torch.empty(chunks or inputs // chunk, columns, chunk * bits // 32, dtype=torch.int32, device="meta")
    return Packed(words, empty, None, empty if ragged else None, None, bits, bits, inputs, chunk, 128 // chunk)


def w4a16(
    name: str, rows: int, inputs: int, columns: int, gated: bool = False, groups: int = 0, filled: int = 0,
    experts: int = 0, k: int = 0, widest: bool = False,
) -> Case:  # fmt: skip
    """groups: of ragged groups, their number and the rows to which each is filled up on average. experts: their number,
    of which each row goes to k, evenly. widest: by the tile of most columns, not by the best guess."""
    packed = packed_like(inputs, columns, ragged_chunk(4) if groups else 128, groups * filled // ragged_chunk(4))
    groups, used = len(packed.words) if groups else inputs // 128, min(experts, rows * k) if experts else 1
    each = rows * k // used if experts else rows
    share = MULTIPROCESSORS // min(experts, 8) if experts else MULTIPROCESSORS
    tiles = triton_launch.tiles(each, packed, gated, share)
    tile = max(tiles, key=lambda tile: tile.columns) if widest else tiles[0]
    constants = triton_launch.constants(packed, columns, gated, tile, True, k)
    code = compile_kernel(triton_quantized.matmul_kernel, constants, "bf16", 90, tile.warps, tile.stages)
    if not experts:
        places = MULTIPROCESSORS * programs_at_once(code.registers, code.shared, code.warps, (9, 0))
        tile = triton_launch.in_waves(tile, rows, packed, gated, places)
    outputs, blocks = columns // (2 if gated else 1), used * -(-each // tile.rows)
    blocks *= -(-outputs // tile.columns)
    chunk, width = packed.chunk, tile.columns * (2 if gated else 1)
    weights = used * (4 * packed.words.numel() + 2 * columns * groups)
    rows_of = 2 * (rows * inputs + used * each * outputs)
    # short chunks are computed several in a turn
    chunk *= int(max(1, code.product_flops / (2 * tile.rows * chunk * width)))
    partial = 4 * 2 * tile.parts * used * each * columns * (tile.parts > 1)
    shape = f"{rows} x {inputs} x {columns}"
    return Case(
        name, f"{rows} tokens, {k} of {experts}, {inputs} x {columns}" if experts else shape, code,
        blocks * tile.parts, len(packed.words) * packed.chunk / chunk / tile.parts, chunk * width, weights + rows_of,
        2 * used * each * inputs * columns, 2 * tile.rows * chunk * width,
        chunk * (width / 2 + 2 * min(each, tile.rows)), left=partial,
    )  # fmt: skip


def paged(name: str, rows: int, sequences: int, context: int, heads: int = 32, kv: int = 8, head: int = 128) -> Case:
    """Each sequence has rows / sequences queries at the end of its context."""
    tile, sharing = triton_paged.launch_sizes(rows, heads // kv, kv, head, context, torch.bfloat16, (9, 0))
    shared, units = sharing.programs, -(-context // (tile["PART"] * sharing.unit))
    constants = tile | {
        "UNIT": sharing.unit,
        "BLOCK": 16,
        "CAPPED": False,
        "FAST": True,
        "WINDOWED": False,
        "WITH_LSE": False,
        "SPLIT": shared > 1,
    }
    types = {"q": "*bf16", "scale": "fp32", "slope": "fp32", "zero": "fp32"}
    code = compile_kernel(
        triton_paged.paged_attention_kernel,
        constants,
        "bf16",
        90,
        triton_paged.warps(tile),
        triton_paged.stages(tile, torch.bfloat16, sharing),
        types,
        triton_paged.registers(tile),
    )
    each = rows // sequences
    runs = sequences * -(-each // tile["TILE"]) * kv
    keys, seen = tile["KEYS"], context - (each - 1) / 2  # the average of a chunk's rows
    programs, turns = runs * shared, seen / keys / shared
    return Case(
        name, f"{rows} rows of {sequences}, {context} keys", code, programs, turns,
        keys * tile["M"], 4 * sequences * context * kv * head + 4 * rows * heads * head, 4 * rows * heads * seen * head,
        4 * tile["M"] * keys * head, 4 * keys * head, left=8 * rows * heads * units * (head + 2) * (shared > 1),
        masked=min(1, (1 + tile["TILE"] / keys) / turns),
    )  # fmt: skip


def flash(which: str, tokens: int, heads: int, kv: int, head: int) -> Case:
    """Causal attention with a softcap, or the gradients of `queries`, `keys` or `values`: they compute scores again."""
    products, moved = {
        "forward": (2, 2), "queries": (3, 4), "keys": (3, 2), "values": (2, 2), "keys and values": (4, 2),
    }[which]  # fmt: skip
    tile, code = compile_flash(which, tokens, heads, kv, head, CausalMask(range(tokens), range(tokens)), 90)
    of_keys, size = "key" in which or which == "values", tile.rows * tile.keys
    mine, other = (tile.keys, tile.rows) if of_keys else (tile.rows, tile.keys)
    turns, written = (tokens + mine) / 2 / other, 2 if which == "keys and values" else 1
    return Case(
        f"attention with a softcap, {which if which == 'forward' else 'gradients of ' + which}",
        f"{tokens} tokens, {heads} heads of {head}", code, -(-tokens // mine) * (kv if of_keys else heads),
        turns * (heads // kv if of_keys else 1), size,
        2 * tokens * head * (moved * heads + (2 + written if of_keys else 2) * kv), products * heads * tokens**2 * head,
        2 * products * size * head, 4 * other * head, masked=-(-mine // other) / turns,
    )  # fmt: skip


def experts(name: str, tokens: int, count: int, k: int, width: int, hidden: int, fixed: bool = False) -> Case:
    """The product by `up` where each expert gets its equal share."""
    tile = triton_experts.ExpertTile.of(tokens * k, count, torch.bfloat16, fixed)
    constants = {"BLOCK_M": tile.choices, "BLOCK_N": tile.columns, "BLOCK_K": tile.inputs, "EVEN_K": True}
    constants |= {"by_input": 1, "SHARING": k}
    code = compile_kernel(triton_experts.expert_linear_kernel, constants, "bf16", 90, tile.warps, tile.stages)
    used = min(count, tokens * k)
    blocks = used * -(-tokens * k // used // tile.choices)
    tile_size = tile.inputs * tile.columns
    return Case(
        name, f"{tokens} tokens, {k} of {count}, {width} x {hidden}", code, blocks * -(-hidden // tile.columns),
        width / tile.inputs, tile_size, 2 * used * width * hidden + 2 * tokens * (width + k * hidden),
        2 * tokens * k * width * hidden, 2 * tile.choices * tile_size, 2 * tile.inputs * (tile.columns + tile.choices),
    )  # fmt: skip


def outer(name: str, tokens: int, count: int, k: int, width: int, hidden: int) -> Case:
    tile = triton_experts.ExpertTile.of_outer(torch.bfloat16)
    constants = {"ROWS": tile.choices, "BLOCK_N": tile.columns, "BLOCK_K": tile.inputs, "SHARING": k, "SHARING_DOUT": 1}
    code = compile_kernel(triton_experts.expert_outer_kernel, constants, "bf16", 90, tile.warps, tile.stages)
    blocks, size = count * (hidden // tile.columns) * (width // tile.inputs), tile.columns * tile.inputs
    return Case(
        name, f"{tokens} tokens, {k} of {count}, {width} x {hidden}", code, blocks, tokens * k / count / tile.choices,
        size, 2 * count * width * hidden + 2 * tokens * k * (width + hidden), 2 * tokens * k * width * hidden,
        2 * tile.choices * size, 2 * tile.choices * (tile.columns + tile.inputs),
    )  # fmt: skip


def fp8_product(name: str, m: int, n: int, k: int, **sizes: int) -> Case:
    """sizes: of the tile, where they are not the launcher's."""
    tile = fp8_launch.tile((9, 0)) | sizes
    types = dict.fromkeys(("a", "b"), "*fp8e4nv") | dict.fromkeys(("a_scales", "b_scales"), "*fp32")
    code = compile_kernel(triton_fp8.multiply_kernel, dict(tile), "bf16", 90, 8, 3, types)
    bm, bn = tile["BLOCK_M"], tile["BLOCK_N"]
    return Case(
        name, f"{m} x {k} x {n}", code, -(-m // bm) * -(-n // bn), k / 128, bm * bn, m * k + n * k + 2 * m * n,
        2 * m * n * k, 2 * bm * bn * 128, 128 * (bm + bn), rate="fp8",
    )  # fmt: skip


def fp8_quantize(name: str, m: int, k: int) -> Case:
    rows = fp8_launch.QUANTIZE_ROWS
    types = {"values": "*fp8e4nv", "scales": "*fp32", "row_stride": "i32", "column_stride": "i32"}
    constants = {"SMALLEST": SMALLEST, "BLOCK_M": rows, "column_stride": 1}
    code = compile_kernel(triton_fp8.quantize_kernel, constants, "bf16", 90, 4, 3, types)
    return Case(name, f"{m} x {k}", code, m // rows * (k // 128), 1, 128 * rows, 3 * m * k)


def adamw(name: str, size: int) -> Case:
    block = triton_launch.STEP_BLOCK
    constants = {"LOG_BETA1": -0.1, "LOG_BETA2": -0.01, "BETA1": 0.9, "BETA2": 0.99, "EPS": 1e-8, "DECAY": 0.1}
    constants |= {"WIDE": triton.language.float32, "BLOCK": block}
    types = dict.fromkeys(("exp_avg", "exp_avg_sq"), "*fp32")
    code = compile_kernel(triton_optimizer.adamw_kernel, constants, "fp32", 90, 4, 3, types)
    return Case(name, f"{size:,} in fp32", code, -(-size // block), 1, block, 28 * size)


def cases() -> Iterator[Case]:
    """The hot kernels, on shapes of Llama 3 8B and 70B, of Mixtral 8x7B and of Gemma 2 9B."""
    for rows in (1, 16, 64):
        yield w4a16("W4A16", rows, 8192, 8192)
    yield w4a16("W4A16, one program a multiprocessor", 64, 8192, 8192, widest=True)
    yield w4a16("W4A16, gate and up of 70B, tp 8", 1, 8192, 7168, gated=True)
    # groups of 128 whose rows lie on two ranks, or eight: 64 or 16 of each, filled up to 80 and 32 on average
    yield w4a16("W4A16, ragged groups, tp 2", 1, 4096, 8192, groups=64, filled=80)
    yield w4a16("W4A16, ragged groups, tp 8", 1, 3584, 8192, groups=224, filled=32)
    for rows, sequences, context in ((1, 1, 32768), (16, 16, 8192), (64, 64, 1024)):
        yield paged("paged attention, decode", rows, sequences, context)
    yield paged("paged attention, prefill", 512, 1, 8192)
    yield paged("paged attention, prefill", 2048, 1, 2048)
    yield paged("paged attention, prefill, tp 8", 2048, 1, 8192, heads=4, kv=1)
    yield paged("paged attention, prefill, heads of 256", 2048, 1, 2048, heads=16, head=256)
    for which in ("forward", "queries", "values", "keys"):  # of Gemma 2 9B
        yield flash(which, 4096, 16, 8, 256)
    for which in ("forward", "queries", "keys and values"):  # of Gemma 2 27B
        yield flash(which, 4096, 32, 16, 128)
    yield experts("experts, decode", 16, 8, 2, 4096, 14336, fixed=True)
    yield w4a16("quantized experts, gate and up", 16, 4096, 28672, gated=True, experts=8, k=2)
    yield w4a16("quantized experts, down", 32, 14336, 4096, experts=8, k=1)
    yield experts("experts, training", 16384, 8, 2, 4096, 14336)
    yield outer("experts, gradients", 16384, 8, 2, 4096, 14336)
    yield fp8_product("fp8 product", 8192, 4096, 4096)
    yield fp8_product("fp8 product, tiles of 256 columns", 8192, 4096, 4096, BLOCK_N=256)
    yield fp8_quantize("fp8 blocks", 8192, 4096)
    yield adamw("AdamW", 100_000_000)


# ---- the table -----------------------------------------------------------------------------------------------------
COLUMNS = ("kernel", "shape", "MB", "lane operations", "registers", "shared KiB", "programs", "waves",
           "H100: limit, us", "of it", "H200: limit, us", "of it", "held back by")  # fmt: skip
DEVICES = ("h100-sxm-80g", "h200")


def row(case: Case) -> dict[str, Any]:
    """What the record holds of a case."""
    code, on = case.compiled, {}
    for name in DEVICES:
        result = expected(case, device(name))
        on[name] = {"limit_us": 1e6 * result.limit_s, "time_us": 1e6 * result.time_s, "share": result.share,
                    "bound": result.bound, "waves": result.waves, "resident": result.resident,
                    "alone_us": {what: 1e6 * seconds for what, seconds in result.alone_s.items()}}  # fmt: skip
    return {
        "name": f"{case.kernel}: {case.shape}", "kernel": case.kernel, "shape": case.shape, "bytes": case.bytes,
        "flops": case.flops, "lane_operations": code.arithmetic(case.masked) * LANES * code.warps / case.elements,
        "registers": code.registers, "stack": code.stack, "shared": code.shared, "programs": case.programs, "on": on,
    }  # fmt: skip


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for of in rows:
        first, second = (of["on"][name] for name in DEVICES)
        cells = [
            of["kernel"], of["shape"], f"{of['bytes'] / 1e6:.1f}", f"{of['lane_operations']:.1f}", of["registers"],
            f"{of['shared'] / 1024:.0f}", f"{of['programs']:,}", f"{first['waves']:.2f}", f"{first['limit_us']:.1f}",
            f"{first['share']:.0%}", f"{second['limit_us']:.1f}", f"{second['share']:.0%}", second["bound"],
        ]  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join([*lines, "", *_low(rows)])


LOW = 0.6
PARTS = ("memory", "L2 cache", "instructions", "products", "first and last copies")


def _low(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A table of what takes the time of those that are expected to reach less than LOW of the limit."""
    yield f"Those below {LOW:.0%}, on the device where they are lower; microseconds of each part alone:"
    yield ""
    yield f"| kernel | shape | of it | limit | expected | {' | '.join(PARTS)} | stack |"
    yield "|---" * (6 + len(PARTS)) + "|"
    for of in rows:
        on = min((of["on"][name] for name in DEVICES), key=lambda on: on["share"])
        if on["share"] >= LOW:
            continue
        alone = {"memory": 0.0} | on["alone_us"]
        alone["memory"] += alone.pop("copies in flight", 0.0)
        cells = [f"{number:.1f}" for number in (on["limit_us"], on["time_us"], *map(alone.__getitem__, PARTS))]
        yield f"| {of['kernel']} | {of['shape']} | {on['share']:.0%} | {' | '.join(cells)} | {of['stack']} |"


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--docs", action="store_true", help="write the table of docs/kernels.md")
    options = parser.parse_args()
    record = Record("kernel_limits", quiet=options.json)
    record.rows += map(row, cases())
    close_with_table(record, table(record.rows), "kernels.md", options)


if __name__ == "__main__":
    main()
