"""The programs of a training step on one device: micro-batch, optimizer update, evaluation, gather and reduce."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from tpshard.diagnostics.diagnostic import Exit, Mistakes
from tpshard.models import counts
from tpshard.models.assemble import evaluating, without_checkpointing
from tpshard.models.families.routing import weighed_by
from tpshard.models.objectives.chunked_head import Unprojected, in_chunks
from tpshard.models.objectives.tasks import TASKS, Task, targets_of_rows
from tpshard.models.own_code import line_of
from tpshard.parallelism.annotate import boundary, role
from tpshard.parallelism.draws import SEED, step_seed
from tpshard.parallelism.graph import Graph, Place, Value, mark
from tpshard.parallelism.partitioning.partitioner import mark_outputs, partition_graph
from tpshard.parallelism.program import PortKey, Program
from tpshard.parallelism.propagated import Annotation
from tpshard.parallelism.propagation.propagate import propagate
from tpshard.parallelism.propagation.storage import boundaries, propagate_and_store
from tpshard.parallelism.sharding import Layout
from tpshard.parallelism.simulate import draws
from tpshard.parallelism.tracing.capture import Trail, capture
from tpshard.programs.parts.checks import uneven_notes
from tpshard.programs.parts.memo import Memo
from tpshard.programs.parts.passes import apply
from tpshard.programs.setting.annotations import annotate, dim_notes, fixed, name_dims, source_of
from tpshard.programs.setting.setting import Setting
from tpshard.programs.setting.stacked_layers import discount

LOSS, COUNT, COUNTERS = ("scalar", "loss"), ("scalar", "count"), ("scalar", "counters")
"""The ports of a micro-batch's summed loss in nats, its number of targets, and the values that its model counts."""


MicroMaker = Callable[[Setting, Program | None], Program]
"""A function that builds the program of a micro-batch, like `micro_program`."""


WATCHED = "watched "
"""What precedes a value's name in the name of the result that shows it."""


SUM = ".grad_sum"
"""What follows a parameter's name in the name of the sum of its gradients."""


def trained_by(program: Program) -> list[str]:
    """The parameters that a step trains, from the program of a micro-batch or of an update: those with a sum of
    gradients among its inputs, in the order of the model's."""
    return [port.name.removesuffix(SUM) for port in program.inputs if port.kind == "gradient"]


def counters_of(program: Program) -> int:
    """The number of values that the model of a micro-batch's program counts."""
    return sum(port.shape[0] for port in program.outputs if port.key == COUNTERS)


def parameters_of(setting: Setting, names: Sequence[str] | None = None) -> dict[str, Tensor]:
    parameters = {name: p.detach() for name, p in setting.model.named_parameters()}
    return parameters if names is None else {name: parameters[name] for name in names}


def _batch(setting: Setting) -> dict[str, Tensor]:
    rows = setting.batch.per_device * setting.batch.data_ranks
    fields = setting.task.fields.items()
    return {name: torch.empty(rows, *field.shape, dtype=field.dtype, device="meta") for name, field in fields}


def _field_dims(setting: Setting) -> dict[str, tuple[str, ...]]:
    """The dim names of the batch's tensors."""
    return {name: ("batch", *field.dims) for name, field in setting.task.fields.items()}


def rows_of(batch: Mapping[str, Tensor]) -> int:
    """The number of rows of a micro-batch, of all data ranks together."""
    return next(iter(batch.values())).shape[0]


def seeds(setting: Setting, program: Program, seed: int, micro: int) -> dict[PortKey, Tensor]:
    """The seed of a step's micro-batch as an argument; nothing for a program that draws no random numbers."""
    plan = setting.batch
    return {(SEED, SEED): step_seed(seed, micro, plan.per_device, plan.sequences_each)} if draws(program) else {}


def _forward(
    setting: Setting, task: Task, trail: Trail, used: Mapping[str, Tensor], batch: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor]:
    inputs = task.inputs(batch)
    with trail.inside(Place("loss", role="loss")):
        targets = targets_of_rows(task, batch)
    chunks = setting.recipe.loss.chunks
    with trail.watch(setting.model), weighed_by(targets), without_checkpointing(), in_chunks(chunks):
        try:
            output = torch.func.functional_call(setting.model, dict(used), inputs)
        except (TypeError, AttributeError) as error:
            if chunks == 1 or Unprojected.__name__ not in str(error):
                raise
            raise _whole_logits(setting) from error
        if chunks > 1 and not isinstance(output, Unprojected):
            raise _whole_logits(setting)
        if not isinstance(output, (Tensor, Unprojected)):
            raise _misfit(setting, output)
        logits: Any = role(output, "logits") if isinstance(output, Tensor) else output
    with trail.inside(Place("loss", role="loss")):
        try:
            return task.loss(logits, batch)
        except Exception as error:
            if setting.recipe.task not in TASKS or line_of(error) is not None:
                raise
            raise _misfit(setting, output) from error


def _misfit(setting: Setting, output: object) -> Mistakes:
    """The mistake that a built-in task cannot compute its loss from what the model returns."""
    shape = f"a tensor {list(output.shape)}" if isinstance(output, Tensor) else f"a {type(output).__name__}"
    needed = {"volumes": "[rows, classes, depth, height, width]", "frames": "[batch, seq, classes]"}
    task = setting.recipe.task
    return Mistakes.one(
        f"{type(setting.model).__name__} returns {shape}, and `task: {task}` needs logits "
        f"{needed.get(task, '[batch, seq, vocab]')}",
        exit=Exit.RECIPE, where=setting.recipe.where(f"model.{setting.recipe.model.named_by}"),
        fix="return one tensor of logits from forward, or write a task of your own (docs/models.md)",
    )  # fmt: skip


def _whole_logits(setting: Setting) -> Mistakes:
    """The mistake that a model's logits are not simply the product of its head."""
    return Mistakes.one(
        f"{type(setting.model).__name__} does not leave its head's product to the loss", exit=Exit.FIT,
        where=setting.recipe.where("loss.chunks"),
        why="it computes logits itself, or more than the product, such as a cap or the head's adapter",
        fix="remove it; a model of your own may end with tpshard.models.objectives.chunked_head.project",
    )  # fmt: skip


def _changed(setting: Setting, names: Sequence[str]) -> Mistakes:
    """The mistake that a forward pass writes to parameters, which a step computes with alone and does not keep."""
    several = ", ".join(f"`{name}`" for name in names[:3])
    return Mistakes.one(
        f"the forward pass of {type(setting.model).__name__} changes {several}", exit=Exit.RECIPE,
        where=setting.recipe.where(f"model.{setting.recipe.model.named_by}"),
        why="only the optimizer changes parameters: the change would be lost after the step",
        fix="compute a new tensor instead; for an embedding's `max_norm`, scale the rows that were looked up",
    )  # fmt: skip


def _capture_micro(setting: Setting, gathered: bool, unreduced: bool, watched: bool) -> Graph:
    """Captures the graph of a micro-batch, with the roles of its inputs and outputs; callers share it unchanged."""
    trail = Trail()
    asked = [name for name in parameters_of(setting) if name in setting.trained]
    trained: list[str] = []

    def step(params: dict[str, Tensor], sums: dict[str, Tensor], batch: dict[str, Tensor]) -> Any:
        used = {}
        for name, param in params.items():
            with trail.inside(Place(name.rpartition(".")[0])):
                used[name] = boundary(param.to(setting.used_dtype(name)), "parameter", name)
                used[name].requires_grad_(name in setting.trained)
        unchanged = {name: parameter._version for name, parameter in used.items()}
        loss, count = _forward(setting, setting.task, trail, used, batch)
        if changed := [name for name, parameter in used.items() if parameter._version != unchanged[name]]:
            raise _changed(setting, changed)
        counted = counts.take(setting.model)
        counters = [torch.cat(counted)] if counted else []
        if not loss.requires_grad:
            raise nothing_trained(setting)
        with trail.backward(loss):
            computed = torch.autograd.grad(loss, [used[name] for name in asked], allow_unused=True)
        gradients = {name: grad for name, grad in zip(asked, computed) if grad is not None}
        if idle := [name for name in asked if name in setting.spec.added and name not in gradients]:
            raise unread_adapter(setting, idle[0])
        trained[:], added = list(gradients), []
        for name, grad in gradients.items():
            with trail.inside(Place(name.rpartition(".")[0], phase="backward")):
                if not unreduced:
                    grad = boundary(grad.to(setting.reduced_dtype(name)), "gradient", name)
                added.append(sums[name] + grad.to(sums[name].dtype))
        return loss.detach(), count, added, counters

    params = parameters_of(setting)
    if gathered:
        params = {n: p.to(setting.used_dtype(n)) for n, p in params.items()}
    sums = {n: p.to(setting.sum_dtype) for n, p in parameters_of(setting, asked).items()}
    labels = [*params, *(n + SUM for n in sums), *setting.task.fields]
    batch = _batch(setting)
    graph = capture(step, (params, sums, batch), labels, trail, rows=rows_of(batch))
    without = {name + SUM for name in asked if name not in trained}
    graph.inputs = [value for value in graph.inputs if value.name not in without]
    graph.number_inputs()
    shown = [v for op in graph.ops for v in op.results if watched and v.dtype.is_floating_point]
    own, count, behind = len(graph.outputs), len(trained), len(params) + len(trained)
    graph.outputs = [*graph.outputs, *shown]
    results = ["return[0]", "return[1]", *(f"{n}{SUM}.new" for n in trained), *["counters"] * (own - count - 2)]
    mark_outputs(graph, dict(enumerate([*results, *(WATCHED + value.name for value in shown)])))
    inputs, outputs = graph.inputs, graph.outputs
    mark(inputs[: len(params)], "parameter")
    mark([*inputs[len(params) : behind], *outputs[2 : 2 + count]], "gradient")
    fields = [value for value in inputs[behind:] if value is not graph.seed]
    mark(fields, "batch")
    mark([*outputs[:2], *outputs[2 + count : own]], "scalar")
    name_dims(graph, setting.dims, fields, fields=_field_dims(setting))
    return graph


def nothing_trained(setting: Setting) -> Mistakes:
    """The mistake that no parameter of the model gets a gradient."""
    return Mistakes.one(
        f"no parameter of {type(setting.model).__name__} can be trained", exit=Exit.FIT,
        where=setting.recipe.where(f"model.{setting.spec.source.key}"),
        why="`requires_grad` is False for all of them, or the loss depends on none that requires a gradient",
        fix="leave `requires_grad` True for what is to be trained",
    )  # fmt: skip


def unread_adapter(setting: Setting, name: str) -> Mistakes:
    """The mistake that a model does not call the layer of an adapter."""
    return Mistakes.one(
        f"no gradient reaches `{name}`", exit=Exit.RECIPE, where=setting.recipe.where("adapters.lora"),
        why=f"{type(setting.model).__name__} does not call `{name.rpartition('.')[0]}`, but reads its weight",
        fix="leave that layer out of adapters.lora.targets",
    )  # fmt: skip


def micro_program(
    setting: Setting, base: Program | None = None, *, watched: bool = False, memo: Memo | None = None
) -> Program:
    """Builds the program of forward and backward of one micro-batch; gradients of the summed loss are added to the
    sums.

    base: the plain program, for what the recipe does once for all micro-batches. Where it gathers parameters once, they
    are inputs in the form in which `base` uses them; where it reduces gradients once, the sums are laid out as `base`
    computes gradients, whole and partial over the data axes. watched: every floating-point result of an op is also an
    output, in execution order, named `watched NAME`. memo: keeps the captured graph.
    """
    gathered, unreduced = (base is not None and once for once in (setting.gathers_once, setting.reduces_once))
    form = gathered, unreduced, watched
    graph = (memo or Memo()).of("graph of a micro-batch", setting, lambda: _capture_micro(setting, *form), *form)
    params, sums, fields = (
        [value for value in graph.inputs if value.role == role] for role in ("parameter", "gradient", "batch")
    )
    before = {} if base is None else {port.name: port.layout for port in base.inputs}
    stored: dict[str, list[Value]] = {value.name: [] for value in params}
    annotations: dict[Value, Annotation] = {}
    for value in params:
        if gathered and base is not None:
            used = base.records.get(f"{value.name}.used")  # of all layers, also where its inputs are a shallow model's
            annotations[value] = fixed(used.layout if used else before[value.name], "how it is used")
        else:
            stored[value.name].append(value)
    for total, added in zip(sums, graph.outputs[2:]):
        name = total.name.removesuffix(SUM)
        if unreduced and base is not None:
            computed = fixed(base.records[f"{name}.grad"].layout, "how the gradient is made")
            annotations[total] = annotations[added] = computed
        else:
            stored[name].append(total)
    program = _partition(setting, graph, stored, fields, annotations)
    rest = program.outputs[2 + len(sums) :]
    noted = [COUNTERS if port.kind == "scalar" else port.key for port in rest]
    return program.with_results([LOSS, COUNT, *(("gradient", total.name) for total in sums), *noted], overwrites=True)


def used_layout(program: Program, name: str, stored: Layout) -> Layout:
    """The layout in which a program uses a parameter; `stored` for one that it does not read."""
    record = program.records.get(f"{name}.used")
    return stored if record is None else record.layout


def gather_program(
    setting: Setting, base: Program, storage: Mapping[str, Layout], names: Sequence[str] | None = None,
    memo: Memo | None = None, stored: Mapping[str, int] | None = None,
) -> Program:  # fmt: skip
    """Builds the program, after its passes, that casts and gathers all parameters (or `names`) once for all
    micro-batches of a step. stored: as for `Chooser`."""

    def step(params: dict[str, Tensor]) -> Any:
        return [boundary(p.to(setting.used_dtype(n)), "parameter", n) for n, p in params.items()]

    params = parameters_of(setting, names)
    used = {n: (used_layout(base, n, storage[n]), "how it is used") for n in params}
    layouts = {n: (storage[n], "how it is stored") for n in params}
    program = apply(setting, _between(setting, step, params, layouts, used, memo), stored=stored)
    return program.with_results([port.key for port in program.inputs])


def reduce_program(
    setting: Setting, base: Program, storage: Mapping[str, Layout], names: Sequence[str], memo: Memo | None = None,
    stored: Mapping[str, int] | None = None,
) -> Program:  # fmt: skip
    """Builds the program, after its passes, that reduces and shards the gradient sums of all micro-batches, of the
    parameters `names`, once per step. stored: as for `Chooser`.
    """

    def step(sums: dict[str, Tensor]) -> Any:
        return [boundary(s.to(setting.reduced_dtype(n)), "gradient", n).to(s.dtype) for n, s in sums.items()]

    sums = {n: p.to(setting.sum_dtype) for n, p in parameters_of(setting, names).items()}
    computed = {n: (base.records[f"{n}.grad"].layout, "how the gradient is made") for n in sums}
    moved = _between(setting, step, sums, computed, {n: (storage[n], "how it is stored") for n in sums}, memo)
    program = apply(setting, moved, stored=stored)
    ports = tuple(replace(port, name=port.name + SUM, kind="gradient") for port in program.inputs)
    return replace(program, inputs=ports).with_results([port.key for port in ports])


Placed = Mapping[str, tuple[Layout, str]]
"""Name of each tensor -> its layout, and the reason for it that a plan shows."""


def _between(
    setting: Setting, step: Any, tensors: Mapping[str, Tensor], before: Placed, after: Placed, memo: Memo | None
) -> Program:
    """A program that only moves each tensor from one layout to another."""

    def make() -> Program:
        graph = capture(step, (dict(tensors),), list(tensors))
        mark_outputs(graph)
        annotations: dict[Value, Annotation] = {}
        for name, start, end in zip(tensors, graph.inputs, graph.outputs):
            annotations[start], annotations[end] = fixed(*before[name]), fixed(*after[name])
        for kind in ("parameter", "gradient"):
            for name, (_, value) in boundaries(graph, kind).items():
                annotations[value] = fixed(*after[name])
        mark([*graph.inputs, *graph.outputs], "parameter")
        return partition_graph(propagate(graph, setting.mesh, annotations))

    return (memo or Memo()).of("transfer", setting, make, before, after)


def evaluate_program(setting: Setting, storage: Mapping[str, Layout], task: Task) -> Program:
    """Builds the program that computes the loss of one micro-batch of held-out data, as `task` says."""
    trail = Trail()

    def step(params: dict[str, Tensor], batch: dict[str, Tensor]) -> Any:
        used = {n: boundary(p.to(setting.used_dtype(n)), "parameter", n) for n, p in params.items()}
        return _forward(setting, task, trail, used, batch)

    params = parameters_of(setting)
    with torch.no_grad(), evaluating(setting.model):
        batch = _batch(setting)
        graph = capture(step, (params, batch), [*params, *batch], trail, rows=rows_of(batch))
    mark_outputs(graph)
    stored = dict(zip(params, graph.inputs))
    fields = [value for value in graph.inputs[len(params) :] if value is not graph.seed]
    mark(stored.values(), "parameter")
    mark(fields, "batch")
    mark(graph.outputs, "scalar")
    name_dims(graph, setting.dims, fields, fields=_field_dims(setting))
    annotations = {value: fixed(storage[name], "how it is stored") for name, value in stored.items()}
    program = _partition(setting, graph, {name: [value] for name, value in stored.items()}, fields, annotations)
    return program.with_results([LOSS, COUNT])


def _partition(
    setting: Setting, graph: Graph, stored: Mapping[str, list[Value]], batch: list[Value],
    known: Mapping[Value, Annotation],
) -> Program:  # fmt: skip
    """Partitions a graph by the recipe's annotations and those of values whose layout is known. stored: the inputs that
    are laid out as each parameter is stored."""
    asked = annotate(setting, graph, batch, by=setting.named_by, fields=_field_dims(setting))
    annotations = asked | dict(known)
    why = (source_of(setting.recipe, "fsdp.axis", f"fsdp.axis: {', '.join(setting.recipe.fsdp.axes)}"),)
    shardings = propagate_and_store(graph, setting.mesh, annotations, stored, setting.data_axes, setting.fsdp_axes, why)
    stages = setting.pipeline_axis
    program = partition_graph(shardings, apart=() if stages is None or setting.stacking else (stages.name,))
    if setting.stacking is not None:
        program = discount(program, 1.0 - setting.stacking.bubble)
    notes = uneven_notes(asked) if setting.recipe.sharding.on_uneven == "pad" else []
    notes += dim_notes(setting, graph, _field_dims(setting))
    return replace(program, warnings=[*program.warnings, *notes])
