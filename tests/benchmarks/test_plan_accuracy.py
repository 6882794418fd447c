"""Published runs become recipes that say the same; what a recipe cannot say is counted by name."""

from __future__ import annotations

import csv
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tpshard.devices.read import device
from tpshard.programs.setting.setting import Setting
from tpshard.programs.step.training_step import TrainingPrograms
from tpshard.programs.step.variants import Variants

import dense_rows
import device_fit
import plan_accuracy
import published_rows
from plan_accuracy import Outcome
from published_rows import Missing, PublishedRun

OLD = {"src": "run", "model": "8B", "gpu": "A100-80GB", "gpus": "8", "mem_gib": "40", "step_s": "2", "fsdp": "8"}
OLD |= {"tp": "1", "dp_rep": "1", "ac": "full", "compile": "1", "local_bs": "1", "seq": "8192", "cp": "1"}
OLD |= {"master_dtype": "fp32", "gather_dtype": "bf16", "reduce_dtype": "fp32"}
NEW = dict.fromkeys(("vpp", "cp", "ep", "pp", "dp_rep", "fsdp", "tp", "n_micro", "micro_bs"), "1")
NEW |= {"use": "fit", "id": "run", "model": "llama3_70b cut to 2 layers", "gpu": "B200-SXM", "gpus": "8", "sp": "1"}
NEW |= {"gpus_per_node": "8", "zero": "1", "gbs": "8", "seq": "512", "remat": "none", "compile": "0", "quant": "none"}
NEW |= {"lora": "", "param_dtype": "bf16", "reduce_dtype": "fp32", "step_s": "1", "mem_gib": "9", "outcome": "ok"}
NEW |= {"mem_kind": "max_memory_allocated", "stack": "Megatron-LM", "note": "", "attention": ""}


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ([{}], 0, ""),
        ([{"cp": "2"}, {}], 0, "| cp | 1 | 1 |"),
        ([{"model": "9Q", "pp": "2"}, {}], 1, "| model | 1 | 0 |"),
        ([{"cp": "2"}], 1, "left out: cp: above 1 in run"),
    ],
)
def test_rows_that_are_left_out_are_counted_and_an_unknown_model_fails(
    changes: list[dict[str, str]], code: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    file = tmp_path / "published_runs.csv"
    with file.open("w", newline="") as out:
        writer = csv.DictWriter(out, [*OLD, "pp"])
        writer.writeheader()
        writer.writerows([{**OLD, **change} for change in changes])
    monkeypatch.setattr(plan_accuracy, "predict", lambda run, build: Outcome(run, 41.0, 2.1, 0.0))
    monkeypatch.setattr(sys, "argv", ["plan_accuracy.py", str(file), "--json"])
    with pytest.raises(SystemExit) as ended:
        plan_accuracy.main()
    assert ended.value.code == code
    out_text = capsys.readouterr()
    assert words in out_text.err + out_text.out
    assert all(row["name"] == "run x8 full" for row in json.loads(out_text.out)["rows"])


def test_a_row_misses_everything_that_a_recipe_lacks_and_only_that() -> None:
    lacking = {"lora": "r=16", "gpu": "MI325X", "model": "Nemotron", "quant": "NVFP4", "remat": "see the recipe"}
    with pytest.raises(Missing) as missing:
        published_rows.run_of({**NEW, **lacking})
    assert set(missing.value.keys) == {
        "unsaid: targets of adapters", "cluster.device", "model", "model.dtype", "unsaid: remat"
    }  # fmt: skip


def test_experts_are_spread_over_the_data_ranks_and_stored_parameters_over_all_axes_that_are_left() -> None:
    """Megatron counts ep and cp among its data ranks; where tp is needed too, experts take the axes of both."""
    assert published_rows.run_of({**NEW, "cp": "2", "dp_rep": "4"}).recipe.fsdp.axes == ("fsdp", "cp")
    moe = {**NEW, "model": "deepseekv2 cut to 4 layers", "dp_rep": "8", "ep": "4"}
    recipe = published_rows.run_of(moe).recipe
    assert {"fsdp": 2, "ep": 4}.items() <= recipe.mesh.items() and recipe.fsdp.axes == ("fsdp", "ep")
    across = published_rows.run_of({**moe, "tp": "2", "dp_rep": "4", "ep": "8"}).recipe
    assert across.sharding.rules["expert"] == ("fsdp", "tp") and across.mesh["fsdp"] == 4
    staged = published_rows.run_of({**moe, "pp": "2", "dp_rep": "4"}).recipe
    assert staged.pipeline is not None and staged.pipeline.split == (2, 2)


def test_a_megatron_row_keeps_whole_parameters_and_gradients_and_shards_the_optimizer() -> None:
    """bf16 parameters and fp32 gradients whole on each of 4 data ranks of tp 2; fp32 master and moments over them.
    With so many tokens the peak is in a micro-batch."""
    run = published_rows.run_of({**NEW, "tp": "2", "dp_rep": "4", "n_micro": "4", "seq": "4096"})
    programs = Variants().for_prices(Setting.of(run.recipe))
    held = plan_accuracy.priced(run, programs).worst.memory.at_peak
    params = 2 * 128256 * 8192 + 2 * (2 * 8192 * 8192 + 2 * 1024 * 8192 + 3 * 8192 * 28672)
    assert held["parameters"] == pytest.approx(params / 2 * (2 + 4 / 4), rel=1e-3)
    assert held["gradients"] >= params / 2 * 4
    assert held["optimizer"] == pytest.approx(params / 2 * 8 / 4, rel=1e-3)
    assert run.recipe.batch.global_sequences == 16


def test_fitting_finds_the_constants_that_made_the_measurements() -> None:
    """Rows priced with other constants are fitted to within 1%."""
    runs, build = (
        [published_rows.run_of({**NEW, "tp": "8", "seq": seq}) for seq in ("512", "8192")],
        Variants().for_prices,
    )
    true = device("b200")
    true = replace(true, efficiency=replace(true.efficiency, matmul=0.4, streaming=0.5))

    def measured(run: PublishedRun) -> PublishedRun:
        return replace(run, step_s=plan_accuracy.priced(run, build(Setting.of(run.recipe)), true).step_s)

    def planned_s(run: PublishedRun, programs: TrainingPrograms) -> float:
        return plan_accuracy.priced(run, programs).step_s

    constants, left = device_fit.fit([measured(run) for run in runs], build, planned_s)
    assert left < 0.01 and constants["b200.matmul"] == pytest.approx(0.4, rel=0.1)


def test_the_older_rows_say_what_was_compiled() -> None:
    assert dense_rows.run_of({**OLD, "compile": "0"}).compiled == "rest"
    assert dense_rows.run_of({**OLD, "src": "kf_x", "compile": "0"}).held_logits == 2
