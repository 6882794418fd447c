"""The page on kernels shows what was computed, and what a kernel is expected to take follows from its counts."""

from dataclasses import replace

import pytest
from tpshard.devices.read import device

pytest.importorskip("triton", reason="Triton has wheels for Linux on x86-64 alone")

import kernel_limits
import record
from compiled_kernel import Compiled


def test_the_page_shows_the_record() -> None:
    table = kernel_limits.table(record.load("kernel_limits")["rows"])
    page = (record.ROOT / "docs/kernels.md").read_text(encoding="utf-8")
    assert record.with_table(page, "kernel_limits", table) == page and table in page


def written(sass: str) -> Compiled:
    """A kernel with this code."""
    code = Compiled(warps=4, stages=3, registers=128, shared=0, stack=0, local=0, binary=b"")
    vars(code)["sass"] = sass
    return code


def test_a_time_is_that_of_the_slowest_part_of_each_wave() -> None:
    sass = ".L_x_0:\n" + "/*0000*/ FADD R0, R0, R0 ;\n" * 998 + "/*0010*/ LDGSTS R0 ;\n/*0020*/ @P0 BRA `(.L_x_0) ;\n"
    code = written(sass)
    assert code.arithmetic() == 998 and len(code.main_loop) == 1000
    h100 = device("h100-sxm-80g")
    streams = kernel_limits.Case("k", "s", code, programs=4 * 132, turns=100, elements=1, bytes=3.35e9)
    ramp = kernel_limits.RAMP
    first = kernel_limits.expected(streams, h100)
    assert (first.resident, first.waves, first.bound) == (4, 1, "memory")
    assert first.limit_s == pytest.approx(1e-3) and first.time_s == pytest.approx(1e-3 + ramp)
    computes = kernel_limits.expected(replace(streams, programs=5 * 132, bytes=3e8), h100)
    cycle = 132 * 4096 / h100.rates["bf16"]
    assert computes.bound == "instructions" and computes.waves == 1.25
    assert computes.time_s == pytest.approx(5 * 100 * 1000 * cycle + ramp)
    alone = kernel_limits.Case("k", "s", written("/*0000*/ FADD R0, R0, R0 ;\n"), 1, 9, 1, bytes=6e4)
    assert kernel_limits.expected(alone, h100).bound == "copies in flight"
