"""The stages of a recipe's step as text (`plan --stage`): captured graph, shardings, program, and after each pass."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from tpshard.diagnostics.diagnostic import Exit, Mistakes, did_you_mean
from tpshard.diagnostics.patterns import covers
from tpshard.parallelism.passes.run import PassResult, name_and_settings
from tpshard.parallelism.program import Program
from tpshard.parallelism.texts import Of, difference
from tpshard.plan.planner import without_gc
from tpshard.plan.server.server_steps import server_of
from tpshard.programs.parts.checks import traceable
from tpshard.programs.parts.memo import Memo
from tpshard.programs.parts.pass_choices import Choices
from tpshard.programs.parts.passes import passes
from tpshard.programs.server.serve_setting import Size
from tpshard.programs.server.serving import build_serving
from tpshard.programs.setting.cluster import devices_of
from tpshard.programs.setting.setting import Setting
from tpshard.programs.step import few_layers, training
from tpshard.programs.step.staged import between_passes
from tpshard.recipes.keys.schema import Recipe

BEFORE = ("graph", "shardings", "partition")
"""The stages before the first pass."""
UPDATE = "update"
"""The optimizer's program, which no pass changes, and its name in `--of`."""
MOST = 20
"""Modules that an error names."""
Parts = dict[str, Program]
"""The programs of a step at one stage, by name."""


def stage(recipe: Recipe, what: str, name: str, of: str = "") -> dict[str, str]:
    """The text of a stage of a step, by part: micro-batch, stage of a pipeline, or size of a server's step.

    what: train, prefill or decode. name: graph, shardings, partition, or a pass. of: a pattern of modules, parameters
    and activations to which the text is limited; or a part, such as `stage 1` or `update`. Raises `Mistakes` (exit 2)
    for a name that is none of the choices.
    """
    with without_gc():
        parts = _training(recipe, name) if what == "train" else _server(recipe, what, name)
        whole = [part for part in parts if of in (part, part.partition(",")[0])]
        texts = {part: part_text(name, parts[part], "" if whole else of) for part in whole or parts}
        if not any(texts.values()) and of == UPDATE and what == "train" and name in BEFORE:
            update = training.build(Setting.of(recipe, devices_of(recipe))).update
            texts = {UPDATE: part_text(name, update)}
    if not any(texts.values()):
        raise _nothing(name, of, parts.values())
    return {part: text for part, text in texts.items() if text}


def text(parts: dict[str, str]) -> str:
    """The parts of a stage as one text, each under its name."""
    return "\n".join(f"{part}\n{'=' * len(part)}\n{text}" for part, text in parts.items())


def to_json(name: str, of: str, parts: dict[str, str]) -> dict[str, Any]:
    lines = [{"part": part, "lines": text.splitlines()} for part, text in parts.items()]
    return {"stage": name, "of": of, "parts": lines}


def comparison(before: str, after: str, names: Sequence[str]) -> tuple[dict[str, Any], str]:
    """Two texts of a stage compared, as JSON and as text. names: what the two are."""
    lines = difference(before, after)
    data = {"before": names[0], "after": names[1], "same": not lines, "lines": lines}
    return data, "\n".join([f"- {names[0]}", f"+ {names[1]}", *(lines or ["the same"]), ""])


def part_text(name: str, program: Program, of: str = "") -> str:
    """The text of a program: its graph or its shardings before partitioning, or itself."""
    selected: Of | None = (lambda value: covers(of, value)) if of else None
    return program.text(name if name in BEFORE else BEFORE[-1], selected)


def _training(recipe: Recipe, name: str) -> Parts:
    setting = Setting.of(recipe, devices_of(recipe))
    _require(name, [*BEFORE, *(name_and_settings(one)[0] for one in passes(setting, Choices(False, ())))])
    if name in BEFORE:
        return {"micro-batch": _micro(setting)}
    parts: Parts = {}

    def watch(_: object, passed: PassResult) -> None:
        if passed.name == name:
            parts["micro-batch"] = passed.program

    step = training.build(setting, watch)
    if step.pipeline is not None:
        cuts = next(each.programs.stages for each in between_passes(step) if each.name == name)
        kinds = ("forward", "backward", "gradients of weights")
        parts = {f"stage {cut.index}, {kind}": program for cut in cuts
                 for kind, program in zip(kinds, cut.programs)}  # fmt: skip
    return parts


def _micro(setting: Setting) -> Program:
    """The program of a micro-batch before any pass; gathering and reducing are its own unless a step does that once."""
    memo = Memo()
    with traceable(setting):
        micro = few_layers.micro_program(setting, None, memo)
        return few_layers.micro_program(setting, micro, memo) if setting.gathers_once or setting.reduces_once else micro


def _server(recipe: Recipe, what: str, name: str) -> Parts:
    setting, _, _ = server_of(recipe)
    sizes = setting.steps_of(what, recipe.serve.requests, recipe.model.seq_len)
    names = dict.fromkeys(BEFORE)
    parts: Parts = {}

    def watch(size: Size, passed: PassResult) -> None:
        names[passed.name or BEFORE[-1]] = None
        if passed.name == name or (not passed.name and name in BEFORE):
            parts[f"{'a chunk of' if size.chunk else what + ' of'} {size.rows} rows"] = passed.program

    build_serving(setting, sizes, watch)
    _require(name, list(names))
    return parts


def _require(name: str, choices: Sequence[str]) -> None:
    """Raises `Mistakes` (exit 2) for a stage that is none of the choices."""
    if name not in choices:
        fix = f"{did_you_mean(name, choices)} The stages are {', '.join(choices)}".strip()
        raise Mistakes.one(f"this step has no stage {name!r}", exit=Exit.USAGE, fix=fix)


def _nothing(name: str, of: str, programs: Any) -> Mistakes:
    """The mistake that a pattern matches nothing, with the modules that there are."""
    parameters = {record.label for program in programs for record in program.records.values()
                  if record.role == "parameter"}  # fmt: skip
    modules: dict[str, None] = {}
    for parameter in sorted(parameters):
        parts = re.sub(r"\.\d+(?=\.|$)", ".*", parameter).split(".")
        modules.update(dict.fromkeys(".".join(parts[:n]) for n in range(1, len(parts))))
    fix = f"{did_you_mean(of, modules)} Modules are {', '.join(list(modules)[:MOST])}".strip()
    return Mistakes.one(f"nothing of the stage {name!r} is named {of!r}", exit=Exit.USAGE, fix=fix)
