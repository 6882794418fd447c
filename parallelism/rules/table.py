"""The table: one line per op. A new op is one line here (or `register` for a custom op)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tpshard.parallelism.canonical import contract
from tpshard.parallelism.graph import Op
from tpshard.parallelism.rules import (
    attention,
    contraction,
    creation,
    elementwise,
    indexing,
    paged,
    reduction,
    reorder,
    shape,
)
from tpshard.parallelism.rules.rule import Kind, Rule, whole

aten = torch.ops.aten
Builder = Callable[[Op], Rule]

RULES: dict[Any, Builder] = {
    # products
    contract: contraction.contract_rule,
    aten.convolution.default: contraction.convolution,
    # pointwise, where a partial sum may pass
    aten.add.Tensor: elementwise.add,
    aten.sub.Tensor: elementwise.add,
    aten.mul.Tensor: elementwise.multiply,
    aten.div.Tensor: elementwise.multiply,
    aten.mul.Scalar: elementwise.linear,
    aten.div.Scalar: elementwise.linear,
    aten.neg.default: elementwise.linear,
    aten.clone.default: elementwise.linear,
    aten._to_copy.default: elementwise.linear,
    aten.copy.default: elementwise.pointwise,
    aten.masked_fill.Scalar: elementwise.linear,
    aten.silu_backward.default: elementwise.pointwise,
    aten.gelu_backward.default: elementwise.pointwise,
    aten.sigmoid_backward.default: elementwise.pointwise,
    aten.tanh_backward.default: elementwise.pointwise,
    aten.threshold_backward.default: elementwise.pointwise,
    aten.ones_like.default: elementwise.same_shape_creation,
    aten.zeros_like.default: elementwise.same_shape_creation,
    aten.full_like.default: elementwise.same_shape_creation,
    aten.empty_like.default: elementwise.same_shape_creation,
    # views and pieces
    aten.view.default: shape.view,
    aten.reshape.default: shape.view,
    aten.permute.default: shape.permute,
    aten.expand.default: shape.expand,
    aten.unsqueeze.default: shape.squeeze,
    aten.squeeze.dim: shape.squeeze,
    aten.squeeze.dims: shape.squeeze,
    aten.squeeze.default: shape.squeeze,
    aten.slice.Tensor: shape.slice_rule,
    aten.slice_scatter.default: shape.scatter_slice,
    aten.select.int: shape.select,
    aten.unbind.int: shape.unbind,
    aten.split.Tensor: shape.split,
    aten.split_with_sizes.default: shape.split,
    aten.cat.default: shape.cat,
    aten.constant_pad_nd.default: shape.pad,
    aten.flip.default: shape.dims_argument,
    aten.roll.default: shape.dims_argument,
    aten.tril.default: shape.tril,
    aten.triu.default: shape.tril,
    # reductions
    aten.sum.default: reduction.reduce,
    aten.sum.dim_IntList: reduction.reduce,
    aten.mean.default: reduction.mean,
    aten.mean.dim: reduction.mean,
    aten.amax.default: lambda op: reduction.reduce(op, "max"),
    aten.amin.default: lambda op: reduction.reduce(op, "min"),
    aten.max.default: lambda op: reduction.reduce(op, "max"),
    aten.min.default: lambda op: reduction.reduce(op, "min"),
    aten.max.dim: reduction.whole_reduction,
    aten.min.dim: reduction.whole_reduction,
    aten.argmax.default: reduction.whole_reduction,
    aten.argmin.default: reduction.whole_reduction,
    aten.prod.default: reduction.whole_reduction,
    aten.prod.dim_int: reduction.whole_reduction,
    aten.any.default: reduction.whole_reduction,
    aten.any.dim: reduction.whole_reduction,
    aten.all.default: reduction.whole_reduction,
    aten.all.dim: reduction.whole_reduction,
    aten.var.correction: reduction.whole_reduction,
    aten.cumsum.default: reduction.along,
    aten.cumprod.default: reduction.along,
    aten._softmax.default: reduction.along,
    aten.sort.default: lambda op: reduction.along(op, 1),
    aten.topk.default: lambda op: reduction.along(op, 2),
    # by index
    aten.embedding.default: indexing.embedding,
    aten.embedding_dense_backward.default: indexing.embedding_backward,
    aten.index_select.default: indexing.index_select,
    aten.gather.default: indexing.gather,
    aten.scatter.value: indexing.scatter,
    aten.scatter.src: indexing.scatter,
    aten.scatter_add.default: indexing.scatter,
    aten.index.Tensor: indexing.index_rule,
    aten.index_put.default: indexing.index_put,
    # made in place
    aten.full.default: creation.filled,
    aten.zeros.default: creation.filled,
    aten.ones.default: creation.filled,
    aten.empty.memory_format: creation.filled,
    aten.new_zeros.default: creation.new_filled,
    aten.new_ones.default: creation.new_filled,
    aten.new_full.default: creation.new_filled,
    aten.new_empty.default: creation.new_filled,
    aten.arange.start_step: creation.arange,
    aten.arange.start: creation.arange,
    aten.arange.default: creation.arange,
    aten.scalar_tensor.default: whole,
}

BY_NAME: dict[str, Builder] = {
    "tpshard.attention.default": attention.attention,
    "tpshard.attention_backward.default": attention.attention_backward,
    "tpshard.paged_attention.default": paged.paged_attention,
    "tpshard.reorder.default": reorder.reorder,
    "aten._scaled_dot_product_flash_attention_for_cpu.default": attention.batch_and_heads,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": attention.batch_and_heads,
    "aten._scaled_dot_product_flash_attention.default": attention.batch_and_heads,
    "aten._scaled_dot_product_flash_attention_backward.default": attention.batch_and_heads,
    "aten._scaled_dot_product_efficient_attention.default": attention.batch_and_heads,
    "aten._scaled_dot_product_efficient_attention_backward.default": attention.batch_and_heads,
    "aten.max_pool2d_with_indices.default": attention.batch_and_heads,
    "aten.avg_pool2d.default": attention.batch_and_heads,
    "prims.broadcast_in_dim.default": shape.broadcast_in_dim,
    "prims.var.default": reduction.whole_reduction,
    "tpshard.named.default": elementwise.identity,
    "tpshard.mesh_split.default": elementwise.identity,
    "tpshard.boundary.default": elementwise.identity,
}
"""Custom ops, by qualified name: their rooms need not be imported here."""


def register(name: str, builder: Builder) -> None:
    """Gives a custom op `namespace.op.overload` its rule."""
    BY_NAME[name] = builder


def rule_for(op: Op) -> Rule:
    """The rule of an op; everything whole (and `known` False) for an op that the table does not have."""
    builder = RULES.get(op.target) or BY_NAME.get(str(op.target))
    if builder is None and getattr(op.target, "__name__", "") == "output":
        builder = elementwise.identity
    if builder is None:
        tags = getattr(op.target, "tags", ())
        if torch.Tag.pointwise in tags and not op.target._schema.is_mutable:
            builder = elementwise.pointwise
        else:
            return whole(op)
    if any(0 in value.shape for value in (*op.operands, *op.results)):
        return whole(op)
    return builder(op)


__all__ = ["BY_NAME", "RULES", "Kind", "register", "rule_for"]
