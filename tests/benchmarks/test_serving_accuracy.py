"""Published servers become recipes and traffic that say the same, and are compared in their own statistic."""

from __future__ import annotations

import pytest
from tpshard.plan.server.traffic import Answered, Rehearsal

import serving_accuracy
from published_rows import Missing

ROW = dict.fromkeys(("pp", "ep", "dp"), "1") | dict.fromkeys(("batch", "rate_rps", "tpot_ms", "tpot_stat"), "")
ROW |= {"id": "run", "model": "Llama-3.1-8B", "gpu": "A100-SXM-80GB", "tp": "2", "weights": "bf16", "kv_dtype": "bf16"}
ROW |= {"engine": "vLLM", "use": "test", "input_len": "100", "output_len": "11", "concurrency": "8"}
ROW |= {"ttft_ms": "50", "ttft_stat": "p95", "output_tok_s_total": "400"}


def test_a_row_is_a_server_with_its_clients() -> None:
    row = serving_accuracy.row_of(ROW)
    assert dict(row.recipe.serve.mesh) == {"tp": 2} and row.recipe.cluster is not None
    assert (row.traffic.prompt, row.traffic.answer, row.traffic.clients, row.traffic.rate) == (100, 11, 8, None)
    assert row.measured == {"ttft": ("p95", 0.05), "tokens/s": ("", 400.0)} and not row.fitted
    assert serving_accuracy.row_of({**ROW, "batch": "8"}).traffic.count == 8
    with pytest.raises(Missing, match="int4") as missing:
        serving_accuracy.row_of({**ROW, "weights": "int4 gptq", "gpu": "L4-24GB"})
    assert set(missing.value.keys) == {"weights", "cluster.device"}


def test_figures_are_in_the_row_s_statistic() -> None:
    batch = serving_accuracy.row_of({**ROW, "batch": "8"})
    answers = tuple(Answered(0.0, 0.01 * (i + 1), 1.0 + 0.01 * (i + 1), 11) for i in range(8))
    planned = serving_accuracy.figures(batch, Rehearsal(answers, 0, 0, 1, 2.0, 8.0))
    assert planned == pytest.approx({"ttft": 0.08, "tokens/s": 8 * 11 / 2.0})
    assert serving_accuracy.ServedOutcome(batch, planned).errors["tokens/s"] == pytest.approx(44 / 400 - 1)
