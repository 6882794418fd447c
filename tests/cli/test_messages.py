"""What is written in another tool's way is refused with the way that is meant."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tpshard.cli.main import run
from tpshard.cli.shared.option_keys import keys_of
from tpshard.devices import machine
from tpshard.diagnostics.diagnostic import Exit
from tpshard.recipes.reading.document import keys
from tpshard.recipes.reading.load import loads
from tpshard.recipes.text import other_tools


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ("serve quickstart --port 8001", 2, "`serve.port=8001`"),
        ("serve quickstart --host=0.0.0.0", 2, "`serve.host=0.0.0.0`"),
        ("serve quickstart -tp 2", 2, "`serve.mesh.tp=2`"),
        ("serve quickstart --max-num-seqs 4", 2, "`serve.requests=4`"),
        ("train quickstart --training.steps 10", 2, "`train.steps=10`"),
        ("train quickstart --train.steps=10", 2, "`train.steps=10`"),
        ("train quickstart --lr 1e-3", 2, "`optimizer.lr=1e-3`"),
        ("train quickstart --output_dir x", 2, "`run.dir=x`"),
        ("train quickstart --tensor-parallel-size 2", 2, "`mesh.tp=2`"),
        ("train --config x.yaml", 2, "name the recipe itself"),
        ("train quickstart sharding.heads=tp", 3, "here it is `sharding.rules.heads`"),
        ("train quickstart +data.column=x", 2, "drop the plus: data.column=x"),
        ("train quickstart ++data.column=x", 2, "drop the plus: data.column=x"),
        ("train quickstart ~data.column", 2, "data.column=null"),
        ("train quickstart optimizer.betas=0.9,0.95", 3, "write a list: [0.9, 0.95]"),
        ("train quickstart betas=0.9,0.95", 3, "optimizer.betas=[0.9, 0.95]"),
        ("train quickstart fsdp.bucket=25MB", 3, "fsdp.bucket: {mb: 25}"),
        ("train quickstart model={hf:folder}", 3, "a space behind the colon: {hf: folder}"),
        ("train quickstart mesh={tp:2}", 3, "a space behind the colon: {tp: 2}"),
        ("train quickstart bucket=25MB", 3, "fsdp.bucket={mb: 25}"),
        ("train quickstart data.source=*.jsonl", 3, """'data.source="*.jsonl"'"""),
        ("train quickstart train.steps 10", 2, "write train.steps=VALUE, without a space"),
        ("train quickstart train.steps:10", 2, "write train.steps=10"),
        ("train quickstart model.hf=meta-llama/Llama-3.2-1B", 3, "`hf:meta-llama/Llama-3.2-1B"),
        ("train meta-llama/Llama-3.2-1B", 2, "`hf:meta-llama/Llama-3.2-1B"),
        ("convert meta-llama/Llama-3.2-1B out", 2, "`hf:meta-llama/Llama-3.2-1B"),
        ("serve quickstart serve.checkpoint=meta-llama/Llama-3.2-1B", 7, "`hf:meta-llama/Llama-3.2-1B"),
        ("validate quickstart data.tokenizer=org/name", 6, "`hf:org/name"),
        ("convert quickstart out model.layers=2", 2, "`convert` does not obey `model.layers`"),
        ("quantize quickstart out mesh.tp=2", 2, "`quantize` does not obey `mesh.tp`"),
        ("validate quickstart model.seq_len=512", 0, "sequences of 512 tokens, but the model has 256 positions"),
    ],
)  # fmt: skip
def test_a_near_miss_is_told_the_right_spelling(
    line: str, code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(line.split()) == code, capsys.readouterr().err
    shown = capsys.readouterr()
    assert words in shown.err and shown.out == "", shown.err


def test_every_key_that_is_offered_exists() -> None:
    known = {key.path for key in keys()}
    for word in other_tools.KEYS:
        for key in keys_of(word):
            assert key in known or key.rpartition(".")[0] in ("mesh", "serve.mesh") or f"{key}." in str(known), word


@pytest.mark.parametrize(
    ("recipe", "offered", "not_offered"),
    [("preset: llama3-8b}\ncluster: {device: h200, nodes: 4, devices_per_node: 8}", "plan", "--device cpu"),
     ("preset: tiny}\ncluster: {device: h200, devices_per_node: 2}", "--device cpu", "plan")],
)  # fmt: skip
def test_without_gpus_only_what_can_run_is_offered(
    recipe: str, offered: str, not_offered: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "probe_driver", lambda: machine.Driver("", ()))
    loaded = loads("model: {" + recipe)
    with pytest.raises(machine.Mistakes) as caught:
        machine.require(loaded)
    assert offered in str(caught.value) and not_offered not in str(caught.value)
    if offered == "plan":
        here = machine.largest_here()
        assert f"tpshard train {here}" in str(caught.value) and run(["validate", here]) == 0


def test_validate_says_what_train_would_lack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TOKENIZER_DIR", raising=False)
    Path("mine.jsonl").write_text('{"text": "a"}\n' * 3)
    Path("chat.jsonl").write_text('{"messages": []}\n' * 3)
    assert run(["validate", "tiny", "data.source=mine.jsonl"]) == Exit.DATA
    assert "`data.tokenizer` is not known here" in capsys.readouterr().err
    assert run(["validate", "tiny", "data.source=c4"]) == 0
    assert "warning: `data.tokenizer` is not known here" in capsys.readouterr().err
    Path("tok").mkdir()
    Path("tok/tokenizer.json").write_text("{}")
    assert run(["validate", "tiny", "data.source=chat.jsonl", "data.tokenizer=tok"]) == Exit.DATA
    assert "data.column" in capsys.readouterr().err
    config = {"architectures": ["OPTForCausalLM"], "model_type": "opt", "max_position_embeddings": 64}
    Path("model").mkdir()
    Path("model/config.json").write_text(json.dumps(config))
    Path("r.yaml").write_text("model: {transformers: model, seq_len: 128}")
    assert run(["validate", "r.yaml"]) == Exit.FIT
    assert "sequences of 128 tokens, but the model has 64 positions" in capsys.readouterr().err
