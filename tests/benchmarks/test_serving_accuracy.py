"""Published servers become their engines' steps and traffic, and are compared in their own statistic."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tpshard.plan.server.traffic import Answered, Rehearsal

import engine_fit
import published_models
import published_servers
import serving_accuracy
from engines.engine_traffic import EngineRun
from published_rows import Missing

ROW = dict.fromkeys(("pp", "ep", "dp"), "1") | dict.fromkeys(("batch", "rate_rps", "tpot_ms", "tpot_stat", "note"), "")
ROW |= {"id": "run", "model": "Llama-3.1-8B", "gpu": "A100-SXM-80GB", "tp": "2", "weights": "bf16", "kv_dtype": "bf16"}
ROW |= {"engine": "vLLM", "engine_version": "0.7.3", "use": "test", "input_len": "100", "output_len": "11"}
ROW |= {"concurrency": "8", "ttft_ms": "50", "ttft_stat": "p95", "output_tok_s_total": "400"}


def test_a_row_is_an_engine_with_its_clients() -> None:
    row = published_servers.row_of(ROW)
    assert (row.engine.name, row.device, row.tp, row.fitted) == ("vLLM to 0.7", "a100-80g", 2, False)
    assert (row.traffic.prompt, row.traffic.answer, row.traffic.clients, row.traffic.count) == (100, 11, 8, 80)
    assert row.measured == {"ttft": ("p95", 0.05), "tokens/s": ("", 400.0)} and not row.steady
    assert published_servers.row_of({**ROW, "batch": "8"}).traffic.count == 8
    paced = published_servers.row_of({**ROW, "rate_rps": "2.5", "ttft_stat": "p17"})
    assert paced.traffic.rate == 2.5 and paced.traffic.count == 500 and "ttft" not in paced.measured
    long = published_servers.row_of({**ROW, "engine_version": "0.6.3", "note": "max-model-len 91680"})
    assert long.engine.mixes and long.engine.step_tokens == 512
    with pytest.raises(Missing, match="int3") as missing:
        published_servers.row_of({**ROW, "weights": "int3", "gpu": "M4-Max", "engine": "mine", "dp": "2"})
    assert set(missing.value.keys) == {"weights", "cluster.device", "engine", "serve.mesh"}


def test_published_models_are_cut_to_few_layers() -> None:
    assert published_models.layers_of("Qwen3-32B") == 64 and published_models.layers_of("gpt-oss-20b") == 24
    assert published_models.layers_of("Llama-3.1-405B") == 126
    assert published_models.keys_of("Qwen3-14B cut to 2 layers").count("layers") == 1


def test_figures_are_in_the_row_s_statistic() -> None:
    batch = published_servers.row_of({**ROW, "batch": "8", "tpot_ms": "90", "tpot_stat": "ITL p50"})
    answers = tuple(Answered(0.0, 0.01 * (i + 1), 1.0 + 0.01 * (i + 1), 11) for i in range(8))
    run = EngineRun(Rehearsal(answers, 0, 0, 1, 2.0, 8.0), np.array([(0.2, 1), (0.1, 8)]), 4)
    planned = serving_accuracy.figures(batch, run)
    assert planned == pytest.approx({"ttft": 0.08, "tpot": 0.1, "tokens/s": 8 * 11 / 2.0})
    outcome = serving_accuracy.ServedOutcome(batch, planned, run.limit, 8)
    assert outcome.saturated and outcome.errors["TTFT above it"] == pytest.approx(0.6)
    assert not replace(outcome, limit=8).saturated
    assert "tokens/s: 89.0% off" in serving_accuracy.goals([outcome])


def test_a_fit_moves_what_the_rows_tell_and_keeps_the_rest() -> None:
    """Rows whose error is of one constant alone."""
    row = published_servers.row_of({**ROW, "use": "fit"})

    class Planned:
        def __init__(self, constants: published_servers.Constants) -> None:
            self.errors = {"TPOT": constants.get("vLLM to 0.7/host_s", 1.0) / 5e-3 - 1}

    constants = engine_fit.fit([row] * 20, lambda row, constants: Planned(constants), 8, lambda text: None)
    assert constants["vLLM to 0.7/host_s"] == pytest.approx(5e-3, rel=0.1)
    assert constants["kernels/hops"] == row.engine.kernels.hops
