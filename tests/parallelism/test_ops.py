"""Every op of the table, with its operands in every layout, equals one device's result."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import tpshard.kernels.attention  # registers its op, as those below do
import tpshard.kernels.attention.paged_attention
import tpshard.kernels.attention.paged_selection
import tpshard.kernels.experts.expert_linear
import tpshard.kernels.experts.experts
import tpshard.kernels.experts.slots
import tpshard.kernels.fp8.fp8
import tpshard.kernels.optimizer_steps
import tpshard.kernels.quantized.dequantize
import tpshard.kernels.quantized.reorder
import tpshard.kernels.recurrences.delta_rule
import tpshard.kernels.recurrences.selective_scan
import tpshard.kernels.recurrences.state_pool
import tpshard.models.dims
import tpshard.parallelism.annotate  # noqa: F401
from layer_cases import LAYERS
from op_case import Case, Of, call, f, flat, ints, octets, of, truths
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from tpshard.parallelism import Mesh
from tpshard.parallelism.graph import Graph, Op, map_refs
from tpshard.parallelism.partitioning.partition import partition_captured
from tpshard.parallelism.partitioning.partitioner import mark_outputs
from tpshard.parallelism.rules import drawn, kernel_costs, table
from tpshard.parallelism.rules.control_flow import CONTROL_FLOW
from tpshard.parallelism.rules.elementwise import pointwise
from tpshard.parallelism.rules.rule import Kind, whole
from tpshard.parallelism.rules.table import TABLE, entry_of, name_of, rule_for
from tpshard.parallelism.tracing.capture import capture
from tpshard.parallelism.tracing.recorder import Recorder

aten, prims, ours = torch.ops.aten, torch.ops.prims, torch.ops.tpshard
torch.set_num_threads(1)
MESHES = [Mesh({"x": 2}), Mesh({"x": 3})]
MOST = 24
"""Placements of a case that are tried on every mesh; of more, so many are tried on one mesh each."""


def _attend(*shape: int, documents: bool = False) -> list[Of]:
    b, s, h, kv, d = shape
    return [f(b, s, h, d), f(b, s, kv, d), f(b, s, kv, d), *([ints(2, b, s)] if documents else [])]


def _attention_gradients(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Any:
    out, lse = ours.attention.default(q, k, v, None, 0.5)
    return ours.attention_backward.default(dout, q, k, v, out, lse, None, 0.5)


def _part_gradients(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Any:
    out, lse = ours.attention_part.default(q, k, v, None, None, 0.5, None, 4, 2)
    return ours.attention_part_backward.default(dout, q, k, v, out, lse, None, None, 0.5, None, 4, 2)


SLOTS = torch.tensor([[[0, 5], [3, -1], [-1, 1]], [[2, 4], [0, 1], [3, -1]]]).repeat(2, 1, 1)
"""[4, 3, 2]: which of 6 slots the tokens of four sequences take."""


CHOICES = torch.tensor([[0, 3], [2, 1], [3, 2], [0, 2]])
"""[4, 2]: which two of four experts each token takes."""


def _experts(x: Tensor, weights: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return ours.experts.default(x, CHOICES, weights, gate, up, down)


def _experts_gradients(dout: Tensor, x: Tensor, weights: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Any:
    return ours.experts_backward.default(dout, x, CHOICES, weights, gate, up, down)


EXPERTS = (f(4, 2), f(4, 6, 3), f(4, 6, 3), f(4, 3, 6))
"""Weights of two choices for each of four tokens; gate, up and down of four experts."""
IN_GROUPS, GROUPS = torch.stack([CHOICES, CHOICES - 2]), [f(2, *one.shape) for one in EXPERTS]
"""The same for two groups; the second has half of the experts that its tokens choose."""


def _flash(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return aten._scaled_dot_product_flash_attention_for_cpu.default(q, k, v)[0]


def _flash_gradients(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Any:
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu.default(q, k, v)
    return aten._scaled_dot_product_flash_attention_for_cpu_backward.default(dout, q, k, v, out, lse, 0.0, False)


PAGE = (f(1, 4, 6, 8), f(1, 4, 2, 8), f(1, 4, 2, 8), f(3, 8, 2, 8), f(3, 8, 2, 8))
"""Queries, keys and values of four rows, and pools of three blocks."""


DELTA = (*[f(4, 3, 6, 2)] * 3, f(4, 3, 6, 1), f(4, 3, 6), f(4, 6, 2, 2))
"""Queries, keys, values, decays, rates and states of three tokens and six heads."""
KIMI = (*DELTA[:3], f(4, 3, 6, 2), *DELTA[4:])
"""The same, with a decay for each input of a head."""


SCAN = (f(4, 3, 6), f(4, 3, 6), f(6, 2), f(4, 3, 2), f(4, 3, 2), f(4, 6, 2))


def _page(*tensors: Tensor, op: Any = ours.paged_attention.default) -> Any:
    """tensors: q, k, v and the pools."""
    rows = torch.arange(4)[None]
    return op(*tensors, rows, rows + 8, rows * 0, torch.tensor([[1]]), 0.5)


def _select(*tensors: Tensor) -> Any:
    """tensors: an indexer's queries, keys and weights, and its pool."""
    rows = torch.arange(4)[None]
    return ours.paged_select_keys.default(*tensors, rows, rows + 8, rows * 0, torch.tensor([[1]]), 0.5, 3)


def _page_selected(*tensors: Tensor) -> Any:
    """tensors: q, k, v and the pools; each row attends to itself and at most one other."""
    rows = torch.arange(4)[None]
    chosen = torch.stack([rows, torch.tensor([[-1, 0, 1, 0]])], -1)
    return ours.paged_selected_attention.default(*tensors, rows, rows + 8, rows * 0, torch.tensor([[1]]), chosen, 0.5)


def _layer_norm_gradients(x: Tensor, w: Tensor, b: Tensor, dout: Tensor) -> Any:
    _, mean, rstd = aten.native_layer_norm.default(x, [6], w, b, 1e-5)
    return aten.native_layer_norm_backward.default(dout, x, [6], mean, rstd, w, b, [True] * 3)


def _rms_norm_gradients(x: Tensor, w: Tensor, dout: Tensor) -> Any:
    rstd = (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    return aten._fused_rms_norm_backward.default(dout, x, [6], rstd, w, [True] * 2)


def _rms_norm_by_autograd(x: Tensor, w: Tensor, dout: Tensor) -> Any:
    inputs = [x.clone().requires_grad_(), w.clone().requires_grad_()]
    return torch.autograd.grad(torch.nn.functional.rms_norm(inputs[0], [6], inputs[1], 1e-5), inputs, dout)


def _nll(logits: Tensor, target: Tensor) -> Any:
    return aten.nll_loss_forward.default(logits, target, None, 2, -100)[0]


def _nll_gradient(logits: Tensor, target: Tensor) -> Any:
    loss, weight = aten.nll_loss_forward.default(logits, target, None, 2, -100)
    return aten.nll_loss_backward.default(torch.ones_like(loss), logits, target, None, 2, -100, weight)


def _write(x: Tensor, mask: Tensor) -> Tensor:
    return aten.masked_fill_.Scalar(x.clone(), mask, 3.0)


def _like(target: Any, **kwargs: Any) -> Case:
    return call(target, f(4, 6), **kwargs)


def _size_of(target: Any, *args: Any) -> Case:
    return of(lambda x: target([4, 6], *args) + x, f(4, 6))


CASES: dict[str, list[Case]] = {
    # products
    "contract": [of(lambda x, w: torch.nn.functional.linear(x, w), f(2, 4, 6), f(8, 6))],
    "tpshard.fp8_product": [
        call(ours.fp8_product.default, f(4, 2, 256), f(6, 256), "abk,nk->abn"),
        call(ours.fp8_product.default, f(2, 256, 4), f(2, 256, 6), "abn,abk->nk"),
        call(ours.fp8_product.default, f(2, 3, 384), f(384, 4), "abn,nk->abk"),
    ],
    "aten.mm": [call(aten.mm.default, f(4, 6), f(6, 8))],
    "aten.addmm": [
        call(aten.addmm.default, f(8), f(4, 6), f(6, 8)),
        call(aten.addmm.default, f(4, 8), f(4, 6), f(6, 8), beta=0.5, alpha=2),
        call(aten.addmm.default, f(8), f(4, 6), f(6, 8), beta=0),
    ],
    "aten.bmm": [call(aten.bmm.default, f(4, 2, 6), f(4, 6, 8))],
    "aten.mv": [call(aten.mv.default, f(4, 6), f(6))],
    "aten.dot": [call(aten.dot.default, f(6), f(6))],
    "aten.convolution": [
        call(aten.convolution.default, f(4, 6, 5), f(8, 6, 3), f(8), [1], [1], [1], False, [0], 1),
        call(aten.convolution.default, f(4, 6, 5, 4), f(8, 6, 3, 3), None, [2, 1], [1, 1], [1, 1], False, [0, 0], 1),
        call(aten.convolution.default, f(4, 6, 5), f(6, 2, 3), None, [1], [1], [1], False, [0], 3),
        call(aten.convolution.default, f(4, 6, 5), f(6, 4, 3), None, [1], [1], [1], True, [0], 1),
    ],
    # pointwise
    "aten.add": [
        call(aten.add.Tensor, f(4, 6), f(4, 6), alpha=3),
        call(aten.add.Tensor, f(4, 1), f(6)),
        call(aten.add.Tensor, f(4, 6), 2.0),
        call(aten.add.Scalar, f(4), 2.0),
    ],
    "aten.sub": [
        call(aten.sub.Tensor, f(4, 6), f(4, 6)),
        call(aten.sub.Tensor, f(4, 6), f(6)),
        call(aten.sub.Tensor, f(4), 1),
    ],
    "aten.mul": [
        call(aten.mul.Tensor, f(4, 6), f(4, 6)),
        call(aten.mul.Tensor, f(4, 6), f()),
        call(aten.mul.Tensor, f(), f(4)),
        call(aten.mul.Scalar, f(4, 6), 3),
    ],
    "aten.div": [
        call(aten.div.Tensor, f(4, 6), f(4, 6)),
        call(aten.div.Tensor, f(4, 6), f()),
        call(aten.div.Tensor, f(4), 2),
        call(aten.div.Tensor_mode, f(4, 6), f(), rounding_mode="floor"),
    ],
    "aten.floor_divide": [
        call(aten.floor_divide.default, f(4, 6), f(4, 6)),
        call(aten.floor_divide.default, f(4, 6), f()),
    ],
    "aten.remainder": [
        call(aten.remainder.Tensor, f(4, 6), f()),
        call(aten.remainder.Scalar, f(4, 6), 0.5),
        call(aten.remainder.Tensor, ints(9, 4, 6), ints(9, 4, 6, low=1)),
        call(aten.remainder.Scalar_Tensor, 7, ints(9, 4, 6, low=1)),
    ],
    "aten.fmod": [call(aten.fmod.Tensor, f(4, 6), f(6)), call(aten.fmod.Scalar, f(4, 6), 0.5)],
    "aten.neg": [call(aten.neg.default, f(4, 6))],
    "aten.clone": [call(aten.clone.default, f(4, 6))],
    "aten._to_copy": [
        call(aten._to_copy.default, f(4, 6), dtype=torch.float32),
        call(aten._to_copy.default, f(4, 6), dtype=torch.int64),
        call(aten._to_copy.default, f(4), dtype=torch.bool),
    ],
    "aten.masked_fill.Scalar": [
        call(aten.masked_fill.Scalar, f(4, 6), truths(4, 6), 0),
        call(aten.masked_fill.Scalar, f(4, 6), truths(6), 2.5),
    ],
    "aten.copy": [call(aten.copy.default, f(4, 6), f(6))],
    "aten.exp": [call(aten.exp.default, f(4, 6))],
    "aten.log": [call(aten.log.default, f(4, 6))],
    "aten.tanh": [call(aten.tanh.default, f(4, 6))],
    "aten.sigmoid": [call(aten.sigmoid.default, f(4, 6))],
    "aten.silu": [call(aten.silu.default, f(4, 6))],
    "aten.gelu": [call(aten.gelu.default, f(4, 6))],
    "aten.silu_backward": [call(aten.silu_backward.default, f(4, 6), f(4, 6))],
    "aten.gelu_backward": [call(aten.gelu_backward.default, f(4, 6), f(4, 6))],
    "aten.sigmoid_backward": [call(aten.sigmoid_backward.default, f(4, 6), f(4, 6))],
    "aten.tanh_backward": [call(aten.tanh_backward.default, f(4, 6), f(4, 6))],
    "aten.threshold_backward": [call(aten.threshold_backward.default, f(4, 6), f(4, 6), 0.5)],
    "aten.ones_like": [_like(aten.ones_like.default)],
    "aten.zeros_like": [_like(aten.zeros_like.default)],
    "aten.full_like": [_like(aten.full_like.default, fill_value=3)],
    "aten.empty_like": [of(lambda x: torch.ones_like(aten.empty_like.default(x)), f(4, 6))],
    # views and pieces
    "aten.view": [
        call(aten.view.default, f(4, 6), [24]),
        call(aten.view.default, f(8, 3), [2, 4, 3]),
        call(aten.view.default, f(4, 6), [6, 4]),
        call(aten.view.default, f(4, 6), [2, 12]),
    ],
    "aten.reshape": [of(lambda x: aten.permute.default(x, [1, 0]).reshape(24), f(4, 6))],
    "aten._unsafe_view": [call(aten._unsafe_view.default, f(4, 6), [24])],
    "aten._reshape_alias": [call(aten._reshape_alias.default, f(4, 6), [2, 12], [12, 1])],
    "aten.unsqueeze": [call(aten.unsqueeze.default, f(4, 6), d) for d in (0, 1, -1)],
    "aten.squeeze": [
        call(aten.squeeze.dim, f(4, 1, 6), 1),
        call(aten.squeeze.dim, f(4, 1, 6), 0),
        call(aten.squeeze.dims, f(1, 4, 1), [0, 2]),
        call(aten.squeeze.default, f(1, 4, 1)),
    ],
    "aten.permute": [call(aten.permute.default, f(4, 6, 2), [2, 0, 1])],
    "aten.transpose": [call(aten.transpose.int, f(4, 6, 2), 0, -1)],
    "aten.t": [call(aten.t.default, f(4, 6)), call(aten.t.default, f(4))],
    "aten.expand": [call(aten.expand.default, f(4, 1), [4, 6]), call(aten.expand.default, f(6), [4, 6])],
    "aten.slice": [
        call(aten.slice.Tensor, f(4, 6), 0, 1, 3),
        call(aten.slice.Tensor, f(4, 6), 1, 0, 6, 2),
        call(aten.slice.Tensor, f(4, 6)),
    ],
    "aten.narrow": [of(lambda x: x.cumsum(0), f(4, 6))],
    "aten.split": [call(aten.split.Tensor, f(4, 6), 2), call(aten.split.Tensor, f(4, 6), 4, 1)],
    "aten.split_with_sizes": [call(aten.split_with_sizes.default, f(4, 6), [2, 4], 1)],
    "aten.select": [call(aten.select.int, f(4, 6), 0, 1), call(aten.select.int, f(4, 6), -1, 5)],
    "aten.unbind": [call(aten.unbind.int, f(2, 6)), call(aten.unbind.int, f(4, 2), 1)],
    "aten.as_strided": [call(aten.as_strided.default, f(4, 6), [3, 4], [6, 2], 1)],
    "aten.alias": [call(aten.alias.default, f(4, 6))],
    "aten.detach": [call(aten.detach.default, f(4, 6))],
    "aten.lift_fresh": [call(aten.lift_fresh.default, f(4, 6))],
    "aten.lift_fresh_copy": [of(lambda x: x + torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]), f(4, 6))],
    "getitem": [call(aten.split.Tensor, f(4, 6), 2)],
    "_c10d_functional.wait_tensor": [of(lambda x: x.sum(0), f(4, 6))],
    "aten.cat": [
        call(aten.cat.default, [f(4, 6), f(2, 6)]),
        call(aten.cat.default, [f(4, 6), f(4, 2)], 1),
        call(aten.cat.default, [f(0), f(4, 6)]),
    ],
    "aten.slice_scatter": [call(aten.slice_scatter.default, f(4, 6), f(4, 2), 1, 2, 4)],
    "aten.constant_pad_nd": [
        call(aten.constant_pad_nd.default, f(4, 6), [1, 2]),
        call(aten.constant_pad_nd.default, f(4, 6), [0, 0, 2, 0], 1.5),
    ],
    "aten.flip": [call(aten.flip.default, f(4, 6), [0]), call(aten.flip.default, f(4, 6), [0, 1])],
    "aten.roll": [call(aten.roll.default, f(4, 6), [2], [1]), call(aten.roll.default, f(4, 6), [5])],
    "aten.tril": [call(aten.tril.default, f(4, 6)), call(aten.tril.default, f(4, 6, 6), 1)],
    "aten.triu": [call(aten.triu.default, f(4, 6), -1)],
    "prim.device": [of(lambda x: x.to(x.device) * 2, f(4, 6))],
    # reductions
    "aten.sum": [
        call(aten.sum.default, f(4, 6)),
        call(aten.sum.dim_IntList, f(4, 6, 2), [1], True),
        call(aten.sum.dim_IntList, f(4, 6, 2), [0, 2]),
    ],
    "aten.mean": [call(aten.mean.default, f(4, 6)), call(aten.mean.dim, f(4, 6), [1], True)],
    "aten.amax": [call(aten.amax.default, f(4, 6)), call(aten.amax.default, f(4, 6), [1], True)],
    "aten.amin": [call(aten.amin.default, f(4, 6), [0])],
    "aten.max.default": [call(aten.max.default, f(4, 6))],
    "aten.min.default": [call(aten.min.default, f(4, 6))],
    "aten.max.dim": [call(aten.max.dim, f(4, 6), 1)],
    "aten.min.dim": [call(aten.min.dim, f(4, 6), 0, True)],
    "aten.argmax": [call(aten.argmax.default, f(4, 6), 1), call(aten.argmax.default, f(4, 6))],
    "aten.argmin": [call(aten.argmin.default, f(4, 6), 0, True)],
    "aten.prod": [call(aten.prod.default, f(4, 6)), call(aten.prod.dim_int, f(4, 6), 1)],
    "aten.any": [call(aten.any.default, truths(4, 6)), call(aten.any.dim, truths(4, 6), 1)],
    "aten.all": [call(aten.all.default, truths(4, 6)), call(aten.all.dim, truths(4, 6), 0)],
    "aten.var.correction": [call(aten.var.correction, f(4, 6), [1], correction=1)],
    "prims.var": [call(prims.var.default, f(4, 6), [1], 1.0)],
    "aten.cumsum": [call(aten.cumsum.default, f(4, 6), 1)],
    "aten.cumprod": [call(aten.cumprod.default, f(4, 6), 0)],
    "aten.sort": [call(aten.sort.default, f(4, 6), 1, True), call(aten.sort.default, f(4, 6))],
    "aten.topk": [call(aten.topk.default, f(4, 6), 2), call(aten.topk.default, f(4, 6), 3, 0, False)],
    # by index
    "aten.embedding": [call(aten.embedding.default, f(12, 6), ints(12, 4, 2))],
    "aten.embedding_dense_backward": [
        call(aten.embedding_dense_backward.default, f(4, 2, 6), ints(12, 4, 2), 12, -1, False),
        call(aten.embedding_dense_backward.default, f(4, 2, 6), ints(12, 4, 2), 12, 5, False),
        call(aten.embedding_dense_backward.default, f(4, 2, 6), ints(12, 4, 2), 12, 5, True),
    ],
    "aten.index_select": [
        call(aten.index_select.default, f(12, 6), 0, ints(12, 4)),
        call(aten.index_select.default, f(4, 6), 1, ints(6, 8)),
    ],
    "aten.gather": [
        call(aten.gather.default, f(4, 6), 1, ints(6, 4, 1)),
        call(aten.gather.default, f(4, 6), 0, ints(4, 2, 6)),
    ],
    "aten.scatter.value": [call(aten.scatter.value, f(4, 6), 1, ints(6, 4, 2), 3.0)],
    "aten.scatter.src": [
        of(lambda x, y: aten.scatter.src(x, 0, torch.tensor([[2, 0, 1, 3, 0, 1]]), y), f(4, 6), f(1, 6))
    ],
    "aten.scatter_add": [call(aten.scatter_add.default, f(4, 6), 0, ints(4, 8, 6), f(8, 6))],
    "aten.index": [
        call(aten.index.Tensor, f(12, 6), [ints(12, 4)]),
        call(aten.index.Tensor, f(4, 6), [None, ints(6, 2, 4)]),
        call(aten.index.Tensor, f(4, 6), [ints(4, 8), ints(6, 8)]),
        call(aten.index.Tensor, f(4, 2, 6), [ints(4, 8), None, ints(6, 8)]),
    ],
    "aten.index_put": [
        of(lambda x, y: aten.index_put.default(x, [torch.tensor([3, 1])], y), f(4, 6), f(2, 6)),
        call(aten.index_put.default, f(4, 6), [None, ints(6, 8)], f(4, 8), True),
    ],
    # made where they are
    "aten.full": [_size_of(aten.full.default, 2.0)],
    "aten.zeros": [_size_of(aten.zeros.default)],
    "aten.ones": [_size_of(aten.ones.default)],
    "aten.empty.memory_format": [of(lambda x: torch.ones_like(aten.empty.memory_format([4, 6])) + x, f(4, 6))],
    "aten.new_zeros": [_like(aten.new_zeros.default, size=[6, 4])],
    "aten.new_ones": [_like(aten.new_ones.default, size=[6, 4])],
    "aten.new_full": [_like(aten.new_full.default, size=[6, 4], fill_value=2)],
    "aten.new_empty": [of(lambda x: torch.ones_like(aten.new_empty.default(x, [4, 6])), f(4, 6))],
    "aten.arange": [
        of(lambda x: aten.arange.default(6) * x, f(4, 6)),
        of(lambda x: aten.arange.start(2, 8) * x, f(4, 6)),
        of(lambda x: aten.arange.start_step(9, -3, -2) * x, f(4, 6)),
    ],
    "aten.scalar_tensor": [of(lambda x: aten.scalar_tensor.default(2.0) * x, f(4, 6))],
    # attention
    "tpshard.attention": [
        call(ours.attention.default, *_attend(4, 3, 6, 2, 4), None, 0.5),
        call(ours.attention.default, *_attend(2, 4, 4, 4, 4, documents=True), 0.5),
    ],
    "tpshard.attention_backward": [of(_attention_gradients, *_attend(4, 3, 6, 2, 4), f(4, 3, 6, 4))],
    "tpshard.attention_part": [
        call(ours.attention_part.default, *_attend(2, 4, 4, 2, 4), None, None, 0.5, None, 4, 2),
    ],
    "tpshard.attention_part_backward": [of(_part_gradients, *_attend(2, 4, 4, 2, 4), f(2, 4, 4, 4))],
    # experts
    "tpshard.experts": [
        of(_experts, f(4, 3), *EXPERTS),
        of(lambda x, w, g, u, d: ours.experts.default(x, IN_GROUPS, w, g, u, d, 0.5), f(2, 4, 3), *GROUPS),
    ],
    "tpshard.experts_backward": [of(_experts_gradients, f(4, 3), f(4, 3), *EXPERTS)],
    "tpshard.expert_linear": [
        of(lambda x, w: ours.expert_linear.default(x, CHOICES, w), f(4, 1, 3), f(4, 6, 3)),
        of(lambda x, w: ours.expert_linear.default(x, CHOICES, w), f(4, 2, 3), f(4, 6, 3)),
    ],
    "tpshard.expert_outer": [
        of(lambda d, x: ours.expert_outer.default(d, x, CHOICES, 4), f(4, 2, 6), f(4, 1, 3)),
        of(lambda d, x: ours.expert_outer.default(d, x, CHOICES, 4), f(4, 2, 6), f(4, 2, 3)),
    ],
    "tpshard.to_slots": [
        of(lambda x, w: ours.to_slots.default(x, SLOTS, w, 6), f(4, 3, 5), f(4, 3, 2)),
        of(lambda x: ours.to_slots.default(x, SLOTS, None, 6), f(4, 3, 5)),
    ],
    "tpshard.from_slots": [
        of(lambda y, w: ours.from_slots.default(y, SLOTS, w), f(4, 6, 5), f(4, 3, 2)),
        of(lambda y: ours.from_slots.default(y, SLOTS, None), f(4, 6, 5)),
    ],
    "tpshard.slot_products": [of(lambda x, y: ours.slot_products.default(x, y, SLOTS), f(4, 3, 5), f(4, 6, 5))],
    "aten._scaled_dot_product_flash_attention_for_cpu": [of(_flash, f(4, 6, 3, 4), f(4, 6, 3, 4), f(4, 6, 3, 4))],
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": [of(_flash_gradients, *[f(4, 6, 3, 4)] * 4)],
    "aten.max_pool2d_with_indices": [call(aten.max_pool2d_with_indices.default, f(4, 6, 4, 4), [2, 2])],
    "aten.avg_pool2d": [call(aten.avg_pool2d.default, f(4, 6, 4, 4), [2, 2])],
    "tpshard.paged_attention": [
        of(_page, *PAGE, written=(3, 4)),
    ],
    "tpshard.paged_attention_lse": [of(partial(_page, op=ours.paged_attention_lse.default), *PAGE, written=(3, 4))],
    "tpshard.delta_rule": [of(ours.delta_rule.default, *DELTA), of(ours.delta_rule.default, *KIMI)],
    "tpshard.delta_rule_backward": [
        of(ours.delta_rule_backward.default, f(4, 3, 6, 2), f(4, 6, 2, 2), *DELTA),
        of(ours.delta_rule_backward.default, f(4, 3, 6, 2), f(4, 6, 2, 2), *KIMI),
    ],
    "tpshard.selective_scan": [of(ours.selective_scan.default, *SCAN)],
    "tpshard.selective_scan_backward": [of(ours.selective_scan_backward.default, f(4, 3, 6), f(4, 6, 2), *SCAN)],
    "tpshard.read_state": [
        of(lambda pool: ours.read_state.default(pool, torch.tensor([2, 0]), torch.tensor([[3, 0]])), f(4, 6, 2)),
        of(lambda pool: ours.read_state.default(pool, torch.tensor([1]), torch.tensor([[3, 4]])), f(4, 6, 2)),
    ],
    "tpshard.write_state": [
        of(lambda *x: ours.write_state.default(x[0], torch.tensor([2, 0]), x[1]), f(4, 6, 3), f(2, 6, 3), written=(0,)),
    ],
    "tpshard.paged_select_keys": [of(_select, f(1, 4, 6, 8), f(1, 4, 1, 8), f(1, 4, 6), f(3, 8, 1, 8), written=(3,))],
    "tpshard.paged_selected_attention": [of(_page_selected, *PAGE, written=(3, 4))],
    "tpshard.dequantize": [
        call(ours.dequantize.default, octets(4, 6, 4), f(4, 6, groups), octets(4, 6, groups), group, 4, torch.float64)
        for groups, group in ((2, None), (1, None), (2, Of((4, 8), 2, torch.int32)))
    ],
    "tpshard.reorder": [of(lambda x: ours.reorder.default(x, torch.tensor([2, 0, 1, 0, 2, 1]), 2), f(4, 6))],
    # optimizers
    "tpshard.adamw_step": [
        of(
            lambda *x: ours.adamw_step.default(*x[:4], torch.tensor(True), *x[4:], 0.9, 0.95, 1e-3, 0.1),
            *[f(4, 6)] * 4,
            *[f()] * 3,
        ),
    ],
    "tpshard.lion_step": [
        of(
            lambda *x: ours.lion_step.default(*x[:3], torch.tensor(True), *x[3:], 0.9, 0.99, 0.1),
            *[f(4, 6)] * 3,
            *[f()] * 2,
        ),
    ],
    "tpshard.square_sum": [call(ours.square_sum.default, f(4, 6), f()), call(ours.square_sum.default, f(5), f())],
    # identities
    "output": [of(lambda x: x, f(4, 6))],
    "tpshard.named": [call(ours.named.default, f(4, 6), "h", ["batch", "embed"])],
    "tpshard.mesh_split": [call(ours.mesh_split.default, f(4, 6), "[{} {x}]")],
    "tpshard.role": [call(ours.role.default, f(4, 6), "logits")],
    "tpshard.grouped": [call(ours.grouped.default, f(4, 6), 3)],
    "tpshard.propagation_barrier": [call(ours.propagation_barrier.default, f(4, 6), "forward")],
    "tpshard.boundary": [call(ours.boundary.default, f(4, 6), "parameter", "w")],
    # what splits
    "aten._softmax": [call(aten._softmax.default, f(4, 6), 1, False)],
    "aten._softmax_backward_data": [call(aten._softmax_backward_data.default, f(4, 6), f(4, 6), 1, torch.float64)],
    "aten._log_softmax": [call(aten._log_softmax.default, f(4, 6), 0, False)],
    "aten._log_softmax_backward_data": [
        call(aten._log_softmax_backward_data.default, f(4, 6), f(4, 6), 1, torch.float64)
    ],
    "aten.logsumexp": [call(aten.logsumexp.default, f(4, 6), [1])],
    "aten.native_layer_norm": [call(aten.native_layer_norm.default, f(4, 6), [6], f(6), f(6), 1e-5)],
    "aten.native_layer_norm_backward": [of(_layer_norm_gradients, f(4, 6), f(6), f(6), f(4, 6))],
    "aten._fused_rms_norm_backward": [of(_rms_norm_gradients, f(4, 6), f(6), f(4, 6), eager=_rms_norm_by_autograd)],
    "aten.norm": [call(aten.norm.ScalarOpt_dim, f(4, 6), 2, [1])],
    "aten.linalg_vector_norm": [call(aten.linalg_vector_norm.default, f(4, 6), 3.0, [0])],
    "aten.std": [call(aten.std.correction, f(4, 6), [1])],
    "aten.var_mean": [call(aten.var_mean.correction, f(4, 6), [0])],
    "aten.aminmax": [call(aten.aminmax.default, f(4, 6), dim=1)],
    "aten.nll_loss_forward": [of(_nll, f(4, 6), ints(6, 4))],
    "aten.nll_loss_backward": [of(_nll_gradient, f(4, 6), ints(6, 4))],
    "aten.mse_loss": [call(aten.mse_loss.default, f(4, 6), f(4, 6))],
    "aten.mse_loss_backward": [call(aten.mse_loss_backward.default, f(), f(4, 6), f(4, 6), 1)],
    "aten.huber_loss": [call(aten.huber_loss.default, f(4, 6), f(4, 6))],
    "aten.smooth_l1_loss": [call(aten.smooth_l1_loss.default, f(4, 6), f(4, 6))],
    "aten.smooth_l1_loss_backward": [call(aten.smooth_l1_loss_backward.default, f(), f(4, 6), f(4, 6), 1, 0.5)],
    "aten.addmv": [call(aten.addmv.default, f(4), f(4, 6), f(6))],
    "aten.addbmm": [call(aten.addbmm.default, f(2, 6), f(4, 2, 8), f(4, 8, 6))],
    "aten.addr": [call(aten.addr.default, f(4, 6), f(4), f(6))],
    "aten.baddbmm": [call(aten.baddbmm.default, f(4, 2, 6), f(4, 2, 8), f(4, 8, 6))],
    "aten.addcmul": [call(aten.addcmul.default, f(4, 6), f(4, 6), f(6))],
    "aten.addcdiv": [call(aten.addcdiv.default, f(4, 6), f(4, 6), f(6), value=2)],
    "aten.hardtanh_backward": [call(aten.hardtanh_backward.default, f(4, 6), f(4, 6), 0.5, 1.0)],
    "aten.elu_backward": [call(aten.elu_backward.default, f(4, 6), 1.0, 1.0, 1.0, False, f(4, 6))],
    "aten.leaky_relu_backward": [call(aten.leaky_relu_backward.default, f(4, 6), f(4, 6), 0.1, False)],
    "aten.softplus_backward": [call(aten.softplus_backward.default, f(4, 6), f(4, 6), 1.0, 20.0)],
    "aten.logit_backward": [call(aten.logit_backward.default, f(4, 6), f(4, 6), 1e-6)],
    "aten.glu_backward": [call(aten.glu_backward.default, f(4, 3), f(4, 6), 1)],
    "aten.hardswish_backward": [call(aten.hardswish_backward.default, f(4, 6), f(4, 6))],
    "aten.mish_backward": [call(aten.mish_backward.default, f(4, 6), f(4, 6))],
    "aten.native_dropout_backward": [call(aten.native_dropout_backward.default, f(4, 6), truths(4, 6), 2.0)],
    "aten.stack": [call(aten.stack.default, [f(4, 6), f(4, 6)], 1)],
    "aten.select_backward": [call(aten.select_backward.default, f(4), [4, 6], 1, 2)],
    "aten.slice_backward": [call(aten.slice_backward.default, f(4, 3), [4, 6], 1, 0, 6, 2)],
    "aten.unsafe_split": [call(aten.unsafe_split.Tensor, f(4, 6), 2, 1)],
    "aten.unfold_backward": [call(aten.unfold_backward.default, f(4, 3, 2), [4, 6], 1, 2, 2)],
    "aten.index_add": [call(aten.index_add.default, f(4, 6), 0, ints(4, 8), f(8, 6))],
    "aten.masked_fill_": [of(_write, f(4, 6), truths(4, 6))],
    "prims.broadcast_in_dim": [call(prims.broadcast_in_dim.default, f(4, 6), [4, 2, 6], [0, 2])],
}

SAME = {
    "aten._scaled_dot_product_flash_attention": "aten._scaled_dot_product_flash_attention_for_cpu",
    "aten._scaled_dot_product_efficient_attention": "aten._scaled_dot_product_flash_attention_for_cpu",
    "aten._scaled_dot_product_flash_attention_backward": "aten._scaled_dot_product_flash_attention_for_cpu_backward",
    "aten._scaled_dot_product_efficient_attention_backward":
        "aten._scaled_dot_product_flash_attention_for_cpu_backward",
    "aten._fused_rms_norm": "aten._fused_rms_norm_backward",
    "send": "output", "recv": "output", "copied": "output",
}  # fmt: skip
"""Ops that only a GPU has, or only a program that passes made: no function calls them here; they have the entry of one
that can be called."""
CASES |= {name: cases for names, cases in LAYERS.items() for name in names.split()}
ELSEWHERE = {name_of(op) for op in (*kernel_costs.OPS, *drawn.OPS, *CONTROL_FLOW)}
"""Kernels, which no function calls; what draws: test_drawn; what has bodies: test_control_flow."""
SEEN = {name for names in LAYERS for name in names.split()[:-1]}
"""Ops that the cases of another call too, which checks them."""


def placements(case: Case, mesh: int) -> list[tuple[Any, ...]]:
    """The ways to cut each tensor along one of its dims, or none, that are tried on the mesh of this number."""
    ways: list[list[Any]] = []
    for i, t in enumerate(case.tensors):
        cut = (d for d, n in enumerate(t.shape) if n > 1)
        ways.append([None] if i in case.written else [(), *((*(None,) * d, "x") for d in cut)])
    every = list(itertools.product(*ways))
    return every if len(every) <= MOST else random.Random(0).sample(every, MOST)[mesh :: len(MESHES)]


def holds(
    graph: Graph, tensors: list[Tensor], mesh: Mesh, expected: list[Tensor], dims: Any, results: Any = None
) -> set[str]:
    """Compares; the targets of the program."""
    program = partition_captured(graph, mesh, dims, results, latency=0)
    for got, want in zip(program.simulate(*tensors), expected, strict=True):
        torch.testing.assert_close(got, want, msg=lambda text: f"{dims} {results}: {text}")
    return {name_of(node.target) for node in program.nodes if node.op == "call_function"}


def check(case: Case) -> set[str]:
    """The three laws: operands cut in every way, results cut in every way, operands that are sums still to be made."""
    expected, targets = flat((case.eager or case.fn)(*case.tensors)), set[str]()
    graph = capture(case.fn, case.tensors)
    for number, mesh in enumerate(MESHES):
        for dims in placements(case, number):
            targets |= holds(graph, case.tensors, mesh, expected, dims)
        for i, result in enumerate(expected):
            for d in range(number, result.dim(), len(MESHES)):  # each dim on one of the meshes
                shardings: list[Any] = [None] * len(expected)
                shardings[i] = (*(None,) * d, "x")
                targets |= holds(graph, case.tensors, mesh, expected, None, shardings)
    floats = [i for i, t in enumerate(case.tensors) if t.is_floating_point() and i not in case.written]
    for summed in {(i,) for i in floats} | {tuple(floats)}:
        parts = [torch.stack([t * 0.25, t * 0.75]) if i in summed else t for i, t in enumerate(case.tensors)]

        def whole(*tensors: Tensor, summed: tuple[int, ...] = summed) -> list[Tensor]:
            return [g.sum(0) if i in summed else g for i, g in enumerate(tensors)]

        def fn(*tensors: Tensor, whole: Any = whole) -> Any:
            return case.fn(*whole(*tensors))

        dims = [("x",) if i in summed else None for i in range(len(parts))]
        holds(capture(fn, parts), parts, MESHES[0], flat((case.eager or case.fn)(*whole(*parts))), dims)
    return targets


@pytest.mark.parametrize("name", [name for name in TABLE if name not in ELSEWHERE])
def test_devices_compute_what_one_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry without a case fails here. Kernels that passes put into a program have no rule."""
    assert all(entry.rule is whole for entry in kernel_costs.OPS.values())
    if name in SAME:
        assert TABLE[name] is TABLE[SAME[name]]
        return
    names: set[str] = set()
    dispatch, record = Recorder.__torch_dispatch__, Recorder._record

    def dispatched(self: Recorder, func: Any, *rest: Any) -> Any:
        names.add(name_of(func))
        return dispatch(self, func, *rest)

    def recorded(self: Recorder, func: Any, *rest: Any) -> Any:
        names.add(name_of(func))
        return record(self, func, *rest)

    monkeypatch.setattr(Recorder, "__torch_dispatch__", dispatched)
    monkeypatch.setattr(Recorder, "_record", recorded)
    for case in CASES[name]:
        graph = capture(case.fn, case.tensors)
        mark_outputs(graph)
        names |= {name_of(op.target) for op in graph.ops}
        if name not in SEEN:
            names |= check(case)
        assert name in {*names, *(one.rpartition(".")[0] for one in names)}, "the case is of another op"


def test_a_wrong_entry_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = {
        "aten.tril": pointwise(), "aten.flip": pointwise(), "aten.cumsum": pointwise(), "aten.exp": pointwise(
            lambda op: (0,)), "aten._to_copy": pointwise(lambda op: (0,)), "aten.argmax": TABLE["aten.amax"],
    }  # fmt: skip
    for name, entry in wrong.items():
        monkeypatch.setitem(table.TABLE, name, entry)
        entry_of.cache_clear()
        try:
            with pytest.raises(AssertionError):
                for case in CASES[name]:
                    check(case)
        finally:
            monkeypatch.undo()
            entry_of.cache_clear()


# ---- facts that need no devices -----------------------------------------------------------------------------------
class Views(TorchDispatchMode):
    """Compares where results lie with what the table says of the op."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        view, source = entry_of(func).view, args[0] if args else None
        if view is not None and isinstance(source, Tensor):
            self.names |= {str(func), str(func.overloadpacket)}
            for one in flat(result):
                strides = view(args, tuple(source.shape), source.stride(), tuple(one.shape))
                shares = one.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()
                assert shares == (strides is not None), func
                if strides is not None:
                    counted = [i for i, n in enumerate(one.shape) if n > 1]
                    assert [strides[i] for i in counted] == [one.stride(i) for i in counted], func
        return result


def test_views_lie_where_the_table_says() -> None:
    mode = Views()
    for case in itertools.chain(*CASES.values()):
        with mode:
            (case.eager or case.fn)(*case.tensors)
            whole = [torch.stack([t, t], -1)[..., 0] if t.dim() else t for t in case.tensors]  # with gaps between
            if not case.written:
                (case.eager or case.fn)(*whole)
    ours = {name for name, entry in TABLE.items() if entry.view is not None and name.startswith("aten.")}
    assert ours - mode.names <= {"aten.narrow", "aten.reshape", "aten.contiguous"}  # which torch runs as others


def _calls() -> Iterator[tuple[Op, list[Tensor]]]:
    """The ops of all cases that read nothing but the case's tensors."""
    for case in itertools.chain(*CASES.values()):
        graph = capture(case.fn, case.tensors)
        of_input = dict(zip(graph.inputs, case.tensors, strict=True))
        for op in graph.ops:
            if op.operands and all(v in of_input for v in op.operands):
                yield op, [of_input[v] for v in op.operands]


def _run(op: Op, operands: list[Tensor]) -> Any:
    args = map_refs(tuple(op.args), lambda ref: operands[ref.index])
    return op.target(*args, **{k: map_refs(v, lambda ref: operands[ref.index]) for k, v in op.kwargs.items()})


def test_what_commutes_with_a_permutation() -> None:
    tried: set[str] = set()
    for op, operands in _calls():
        rule = rule_for(op)
        if not entry_of(op.target).commutes or len(op.results) != 1:
            continue
        expected = _run(op, operands)
        for d, members in enumerate(rule.results[0]):
            member_dims = [[i for i, dim in enumerate(dims) if dim == members] for dims in rule.operands]
            if len(members) != 1 or rule.kinds[members[0]] is not Kind.PASS or not any(member_dims):
                continue
            turned = torch.arange(rule.sizes[members[0]]).flip(0)
            inputs = [t.index_select(places[0], turned) if places else t for t, places in zip(operands, member_dims)]
            torch.testing.assert_close(_run(op, inputs), expected.index_select(d, turned))
            tried.add(name_of(op.target))
    assert len(tried) > 20 and not {"aten.cumsum.default", "aten.scatter.value"} & tried


def test_products_count_the_flops_that_torch_counts() -> None:
    for name in ("contract", "aten.mm", "aten.bmm", "aten.addmm", "aten.convolution"):
        for case in CASES[name][:3]:
            with FlopCounterMode(display=False) as counter:
                case.fn(*case.tensors)
            ops = [op for op in capture(case.fn, case.tensors).ops if entry_of(op.target).work == "matmul"]
            assert sum(rule_for(op).flops for op in ops) == counter.get_total_flops() > 0
