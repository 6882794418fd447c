"""The auxiliary loss of experts has the weight and gradients of transformers' own, however many targets a row has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from tpshard.models import from_hf, to_hf
from tpshard.models.objectives.loss import cross_entropy_sum
from tpshard.models.objectives.targets import IGNORE
from tpshard.programs.compare.float64 import distance, float64
from tpshard.programs.compare.lockstep import Lockstep
from tpshard.programs.setting.setting import Setting
from tpshard.programs.step import training
from tpshard.recipes.reading.load import loads
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

torch.set_num_threads(1)
VOCAB, SEQ, ROWS, COEFFICIENT = 16, 8, 4, 0.5
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 4,
    "max_position_embeddings": 16, "num_experts_per_tok": 2, "router_aux_loss_coef": COEFFICIENT,
    "output_router_logits": True,
}  # fmt: skip
KINDS: dict[str, Any] = {
    "mixtral": (transformers.MixtralConfig, {"num_local_experts": 4, "intermediate_size": 8}),
    "qwen3_moe": (transformers.Qwen3MoeConfig, {"num_experts": 4, "moe_intermediate_size": 8, "norm_topk_prob": True}),
}
THEIRS = {
    "tok_embed.weight": "model.embed_tokens.weight", "layers.0.mlp.router.weight": "model.layers.0.mlp.gate.weight",
    "layers.0.attention.wq.weight": "model.layers.0.self_attn.q_proj.weight",
}  # fmt: skip


def folder_of(kind: str, layers: int, folder: Path) -> Path:
    cls, sizes = KINDS[kind]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(cls(**SHAPE, **sizes, num_hidden_layers=layers))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    return folder


def answers_only(run: Lockstep) -> list[Tensor]:
    """Lets the run's batches have targets at the ends of rows alone, more in later rows. Returns the fields."""
    rows, fields = run.batches._rows(), list(run.setting.task.fields)
    for row in range(ROWS):
        rows["targets"][row, : SEQ - 1 - row] = IGNORE
    run.batches._rows = lambda: rows  # type: ignore[method-assign]
    return [rows[field] for field in fields]


def their_gradients(folder: Path, tokens: Tensor, targets: Tensor, layers: int) -> dict[str, Tensor]:
    """Gradients of the summed loss by transformers' class and its function for the auxiliary loss, row by row."""
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, **plain).double()
    top_k, experts = 2, 4
    with float64():
        for row in range(ROWS):
            out = model(tokens[row : row + 1])
            loss, count = cross_entropy_sum(out.logits, targets[row : row + 1])
            even = [load_balancing_loss_func((logits,), experts, top_k) for logits in out.router_logits]
            own = loss / count + COEFFICIENT * sum(even) / layers
            if layers == 1:  # transformers takes the means of all layers and rows together
                labels = targets[row : row + 1]
                theirs = model(tokens[row : row + 1], labels=labels, shift_labels=labels)
                assert float(theirs.loss) == pytest.approx(float(own), rel=1e-9)
            (own * count).backward()
    return {ours: model.get_parameter(name).grad for ours, name in THEIRS.items()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("layers", "mesh", "overrides"),
    [
        (1, "{}", ["batch.per_device=2"]), (2, "{fsdp: 2}", []), (2, "{fsdp: 2, tp: 2}", ["batch.per_device=1"]),
        (2, "{pp: 2, ep: 2}", ["pipeline={}", "batch.per_device=1"]),
    ],
)  # fmt: skip
def test_gradients_are_transformers_own(
    kind: str, layers: int, mesh: str, overrides: list[str], tmp_path: Path
) -> None:
    folder = folder_of(kind, layers, tmp_path / "folder")
    text = f"model: {{hf: {str(folder)!r}, seq_len: {SEQ}, dtype: fp32}}\nmesh: {mesh}\ncluster: {{device: cpu}}\n"
    setting = Setting.of(loads(text + f"batch: {{global_sequences: {ROWS}}}\n", overrides))
    run = Lockstep(training.build(setting), VOCAB)
    weights = {name: p.detach().double() for name, p in from_hf(folder).named_parameters()}
    run.values |= {port.key: run.local(weights[port.name], port) for port in run.programs.stored}
    tokens, targets, *_ = answers_only(run)
    gradients = run.step().gradients
    for name, expected in their_gradients(folder, tokens, targets, layers).items():
        assert distance(gradients[name], expected) <= 1e-8, name  # their rotary frequencies are rounded to fp32


@pytest.mark.parametrize("coefficient", [0.0, 0.02, 0.001])
@pytest.mark.parametrize("kind", KINDS)
def test_a_written_folder_has_the_coefficient_that_was_read(kind: str, coefficient: float, tmp_path: Path) -> None:
    cls, sizes = KINDS[kind]
    config = cls(**SHAPE | {"router_aux_loss_coef": coefficient}, **sizes, num_hidden_layers=3)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "folder")
    to_hf(from_hf(tmp_path / "folder"), tmp_path / "again")
    assert transformers.AutoConfig.from_pretrained(tmp_path / "again").router_aux_loss_coef == coefficient
