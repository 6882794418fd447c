"""Buckets, kept parameters, reshards and uneven dims are chosen, or reported, as the recipe says."""

from __future__ import annotations

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
from tpshard.plan import planner
from tpshard.plan.report.screen_words import verdict
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
    """Where nothing keeps a limit, and greedy buckets hardly help, the buckets are those of units."""
    tight = ("model.seq_len=256", "model.layers=4", "fsdp.memory_limit=1")
    by_unit, least = peak(*tight, "fsdp.bucket=wrap"), peak(*tight, "fsdp.bucket=greedy")
    assert CLEARLY * by_unit < least, "the sample is meant to hardly gain by greedy buckets"
    assert program_with(*tight).fingerprint == program_with(*tight, "fsdp.bucket=wrap").fingerprint


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
    moved = sum(c.bytes for c in unasked) / 2**20
    assert any(f"nothing asks for move {moved:.1f} MiB;" in text for text in warned.micro.warnings)
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
