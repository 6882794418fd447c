"""Triton kernels compiled for GPUs that are not present: what the binary uses, and the instructions of its loop."""

from __future__ import annotations

import math
import re
import subprocess
import tempfile
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import triton
from tpshard.kernels.attention import triton_flash
from tpshard.kernels.attention.attention_mask import CausalMask
from tpshard.kernels.attention.triton_flash import FlashTile
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
        return [_name(instruction) for instruction in self._lines[0]]

    @cached_property
    def _lines(self) -> tuple[list[str], list[tuple[int, int]]]:
        """All instructions, and from which to which jumps go: backwards for a loop, forwards over what is skipped."""
        labels: dict[str, int] = {}
        code: list[str] = []
        for line in self.sass.splitlines():
            if label := re.match(r"\s*(\.L_x_\d+):", line):
                labels[label[1]] = len(code)
            elif instruction := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(.*?);", line):
                code.append(instruction[1])
        targets = [(at, re.search(r"BRA.*`\((\.L_x_\d+)\)", instruction)) for at, instruction in enumerate(code)]
        return code, [(at, labels[target[1]]) for at, target in targets if target and target[1] in labels]

    @cached_property
    def _main(self) -> tuple[int, int]:
        loops = [(to, at + 1) for at, to in self._lines[1] if to < at]  # a jump to itself is the end of a program
        inner = [a for a in loops if not any(a[0] <= b[0] and b[1] <= a[1] and a != b for b in loops)]
        with_products = [a for a in inner if any(name in PRODUCTS for name in self.code[slice(*a)])]
        return max(with_products or inner or [(0, len(self.code))], key=lambda a: a[1] - a[0])

    @property
    def main_loop(self) -> list[str]:
        """Names of the instructions of the longest loop that holds no other; with products where any has them. The
        whole code where nothing is a loop."""
        return self.code[slice(*self._main)]

    @property
    def skipped(self) -> list[str]:
        """Those of the main loop's instructions that a jump inside it may skip."""
        start, end = self._main
        over = {at for source, to in self._lines[1] if start <= source < to < end for at in range(source + 1, to)}
        return [self.code[at] for at in sorted(over)]

    @property
    def product_flops(self) -> float:
        """Of Hopper's products of all warps in one turn of the main loop, those computed twice too; 0 without any."""
        shapes = (re.match(r"[HQ]GMMA\.(\d+)x(\d+)x(\d+)", line) for line in self._lines[0][slice(*self._main)])
        return sum(2 * math.prod(map(int, shape.groups())) for shape in shapes if shape) * self.warps / 4

    def arithmetic(self, skipping: float = 1) -> float:
        """Integer and floating point instructions of a warp in one turn of the main loop; of those that may be skipped
        the share `skipping`."""
        loop, skipped = (sum(name not in NOT_ARITHMETIC for name in part) for part in (self.main_loop, self.skipped))
        return loop - (1 - skipping) * skipped


def _name(instruction: str) -> str:
    return instruction.split()[0].split(".")[0]


def compile_kernel(
    kernel: Any, constants: dict[str, Any], dtype: str, capability: int, warps: int, stages: int,
    types: dict[str, str] | None = None, registers: int | None = None,
) -> Compiled:  # fmt: skip
    """Compiles a kernel with compile-time arguments `constants` for a device of `capability` (90 is sm_90).

    types: types of arguments that differ from those usual in `kernels/`. registers: the most of a thread.
    """
    names = kernel.arg_names
    usual = _POINTERS | _NUMBERS | dict.fromkeys(_WIDTHS, "i32") | dict.fromkeys(_FLOATING, f"*{dtype}") | (types or {})
    signature = {name: "constexpr" if name in constants else usual[name] for name in names}
    aligned = [i for i, name in enumerate(names)
               if name not in constants and (signature[name].startswith("*") or name in _WIDTHS)]  # fmt: skip
    source = ASTSource(kernel, signature, constants, {(i,): [["tt.divisibility", 16]] for i in aligned})
    options = {"num_warps": warps, "num_stages": stages, "maxnreg": registers}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    binary = compiled.asm["cubin"]
    usage = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", _output("cuobjdump", binary, "-res-usage")))
    registers, stack, local = (int(usage[key]) for key in ("REG", "STACK", "LOCAL"))
    return Compiled(warps, stages, registers, compiled.metadata.shared, stack, local, binary)


def compile_flash(
    which: str, tokens: int, heads: int, kv: int, head: int, mask: CausalMask, capability: int
) -> tuple[FlashTile, Compiled]:
    """Attention with a softcap of 50, `forward` or one of its gradients, as `triton_flash` launches it in bf16."""
    kernels = {"forward": triton_flash.forward_kernel, "queries": triton_flash.query_gradient_kernel}
    kernel = kernels.get(which, triton_flash.key_gradient_kernel)
    tile = FlashTile.of(which, head, torch.bfloat16, divmod(capability, 10))
    q, k = (torch.empty(1, tokens, count, head, device="meta") for count in (heads, kv))
    constants = tile.sizes(q, k) | triton_flash.kind(mask, 50.0, True)
    constants |= triton_flash.own_kind(which, 50.0, torch.bfloat16)
    types = dict.fromkeys(("q", "k", "v", "dout", "dq", "dk", "dv"), "*bf16") | {"lse": "*fp32", "means": "*fp32"}
    types |= {"row_documents": "*i64", "key_documents": "*i64", "keys": "i32", "shift": "i32"}
    types |= dict.fromkeys(("gain", "scale", "slope", "zero"), "fp32")
    own = {name: kind for name, kind in types.items() if name in kernel.arg_names}
    return tile, compile_kernel(kernel, constants, "bf16", capability, tile.warps, tile.stages, own)


def _output(tool: str, binary: bytes, option: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [TOOLS / tool, option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
