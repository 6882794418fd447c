"""An act-ordered GPTQ folder gives the answers of its dense weights in every layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from servers import Lockstep, folder_runner, lockstep, programs_of, ranks_of, runner_of
from torch import Tensor
from tpshard.cli.main import run
from tpshard.cli.shared.serve_worker import stored_weights
from tpshard.cli.shared.sources import open_source
from tpshard.diagnostics.diagnostic import Exit
from tpshard.kernels.norm import NORM
from tpshard.kernels.quantized import int4
from tpshard.kernels.quantized.gptq_solver import Settings
from tpshard.kernels.quantized.int4 import Int4, Int4Parts
from tpshard.models import build, from_hf
from tpshard.models.families.config import ModelConfig
from tpshard.models.family_model import FamilyModel
from tpshard.models.folders import hf_headers
from tpshard.models.folders.hf_names import hf_modules
from tpshard.programs.scheduling.request import Sampling, Sequence
from tpshard.programs.server import step_kernels
from tpshard.programs.server.serve_setting import Size
from tpshard.serve.api.need import kernels
from tpshard.serve.engine import weights
from tpshard.serve.engine.engine import Engine
from tpshard.serve.quantizing.quantize_layers import Quantizer
from tpshard.serve.quantizing.task_rows import text_rows
from tpshard.serve.quantizing.write_quantized import write_quantized

LLAMA = ModelConfig(
    family="llama", layers=2, width=64, heads=4, kv_heads=2, head_dim=32, mlp=128, vocab=128, max_seq=64, seq_len=32,
    dtype="fp32",
)  # fmt: skip
GRANITE = ModelConfig(
    family="granite", layers=1, width=64, heads=4, kv_heads=1, head_dim=16, mlp=128, vocab=128, max_seq=64, seq_len=32,
    dtype="fp32", attention_bias=True, mlp_bias=True, tie_embeddings=True,
)  # fmt: skip
LAYOUTS = ("naive", "local_sort", "tp_aware")


def quantize(config: ModelConfig, out: Path) -> Path:
    torch.manual_seed(1)
    model = build(config, device="cpu")
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.ones_like(p) if name.endswith("norm.weight") else torch.randn_like(p) * 0.15)
    tokens = torch.randint(0, 128, (6, 32)) // torch.randint(1, 9, (6, 1))
    text = text_rows(tokens, tokens.roll(-1, 1))
    parameters = dict(model.named_parameters())
    settings = Settings(bits=4, group_size=32)
    write_quantized(
        Quantizer(FamilyModel(config), lambda name: parameters[name].detach(), text, text, settings, "global"), out
    )
    return out


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("gptq")
    return {config.family: quantize(config, base / config.family) for config in (LLAMA, GRANITE)}


def greedy(runner: Any) -> tuple[list[list[int]], list[float]]:
    engine = Engine(runner)
    sequences = [Sequence(tuple(range(3, 3 + n)), Sampling(temperature=0, logprobs=0), 8) for n in (2, 9, 21)]
    for s in sequences:
        engine.add(s)
    scores: dict[int, list[float]] = {s.id: [] for s in sequences}
    while engine.busy:
        for event in engine.step():
            assert event.logprob is not None
            scores[event.sequence.id].append(event.logprob.logprob)
    return [s.tokens for s in sequences], [x for s in sequences for x in scores[s.id]]


def requests(*more: str) -> tuple[str, ...]:
    return ("serve.requests=8", "serve.step_tokens=8", *more)


@pytest.mark.parametrize("family", ["llama", "granite"])
def test_every_layout_gives_the_answers_of_the_dense_weights(family: str, folders: dict[str, Path]) -> None:
    folder = folders[family]
    tokens, scores = greedy(runner_of(from_hf(folder, dtype=torch.float32), *requests(), blocks=16))
    assert not stored_weights(open_source(str(folder))).quantized("layers.0.mlp.down.weight").sorted  # type: ignore[union-attr]
    for layout in LAYOUTS:
        invariant = str(layout != "naive").lower()
        overrides = requests(f"serve.layout={layout}", f"serve.batch_invariant={invariant}")
        buckets = greedy(folder_runner(folder, *overrides))
        assert buckets[0] == tokens
        assert buckets[1] == pytest.approx(scores, abs=1e-4)


def as_autogptq(folder: Path, place: Path, bias: float) -> Path:
    """The folder as AutoGPTQ wrote such ones in 2023: a bias for each linear, the settings in a file of their own, and
    weights named by them."""
    place.mkdir()
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    for name in [name for name in tensors if name.endswith(".scales")]:
        shape = tensors[name].shape[1]
        tensors[name.replace("scales", "bias")] = (bias * torch.randn(shape, generator=generator)).half()
    save_file(tensors, place / "gptq_model-4bit-32g.safetensors")
    raw = json.loads((folder / "config.json").read_text())
    how = {key: raw["quantization_config"][key] for key in ("bits", "group_size", "desc_act", "sym", "damp_percent")}
    how |= {"model_name_or_path": None, "model_file_base_name": None, "true_sequential": True}
    (place / "quantize_config.json").write_text(json.dumps(how))
    del raw["quantization_config"]
    (place / "config.json").write_text(json.dumps(raw))
    return place


@pytest.mark.parametrize("bias", [0.0, 0.5])
def test_a_folder_of_autogptq_is_served_with_its_biases(
    bias: float, folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = as_autogptq(folders["llama"], tmp_path / "theirs", bias)
    model, plain = (from_hf(place, dtype=torch.float32) for place in (folder, folders["llama"]))
    biases = {name: p for name, p in model.named_parameters() if name.endswith("bias")}
    assert (len(biases) == 14) == bool(bias)
    stored = load_file(folder / "gptq_model-4bit-32g.safetensors")
    for name, parameter in model.named_parameters():
        home = hf_modules(model.config)[name.rpartition(".")[0]].module  # type: ignore[arg-type]
        assert torch.equal(parameter, stored[f"{home}.bias"].float() if name in biases else plain.get_parameter(name))
    tokens, scores = greedy(runner_of(model, *requests(), blocks=16))
    for layout in ("naive", "tp_aware"):
        served = greedy(folder_runner(folder, *requests(f"serve.layout={layout}")))
        assert served[0] == tokens and served[1] == pytest.approx(scores, abs=1e-4)
    coded = greedy(folder_runner(folder, *requests("serve.dtype=bf16")))
    assert coded[1][0] == pytest.approx(scores[0], abs=0.2)
    assert run(["convert", str(folder), str(tmp_path / "out")]) == Exit.DONE
    again = from_hf(tmp_path / "out", dtype=torch.float32)
    assert all(torch.equal(p, again.get_parameter(name)) for name, p in model.named_parameters())


@pytest.mark.parametrize("name", ["gptq_model-4bit-32g", "own", "model", "Llama-GPTQ-4bit.act-order"])
def test_weights_are_found_by_autogptqs_names(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    folder = as_autogptq(folders["llama"], tmp_path / "theirs", 0.0)
    (folder / "gptq_model-4bit-32g.safetensors").rename(folder / f"{name}.safetensors")
    how = json.loads((folder / "quantize_config.json").read_text()) | {"model_file_base_name": "own"}
    (folder / "quantize_config.json").write_text(json.dumps(how))
    if name != "Llama-GPTQ-4bit.act-order":  # the only file may have any name
        save_file({"other": torch.zeros(1)}, folder / "zz-other.safetensors")
    homes_of = hf_headers.homes(folder)
    assert set(homes_of.values()) == {f"{name}.safetensors"} and hf_headers.has_weights(folder)


def test_four_bits_are_multiplied_as_four_bits(folders: dict[str, Path]) -> None:
    runner = folder_runner(folders["llama"], *requests("serve.dtype=bf16"))
    programs = runner._programs
    ports = {port.name: port for port in programs.any.inputs}
    down = next(x for p, x in zip(programs.any.inputs, runner._given[Size(8)]) if p.name == "layers.0.mlp.down.weight")
    if isinstance(down, Int4Parts):  # where dense products have the same bits
        (down,) = down.parts
    assert isinstance(down, Int4) and down.group == 32 and down.codes.numel() == 64 * 128 // 2
    assert ports["layers.0.mlp.down.weight"].local_bytes == down.nbytes
    assert "layers.0.mlp.down.weight" not in programs.arrangement.of  # nothing is taken in order between the two
    product = "parts_linear" if int4.agrees() else "int4_linear"
    assert kernels(programs.any) == {product: 8, "fixed_rows_linear": 1, "rms_norm_permuted": 5,
                                     "reorder": 2, "paged_attention": 2}  # fmt: skip
    norms = [node.args[2] for node in programs.any.graph.nodes if node.target is NORM]
    assert [order is None for order in norms] == [False] * 4 + [True]  # all but the last store in a product's order
    dense = runner_of(from_hf(folders["llama"], dtype=torch.bfloat16), *requests(), blocks=16, dtype="bf16")
    _, expected = greedy(dense)
    assert greedy(runner)[1][0] == pytest.approx(expected[0], abs=0.15)


def test_in_fp32_a_cpu_has_the_files_weights_to_the_bit(folders: dict[str, Path]) -> None:
    """In fp32 the codes are dequantized, in the program's order."""
    runner = folder_runner(folders["llama"], *requests("serve.batch_invariant=false"))
    port, held = next(
        (p, x) for p, x in zip(runner._programs.any.inputs, runner._given[Size(8)]) if ".mlp.down" in p.name
    )
    stored = stored_weights(open_source(str(folders["llama"]))).quantized(port.name)
    assert stored is not None and port.held is None
    order = torch.argsort(stored.group, stable=True)
    assert torch.equal(held, stored.dequantize(torch.float32)[order].T)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_row_of_a_quantized_step_has_the_same_bits_in_every_batch(dtype: str, folders: dict[str, Path]) -> None:
    runner = folder_runner(folders["llama"], *requests(f"serve.dtype={dtype}"))
    _, together = greedy(runner)
    alone = []
    for n in (2, 9, 21):
        engine, s = Engine(runner), Sequence(tuple(range(3, 3 + n)), Sampling(temperature=0, logprobs=0), 8)
        engine.add(s)
        while engine.busy:
            alone += [e.logprob.logprob for e in engine.step() if e.logprob is not None]
    assert together == alone


def quantized_linear(x: Tensor, weight: Tensor, invariant: bool) -> Tensor:
    return x @ weight


def quantized_gate(x: Tensor, weight: Tensor, invariant: bool) -> Tensor:
    gate, up = (x @ weight).chunk(2, -1)
    return F.silu(gate) * up


ON_GPU = {
    "llama": (4, {"quantized_linear": 6, "quantized_gate": 2}),  # two layers: q|k|v, o, down; gate|up
    "granite": (2, {"quantized_linear": 4}),  # q|k|v, o, up, down
}
"""Ranks, which share KV heads, and the products of a step."""


@pytest.mark.parametrize("family", ON_GPU)
def test_a_gpus_matrices_side_by_side_are_those_of_the_folder(
    family: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With plain products in place of a GPU's kernels."""
    tp, products = ON_GPU[family]
    stored = stored_weights(open_source(str(folders[family])))
    expected = lockstep(programs_of(folders[family], *requests()), stored)
    for product in (quantized_linear, quantized_gate):
        monkeypatch.setattr(step_kernels, product.__name__, product)
    monkeypatch.setattr(weights, "prepare", lambda weight, device: weight.dequantize(torch.float32))
    programs = programs_of(folders[family], *requests(f"serve.mesh.tp={tp}", "serve.dtype=fp32"), kind="gpu")
    torch.testing.assert_close(lockstep(programs, stored), expected, rtol=1e-4, atol=1e-4)
    counted = kernels(programs.any)
    assert {name: counted.get(name, 0) for name in products} == products and counted["linear"] == 1


@pytest.mark.parametrize("layout", ["naive", "tp_aware"])
def test_two_ranks_give_the_same_answers(layout: str, folders: dict[str, Path], copies: None) -> None:
    """In one layout as processes, in the other in lock-step in this one."""
    folder, overrides = folders["llama"], requests("serve.mesh.tp=2", f"serve.layout={layout}")
    expected = greedy(folder_runner(folder, *requests()))
    ranks: Any
    if layout == "naive":
        ranks = Lockstep(programs_of(folder, *overrides), stored_weights(open_source(str(folder))), 16)
    else:
        ranks = ranks_of(folder, *overrides, blocks=16)
    try:
        buckets = greedy(ranks)
    finally:
        ranks.close()
    assert buckets[0] == expected[0]
    assert buckets[1] == pytest.approx(expected[1], abs=1e-4)
