"""Making the program of `kernels.llvm_quantized` for this CPU, and running it in torch's threads."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

import llvmlite.binding as llvm
import torch
from torch import Tensor
from tpshard.kernels.llvm_quantized import ARGUMENTS, ENTRY, module

_NEEDED = {"x86_64": ("fma", "f16c", "avx2"), "aarch64": (), "arm64": ()}
"""Features without which LLVM would call functions for what is one instruction here."""


@cache
def available() -> bool:
    """Whether this CPU has instructions for what the program does."""
    features = llvm.get_host_cpu_features()
    needed = _NEEDED.get(llvm.get_default_triple().split("-")[0])
    return needed is not None and all(features.get(name, False) for name in needed)


@cache
def lanes() -> int:
    """Floats of a vector of this CPU that is worth using."""
    return 16 if llvm.get_host_cpu_features().get("avx512f", False) else 8


@cache
def compiled(bits: int, lanes: int) -> int:
    """The address of the program, made at first use in about a third of a second."""
    return _Engine(bits, lanes).address


class _Engine:
    """Compiled code. It lives as long as the process."""

    _kept: list[object] = []

    def __init__(self, bits: int, lanes: int) -> None:
        machine = target_machine()
        made = optimized(module(bits, lanes), machine)
        engine = llvm.create_mcjit_compiler(made, machine)
        engine.finalize_object()
        self._kept.append(engine)
        self.address: int = engine.get_function_address(ENTRY)


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


def matmul(x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor, spans: Tensor, width: int) -> Tensor:
    """x fp32 [rows, inputs] -> fp32 [rows, columns filled up to whole blocks], by the tensors of a `Blocked` weight.

    A row's bits do not depend on the others.
    """
    x = x.contiguous()
    blocks, groups, columns = scales.shape
    out = x.new_empty(x.shape[0], blocks * columns)
    arguments = _Arguments(
        x.data_ptr(), codes.data_ptr(), scales.data_ptr(), zeros.data_ptr(), out.data_ptr(), spans.data_ptr(),
        *x.shape, blocks, groups, spans.shape[0], 0,
    )  # fmt: skip
    _in_threads()(compiled(width, lanes()), ctypes.addressof(arguments), torch.get_num_threads())
    return out


_Arguments = ctypes.c_int64 * len(ARGUMENTS)


@cache
def _in_threads() -> Callable[[int, int, int], None]:
    """run(function, argument, threads): in the threads that torch's own operations use, so that none wait for others
    that spin; in the calling one where torch does not use OpenMP."""
    run = getattr(ctypes.CDLL(None), "GOMP_parallel", None)
    if run is None:
        return lambda function, argument, _threads: ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)(argument)
    run.argtypes, run.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
    return lambda function, argument, threads: run(function, argument, threads, 0)
