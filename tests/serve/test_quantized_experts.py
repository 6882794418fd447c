"""Quantized experts give the answers of the dense weights that they stand for, on any mesh."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import architectures
import gptq_folders
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from servers import folder_runner, lockstep, programs_of, prompts
from torch import Tensor
from tpshard.cli.shared.serve_worker import stored_weights
from tpshard.cli.shared.sources import open_source
from tpshard.diagnostics.diagnostic import Mistakes
from tpshard.kernels.experts.experts import fixed_rows_experts
from tpshard.kernels.experts.quantized_experts import PackedExpert, quantized_experts
from tpshard.kernels.quantized.gptq_format import GPTQFolder
from tpshard.kernels.quantized.gptq_solver import Settings
from tpshard.kernels.quantized.int4 import Int4
from tpshard.kernels.quantized.quantized import Quantized
from tpshard.models import build, from_hf
from tpshard.models.families.presets import PRESETS
from tpshard.models.family_model import FamilyModel
from tpshard.parallelism.rules.table import entry_of
from tpshard.plan.report.describe import shardings
from tpshard.programs.server.captured_steps import can_capture
from tpshard.programs.server.serve_setting import Size
from tpshard.serve.api.need import kernels
from tpshard.serve.engine.step import StepInput
from tpshard.serve.quantizing.quantize_layers import Quantizer
from tpshard.serve.quantizing.task_rows import TaskRows, text_rows
from tpshard.serve.quantizing.write_quantized import write_quantized

STEP = ("serve.requests=8", "serve.step_tokens=8")
MOE = replace(
    PRESETS["tiny-moe"], layers=2, width=64, heads=4, kv_heads=2, head_dim=16, mlp=96, vocab=128, max_seq=64,
    seq_len=32, experts=4, top_k=2, shared_experts=1,
)  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Tensor]]:
    """Folders of transformers' classes, with the logits of their dense weights."""
    made = {}
    with pytest.MonkeyPatch.context() as patch:
        for name in ("mixtral", "qwen2_moe"):
            config = architectures.CONFIGS[name]
            wider = {key: value for key, value in gptq_folders.WIDER.items() if key in config}
            patch.setitem(architectures.CONFIGS, name, {**config, **wider})
            folder, values = gptq_folders.quantized(name, tmp_path_factory.mktemp(name) / "gptq")
            tokens, own = torch.from_numpy(prompts().tokens)[None], architectures.own(name)
            with torch.no_grad():
                parts = [
                    torch.func.functional_call(own, values, (part,)).logits[0]
                    for part in (tokens[:, :5], tokens[:, 5:])
                ]
            made[name] = folder, torch.cat(parts)
    return made


@pytest.mark.parametrize(
    ("name", "mesh", "dtype"),
    [
        ("mixtral", "tp: 1", "fp32"),
        ("mixtral", "tp: 4", "fp32"),
        ("mixtral", "ep: 2, tp: 2", "bf16"),
        ("qwen2_moe", "tp: 2", "fp32"),
        ("qwen2_moe", "tp: 4", "bf16"),
        ("qwen2_moe", "ep: 4", "fp32"),
        *(
            pytest.param(name, mesh, dtype, marks=pytest.mark.slow)
            for name in ("mixtral", "qwen2_moe")
            for mesh in ("tp: 1", "tp: 2", "tp: 4", "ep: 2", "ep: 2, tp: 2")
            for dtype in ("fp32", "bf16")
        ),
    ],
)
def test_logits_are_those_of_the_dense_weights(
    name: str, mesh: str, dtype: str, folders: dict[str, tuple[Path, Tensor]]
) -> None:
    folder, expected = folders[name]
    programs = programs_of(folder, f"serve.mesh={{{mesh}}}", f"serve.dtype={dtype}", *STEP)
    logits = lockstep(programs, stored_weights(open_source(str(folder))))
    worst = 3e-2 if dtype == "bf16" else 1e-5
    assert (logits - expected).abs().max() <= worst * expected.abs().max()
    called = kernels(programs.any)
    assert called["quantized_experts" if dtype == "bf16" else "fixed_rows_experts"] == 2
    moved = [c for c in programs.any.collectives if c.kind != "all_reduce" and c.of != "logits"]
    assert not moved, "gate and up lie in one parameter of transformers, and each is where it is used"


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_token_has_the_same_bits_in_every_batch(dtype: str, folders: dict[str, tuple[Path, Tensor]]) -> None:
    runner = folder_runner(folders["mixtral"][0], f"serve.dtype={dtype}", "serve.requests=8", "serve.step_tokens=32")
    tokens = np.arange(32) * 7 % 64
    places = np.arange(32)

    def logits(rows: int) -> Tensor:
        """Of the first 8 tokens of a prompt, in a step with so many tokens of two prompts."""
        own = places[:rows]
        step = StepInput(tokens[:rows], own % 16, 16 + own, own // 16, np.array([[1], [2]]), np.arange(8))
        return runner.logits(step).clone()

    assert torch.equal(logits(32), logits(8))


@pytest.mark.parametrize(
    ("lost", "message"), [("scales", "scales is missing"), ("g_idx", "the order of the inputs is lost")]
)
def test_a_folder_that_lacks_a_tensor_of_an_expert_is_refused_when_it_is_opened(
    lost: str, message: str, folders: dict[str, tuple[Path, Tensor]], tmp_path: Path
) -> None:
    shutil.copytree(folders["mixtral"][0], tmp_path / "folder")
    file, name = tmp_path / "folder" / "model.safetensors", "model.layers.1.block_sparse_moe.experts.3.w3"
    save_file({key: value for key, value in load_file(file).items() if key != f"{name}.{lost}"}, file)
    with pytest.raises(Mistakes, match=f"{name}: .*{message}"):
        programs_of(tmp_path / "folder", *STEP)


def test_experts_are_held_as_codes(folders: dict[str, tuple[Path, Tensor]]) -> None:
    folder, _ = folders["qwen2_moe"]
    runner = folder_runner(folder, "serve.dtype=bf16", *STEP)
    ports = runner._programs.any.inputs
    port, held = next((p, x) for p, x in zip(ports, runner._given[Size(8)]) if p.held and p.held.form == "experts")
    assert port.held is not None and len(port.held.of) == 3 and len(held) == 4
    assert all(isinstance(one, PackedExpert) and len(one.inward) == 1 for one in held)
    inward = [one.inward[0] for one in held]
    packed = [*(one.weight for one in inward), *(one.down for one in held)]
    assert all(isinstance(one, Int4) for one in packed)
    listed = [tensor.name for tensor in shardings(runner._programs.any, list(runner._programs.shapes))[0]]
    assert len(listed) == len(set(listed)) and set(port.held.of) <= set(listed)
    assert entry_of(quantized_experts).work == entry_of(fixed_rows_experts).work == "matmul"
    assert can_capture(runner._programs.any), "on a GPU they are one stack"
    orders = sum(one.order.nbytes for one in inward)
    assert port.local_bytes == orders + sum(one.codes.nbytes + one.scales.nbytes for one in packed)


def test_gate_and_up_may_have_orders_of_their_own(folders: dict[str, tuple[Path, Tensor]], tmp_path: Path) -> None:
    """Each order is held, and the plan counts both."""
    shutil.copytree(folders["qwen2_moe"][0], tmp_path / "folder")
    file, generator = tmp_path / "folder" / "model.safetensors", torch.Generator().manual_seed(0)
    tensors = load_file(file)
    for name in [name for name in tensors if ".experts." in name and name.endswith("up_proj.g_idx")]:
        tensors[name] = tensors[name][torch.randperm(len(tensors[name]), generator=generator)]
    save_file(tensors, file)
    runner = folder_runner(tmp_path / "folder", "serve.dtype=bf16", *STEP)
    ports = runner._programs.any.inputs
    port, held = next(
        (p, x) for p, x in zip(ports, runner._given[Size(8)]) if p.held and p.held.form == "experts apart"
    )
    assert all(len(one.inward) == 2 for one in held) and not can_capture(runner._programs.any)
    assert port.local_bytes == sum(
        tensor.nbytes
        for expert in held
        for packed in (*expert.inward, expert.down)
        for tensor in ((packed.order, packed.weight.codes, packed.weight.scales) if hasattr(packed, "order")
                       else (packed.codes, packed.scales))
    )  # fmt: skip


def test_each_matrix_of_an_expert_is_decoded_once(
    folders: dict[str, tuple[Path, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where transformers has gate and up in one parameter."""
    decoded, read = list[str](), GPTQFolder.linear

    def count(folder: GPTQFolder, module: str) -> Quantized:
        decoded.append(module)
        return read(folder, module)

    monkeypatch.setattr(GPTQFolder, "linear", count)
    folder_runner(folders["qwen2_moe"][0], "serve.dtype=bf16", *STEP)
    experts = [module for module in decoded if ".experts." in module]
    assert len(experts) == len(set(experts)) == 2 * 4 * 3


# ---- `tpshard quantize` ---------------------------------------------------------------------------------------------
def text(seed: int) -> TaskRows:
    tokens = torch.randint(0, 128, (4, 32), generator=torch.Generator().manual_seed(seed))
    return text_rows(tokens, tokens.roll(-1, 1))


def quantizer(order: str, seen: int = 4) -> Quantizer:
    """A quantizer of a small mixture, whose first router sends no token to experts from `seen` on."""
    torch.manual_seed(0)
    model = build(MOE, device="cpu")
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    for name, parameter in parameters.items():
        parameter.copy_(torch.ones_like(parameter) if "norm" in name else torch.randn_like(parameter) * 0.1)
        if name.endswith("router.bias"):
            parameter.copy_(torch.where(torch.arange(4) < seen, 0.0, -100.0))
    return Quantizer(FamilyModel(MOE), parameters.__getitem__, text(0), text(1), Settings(group_size=16), order)  # type: ignore[arg-type]


@pytest.mark.parametrize("order", ["global", "none"])
def test_the_folder_holds_the_mixture_that_was_measured(order: str, tmp_path: Path) -> None:
    job = quantizer(order)
    weight = job.read("layers.0.mlp.experts.down.weight").clone()
    report = write_quantized(job, tmp_path / "out")
    assert torch.equal(job.read("layers.0.mlp.experts.down.weight"), weight), "the source is not written to"
    assert len(report.linears) == job.count == 2 * (4 + 3 + 3 * 4)
    assert all(0 < one.error < 0.2 for one in report.linears) and not report.unseen
    inward = [
        one for one in report.linears if one.name.startswith(("layers.0.mlp.experts.gate", "layers.0.mlp.experts.up"))
    ]
    assert sum(one.error for one in inward) < sum(one.nearest_error for one in inward)
    assert report.left_dense == []
    folder = GPTQFolder(tmp_path / "out")
    assert len(folder.modules) == job.count and folder.config.of("model.layers.0.mlp.gate") is None
    assert folder.linear("model.layers.0.mlp.experts.3.down_proj").sorted == (order == "none")
    back, held_out = from_hf(tmp_path / "out", dtype=torch.float32), text(1)
    with torch.no_grad():
        logits = back(held_out.batch["tokens"])
    loss = float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), held_out.batch["targets"].flatten()))
    assert abs(loss - report.loss_after) < 2e-3 and report.loss_after != report.loss_before  # type: ignore[operator]


def test_experts_without_tokens_are_rounded_and_named(tmp_path: Path) -> None:
    report = write_quantized(quantizer("global", seen=3), tmp_path / "out")
    names = [f"layers.{i}.mlp.experts.{leaf}[3]" for i in (0, 1) for leaf in ("gate", "up", "down")]
    assert report.unseen == names
    assert GPTQFolder(tmp_path / "out").linear("model.layers.0.mlp.experts.3.up_proj").sorted
