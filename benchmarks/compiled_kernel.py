"""Triton kernels compiled for GPUs that are not present: what the binary uses, and the instructions of its loop."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
_FLOATING = ("x", "out", "weight", "dout", "k_pool", "v_pool")
"""Arguments of the kernel's own dtype."""
_POINTERS = {"words": "*i32", "scales": "*fp16", "zeros": "*u8", "pieces": "*i32", "bias": "*fp16",
             "partial": "*fp32", "peaks": "*fp32", "arrived": "*i32", "order": "*i64", "param": "*fp32",
             "grad": "*fp32", "exp_avg": "*bf16", "exp_avg_sq": "*bf16", "finite": "*i1", "scale": "*fp32",
             "lr": "*fp32", "update": "*fp32"}  # fmt: skip
_POINTERS |= dict.fromkeys(("q", "k", "v", "decay", "beta", "step", "a", "inward", "outward", "state", "last"), "*fp32")
_POINTERS |= dict.fromkeys(("starts", "ends", "experts", "first_block"), "*i64")
_NUMBERS = dict.fromkeys(("M", "group_chunks", "first_chunk", "width", "size"), "i32") | {"eps": "fp32"}
_NUMBERS |= dict.fromkeys(("tokens", "heads", "i_size", "o_size", "decays", "channels", "inner", "stride"), "i32")
_NUMBERS |= dict.fromkeys(("count", "chunks", "blocks_m", "groups"), "i32")
_POINTERS |= dict.fromkeys(("positions", "sequences", "tables"), "*i64") | {"lse": "*fp32"}
_NUMBERS |= dict.fromkeys(("rows", "kv_heads", "window"), "i32") | {"softcap": "fp32"}
_WIDTHS = ("N", "K", "columns", "inputs", "by_expert", "by_column", "by_input")
"""Integers that are multiples of 16, as real matrices' are."""

# Loads, stores, copies, barriers, jumps and the tensor cores' own products; all the rest are integers and floats.
NOT_ARITHMETIC = {
    *("LDS", "LDSM", "LDG", "LDC", "ULDC", "LDGSTS", "STS", "STG", "LDGDEPBAR", "DEPBAR", "BAR", "MEMBAR", "FENCE"),
    *("ERRBAR", "CCTL", "SYNCS", "WARPGROUP", "WARPSYNC", "BRA", "NOP", "HGMMA", "HMMA", "QGMMA", "UTCHMMA", "UTCBAR"),
}
PRODUCTS = ("HGMMA", "QGMMA", "HMMA", "QMMA", "UTCHMMA")
"""Instructions of the tensor cores."""


@dataclass(frozen=True)
class Compiled:
    """A kernel's binary for a device that is not present."""

    warps: int
    stages: int
    registers: int
    """Of a thread."""
    shared: int
    """Bytes of shared memory of a program."""
    stack: int
    local: int
    """Bytes of a thread's stack and local memory. Spilled registers lie there: where both are 0 nothing is spilled."""
    binary: bytes = field(repr=False)

    @cached_property
    def sass(self) -> str:
        """The machine code, disassembled."""
        return _output("nvdisasm", self.binary, "-c")

    @cached_property
    def code(self) -> list[str]:
        """Names of all instructions, in order."""
        return [instruction.split()[0].split(".")[0] for instruction in self._lines[0]]

    @cached_property
    def _lines(self) -> tuple[list[str], list[tuple[int, int]]]:
        labels: dict[str, int] = {}
        code: list[str] = []
        loops = []
        for line in self.sass.splitlines():
            if label := re.match(r"\s*(\.L_x_\d+):", line):
                labels[label[1]] = len(code)
            elif instruction := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(.*?);", line):
                code.append(instruction[1])
                target = re.search(r"BRA.*`\((\.L_x_\d+)\)", instruction[1])
                if target and target[1] in labels and labels[target[1]] < len(code) - 1:  # a jump backwards
                    loops.append((labels[target[1]], len(code)))
        return code, loops

    @cached_property
    def main_loop(self) -> list[str]:
        """Names of the instructions of the longest loop that holds no other; with products where any has them. The
        whole code where nothing is a loop."""
        loops = self._lines[1]
        inner = [a for a in loops if not any(a[0] <= b[0] and b[1] <= a[1] and a != b for b in loops)]
        bodies = [self.code[start:end] for start, end in inner]
        with_products = [body for body in bodies if any(name in PRODUCTS for name in body)]
        return max(with_products or bodies or [self.code], key=len)

    @property
    def arithmetic(self) -> int:
        """Integer and floating point instructions of a warp in one turn of the main loop."""
        return sum(count for name, count in Counter(self.main_loop).items() if name not in NOT_ARITHMETIC)


def compile_kernel(
    kernel: Any, constants: dict[str, Any], dtype: str, capability: int, warps: int, stages: int,
    types: dict[str, str] | None = None,
) -> Compiled:  # fmt: skip
    """Compiles a kernel with compile-time arguments `constants` for a device of `capability` (90 is sm_90).

    types: types of arguments that differ from those usual in `kernels/`.
    """
    names = kernel.arg_names
    usual = _POINTERS | _NUMBERS | dict.fromkeys(_WIDTHS, "i32") | dict.fromkeys(_FLOATING, f"*{dtype}") | (types or {})
    signature = {name: "constexpr" if name in constants else usual[name] for name in names}
    aligned = [i for i, name in enumerate(names)
               if name not in constants and (signature[name].startswith("*") or name in _WIDTHS)]  # fmt: skip
    source = ASTSource(kernel, signature, constants, {(i,): [["tt.divisibility", 16]] for i in aligned})
    options = {"num_warps": warps, "num_stages": stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    binary = compiled.asm["cubin"]
    usage = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", _output("cuobjdump", binary, "-res-usage")))
    registers, stack, local = (int(usage[key]) for key in ("REG", "STACK", "LOCAL"))
    return Compiled(warps, stages, registers, compiled.metadata.shared, stack, local, binary)


def _output(tool: str, binary: bytes, option: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [TOOLS / tool, option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
