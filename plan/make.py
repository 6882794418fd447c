"""From a recipe to its `Report`: the programs that would run, priced on the device that the recipe names."""

from __future__ import annotations

import contextlib
import difflib
import gc
from collections.abc import Iterator, Sequence
from dataclasses import replace

from tpshard.devices import read as devices
from tpshard.parallelism.cost import Device
from tpshard.parallelism.fusion import Compiled
from tpshard.parallelism.program import Program
from tpshard.plan.forecast import Conditions, Forecast, forecast
from tpshard.plan.pricing import Part, Pricing, price_parts
from tpshard.plan.report import Job, Report, Tensor
from tpshard.plan.rows import buckets_of, losses_of, pattern, reshards_of, tensors_of
from tpshard.programs import training
from tpshard.programs.setting import DTYPES, Setting, devices_of
from tpshard.recipes.schema import Recipe

ASSUMED = "cpu"
"""Device of a recipe that names none: the machine that plans is never looked at."""


def device_of(recipe: Recipe) -> tuple[Device, int, int]:
    """(device, hosts, devices on each) that a recipe asks for. Raises `Mistakes` for a device file that is wrong."""
    if recipe.cluster is None:
        return devices.device(ASSUMED), 1, devices_of(recipe)
    found = devices.device(recipe.cluster.device, recipe.where("cluster.device"))
    return found, recipe.cluster.nodes, recipe.cluster.devices_per_node


def training_parts(programs: training.TrainingPrograms, compiled: Compiled | None = None) -> list[Part]:
    """A training step as it runs: the micro-batches, then the update."""
    recipe, times = programs.setting.recipe, programs.setting.batch.micro_batches
    chosen: Compiled = compiled or ("all" if recipe.compile == "inductor" else "none")
    rest = {kind: _held(programs.update, kind) for kind in ("parameter", "gradient", "optimizer")}
    moments = {"optimizer": rest["optimizer"]}
    stored = {"parameters": rest["parameter"]} if programs.gather is not None else {}
    parts = [Part("micro-batch", programs.micro, times, moments | stored, chosen)]
    if programs.gather is not None:
        before = moments | {"gradients": rest["gradient"]}
        parts.insert(0, Part("gather", programs.gather, 1, before, chosen))
    if programs.reduce is not None:
        sums = replace(programs.reduce, inputs=tuple(replace(p, kind="gradient") for p in programs.reduce.inputs))
        parts.append(Part("reduce", sums, 1, moments | {"parameters": rest["parameter"]}, chosen))
    return [*parts, Part("update", programs.update, 1, {}, chosen)]


def _held(program: Program, kind: str) -> int:
    """Bytes of a device's inputs of one kind."""
    return sum(port.local_bytes for port in program.inputs if port.kind == kind)


def price_training(programs: training.TrainingPrograms, compiled: Compiled | None = None) -> Pricing:
    """Prices a training step of programs that are built already. `compiled` overrides what the recipe says."""
    device, _, per_host = device_of(programs.setting.recipe)
    return price_parts(training_parts(programs, compiled), device, per_host, processes=per_host, trains=True)


def report(recipe: Recipe, source: str, what: str = "train", accuracy: str = "") -> Report:
    """Builds and prices what a recipe would run. `what`: train, prefill or decode.

    Raises `Mistakes` for what does not fit together (exit 4), for the recipe (3) and for the mesh (5).
    """
    with uncollected():
        if what != "train":
            from tpshard.plan import serving  # reads this module

            return serving.report(recipe, what, source, accuracy)
        return of_training(built(Setting.of(recipe, devices_of(recipe))), source, accuracy)


def forecast_of(report: Report, recipe: Recipe, conditions: Conditions) -> Forecast:
    """The whole run of a recipe whose training step is planned."""
    saved = 3 * report.job.params * DTYPES[recipe.fsdp.master_dtype].itemsize  # weights and both moments
    return forecast(
        report.pricing.step_s, report.job.tokens, recipe.train.steps, report.devices, report.job.nodes, saved,
        recipe.checkpoint.every_steps, report.provenance["time"], conditions,
    )  # fmt: skip


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Without garbage collection: a plan's hundred thousand nodes all live, and each collection walks over them."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            if not gc.get_freeze_count():  # what was made counts as old, else the next allocation walks over it all
                gc.freeze()
                gc.unfreeze()
            gc.enable()


def built(setting: Setting) -> training.TrainingPrograms:
    """The programs of a training run, as `train` builds them."""
    with uncollected():
        return training.build(setting)


def of_training(programs: training.TrainingPrograms, source: str = "", accuracy: str = "") -> Report:
    """The report of a training recipe whose programs are built."""
    setting, recipe = programs.setting, programs.setting.recipe
    device, nodes, per_host = device_of(recipe)
    pricing = price_training(programs)
    batch = setting.batch
    parameters = {port.name: port for port in programs.micro.inputs if port.kind == "parameter"}
    job = Job(
        name=recipe.name,
        recipe=source,
        what="train",
        model=recipe.model.preset or recipe.model.hf or recipe.model.transformers or recipe.model.module or "model",
        params=sum(_elements(port.shape) for port in parameters.values()),
        seq_len=setting.seq_len,
        dtype=str(recipe.model.dtype),
        mesh=dict(setting.mesh.axes),
        nodes=nodes,
        devices_per_node=per_host,
        global_sequences=batch.global_sequences,
        per_device=batch.per_device,
        micro_batches=batch.micro_batches,
        tokens=batch.global_sequences * setting.seq_len,
        compiled=recipe.compile == "inductor",
        remat=_remat(recipe),
        device_assumed=recipe.cluster is None,
    )
    warnings = extra_warnings(job, device, programs.update)
    return assemble(job, pricing, programs.micro, list(parameters), accuracy, warnings)


def assemble(
    job: Job, pricing: Pricing, program: Program, parameters: Sequence[str], accuracy: str, warnings: Sequence[str]
) -> Report:
    """A report from what was priced; `program` is the one whose shardings are shown."""
    tensors, given, inferred = shardings(program, parameters)
    ranks = program.mesh.ranks
    return Report(
        job=job,
        pricing=pricing,
        tensors=tensors,
        lines=pricing.lines(),
        given=given,
        inferred=inferred,
        buckets=buckets_of(pricing),
        warnings=list(dict.fromkeys([*program.warnings, *warnings])),
        reshards=reshards_of(pricing),
        losses=losses_of(pricing, ranks),
        accuracy=accuracy,
        fingerprint=program.fingerprint,
    )


def extra_warnings(job: Job, device: Device, update: Program) -> list[str]:
    found = list(update.warnings)
    if job.device_assumed:
        found.append("no `cluster` is named: priced on the shipped two-core CPU, not on this machine")
    if device.provenance == "roofline":
        found.append(f"{device.name} has no fitted constants; `tpshard doctor --measure` fits them on a machine")
    if device.kind == "gpu" and job.devices_per_node > device.host_devices:
        here = f"the recipe says {job.devices_per_node}"
        found.append(f"a host of {device.name} has {device.host_devices} devices, {here}")
    return found


def shardings(program: Program, parameters: Sequence[str]) -> tuple[list[Tensor], int, int]:
    """(parameters and named activations as the program has them, values annotated, values inferred)."""
    stored = dict(zip((port.name for port in program.inputs), program.in_shardings))
    used = {r.label: name for name, r in program.records.items() if r.role == "parameter" and name != r.label}
    shown = {used.get(name, name): name for name in parameters}
    named = [name for name, r in program.records.items() if name == r.label and name not in stored]
    out = [
        replace(tensor, name=shown[tensor.name], kind="parameter", stored=stored.get(shown[tensor.name]))
        for tensor in tensors_of(program, list(shown))
    ]
    out += [replace(tensor, kind="activation") for tensor in tensors_of(program, named)]
    given = sum(record.annotated for record in program.records.values())
    return out, given, len(program.records) - given


def _elements(shape: Sequence[int]) -> int:
    n = 1
    for size in shape:
        n *= size
    return n


def _remat(recipe: Recipe) -> str:
    found = recipe.remat
    if isinstance(found, str):
        return found
    return f"every {found.every}" if hasattr(found, "every") else "+".join(found)


def explain(program: Program, name: str) -> str:
    """`--explain NAME`: the chain of reasons of a value, of a parameter's used and stored form, or of a pattern.

    `.weight` may be left out, as the screen does. Raises `KeyError` that names what is near.
    """
    known = program.records
    names: list[str] = []
    for asked in (name, f"{name}.weight"):
        names = names or [n for n in (f"{asked}.used", asked, f"{asked}.grad") if n in known]
    for asked in (name, f"{name}.weight"):
        names = names or [n for n in known if pattern(n) == pattern(asked)][:1]
    if not names:
        raise KeyError(f"no value is named {name!r}{_similar(name, program)}")
    parts = [program.explain(n) for n in names]
    meant = {*names, *(known[n].label for n in names)}
    moved = [
        f"  {c.kind} over {'+'.join(map(str, c.axes))}, {c.bytes} bytes: {c.reason}"
        for c in program.collectives
        if meant & {*c.value}
    ]
    return "\n".join([*parts, *(["collectives that move it:"] if moved else []), *dict.fromkeys(moved)]) + "\n"


def _similar(name: str, program: Program) -> str:
    """Names that a misspelt one may have meant: those of parameters and activations, not of what was made of them."""
    shown = dict.fromkeys(r.label for r in program.records.values() if r.label and r.role in ("", "parameter"))
    near = [n for n in shown if name and name in n][:5] or difflib.get_close_matches(name, shown, 5)
    return f"; similar: {', '.join(near)}" if near else ""
