"""The program of the optimizer, which updates the shards of parameters once per step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from tpshard.models.optimizers.adamw import AdamW, adamw_update, treatments
from tpshard.models.optimizers.lion import Lion, lion_update
from tpshard.models.optimizers.muon import Muon, muon_update
from tpshard.parallelism.anchors import split_annotations
from tpshard.parallelism.annotate import split_as
from tpshard.parallelism.graph import Graph, Place, mark
from tpshard.parallelism.partitioning.partitioner import mark_outputs, partition_graph
from tpshard.parallelism.program import Program
from tpshard.parallelism.propagation.propagate import propagate
from tpshard.parallelism.sharding import Layout, Sharding
from tpshard.parallelism.tracing.capture import capture
from tpshard.programs.parts.memo import Memo
from tpshard.programs.parts.step_programs import SUM, parameters_of
from tpshard.programs.setting.annotations import fixed, summed
from tpshard.programs.setting.setting import Setting


def _shared(setting: Setting, layout: Layout, matrices: Tensor) -> Tensor:
    """Matrices [n, rows, columns] of parameters with one layout, annotated so that devices hold whole ones.

    They are sharded over as many mesh axes as there are matrices for: first those that shard the parameters.
    """
    sizes, over = setting.mesh.axes, list[str]()
    staged = setting.pipeline_axis if setting.stacking is None else None  # its devices update different parameters
    for axis in dict.fromkeys([*(axis.name for dim in layout.dims for axis in dim), *sizes]):
        enough = math.prod(sizes[name] for name in over) >= matrices.shape[0]
        if not enough and sizes[axis] > 1 and (staged is None or axis != staged.name):
            over.append(axis)
    sharding = Sharding.of(setting.mesh, [tuple(over), None, None], 3)
    return split_as(matrices, setting.mesh, sharding) if over else matrices


def update_program(
    setting: Setting, storage: Mapping[str, Layout], names: Sequence[str], memo: Memo | None = None, *,
    staged: bool = False,
) -> Program:  # fmt: skip
    """Builds the program of the optimizer: it updates the shards of the parameters `names`, with the global norm of all
    gradients.

    staged: whether they are those of one device of a pipeline; the last input is then the squared norm of its
    gradients, which is summed over the devices. memo: keeps the program, and its captured graph.
    """
    memo, layouts = memo or Memo(), [storage[name] for name in names]
    # only muon's graph depends on the layouts
    places = (setting.mesh.axes, setting.pipeline_axis, layouts) if setting.recipe.optimizer.name == "muon" else ()

    def make() -> Program:
        capture = partial(_capture_update, setting, storage, names, staged)
        graph = memo.of("graph of an update", setting, capture, names, staged, *places)
        return _partition_update(setting, storage, names, graph, staged)

    return memo.of("update", setting, make, names, staged, layouts)


def _capture_update(setting: Setting, storage: Mapping[str, Layout], names: Sequence[str], staged: bool) -> Graph:
    """The graph of an update with the roles of its inputs and outputs; `staged`: with the squared norm as an input."""
    o, most = setting.recipe.optimizer, setting.recipe.train.clip_grad_norm
    betas = (o.betas[0], o.betas[1])
    params = parameters_of(setting, names)
    shapes = {n: setting.shape_in_layer(n, p.shape) for n, p in params.items()}
    treated = treatments(shapes, setting.balanced, setting.orthogonal, setting.grouped)
    count, moment_names = len(names), setting.moments(names)

    def step(*flat: Tensor) -> Any:
        p, g = list(flat[:count]), list(flat[count : 2 * count])
        rest = iter(flat[2 * count :])
        moments = {s: [next(rest) for state, _ in moment_names if state == s] for s in setting.state_names}
        exp_avg, exp_avg_sq = moments["exp_avg"], moments.get("exp_avg_sq", [])
        loss, tokens, lr, update, *all_squares = rest
        how, squares = [treated[n] for n in names], all_squares[0] if all_squares else None
        adamw = AdamW(betas, o.eps, o.weight_decay, most)
        if o.name == "lion":
            lion = Lion(betas, o.weight_decay, most)
            updated = lion_update(p, g, exp_avg, loss, tokens, lr, treated=how, config=lion, squares=squares)
        elif o.name == "muon":
            updated = muon_update(
                p, g, exp_avg, exp_avg_sq, loss, tokens, lr, update, treated=how, squares=squares,
                config=Muon(adamw, o.momentum, setting.param_dtype), alike=[storage[n].dims for n in names],
                spread=lambda matrices, i: _shared(setting, storage[names[i]], matrices),
            )  # fmt: skip
        else:
            updated = adamw_update(
                p, g, exp_avg, exp_avg_sq, loss, tokens, lr, update, treated=how, config=adamw, squares=squares
            )
        return [*updated.params, *updated.exp_avg, *updated.exp_avg_sq, updated.grad_norm, updated.finite]

    def like(dtype: torch.dtype, names: Iterable[str]) -> list[Tensor]:
        return [torch.empty_like(params[name], dtype=dtype) for name in names]

    dtypes = [torch.float32, torch.int64, *[torch.float32] * (3 if staged else 2)]
    scalars = [torch.empty((), dtype=dtype, device="meta") for dtype in dtypes]
    moments = like(setting.state_dtype, (name for _, name in moment_names))
    arguments = [*params.values(), *like(setting.sum_dtype, names), *moments, *scalars]
    labels = [*names, *(n + SUM for n in names), *(f"{n}.{state}" for state, n in moment_names),
              "loss_sum", "count", "lr", "update", *["squares"] * staged]  # fmt: skip
    graph = capture(step, arguments, labels)
    for op in graph.ops:
        op.place = Place(phase="update")
    mark_outputs(graph)
    for i, value in enumerate(graph.inputs[: 2 * count + len(moment_names)]):
        mark([value], ("parameter", "gradient", "optimizer")[min(i // count, 2)])
    for i, value in enumerate(graph.outputs[: count + len(moment_names)]):
        mark([value], "parameter" if i < count else "optimizer")
    mark(graph.inputs[2 * count + len(moment_names) :], "scalar")
    return graph


def _partition_update(
    setting: Setting, storage: Mapping[str, Layout], names: Sequence[str], graph: Graph, staged: bool
) -> Program:
    moment_names = setting.moments(names)
    annotations = dict(split_annotations(graph, setting.mesh))
    stored = [*names, *(name for _, name in moment_names)]
    for values, places in ((graph.inputs, [*names, *stored]), (graph.outputs, stored)):
        for value, name in zip(values, places):
            annotations[value] = fixed(storage[name], "how it is stored")
    if staged:
        annotations[graph.inputs[-1]] = summed(graph.inputs[-1], setting.stage_axis)
    program = partition_graph(propagate(graph, setting.mesh, annotations))
    updated = [port.key for port in program.inputs if port.kind in ("parameter", "optimizer")]
    return program.with_results([*updated, ("scalar", "grad_norm"), ("scalar", "finite")], overwrites=True)
