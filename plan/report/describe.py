"""Parts of a report that training and serving share: device, shardings, warnings, and explanations."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from tpshard.parallelism.pricing.cost import Device
from tpshard.parallelism.program import Program, public
from tpshard.parallelism.why import SourcePlace
from tpshard.plan.report.pattern import pattern
from tpshard.plan.report.report import Annotations, PlannedJob, Report, Tensor
from tpshard.plan.report.rows import buckets_of, figures_of, losses_of, reshards_of
from tpshard.plan.step.pricing import Pricing


def report_of(
    job: PlannedJob,
    pricing: Pricing,
    program: Program,
    parameters: Sequence[str],
    accuracy: str,
    warnings: Sequence[str],
) -> Report:
    """The report of a priced job; `program` is the one whose shardings are shown."""
    tensors, counts = shardings(program, parameters)
    ranks = program.mesh.ranks
    return Report(
        job=job,
        pricing=figures_of(pricing),
        tensors=tensors,
        lines=pricing.lines(),
        annotations=counts,
        buckets=buckets_of(pricing),
        warnings=list(dict.fromkeys([*program.warnings, *warnings])),
        reshards=reshards_of(pricing),
        losses=losses_of(
            pricing,
            ranks if pricing.pipeline is None else ranks // len(pricing.pipeline.devices),
            0.0 if job.stacking is None else job.stacking.bubble,
        ),
        accuracy=accuracy if job.what == "train" and pricing.device.kind == "gpu" else "",
        fingerprint=program.fingerprint,
    )


def extra_warnings(job: PlannedJob, device: Device, update: Program) -> list[str]:
    """The warnings of the update, and those of a device: assumed, not fitted, or fewer in a host than planned."""
    warnings = list(update.warnings)
    if job.device_assumed:
        warnings.append("no `cluster` is named: priced on the shipped two-core CPU, not on this machine")
    if not device.fitted:
        warnings.append(f"{device.name} has no fitted constants; `tpshard doctor --measure` fits them on a machine")
    if job.dtype == "fp8" and device.kind == "cpu":
        warnings.append("a CPU multiplies fp8 operands as fp32: its numbers are those of fp8, its speed is not")
    if job.offload and device.kind == "cpu":
        warnings.append("a CPU's memory is its host's: offload copies activations within it, which saves nothing")
    if device.kind == "gpu" and job.devices_per_node > device.host_devices:
        in_recipe = f"the recipe says {job.devices_per_node}"
        warnings.append(f"a host of {device.name} has {device.host_devices} devices, {in_recipe}")
    return warnings


def shardings(program: Program, parameters: Sequence[str]) -> tuple[list[Tensor], Annotations]:
    """The parameters and named activations with their shardings, and the numbers of annotations."""
    stored = dict(zip((port.name for port in program.inputs), program.in_shardings))
    used = {r.label: name for name, r in program.records.items() if r.role == "parameter" and name != r.label}
    shown = {used.get(name, name): name for name in parameters}
    named = [name for name, r in program.records.items() if name == r.label and name not in (*stored, *shown)]
    reasons: dict[tuple[str, str], tuple[SourcePlace, ...]] = {}
    out = []
    for name in (*shown, *named):
        record = program.records.get(name)
        if record is None:
            continue
        alike = (pattern(name), str(record.layout))
        if alike not in reasons:
            reasons[alike] = program.explanation_of(name).roots
        label, sharding = shown.get(name, name), public(record.layout, program.mesh)
        tensor = Tensor(
            label, record.shape, sharding, reasons[alike], "parameter" if name in shown else "activation",
            record.annotated, stored.get(label), record.dims,
        )  # fmt: skip
        out.append(tensor)
    return out, _annotations(program, out)


def _annotations(program: Program, tensors: Sequence[Tensor]) -> Annotations:
    """How many annotations were written, what they annotate, and how much follows from them."""
    own = [record for record in program.records.values() if record.annotated]
    alike = {(pattern(record.name), str(record.layout)): record.name for record in own}
    lines = {
        key: {place for place in program.explanation_of(name).written_at if place.says and not place.default}
        for key, name in alike.items()
    }  # what says nothing is no line of a recipe, but how another program stores a value
    annotated = {tensor.name for tensor in tensors if tensor.annotated}
    counted = {record.label for record in own if record.label in annotated or record.role == "batch"}
    by_lines = {record.label for record in own if lines[pattern(record.name), str(record.layout)]} & counted
    written = None if program.reasons is None else len(set().union(*lines.values()))
    return Annotations(written, len(by_lines), len(counted - by_lines), len(program.records) - len(own))


def explain(program: Program, name: str) -> str:
    """Explains the sharding of a value: its chain of reasons, and the collectives that move it (`--explain NAME`).

    For a parameter, both its used and its stored form. The name may be a pattern, and may omit `.weight`. Raises
    `KeyError` with similar names.
    """
    records = program.records
    names: list[str] = []
    for candidate in (name, f"{name}.weight"):
        names = names or [n for n in (f"{candidate}.used", candidate, f"{candidate}.grad") if n in records]
    for candidate in (name, f"{name}.weight"):
        names = names or [n for n in records if pattern(n) == pattern(candidate)][:1]
    if not names:
        raise KeyError(f"no value is named {name!r}{_similar(name, program)}")
    parts = [program.explain(n) for n in names]
    labels = {*names, *(records[n].label for n in names)}
    moved = [
        f"  {c.kind} over {'+'.join(map(str, c.axes))}, {c.bytes} bytes: {c.reason}"
        for c in program.collectives
        if labels & {*c.value}
    ]
    return "\n".join([*parts, *(["collectives that move it:"] if moved else []), *dict.fromkeys(moved)]) + "\n"


def _similar(name: str, program: Program) -> str:
    """Parameters and activations with a name similar to a misspelt one, as the end of an error message."""
    shown = dict.fromkeys(r.label for r in program.records.values() if r.label and r.role in ("", "parameter"))
    near = [n for n in shown if name and name in n][:5] or difflib.get_close_matches(name, shown, 5)
    return f"; similar: {', '.join(near)}" if near else ""
