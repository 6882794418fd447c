# ruff: noqa: E402 (nothing of Triton may be imported where it has no wheel)
"""Triton kernels are right in the interpreter, and compile to lean code for GPUs that are not present."""

import functools
import inspect
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
from patience import PATIENCE

triton = pytest.importorskip("triton", reason="Triton has wheels for Linux on x86-64 alone")

import torch
from tpshard.kernels import triton_device, triton_launch, triton_norm, triton_optimizer, triton_steps
from tpshard.kernels.attention import triton_flash, triton_paged, triton_scores
from tpshard.kernels.attention.attention_mask import CausalMask
from tpshard.kernels.experts import triton_experts
from tpshard.kernels.quantized import triton_quantized
from tpshard.kernels.quantized.packed import Packed
from tpshard.kernels.recurrences import triton_recurrences
from tpshard.kernels.triton_launch import Tile

from compiled_kernel import compile_flash, compile_kernel

LION = {"BETA1": 0.9, "BETA2": 0.99, "DECAY": 0.1, "WIDE": triton.language.float32, "BLOCK": 1024}
TORCH = {"bf16": torch.bfloat16, "fp32": torch.float32}
ADAMW = {"LOG_BETA1": -0.1, "LOG_BETA2": -0.01, "EPS": 1e-8}


def version(module):
    return tuple(int(part) for part in module.__version__.split(".")[:2])


needs_interpreter = pytest.mark.skipif(
    version(triton) < (3, 7) and version(numpy) >= (2, 4),
    reason="the interpreter of Triton 3.6 converts arrays to numbers in a way that numpy 2.4 refuses",
)


@needs_interpreter
def test_kernels_equal_their_references_in_the_interpreter():
    cases = map(str, Path(__file__).parent.glob("interpreted_*.py"))
    command = [sys.executable, "-m", "pytest", *cases, "-p", "no:cacheprovider", "-p", "no:xdist"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None and int(passed[1]) >= 60, done.stdout[-500:]


def assert_nothing_spilled(compiled):
    """Registers are spilled to the stack, which is local memory: a kernel without either has no such load or store."""
    assert compiled.stack == compiled.local == 0, (compiled.stack, compiled.local)


def assert_loop_in_registers(compiled):
    """At most 1% of the main loop moves spilled registers: some versions of Triton spill a few, mostly around it."""
    assert compiled.local == 0, compiled
    if compiled.stack:
        loop = compiled.main_loop
        assert 100 * sum(name in ("LDL", "STL") for name in loop) < len(loop), (compiled, len(loop))


def packed_like(bits=4, chunk=128, group_chunks=1, sym=True, ragged=False, quads=False):
    """The shape of a packed weight [4096, 4096] without its values."""
    width = 4 if bits == 3 else bits
    empty = torch.empty(0)
    words = torch.empty(4096 // chunk, 4096, chunk * width // 32, dtype=torch.int32, device="meta")
    zeros, pieces = None if sym else empty, empty if ragged else None
    return Packed(words, empty, zeros, pieces, None, bits, width, 4096, chunk, group_chunks, quads=quads)


CAPABILITIES = [80, 90, 100]
"""A100, H100 and H200, B200."""
PRODUCT = {80: "HMMA", 90: "HGMMA", 100: "UTCHMMA"}
"""The tensor cores' instruction that a kernel for them is expected to use."""


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(("dtype", "gated", "tile", "sym"), [
    ("bf16", False, Tile(16, 128), True), ("bf16", False, Tile(16, 128, 8), False), ("bf16", True, Tile(16, 64), True),
    ("fp16", True, Tile(16, 64), True),
])  # fmt: skip
def test_decode_takes_few_instructions_a_weight(capability, dtype, gated, tile, sym):
    packed = packed_like(quads=capability < 90, sym=sym)
    constants = triton_launch.constants(packed, 4096, gated, tile, fast=True)
    kernel = triton_quantized.matmul_kernel
    compiled = compile_kernel(kernel, constants, dtype, capability, tile.warps, tile.stages)
    assert_nothing_spilled(compiled)
    assert PRODUCT[capability] in compiled.main_loop
    weights = packed.chunk * tile.columns * (2 if gated else 1) / (32 * tile.warps)  # of a lane in one turn
    assert 1.0 < compiled.arithmetic() / weights <= 3.6, (compiled.arithmetic() / weights, compiled.main_loop)


def assert_no_tile_spills(capability, forms, rows, first_only):
    names = set()
    for packed, gated, count in itertools.product(forms, (False, True), rows):
        tiles = triton_launch.tiles(count, packed, gated, 132, divmod(capability, 10))
        for tile in tiles[:1] if first_only else tiles:
            constants = triton_launch.constants(packed, 4096, gated, tile, fast=True)
            key = (*constants.values(), tile.warps, tile.stages)
            if key not in names:
                kernel = triton_quantized.matmul_kernel
                compiled = compile_kernel(kernel, constants, "bf16", capability, tile.warps, tile.stages)
                (assert_nothing_spilled if first_only else assert_loop_in_registers)(compiled)
                names.add(key)


def forms(capability):
    quads = capability < 90
    ragged = packed_like(chunk=32, ragged=True, quads=quads)
    return [packed_like(sym=False, quads=quads), ragged, packed_like(8, quads=quads),
            packed_like(2, sym=False, quads=quads), packed_like(chunk=64, sym=False, quads=quads),
            packed_like(chunk=32, quads=quads), packed_like(quads=quads)]  # fmt: skip


@pytest.mark.parametrize(("registers", "shared", "warps", "capability", "programs"), [
    (255, 0, 4, (9, 0), 2), (128, 96 << 10, 8, (9, 0), 2), (128, 114 << 10, 8, (9, 0), 1), (32, 0, 1, (9, 0), 32),
    (32, 0, 8, (8, 6), 6), (64, 60 << 10, 4, (8, 0), 2), (64, 60 << 10, 4, (12, 0), 1),
])  # fmt: skip
def test_a_multiprocessor_holds_as_many_programs_as_what_it_shares_allows(
    registers, shared, warps, capability, programs
):
    assert triton_device.programs_at_once(registers, shared, warps, capability) == programs


@pytest.mark.parametrize(
    ("blocks", "places", "most", "parts"),
    [(64, 264, 16, 4), (56, 924, 16, 16), (100, 132, 16, 5), (132, 132, 16, 1), (133, 132, 1, 1), (1000, 132, 4, 1)],
)
def test_parts_fill_whole_waves(blocks, places, most, parts):
    """100 blocks on 132 places are 1 wave, in 5 parts 4, in 13 parts 10 of a thirteenth each, hardly less."""
    assert triton_device.whole_waves(blocks, places, most) == parts


def test_the_best_tile_is_measured_in_whole_waves_too(monkeypatch):
    packed, x = packed_like(), torch.empty(16, 4096, dtype=torch.bfloat16, device="meta")
    compiled = SimpleNamespace(n_regs=168, metadata=SimpleNamespace(shared=40 << 10))
    monkeypatch.setattr(triton_launch, "_median_ms", lambda call: call())
    monkeypatch.setattr(triton_launch, "dense_matmul", lambda *how: 9.0)
    monkeypatch.setattr(triton_launch, "launch_matmul", lambda x, packed, gated, tile, *_: (4.0 / tile.parts, compiled))
    times = triton_launch.TileChoice()._measure(x, packed, False, [Tile(16, 128, 2), Tile(16, 64, 3)], 132)
    # three programs at once on each multiprocessor: 64 blocks in 6 parts are nearly one wave
    assert times == {None: 9.0, Tile(16, 128, 2): 2.0, Tile(16, 64, 3): 4 / 3, Tile(16, 64, 6): 4 / 6}


def emulate(assembly: str, word: int, offset: int, dtype: torch.dtype) -> list[float]:
    """The 8 outputs of the packed-pair assembly, by emulating its five instructions."""
    held: dict[str, int | list[float]] = {"$8": word, "$9": offset}

    def value(name: str) -> int:
        result = held[name] if name in held else int(name, 16 if name.startswith("0x") else 10)
        assert isinstance(result, int)
        return result

    def floats(pair: int) -> list[float]:
        halves = torch.tensor([pair & 0xFFFF, pair >> 16 & 0xFFFF], dtype=torch.int32).to(torch.uint16)
        return halves.view(dtype).tolist()

    for line in filter(None, (part.strip(" {}\n") for part in re.split(r";", assembly))):
        operation, _, rest = line.partition(" ")
        names = [name.strip(" {}") for name in rest.split(",")]
        if operation == ".reg":
            continue
        if operation == "shr.u32":
            held[names[0]] = value(names[1]) >> value(names[2])
        elif operation == "lop3.b32":
            assert names[4] == "0xea"  # (a & b) | c
            held[names[0]] = value(names[1]) & value(names[2]) | value(names[3])
        elif operation.startswith("fma.rn."):
            parts = zip(*(floats(value(name)) for name in names[1:]))
            held[names[0]] = [float(torch.tensor(x * y + z).to(dtype)) for x, y, z in parts]
        elif operation == "mov.b32" and len(names) == 2:
            held[names[0]] = value(names[1])
        else:
            assert operation == "mov.b32" and len(names) == 3, line
            pair = held[names[2]]
            assert isinstance(pair, list)
            held[names[0]], held[names[1]] = pair  # type: ignore[assignment]
    return [held[f"${i}"] for i in range(8)]  # type: ignore[misc]


@pytest.mark.parametrize(("dtype", "which"), [(torch.float16, 0), (torch.bfloat16, 1)])
def test_packed_pairs_are_codes_less_their_zero(dtype, which):
    source = Path(triton_quantized.__file__).read_text()
    assembly = re.findall(r'"""\s*\{\n(.*?)\}\s*"""', source, re.S)[which]
    magic = [int(m, 16) for m in re.findall(r"zero \* 0x10001 \| (-0x[0-9A-F]+)", source)][which]
    for zero in range(16):
        for word in (0x76543210, 0xFEDCBA98, 0x0F1E2D3C, 0xFFFFFFFF):
            pairs = [(word >> 4 * p & 15, word >> 16 + 4 * p & 15) for p in range(4)]
            expected = [float(code - zero) for pair in pairs for code in pair]
            assert emulate(assembly, word, (zero * 0x10001 | magic) & 0xFFFFFFFF, dtype) == expected


@pytest.mark.parametrize(("rows", "large"), [(524287, False), (524288, True)])
def test_products_of_more_than_2_31_numbers_count_places_in_64_bits(rows, large, monkeypatch):
    launched = {}

    class Kernel:
        def __getitem__(self, grid):
            return lambda *tensors, **constants: launched.update(constants)

    monkeypatch.setattr(triton_quantized, "matmul_kernel", Kernel())
    triton_launch.matmul(torch.empty(rows, 4096, device="meta"), packed_like(), False, Tile(128, 128))
    assert launched["LARGE"] == large


@pytest.mark.parametrize(("capability", "kinds"), [(80, 2), (90, 3), (100, 1)])
def test_first_guesses_do_not_spill(capability, kinds):
    assert_no_tile_spills(capability, forms(capability)[:kinds], (1, 512), True)


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_no_tile_that_may_be_chosen_spills_much(capability):
    assert_no_tile_spills(capability, forms(capability), (1, 32, 64, 512), False)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_the_other_kernels_do_not_spill(capability):
    packed = packed_like(quads=capability < 90, sym=False)
    expected = triton_quantized.dequantize_kernel.arg_names
    constants = triton_launch.constants(packed, 4096, False, Tile(16, 64), fast=True)
    constants = {name: value for name, value in constants.items() if name in expected} | {"BLOCK_N": 64}
    types = dict.fromkeys(("y", "total", "cos", "sin", "x_out", "y_out", "k", "v"), "*bf16") | {"slots": "*i64"}
    types |= dict.fromkeys(("gated", "linear", "dhidden", "shares", "values"), "*bf16") | {"dshares": "*fp32"}
    types |= {"keys": "*i64", "places": "*i64"}
    types |= dict.fromkeys(("x_stride", "y_stride", "k_stride", "v_stride", "x_heads", "n", "block", "heads"), "i32")
    for kernel, values in ((triton_quantized.dequantize_kernel, constants),
                           (triton_norm.rms_norm_kernel, {"BLOCK": 8192, "PERMUTED": True, "ADDED": True}),
                           (triton_optimizer.adamw_kernel, {**ADAMW, **LION}),
                           (triton_optimizer.lion_kernel, LION),
                           (triton_steps.rotate_kernel, {"HEAD": 128, "BLOCK": 128}),
                           (triton_steps.store_rows_kernel, {"BLOCK": 1024}),
                           (triton_steps.reorder_kernel, {"BLOCK": 1024}),
                           (triton_steps.largest_kernel, {"BLOCK": 4096}),
                           (triton_experts.swiglu_kernel, {"BLOCK": 1024}),
                           (triton_experts.swiglu_backward_kernel, {"BLOCK": 1024}),
                           (triton_paged.add_parts_kernel,
                            {"HEAD": 128, "D": 128, "KEYS": 512, "COUNT": 4, "WITH_LSE": True}),
                           (triton_experts.combine_kernel, {"CHOICES": 2, "BLOCK": 1024, "PLACED": True})):  # fmt: skip
        own = {name: kind for name, kind in types.items() if name in kernel.arg_names}
        own |= {"out": "*i64"} if kernel is triton_steps.largest_kernel else {}
        assert_nothing_spilled(compile_kernel(kernel, values, "bf16", capability, 8, 3, own))


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_states_of_recurrences_stay_in_registers(capability):
    delta, scan = triton_recurrences.delta_rule_kernel, triton_recurrences.selective_scan_kernel
    cases = [(delta, triton_recurrences.delta_tile(inputs)) for inputs in (64, 128, 256)]
    cases += [(scan, triton_recurrences.scan_tile(size)) for size in (16, 64, 128, 256)]
    for kernel, sizes in cases:
        constants = sizes | {"WIDE": triton.language.float32}
        assert_loop_in_registers(compile_kernel(kernel, constants, "fp32", capability, 4, 3))


@pytest.mark.parametrize(("capability", "head"), [(80, 128), (86, 256), (90, 128), (90, 256), (100, 256)])
def test_attention_stays_on_the_chip(capability, head):
    mask = CausalMask(range(4096), range(4096), window=512)
    for which in ("forward", "queries", *triton_flash.PARTS_OF_KEYS[head > 128]):
        _, compiled = compile_flash(which, 4096, 16, 8, head, mask, capability)
        assert_loop_in_registers(compiled)
        assert compiled.shared <= {80: 163, 86: 99}.get(capability, 227) << 10
        if capability == 90:  # no product is computed twice, and the masks of the diagonal are jumped over
            tile = triton_flash.FlashTile.of(which, head, torch.bfloat16)
            products = {"forward": 2, "queries": 3, "values": 2, "keys": 3, "keys and values": 4}[which]
            assert compiled.product_flops == products * 2 * tile.rows * tile.keys * head
            assert "ISETP" in compiled.skipped


def test_four_reciprocals_take_one_division():
    source = inspect.getsource(triton_scores._reciprocals.fn).split('"""')[3]
    held = {f"${4 + i}": x for i, x in enumerate((1.0, 3.0, 2.0**30, 1.5))}
    for line in filter(None, (part.strip(" {}\n") for part in source.split(";"))):
        operation, _, rest = line.partition(" ")
        names = [name.strip() for name in rest.split(",")]
        if operation == "mul.f32":
            held[names[0]] = held[names[1]] * held[names[2]]
        elif operation == "rcp.approx.ftz.f32":
            held[names[0]] = 1 / held[names[1]]
    assert [held[f"${i}"] * held[f"${4 + i}"] for i in range(4)] == pytest.approx([1.0] * 4)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_products_with_experts_do_not_spill(capability, dtype):
    of_device = {"experts": 8, "dtype": TORCH[dtype], "capability": divmod(capability, 10)}
    tile_of = functools.partial(triton_experts.ExpertTile.of, **of_device)
    for tile in {tile_of(choices, fixed=fixed) for choices in (8, 800, 8000) for fixed in (True, False)}:
        for stride in ("by_input", "by_column"):  # of a weight, and of its transpose in the backward pass
            sizes = {
                "BLOCK_M": tile.choices,
                "BLOCK_N": tile.columns,
                "BLOCK_K": tile.inputs,
                "EVEN_K": True,
                "SHARING": 2,
                stride: 1,
            }
            program = triton_experts.expert_linear_kernel, sizes, dtype, capability, tile.warps, tile.stages
            assert_loop_in_registers(compile_kernel(*program))
    tile = triton_experts.ExpertTile.of_outer(TORCH[dtype])
    sizes = {"ROWS": tile.choices, "BLOCK_N": tile.columns, "BLOCK_K": tile.inputs, "SHARING": 1, "SHARING_DOUT": 2}
    program = triton_experts.expert_outer_kernel, sizes, dtype, capability, tile.warps, tile.stages
    assert_loop_in_registers(compile_kernel(*program))
