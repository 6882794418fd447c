"""The learning rate follows its schedule, and a step's sequences are divided among ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tpshard.diagnostics.diagnostic import Exit, Mistakes
from tpshard.programs.fit.batching import BatchPlan, derive
from tpshard.recipes.keys.schema import Recipe
from tpshard.recipes.keys.training_keys import Schedule
from tpshard.recipes.reading.load import loads
from tpshard.train.run.learning_rate import change, described, learning_rate, require_schedule


def test_warmup_reaches_the_peak_and_the_cosine_ends_at_the_floor() -> None:
    schedule = Schedule(name="cosine", warmup_steps=10, min_lr_ratio=0.1)
    rates = [learning_rate(step, schedule, peak=2.0, steps=110) for step in range(1, 111)]
    assert rates[0] == pytest.approx(0.2) and rates[9] == 2.0
    assert rates[59] == pytest.approx(1.1)  # half-way down: the middle of peak and floor
    assert rates[-1] == pytest.approx(0.2)
    assert rates[9:] == sorted(rates[9:], reverse=True)


def test_without_warmup_the_first_step_is_near_the_peak() -> None:
    schedule = Schedule(name="cosine", warmup_steps=0, min_lr_ratio=0.0)
    assert learning_rate(1, schedule, peak=1.0, steps=1000) == pytest.approx(1.0, abs=1e-4)
    assert learning_rate(1000, schedule, peak=1.0, steps=1000) == pytest.approx(0.0)


def test_constant_stays() -> None:
    schedule = Schedule(name="constant", warmup_steps=2, min_lr_ratio=0.1)
    assert [learning_rate(s, schedule, peak=1.0, steps=4) for s in (1, 2, 3, 4)] == [0.5, 1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("name", "fall", "decay"),
    [(name, "linear", "linear") for name in ("cosine", "linear", "inverse_sqrt", "constant", "wsd")]
    + [("wsd", "cosine", "cosine"), ("wsd", "sqrt", "1-sqrt")],
)
def test_rates_are_those_of_transformers(name: str, fall: str, decay: str) -> None:
    """With no lowest rate, at which those of transformers do not stay. Their first step is number 0."""
    import torch
    from transformers import get_scheduler

    steps, warmup, peak = 40, 8, 0.5
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=peak)
    named = {"cosine": "cosine", "linear": "linear", "inverse_sqrt": "inverse_sqrt", "constant": "constant_with_warmup",
             "wsd": "warmup_stable_decay"}[name]  # fmt: skip
    special = {"num_decay_steps": 10, "decay_type": decay, "min_lr_ratio": 0.0} if name == "wsd" else {}
    theirs = get_scheduler(
        named, optimizer, num_warmup_steps=warmup, num_training_steps=steps, scheduler_specific_kwargs=special
    )
    schedule = Schedule(name=name, warmup_steps=warmup, min_lr_ratio=0.0, decay_over=10, fall=fall)
    for step in range(1, steps + 1):
        optimizer.step()
        theirs.step()
        expected = theirs.get_last_lr()[0]
        assert learning_rate(step, schedule, peak=peak, steps=steps) == pytest.approx(expected, abs=1e-12), step


def test_an_exponential_fall_is_megatrons() -> None:
    schedule = Schedule(name="wsd", warmup_steps=0, min_lr_ratio=0.1, decay_over=10, fall="exponential")
    expected = [0.1 + 0.9 * (2 * 0.5 ** (part / 10) - 1) for part in (1, 5, 10)]
    rates = [learning_rate(90 + part, schedule, peak=1.0, steps=100) for part in (1, 5, 10)]
    assert rates == pytest.approx(expected) and rates[-1] == pytest.approx(0.1)


def test_a_users_function_is_a_schedule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_rates.py").write_text("def half(at):\n    return 0.5\n\ndef none(at):\n    return None\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    own = Schedule(name="own_rates:half", warmup_steps=2)
    assert [learning_rate(step, own, peak=1.0, steps=4) for step in (1, 2, 3, 4)] == [0.5, 1.0, 0.5, 0.5]
    for name in ("own_rates:none", "own_rates:missing", "no_such_package:f"):
        with pytest.raises(ValueError, match=r"schedule\.name"):
            learning_rate(3, Schedule(name=name, warmup_steps=2), peak=1.0, steps=4)


def test_a_run_made_longer_keeps_its_last_rate_and_says_where_another_schedule_changes_it() -> None:
    def of(text: str) -> Recipe:
        return loads(f"model: {{preset: tiny}}\noptimizer: {{lr: 1.0}}\n{text}")

    first = of("train: {steps: 100}")
    saved = loads(first.to_yaml(), ["train.steps=200"])
    again = loads(first.to_yaml(), ["train.steps=200", "schedule.decay_steps=200"])
    constant = loads(first.to_yaml(), ["train.steps=200", "schedule.name=constant"])
    rates = [learning_rate(s, saved.schedule, peak=1.0, steps=200) for s in range(1, 201)]
    assert rates[:100] == [learning_rate(s, first.schedule, peak=1.0, steps=100) for s in range(1, 101)]
    assert rates[99:] == [0.1] * 101 and change(101, described(first), described(saved)) == ""
    text = change(101, described(first), described(again))
    assert "step 101 was to be 0.1 (cosine, warm-up of 10 steps to 1, 0.1 from step 100 on)" in text
    assert "is now 0.58 (cosine, warm-up of 10 steps to 1, 0.1 from step 200 on)" in text
    assert "is now 1 (constant" in change(101, described(first), described(constant))


@pytest.mark.parametrize(
    ("total", "ranks", "per_device", "micro"), [(128, 4, 8, 4), (16, 2, 8, 1), (18, 3, 6, 1), (22, 2, 1, 11)]
)
def test_the_default_micro_batch_is_the_largest_divisor_up_to_8(
    total: int, ranks: int, per_device: int, micro: int
) -> None:
    plan = derive(loads(f"model: {{preset: tiny}}\nbatch: {{global_sequences: {total}}}"), ranks)
    assert (plan.per_device, plan.micro_batches) == (per_device, micro)
    assert [row for rank in range(ranks) for row in plan.rows(rank)] == list(range(total))


@pytest.mark.parametrize(
    ("batch", "ranks", "fix"),
    [("{global_sequences: 10}", 4, "8 or 12"), ("{global_sequences: 24, per_device: 5}", 2, "2, 3, 4 or 6")],
)
def test_what_does_not_divide_is_refused_with_numbers(batch: str, ranks: int, fix: str) -> None:
    recipe = loads(f"model: {{preset: tiny}}\nbatch: {batch}")
    with pytest.raises(Mistakes) as wrong:
        derive(recipe, ranks)
    assert wrong.value.exit == Exit.FIT and fix in wrong.value.diagnostics[0].fix
    where = wrong.value.diagnostics[0].where
    assert where is not None and where.line == 2


def test_a_plan_says_itself() -> None:
    assert str(BatchPlan(128, 4, 8)) == "128 sequences a step = 4 data ranks x 4 micro-batches of 8"


def test_stages_follow_one_another_by_steps_or_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each goes on from the rate of the one before; a function of one's own is a row of the table of their shapes."""
    (tmp_path / "own_ways.py").write_text("def late(done):\n    return float(done == 1)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    text = "model: {preset: tiny, seq_len: 64}\nbatch: {global_sequences: 8}\noptimizer: {lr: 2.0}\n"
    stages = "{steps: 3, to: 1}, {tokens: 1025, to: 0.5, name: constant}, {steps: 4, to: 0.1, name: cosine}"
    schedule = f"schedule: {{warmup_steps: 2, stages: [{stages}, {{steps: 2, to: 0, name: 'own_ways:late'}}]}}\n"
    recipe = loads(f"{text}{schedule}train: {{steps: 16}}")
    expected = [0.5, 1, *[1] * 3, *[0.5] * 3, 0.44142135, 0.3, 0.15857864, 0.1, 0.1, 0, 0, 0]
    for one in (recipe, loads(recipe.to_yaml())):
        rates = [learning_rate(step, one.schedule, peak=1.0, steps=16) for step in range(1, 17)]
        assert rates == pytest.approx(expected)
    shorter = loads(recipe.to_yaml(), ["schedule.stages=[{steps: 9, to: 0}]"])
    before = json.loads(json.dumps(described(recipe)))
    assert change(9, before, described(recipe)) == "" and "is now 0.444 (1 stages" in change(
        9, before, described(shorter)
    )
    for wrong in ("{to: 0}", "{steps: 3, tokens: 9}"):
        with pytest.raises(Mistakes, match=r"`steps` and `tokens`"):
            loads(f"{text}schedule: {{stages: [{wrong}]}}")


def test_a_stage_whose_function_cannot_be_called_is_named_by_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wrongly.py").write_text("def fails(done):\n    raise KeyError(done)\n")
    monkeypatch.syspath_prepend(tmp_path)
    text = "model: {preset: tiny}\nschedule:\n  warmup_steps: 1\n  stages:\n  - {steps: 4}\n  - {steps: 4, name: "
    for name, said in (("nowhere:f", "No module named"), ("wrongly:fails", "failed")):
        with pytest.raises(Mistakes, match=rf"`schedule.stages.name: {name}`.*{said}") as caught:
            require_schedule(loads(f"{text}{name}}}\ntrain: {{steps: 9}}", file="r.yaml"))
        assert caught.value.exit == Exit.RECIPE and "r.yaml:6:" in str(caught.value)
