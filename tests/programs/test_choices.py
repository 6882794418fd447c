"""Buckets, kept parameters, reshards and uneven dims are chosen, or reported, as the recipe says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_model import of_small_model
from tpshard.diagnostics.diagnostic import Exit, Mistakes
from tpshard.models.objectives.loss import cross_entropy_sum
from tpshard.parallelism.graph import Value
from tpshard.parallelism.program import Program
from tpshard.parallelism.propagated import Annotation
from tpshard.parallelism.rules import table
from tpshard.parallelism.words import size
from tpshard.plan import planner
from tpshard.plan.questions import fitting
from tpshard.plan.report import screen
from tpshard.plan.report.screen_words import verdict
from tpshard.plan.search import edits
from tpshard.plan.step.step_price import price_training
from tpshard.plan.step.units import gib
from tpshard.programs.compare.float64 import BOUND, distance, float64
from tpshard.programs.fit.fit import SAVED_OPERATIONS, misfits
from tpshard.programs.parts import step_programs
from tpshard.programs.parts.memo import Memo
from tpshard.programs.parts.pass_choices import CLEARLY, Chooser
from tpshard.programs.parts.passes import apply
from tpshard.programs.setting.annotations import annotate
from tpshard.programs.setting.setting import Setting
from tpshard.programs.step import training
from tpshard.recipes.reading.load import loads

RECIPE = of_small_model("""
name: small
cluster: {device: cpu}
mesh: {fsdp: 2}
batch: {global_sequences: 4}
""")
MEMO = Memo()
"""What settings share that differ in their passes alone."""


def program_with(*overrides: str) -> Program:
    setting = Setting.of(loads(RECIPE, overrides))
    return apply(setting, step_programs.micro_program(setting, memo=MEMO))


def buckets(program: Program) -> list[int]:
    return [c.members for c in program.collectives if c.kind == "reduce_scatter"]


def test_buckets_are_as_the_recipe_says() -> None:
    parameters = sum(port.kind == "parameter" for port in program_with("fsdp.bucket=none").inputs)
    assert buckets(program_with("fsdp.bucket=none")) == [1] * parameters
    assert sorted(buckets(program_with("fsdp.bucket=wrap"))) == [1, 2, 9, 9]
    assert buckets(program_with("fsdp.bucket={mb: 100}")) == [parameters]
    assert (
        sum(buckets(program_with("fsdp.bucket=greedy"))) == sum(buckets(program_with("fsdp.bucket=auto"))) == parameters
    )
    assert sorted(buckets(program_with("fsdp.bucket=[[layers.*.mlp], [output, norm]]")), reverse=True)[:2] == [6, 2]


def test_parameters_stay_gathered_while_there_is_room() -> None:
    roomy, tight = (program_with("fsdp.reshard_after_forward=auto", f"fsdp.memory_limit={n}") for n in ("1GiB", "1KiB"))
    gathers = [sum(c.members for c in p.collectives if c.kind == "all_gather") for p in (roomy, tight)]
    assert gathers[0] < gathers[1]


def peak(*overrides: str) -> int:
    setting = Setting.of(loads(RECIPE, overrides))
    return Chooser(setting).peak(apply(setting, step_programs.micro_program(setting, memo=MEMO)))


@pytest.mark.parametrize("policy", ["greedy", "auto"])
def test_the_program_that_runs_keeps_the_memory_limit(policy: str) -> None:
    sizes = ["model.width=64", "model.mlp=256", "model.vocab=128", f"fsdp.bucket={policy}", "remat=full"]
    least, most = peak(*sizes, "fsdp.memory_limit=1"), peak(*sizes, "fsdp.bucket=greedy")
    assert least < 0.9 * most
    assert policy == "auto" or least == peak(*sizes, "fsdp.bucket=none")
    for limit in (least, (least + most) // 2, most):
        assert peak(*sizes, f"fsdp.memory_limit={limit}") <= limit


def test_time_is_paid_only_for_memory_that_is_needed() -> None:
    """Where nothing fits a device, and greedy buckets hardly help, the buckets are those of units; beyond a limit,
    which ends the plan, they are the smallest."""
    setting = Setting.of(loads(RECIPE, ["model.seq_len=256", "model.layers=4"]))
    program = step_programs.micro_program(setting, memo=MEMO)
    by_unit = [[port.name] for port in program.inputs if port.kind == "parameter"]
    for limit, least in ((None, CLEARLY), (1, 0.999)):
        tight = Chooser(replace(setting, recipe=loads(RECIPE, [] if limit is None else [f"fsdp.memory_limit={limit}"])))
        tight.memory = 1
        for of_greedy in (0.97, 0.99, 1.01):
            peaks = {by_unit[0][0]: 1000, "greedy": int(1000 * of_greedy)}
            tight.greedy = lambda *_: [["greedy"]]  # type: ignore[method-assign]
            tight.peak = lambda groups, peaks=peaks: peaks[groups[0][0]]  # type: ignore[method-assign, assignment, misc]
            chosen = tight.best(program, by_unit, lambda groups: groups)  # type: ignore[arg-type, return-value]
            assert (chosen == [["greedy"]]) == (of_greedy < least)


PIPELINE = ("mesh={pp: 2, fsdp: 2}", "model.layers=4", "model.seq_len=64", "batch.global_sequences=16")
SIZES = ("model.width=64", "model.mlp=256", "model.vocab=128")


@pytest.mark.parametrize(
    "overrides",
    [
        ("fsdp.bucket=greedy",), ("fsdp.bucket=greedy", "fsdp.reshard_after_forward=false", "model.seq_len=256"),
        (*PIPELINE, "pipeline={schedule: 1f1b, micro_batches: 4}", "fsdp.bucket=greedy"),
        (*PIPELINE, "pipeline={schedule: zero_bubble, micro_batches: 4}"),
        (*PIPELINE, "pipeline={schedule: gpipe, micro_batches: 4}", "fsdp.accumulate.gather=step"),
        ("batch.global_sequences=8", "batch.per_device=1", "fsdp.accumulate.gather=step"),
        ("batch.global_sequences=8", "batch.per_device=1", "fsdp.accumulate.reduce=last"),
    ],
    ids=["greedy", "kept", "1f1b", "zero bubble", "pipeline gathers once", "gathers once", "reduces once"],
)  # fmt: skip
def test_the_least_that_can_be_had_is_kept_as_a_limit(overrides: tuple[str, ...]) -> None:
    """What a plan says is least, where a limit cannot be met, is met as a limit; no policy of buckets needs less."""

    def step_peak(*more: str) -> int:
        built = training.build(Setting.of(loads(RECIPE, ["remat=full", *SIZES, *overrides, *more])), memo=MEMO)
        return price_training(built).peak_bytes

    least = step_peak("fsdp.memory_limit=1")
    assert step_peak(f"fsdp.memory_limit={least}") <= least
    assert least <= min(step_peak("fsdp.bucket=wrap"), step_peak("fsdp.bucket=none"))


@pytest.mark.parametrize("limit", ["4KiB", "1GiB"])
def test_a_limit_that_nothing_keeps_ends_the_plan_and_the_run(limit: str) -> None:
    programs = training.build(Setting.of(loads(RECIPE, [f"fsdp.memory_limit={limit}"])), memo=MEMO)
    report = planner.planned_training(programs).report
    assert report.to_json()["memory"]["limit_bytes"] == report.pricing.limit
    assert report.fits == (limit == "1GiB") == (report.pricing.peak_bytes <= (report.pricing.limit or 0))
    if report.fits:
        assert "at the peak, 1.00 GiB by fsdp.memory_limit" in verdict(report)
        return planner.check_limit(programs)
    assert verdict(report).startswith("DOES NOT FIT") and "by fsdp.memory_limit" in verdict(report)
    with pytest.raises(Mistakes, match=r"more than `fsdp.memory_limit`") as raised:
        planner.check_limit(programs)
    assert raised.value.exit == Exit.FIT
    with pytest.raises(Mistakes, match=r"at the peak, and `fsdp.memory_limit` is"):
        fitting.fit(report, programs.setting.recipe)


def test_what_keeps_a_limit_is_compared_with_the_limit() -> None:
    """Edits, `--fit` and the search say peaks beside a limit, not what a device needs in all."""
    setting = Setting.of(loads(RECIPE, [*SIZES, "model.seq_len=256", "fsdp.memory_limit=1"]))
    least = price_training(training.build(setting, memo=MEMO)).peak_bytes
    recipe = loads(RECIPE, [*SIZES, "model.seq_len=256", f"fsdp.memory_limit={least - 1}"])
    report = planner.planned_training(training.build(Setting.of(recipe), memo=MEMO)).report
    report.edits = edits.edits(report, recipe, count=1)
    assert [edit.fits for edit in report.edits] == [True]
    assert (peak := report.edits[0].peak_bytes) is not None and peak < least
    assert f"{report.edits[0].change}: {gib(peak)} at the peak" in screen.screen(report)
    words = fitting.text(fitting.fit(report, recipe), report, recipe).splitlines()[0]
    assert words.endswith(f"of the {gib(least - 1)} of `fsdp.memory_limit`, as given {gib(least)}")


def test_a_reshard_nobody_asked_for_stops_only_where_the_recipe_says_so() -> None:
    # gate gives a result cut over mlp, which down, pinned by its other dim, needs whole
    pins = ["mesh.fsdp=1", "mesh.tp=2", "sharding.pin={layers.*.mlp.gate.weight: [tp, null], "
            "layers.*.mlp.up.weight: [null, tp], layers.*.mlp.down.weight: [tp, null]}"]  # fmt: skip
    setting = Setting.of(loads(RECIPE, [*pins, "sharding.on_reshard=error"]))
    unasked = [c for c in step_programs.micro_program(setting).collectives if not c.requested]
    if not unasked:
        pytest.fail("this recipe is meant to have a reshard that nothing asks for")
    with pytest.raises(Mistakes) as stopped:
        training.build(setting)
    assert stopped.value.exit == Exit.FIT and unasked[0].value[0] in str(stopped.value.diagnostics)
    warned = training.build(Setting.of(loads(RECIPE, [*pins, "sharding.on_reshard=warn"])))
    moved = size(sum(c.bytes for c in unasked))
    assert any(f"{len(unasked)} reshards that nothing asks for move {moved};" in text for text in warned.micro.warnings)
    assert "nothing in the recipe asks for the " in str(stopped.value.diagnostics)
    silent = training.build(Setting.of(loads(RECIPE, [*pins, "sharding.on_reshard=allow"])))
    assert not silent.micro.warnings


def test_uneven_dims_give_the_same_result_and_are_told() -> None:
    overrides = ["mesh.fsdp=2", "mesh.tp=3", "sharding.on_uneven=pad"]
    setting = Setting.of(loads(RECIPE, overrides))
    program = step_programs.micro_program(setting)
    assert any("does not divide" in text for text in program.warnings)
    check_loss_and_gradients(setting, program)


def check_loss_and_gradients(setting: Setting, program: Program) -> None:
    """Requires that a simulated micro-step has the loss and the gradients of the whole model, in float64."""
    random = torch.Generator().manual_seed(0)
    arguments = []
    for port in program.inputs:
        if port.kind == "parameter":
            arguments.append(torch.randn(port.shape, generator=random, dtype=torch.float64) * 0.3)
        elif port.kind == "gradient":
            arguments.append(torch.zeros(port.shape, dtype=torch.float64))
        elif port.name in ("tokens", "targets"):
            arguments.append(torch.randint(0, 32, port.shape, generator=random))
        else:
            arguments.append(torch.zeros(port.shape, dtype=torch.int64))
    names = [port.name for port in program.inputs if port.kind == "parameter"]
    params = {n: t.clone().requires_grad_() for n, t in zip(names, arguments)}
    batch = dict(zip(setting.task.fields, arguments[-4:]))
    with float64():
        inputs = (batch["tokens"], batch["documents"], batch["positions"])
        logits = torch.func.functional_call(setting.model, params, inputs)
        loss, _ = cross_entropy_sum(logits, batch["targets"])
        grads = torch.autograd.grad(loss, list(params.values()))
        results = program.simulate(*arguments)
    assert distance(results[0], loss.detach()) <= BOUND
    for name, expected, grad in zip(names, grads, results[2:], strict=True):
        assert distance(grad, expected) <= BOUND, name


def test_rules_of_later_priority_take_the_axes_that_earlier_ones_leave() -> None:
    """Batch and hidden columns compete for one axis: what wins is moved less, and the step computes the same."""
    rules = ["mesh.fsdp=1", "mesh.tp=2", "sharding.rules={batch: tp, heads: tp, mlp: tp, vocab: tp}"]
    programs = {}
    for priority in ("{}", "{heads: 0, batch: 0}", "{batch: 1}"):
        setting = Setting.of(loads(RECIPE, [*rules, f"sharding.priority={priority}"]))
        programs[priority] = step_programs.micro_program(setting)
        check_loss_and_gradients(setting, programs[priority])
    default, same, later = programs.values()
    assert same.fingerprint == default.fingerprint

    def moved_activations(program: Program) -> int:
        return sum(c.bytes for c in program.collectives if c.kind == "all_to_all")

    assert moved_activations(later) < moved_activations(default)


def test_an_annotation_takes_the_priorities_of_its_dims(monkeypatch: pytest.MonkeyPatch) -> None:
    """A priority of an activation's dim replaces 1, the default of activations."""
    texts: set[str] = set()

    def recording(*args: Any, **kwargs: Any) -> dict[Value, Annotation]:
        annotations = annotate(*args, **kwargs)
        texts.update(a.sharding.show() for v, a in annotations.items() if v.label.endswith(".residual"))
        return annotations

    monkeypatch.setattr(step_programs, "annotate", recording)
    rules = ["mesh.fsdp=1", "mesh.tp=2", "sharding.rules={seq_sp: tp}",
             "sharding.annotate={layers.*.residual: [batch, seq_sp, embed]}"]  # fmt: skip
    for priority, text in {"{}": "[{}p1 {tp}p1 {}p1]", "{seq_sp: 0}": "[{}p1 {tp}p0 {}p1]"}.items():
        texts.clear()
        step_programs.micro_program(Setting.of(loads(RECIPE, [*rules, f"sharding.priority={priority}"])))
        assert texts == {text}


TABLE = """
import torch

class Table(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(32, 8))
        self.dims = {"weight": ("vocab", "embed")}

    def forward(self, tokens, documents=None, positions=None):
        return torch.nn.functional.linear(torch.nn.functional.embedding(tokens, self.weight), self.weight)
"""


def test_a_pattern_that_a_module_does_not_know_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_table.py").write_text(TABLE)
    monkeypatch.syspath_prepend(tmp_path)
    recipe = "mesh: {fsdp: 2}\nmodel: {module: 'own_table:Table', seq_len: 8}\nbatch: {global_sequences: 4}\n"
    assert step_programs.micro_program(
        Setting.of(loads(recipe + "sharding: {pin: {weight: [null, null]}}"))
    ).collectives
    with pytest.raises(Mistakes) as stopped:
        step_programs.micro_program(Setting.of(loads(recipe + "sharding: {pin: {wieght: [null, null]}}")))
    (mistake,) = stopped.value.diagnostics
    assert stopped.value.exit == Exit.RECIPE and "`wieght` matches nothing" in mistake.message
    assert mistake.where is not None and mistake.where.line == 4
    with pytest.raises(Mistakes, match="no tensor of own_table:Table has a dim called `bacth`") as stopped:
        step_programs.micro_program(Setting.of(loads(recipe + "sharding: {rules: {batch: fsdp, bacth: fsdp}}")))
    (mistake,) = stopped.value.diagnostics
    assert stopped.value.exit == Exit.RECIPE and mistake.fix == "did you mean `batch`?"


@pytest.mark.parametrize("pipeline", [(), ("mesh={pp: 2, fsdp: 1}", "pipeline={schedule: 1f1b}")])
def test_a_name_of_remat_that_selects_nothing_is_refused(pipeline: tuple[str, ...]) -> None:
    """It kept nothing, so that everything was recomputed."""
    for name, fix in (("no_such_op", "name one of them"), ("attentio", "did you mean `attention`")):
        with pytest.raises(Mistakes, match=f"`remat` names `{name}`, which no saved value") as refused:
            training.build(Setting.of(loads(RECIPE, [*pipeline, f"remat=[mm, {name}]"])))
        assert refused.value.exit == Exit.RECIPE and fix in str(refused.value)
        recipe = loads(RECIPE, [f"remat=[mm, wq, {name}]"])
        (told,) = misfits(recipe, Setting.of(loads(RECIPE)).spec)  # `validate` knows it, without the program
        assert f"`remat` names `{name}`" in told.message
    assert {name.rpartition(".")[2] for name, entry in table.TABLE.items() if entry.saved} <= SAVED_OPERATIONS
    with pytest.raises(Mistakes, match=r"`remat.modules` names `layers.\*.mpl`, which computes nothing") as refused:
        training.build(Setting.of(loads(RECIPE, [*pipeline, "remat={modules: layers.*.mpl}"])))
    assert "did you mean `layers.*.mlp`" in str(refused.value)
    if not pipeline:
        training.build(Setting.of(loads(RECIPE, ["remat=[mm, wq, attention]"])))


@pytest.mark.parametrize("text", ["[1]", '["tok_embed.weight"]', '{"buckets": 1}', "{", "[" * 100_000, "null"])
def test_a_file_of_buckets_of_another_form_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "buckets.json").write_text(text)
    with pytest.raises(Mistakes, match=r"buckets cannot be read|is not a list of lists") as refused:
        program_with(f"fsdp.bucket={{file: '{tmp_path / 'buckets.json'}'}}")
    assert refused.value.exit == Exit.RECIPE
