"""The programs that choose a server's tokens where devices hold parts of the vocabulary: logits stay where they are."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from operator import getitem

import torch
from torch import Tensor, fx
from tpshard.kernels.largest import LARGEST
from tpshard.parallelism.mesh import Mesh
from tpshard.parallelism.partitioning.partitioner import mark_outputs, partition_graph
from tpshard.parallelism.passes.copy import copy_program
from tpshard.parallelism.program import INFO, Program, info
from tpshard.parallelism.propagation.propagate import propagate
from tpshard.parallelism.sharding import Layout, replicated
from tpshard.parallelism.tracing.capture import capture
from tpshard.programs.server.step_kernels import Edited, at_each_call
from tpshard.programs.setting.annotations import fixed

aten = torch.ops.aten

Choice = Callable[..., list[Tensor]]
"""A function of `token_choice`."""
CHOICE = "choice"
"""What the programs' collectives move, in plans."""
SETTINGS = 5
"""Columns of `token_choice`'s settings."""


@lru_cache(maxsize=64)
def sampling_program(
    choice: Choice, mesh: Mesh, layout: Layout, rows: int, vocab: int, count: int | None = None
) -> Program:
    """The program of a function of `token_choice` for so many rows: its logits have the `layout` of a step's, its other
    inputs and its results are whole on every device. count: the function's argument of that name, if it has one."""
    sizes = {"settings": ((rows, SETTINGS), torch.float64), "tokens": ((rows,), torch.int64)}
    names = [name for name in inspect.signature(choice).parameters if name != "count"]
    shapes = [sizes.get(name, ((rows, vocab), torch.float32)) for name in names]
    inputs = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in shapes]
    graph = capture(choice if count is None else partial(choice, count=count), inputs, names)
    mark_outputs(graph)
    whole = {
        value: fixed(replicated(value.rank), "what is chosen is whole") for value in (*graph.inputs, *graph.outputs)
    }
    parts = {value: fixed(layout, "the step's logits") for value in graph.inputs if value.name not in sizes}
    for value in graph.inputs:
        value.marked = "batch"
    program, _ = copy_program(partition_graph(propagate(graph, mesh, whole | parts)))
    for node, comm in program.issues():
        node.meta[INFO] = replace(node.meta[INFO], comm=replace(comm, of=CHOICE, requested=True))
    return program


@at_each_call
def select_by_kernel(edited: Edited, node: fx.Node) -> None:
    """Makes a GPU find the largest of many keys by a kernel of its own (`kernels.largest`)."""
    used = [user.target is getitem and user.args[1] == 0 for user in node.users]
    if node.target is not aten.topk.default or info(node).specs[0].dtype != torch.int64 or not all(used):
        return
    like = replace(info(node), specs=info(node).specs[:1])
    selected = edited.put(node, LARGEST, node.args[:2], like)
    for user in list(node.users):
        user.replace_all_uses_with(selected)
