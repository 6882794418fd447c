"""Running a device's program on fake CUDA tensors: no GPU is needed, and a tensor left on the CPU is an error."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves
from tpshard.parallelism.program import Program, info
from tpshard.parallelism.rules import control_flow
from tpshard.parallelism.runtime import execute

aten = torch.ops.aten
GPU = torch.device("cuda:0")
CONVOLUTIONS = (aten.convolution.default, aten.convolution_backward.default)
"""Ops whose fake form runs a CUDA operation for images with one dim, which a build without CUDA lacks."""


def run_on_fake_gpu(program: Program, rank: int, sizes: Mapping[str, int] | None = None) -> None:
    """Runs a rank's part of a program on fake tensors of a GPU, as an `Executor` with kind cuda would.

    sizes: the size of the free dims of an input, by its name (1 if it is not there). Raises AssertionError for a value
    that is not on the GPU, and what torch raises where tensors of two devices meet or the host reads a tensor's values.
    """
    with MODE, mock.patch.object(execute, "_bind_bodies", _bodies):  # and the program's constants move to the GPU
        module = execute.localize(program, rank, GPU, _wait, exchange=False, transfer=lambda value, node: value)
    _OnGPU(module).run(*[_input(port, (sizes or {}).get(port.name, 1)) for port in program.inputs])


MODE = FakeTensorMode(allow_non_fake_inputs=True)


def _bodies(node: fx.Node, parts: Sequence[fx.GraphModule]) -> Callable[..., list[Tensor]]:
    """Control flow that runs each of its bodies, since fake tensors do not say which one a step runs."""
    runs = [_OnGPU(part).run for part in parts]

    def bound(*operands: Tensor) -> list[Tensor]:
        if node.target is control_flow.cond:
            then, _ = (list(run(*operands[1:])) for run in runs)
            return then
        if node.target is control_flow.while_loop:
            _, results = (list(run(*operands)) for run in runs)
            return results
        carried, sliced, _ = control_flow.numbers(node.args)
        at = [x.select(0, 0) for x in operands[carried : carried + sliced]]
        results = list(runs[0](*operands[:carried], *at, *operands[carried + sliced :]))
        rounds = operands[carried].shape[0]
        return results[:carried] + [x.new_empty((rounds, *x.shape)) for x in results[carried:]]

    return bound


def _wait(started: Tensor, node: fx.Node) -> Tensor:
    return torch.ops._c10d_functional.wait_tensor.default(started)


def _input(port: Any, free: int) -> Tensor:
    shape = [free if dim in port.free else size for dim, size in enumerate(port.local)]
    if port.held is not None and port.held.form == "dense":  # of several joined ones, one behind the other
        shape[0] = port.held.bytes // (port.dtype.itemsize * math.prod(shape[1:]))
    with MODE:
        return torch.empty(shape, dtype=port.dtype, device=GPU)


class _OnGPU(fx.Interpreter):
    """Runs a graph node by node, and asserts that every tensor is on the GPU."""

    def run_node(self, n: fx.Node) -> Any:
        with MODE, torch.no_grad():
            result = self._apart(n) if _is_apart(n) else super().run_node(n)
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                assert tensor.device == GPU, f"{n.format_node()} is on {tensor.device}"
        return result

    def _apart(self, n: fx.Node) -> Any:
        """The results of a node as its metadata says, with operands on the GPU."""
        operands = tree_leaves(self.fetch_args_kwargs_from_env(n))
        assert all(x.device == GPU for x in operands if isinstance(x, Tensor)), f"{n} reads another device"
        results = [torch.empty(spec.shape, dtype=spec.dtype, device=GPU) for spec in info(n).specs]
        return results[0] if len(results) == 1 else tuple(results)


def _is_apart(n: fx.Node) -> bool:
    """Whether a node cannot run on fake tensors: a kernel that reads packed weights, or a convolution."""
    packed = not isinstance(n.target, OpOverload) and getattr(n.target, "__module__", "").startswith("tpshard.kernels")
    return n.op == "call_function" and (packed or n.target in CONVOLUTIONS)
