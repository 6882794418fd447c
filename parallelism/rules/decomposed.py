"""Ops that split into others which shard better than the whole: vocabulary-parallel softmax, for one."""

from __future__ import annotations

import torch
from torch import Tensor
from tpshard.parallelism.rules.entry import Entry, Table, decomposed

aten = torch.ops.aten


def broadcast_in_dim(x: Tensor, shape: list[int], dims: list[int]) -> Tensor:
    """Dim i of x is dim dims[i] of the result, or broadcasts along it."""
    grown = [1] * len(shape)
    for size, d in zip(x.shape, dims):
        grown[d] = size
    return x.view(grown).expand(shape) if tuple(grown) != tuple(x.shape) else x.expand(shape)


OPS: Table = dict.fromkeys(
    (
        # softmax, norms
        aten._softmax, aten._softmax_backward_data, aten._log_softmax, aten._log_softmax_backward_data, aten.logsumexp,
        aten.native_layer_norm, aten.native_layer_norm_backward, aten._fused_rms_norm, aten._fused_rms_norm_backward,
        aten.norm, aten.linalg_vector_norm, aten.std, aten.var_mean, aten.aminmax,
        # losses
        aten.nll_loss_forward, aten.nll_loss_backward, aten.mse_loss, aten.mse_loss_backward, aten.huber_loss,
        aten.smooth_l1_loss, aten.smooth_l1_loss_backward,
        # products with something added
        aten.addmv, aten.addbmm, aten.addr, aten.baddbmm, aten.addcmul, aten.addcdiv,
        # activations
        aten.hardtanh_backward, aten.elu_backward, aten.leaky_relu_backward, aten.softplus_backward,
        aten.logit_backward, aten.glu_backward, aten.hardswish_backward, aten.mish_backward,
        aten.native_dropout_backward,
        # pieces
        aten.stack, aten.select_backward, aten.slice_backward, aten.unsafe_split, aten.unfold_backward,
        aten.index_add, aten.masked_fill_,
    ),
    decomposed,
) | {"prims.broadcast_in_dim": Entry(recorded=broadcast_in_dim)}  # fmt: skip
