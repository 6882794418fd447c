"""Entries of ops that capture replaces by other ops, whose rules allow more shardings.

Torch decomposes an op without an entry, if it can. This file has the ops that must be decomposed although torch would
not, and those that tpshard decomposes itself.
"""

from __future__ import annotations

import torch
from tpshard.parallelism.rules import decompositions as by
from tpshard.parallelism.rules.entry import Entry, Table, decomposed

aten = torch.ops.aten


OPS: Table = {
    # pointwise, but shorter as its parts
    aten.addcmul: decomposed,
    aten.addcdiv: decomposed,
    aten.logit_backward: decomposed,
    aten.native_dropout_backward: decomposed,
    aten.var.correction: Entry(recorded=by.variance),
    aten.var_mean.correction: Entry(recorded=by.variance_and_mean),
    aten.native_batch_norm: Entry(recorded=by.batch_norm),
    aten.native_batch_norm_backward: Entry(recorded=by.batch_norm_backward),
    aten.native_group_norm: Entry(recorded=by.group_norm),
    aten.native_group_norm_backward: Entry(recorded=by.group_norm_backward),
    aten._weight_norm_interface: Entry(recorded=by.weight_norm),
    aten._weight_norm_interface_backward: Entry(recorded=by.weight_norm_backward),
    aten.multilabel_margin_loss_forward: Entry(recorded=by.multilabel_margin_loss),
    aten.stack: Entry(recorded=by.stack),
    aten.slice_backward: Entry(recorded=by.slice_backward),
    aten.select_backward: Entry(recorded=by.select_backward),
    aten._euclidean_dist: Entry(recorded=by.euclidean_distance),
    aten.addbmm: Entry(recorded=by.addbmm),
}
