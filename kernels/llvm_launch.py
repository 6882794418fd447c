"""Making the programs of the `llvm_` modules for this CPU, and running them in torch's threads."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

import llvmlite.binding as llvm
import torch
import torch.nn.functional as F
from torch import Tensor
from tpshard.kernels import llvm_attention, llvm_quantized, llvm_rows
from tpshard.kernels.blocked import CHUNK

_NEEDED = {"x86_64": ("fma", "f16c", "avx2"), "aarch64": (), "arm64": ()}
"""Features without which LLVM would call functions for what is one instruction here."""


@cache
def available() -> bool:
    """Whether this CPU has instructions for what the program does."""
    features = llvm.get_host_cpu_features()
    needed = _NEEDED.get(architecture())
    return needed is not None and all(features.get(name, False) for name in needed)


def architecture() -> str:
    """LLVM's name for the kind of this CPU."""
    return llvm.get_default_triple().split("-")[0]


@cache
def lanes() -> int:
    """Floats of a vector of this CPU that is worth using."""
    return 16 if llvm.get_host_cpu_features().get("avx512f", False) else 8


@cache
def product(bits: int, lanes: int) -> int:
    """The address of the product's program, made at first use in about a third of a second."""
    return _address(llvm_quantized.module(bits, lanes, architecture()), llvm_quantized.ENTRY)


@cache
def attention(dim: int, dtype: torch.dtype) -> int:
    """The address of the program for attention over a paged cache."""
    return _address(llvm_attention.module(dim, str(dtype).removeprefix("torch.")), llvm_attention.ENTRY)


@cache
def row_program(name: str) -> int:
    """The address of one of the programs of `llvm_rows`."""
    return _address(llvm_rows.module(name), name)


_ALL = 2**60
"""A window that holds every position."""
_FOR_ONE_THREAD = 1 << 15
"""Elements up to which waking others takes longer than what they would do."""

_engines: list[llvm.ExecutionEngine] = []
"""Compiled code. It lives as long as the process."""


def _address(text: str, entry: str) -> int:
    machine = target_machine()
    engine = llvm.create_mcjit_compiler(optimized(text, machine), machine)
    engine.finalize_object()
    _engines.append(engine)
    return int(engine.get_function_address(entry))


def target_machine(cpu: str = "") -> llvm.TargetMachine:
    """This CPU, or another of its kind by LLVM's name."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    features = "" if cpu else llvm.get_host_cpu_features().flatten()
    cpu = cpu or llvm.get_host_cpu_name()
    return llvm.Target.from_default_triple().create_target_machine(cpu=cpu, features=features, opt=3)


def optimized(text: str, machine: llvm.TargetMachine) -> llvm.ModuleRef:
    made = llvm.parse_assembly(text)
    made.triple, made.data_layout = machine.triple, str(machine.target_data)
    made.verify()
    passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
    passes.getModulePassManager().run(made, passes)
    return made


def matmul(x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor, spans: Tensor, width: int, used: int) -> Tensor:
    """x fp32 [rows, inputs] -> fp32 [rows, columns filled up to whole panels], by the tensors of a `Blocked` weight.

    Rows from `used` on come out as 0. A row's bits do not depend on the others.
    """
    (rows, inputs), (panels, groups, columns) = x.shape, scales.shape
    if codes.shape[1] * 8 > inputs * width * columns:  # a chunk that is not full reads on, and multiplies by 0
        x = F.pad(x, (0, CHUNK))
    x = x.contiguous()
    out = x.new_empty(rows, panels * columns)
    if used < rows:
        out[used:] = 0
    _run(
        product(width, lanes()), x.data_ptr(), codes.data_ptr(), scales.data_ptr(), zeros.data_ptr(), out.data_ptr(),
        spans.data_ptr(), used, x.shape[1], panels, groups, spans.shape[0], codes.shape[1],
    )  # fmt: skip
    return out


def rows(name: str, *fields: int, elements: int) -> None:
    """A program of `llvm_rows`; `elements` says how much there is to do."""
    _run(row_program(name), *fields, threads=None if elements > _FOR_ONE_THREAD else 1)


def takes(k_pool: Tensor, v_pool: Tensor) -> bool:
    """Whether there is a program for attention over this cache."""
    known = str(k_pool.dtype).removeprefix("torch.") in llvm_attention.KINDS and v_pool.dtype == k_pool.dtype
    whole = k_pool.is_contiguous() and v_pool.is_contiguous()
    return available() and known and whole and k_pool.shape[-1] % llvm_attention.LANES == 0


def paged_attention(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, positions: Tensor, sequences: Tensor, tables: Tensor,
    window: int | None = None,
) -> Tensor:  # fmt: skip
    """q fp32 [rows, h, d], scaled; pools [n, s, kv, d] that hold the rows' own keys and values already; positions and
    sequences int64 [rows]; tables int64 [m, w]. -> fp32 [rows, h, d]"""
    q, positions, sequences, tables = (x.contiguous() for x in (q, positions, sequences, tables))
    out = torch.empty_like(q)
    (rows, heads, dim), (_, size, kv_heads, _) = q.shape, k_pool.shape
    _run(
        attention(dim, k_pool.dtype), q.data_ptr(), k_pool.data_ptr(), v_pool.data_ptr(), out.data_ptr(),
        positions.data_ptr(), sequences.data_ptr(), tables.data_ptr(), rows, heads, kv_heads, tables.shape[1],
        size.bit_length() - 1, _ALL if window is None else window,
    )  # fmt: skip
    return out


def _run(function: int, *fields: int, threads: int | None = None) -> None:
    """The function with these fields, and 0 for the first task."""
    arguments = (ctypes.c_int64 * (len(fields) + 1))(*fields, 0)
    _in_threads()(function, ctypes.addressof(arguments), threads or torch.get_num_threads())


@cache
def _in_threads() -> Callable[[int, int, int], None]:
    """run(function, argument, threads): in the threads that torch's own operations use, so that none wait for others
    that spin; in the calling one where torch does not use OpenMP."""
    run = getattr(ctypes.CDLL(None), "GOMP_parallel", None)
    if run is None:
        return lambda function, argument, _threads: ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)(argument)
    run.argtypes, run.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
    return lambda function, argument, threads: run(function, argument, threads, 0)
