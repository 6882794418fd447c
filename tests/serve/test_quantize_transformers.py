"""`tpshard quantize` takes models that transformers computes, or names what it cannot take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import architectures
import gptq_folders
import pytest
import torch
from torch import Tensor, nn
from tpshard.cli.main import run
from tpshard.diagnostics.diagnostic import Exit
from tpshard.kernels.quantized.gptq_format import GPTQFolder
from tpshard.kernels.quantized.gptq_solver import Settings
from tpshard.models.layered.layered_model import NotQuantizable, TransformersLayers
from tpshard.models.transformers.architecture import Architecture
from tpshard.models.transformers.class_weights import FolderWeights
from tpshard.models.transformers_model import TransformersModel
from tpshard.serve.quantizing.layer_calls import calls_of_layers, form_of
from tpshard.serve.quantizing.quantize_layers import Quantizer
from tpshard.serve.quantizing.task_rows import TaskRows, text_rows
from tpshard.serve.quantizing.write_quantized import write_quantized

QUICK = ("gemma3_text", "gpt2", "stablelm", "qwen2_moe")
"""Layers whose arguments differ; weights [inputs, outputs]; attention that tpshard replaces; experts."""


def text(seed: int) -> TaskRows:
    tokens = torch.randint(0, 64, (4, 12), generator=torch.Generator().manual_seed(seed))
    places = torch.arange(12).expand(4, 12).contiguous()
    return text_rows(tokens, tokens.roll(-1, 1), torch.zeros_like(tokens), places)


def widen(name: str, patch: pytest.MonkeyPatch, **more: Any) -> None:
    """Gives a configuration sizes that GPTQ files can hold."""
    config = architectures.CONFIGS[name]
    wider = {key: value for key, value in gptq_folders.WIDER.items() if key in config}
    patch.setitem(architectures.CONFIGS, name, {**config, **wider, **more})


@pytest.mark.parametrize(
    "name",
    [
        *QUICK,
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in architectures.CONFIGS
            if name not in (*QUICK, "mamba", "gpt_oss")  # no SwiGLU experts
        ),
    ],
)
def test_the_folder_holds_the_model_that_was_measured(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both losses, by transformers' own class: of the dense values, and of those that the folder stands for."""
    widen(name, monkeypatch)
    architecture, values = Architecture(architectures.config_of(name)), architectures.values(name)
    spec = TransformersModel(architecture.raw)
    job = Quantizer(spec, values.__getitem__, text(0), text(1), Settings(group_size=16), "head_local")
    report = write_quantized(job, tmp_path / "out")
    stored = FolderWeights(tmp_path / "out", architecture, architecture.build())
    own, held_out = architectures.own(name), text(1)

    def loss(weights: dict[str, Tensor]) -> float:
        with torch.no_grad():
            logits = torch.func.functional_call(own, weights, (held_out.batch["tokens"],)).logits
        return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), held_out.batch["targets"].flatten()))

    assert report.loss_before == pytest.approx(loss(values), abs=1e-5)
    assert report.loss_after == pytest.approx(
        loss({path: stored.block(path, (), ()).float() for path in values}), abs=2e-3
    )
    assert report.loss_after != report.loss_before
    assert len(report.linears) == job.count == len(GPTQFolder(tmp_path / "out").modules)
    assert all(0 < one.error < 0.2 for one in report.linears)
    assert not [module for module in report.left_dense if "shared_expert_gate" not in module]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (architectures.config_of("mamba"), "MambaForCausalLM mixes tokens by itself"),
        (
            {"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], **architectures._LLAMA, "head_dim": 8,
             "num_local_experts": 4, "num_experts_per_tok": 2},
            "`model.layers.0.mlp.experts` are not SwiGLU experts without biases",
        ),
    ],
)  # fmt: skip
def test_a_class_that_cannot_be_quantized_is_named(config: dict[str, Any], words: str) -> None:
    with pytest.raises(NotQuantizable, match=words):
        TransformersLayers(Architecture(config), torch.float32)


class Toy(nn.Module):
    """Two layers; the second gets what `passes` says from the first."""

    def __init__(self, passes: str) -> None:
        super().__init__()
        self.passes, self.layers = passes, nn.ModuleList([ToyLayer(), ToyLayer()])

    def forward(self, x: Tensor) -> Tensor:
        first, kept = x, {}
        for i, layer in enumerate(self.layers):
            given = {"place": i, "result": x - first, "memory": kept}[self.passes]
            x = layer(x, given)[0]
        return x


class ToyLayer(nn.Module):
    def forward(self, x: Tensor, given: Any) -> tuple[Tensor, None]:
        return x + 1, None


@pytest.mark.parametrize(("passes", "where"), [("place", None), ("result", 1), ("memory", 0)])
def test_a_layer_that_reads_more_of_earlier_layers_than_their_result_is_named(passes: str, where: int | None) -> None:
    model, x = Toy(passes), torch.zeros(2)
    layers = model.layers

    def calls() -> list[Any]:
        form = lambda x: (x, None)  # noqa: E731
        return calls_of_layers(model, "layers", form, lambda: model(x))

    if where is None:
        first, second = calls()
        assert torch.equal(first.x, x) and first.rest == (0,)
        assert second.rest == (1,) and first.into(layers[0]).eq(1).all(), "each layer gets its own arguments"
        assert form_of(layers[0], first)(x)[1] is None
    else:
        with pytest.raises(ValueError, match=rf"`layers\.{where}` is not called with"):
            calls()
    assert model.layers is layers, "the model has its layers again"


def test_a_selection_of_keys_that_layers_share_is_named() -> None:
    """GLM-5's layers return whole numbers, which later layers read."""
    architecture = Architecture(architectures.config_of("glm_moe_dsa"))
    spec = TransformersModel(architecture.raw)
    job = Quantizer(
        spec,
        architectures.values("glm_moe_dsa").__getitem__,
        text(0),
        None,
        Settings(),
        "global",
    )
    with pytest.raises(ValueError, match=r"`model\.layers\.1` is not called with values of earlier layers alone"):
        list(job.run())


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from tpshard.models.folders.folder_files import copy_tokenizer
    from tpshard.train.data.sample import ensure_sample

    widen("qwen2_moe", monkeypatch, vocab_size=2048)
    folder = architectures.folder(tmp_path / "in", "qwen2_moe", weights=True)
    copy_tokenizer(ensure_sample().tokenizer, folder)
    out, settings = tmp_path / "out", ["quantize.group_size=32", "quantize.calibration.sequences=8"]
    assert run(["quantize", str(folder), str(out), *settings, "--json"]) == Exit.DONE
    report = json.loads(capsys.readouterr().out)
    assert len(report["linears"]) == 38 and (out / "tokenizer.json").is_file()
    written = json.loads((out / "config.json").read_text())
    assert written["quantization_config"]["group_size"] == 32 and written["dtype"] == "float16"
    again = FolderWeights(out, Architecture.of(out), Architecture.of(out).build())
    assert again.stack_of("model.layers.0.mlp.experts.down_proj") is not None
    widen("mamba", monkeypatch, vocab_size=2048)
    mamba = architectures.folder(tmp_path / "mamba", "mamba", weights=True)
    copy_tokenizer(ensure_sample().tokenizer, mamba)
    assert run(["quantize", str(mamba), str(tmp_path / "no"), *settings]) == Exit.FIT
    assert "mixes tokens by itself" in capsys.readouterr().err and not (tmp_path / "no").exists()


def test_an_encoder_is_quantized_and_its_orders_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No server takes it; what stands between its linears is found on the graph of its forward pass."""
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    BertForMaskedLM(BertConfig(vocab_size=288, **sizes)).save_pretrained(tmp_path / "bert")
    settings = ["quantize.group_size=8", "quantize.calibration.sequences=1", "evaluate.sequences=1",
                "data.tokenizer=bytes", "--seq-len", "16", "--json"]  # fmt: skip
    assert run(["quantize", str(tmp_path / "bert"), str(tmp_path / "out"), *settings]) == Exit.DONE
    said = {row["linear"]: row["between"] for row in json.loads(capsys.readouterr().out)["act_orders"]}
    layer = "bert.encoder.layer.*."
    assert said.keys() >= {f"{layer}attention.self.query", f"{layer}output.dense"} and len(said) == 6
    absorbed = {name for name, between in said.items() if not between}
    assert absorbed == {f"{layer}attention.output.dense", f"{layer}output.dense"}
    assert said[f"{layer}intermediate.dense"] == f"`add` in {layer}output reads the same values"
