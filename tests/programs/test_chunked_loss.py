"""A loss in chunks is the whole one: loss, gradients and collectives, with fewer logits in memory."""

from __future__ import annotations

from pathlib import Path

import architectures
import pytest
import torch
import torch.nn.functional as F
from tpshard.diagnostics.diagnostic import Exit, Mistakes
from tpshard.models.objectives.chunked_head import in_chunks, project
from tpshard.models.objectives.loss import LossTerms, cross_entropy_sum
from tpshard.models.objectives.targets import IGNORE
from tpshard.plan import planner
from tpshard.programs.compare.float64 import BOUND, distance, float64
from tpshard.programs.compare.lockstep import Lockstep
from tpshard.programs.setting.setting import Setting
from tpshard.programs.step import training
from tpshard.recipes.reading.load import loads
from training_cases import setting_of


@pytest.mark.parametrize("bias", [False, True])
def test_gradients_are_those_of_the_whole_loss(bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = [(2, 12, 5), (7, 5), *[(7,)] * bias]
    tensors = [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in sizes]
    targets = torch.randint(0, 7, (2, 12), generator=generator)
    targets[:, 3] = IGNORE
    results = []
    for chunks in (1, 4):
        with in_chunks(chunks), float64():
            loss, count = cross_entropy_sum(project(*tensors), targets)
            results.append((loss, count, *torch.autograd.grad(3 * loss, tensors)))
    for whole, in_parts in zip(*results, strict=True):
        torch.testing.assert_close(in_parts, whole, rtol=BOUND, atol=BOUND)


def test_terms_of_the_loss_are_those_of_torch_and_palm() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 5, 7, generator=generator, dtype=torch.float64).requires_grad_()
    targets = torch.randint(0, 7, (2, 5), generator=generator)
    targets[:, 3] = IGNORE
    with float64():
        loss, _ = cross_entropy_sum(logits, targets, LossTerms(0.2, 0.1))
        (gradient,) = torch.autograd.grad(loss, logits)
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), label_smoothing=0.2, reduction="sum")
    expected = expected + 0.1 * (logits.logsumexp(-1).square() * (targets != IGNORE)).sum()
    torch.testing.assert_close(loss, expected, rtol=BOUND, atol=BOUND)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, logits)[0], rtol=BOUND, atol=BOUND)


@pytest.mark.parametrize(
    ("mesh", "overrides"),
    [
        ({"fsdp": 2, "tp": 2}, ["model.tie_embeddings=true", "task=mlm", "loss={label_smoothing: 0.1, z_loss: 0.01}"]),
        ({"fsdp": 2, "cp": 2}, ["sharding.rules={batch: fsdp, seq: cp}"]),
        ({"pp": 2}, ["pipeline={schedule: zero_bubble}"]),
    ],
)
def test_a_step_on_any_mesh_is_that_of_the_whole_loss(mesh: dict[str, int], overrides: list[str]) -> None:
    whole, parts = ([] if n == 1 else [f"loss.chunks={n}"] for n in (1, 3))
    kept = [o for o in overrides if o.startswith(("model", "task", "loss"))]
    one = Lockstep(training.build(setting_of({}, *kept, *whole)), 40).step()
    two = Lockstep(training.build(setting_of(mesh, *overrides, *parts)), 40).step()
    assert two.loss == pytest.approx(one.loss, rel=BOUND)
    assert all(distance(two.gradients[name], gradient) <= BOUND for name, gradient in one.gradients.items())


def test_less_is_held_and_as_much_sent() -> None:
    """Also where a compiler makes one kernel of the additions of the chunks' gradients."""
    inputs = ["model.vocab=4000", "model.seq_len=512", "compile=inductor"]
    peaks, sent = [], []
    for chunks in (1, 8):
        price = planner.price_training(
            training.build(setting_of({"fsdp": 2, "tp": 2}, *inputs, f"loss.chunks={chunks}"))
        )
        micro = price.parts[0]
        peaks.append(max(micro.memory.by_category["logits_and_loss"]))
        sent.append(sum(c.bytes for c in micro.part.program.collectives if c.axes == ("fsdp",)))
    assert peaks[1] < peaks[0] / 4 and sent[0] >= sent[1]


def test_a_class_of_transformers_leaves_its_head_or_is_refused(tmp_path: Path) -> None:
    recipe = (
        "cluster: {{device: cpu}}\nmodel: {{transformers: {}, seq_len: 8, dtype: fp32}}\nbatch: {{per_device: 2}}\n"
    )

    def step(name: str, chunks: int) -> Lockstep:
        text = recipe.format(architectures.folder(tmp_path / name, name))
        return Lockstep(training.build(Setting.of(loads(text, [f"loss.chunks={chunks}"]))), architectures.VOCAB)

    one, two = step("qwen2", 1).step(), step("qwen2", 4).step()
    assert two.loss == pytest.approx(one.loss, rel=BOUND)
    with pytest.raises(Mistakes) as caught:
        step("gemma2", 4)  # caps its logits
    assert caught.value.exit == Exit.FIT and "loss.chunks" in str(caught.value)


@pytest.mark.parametrize("overrides", [["loss.chunks=5"], ["loss.chunks=4", "task=package:Class"]])
def test_chunks_that_cannot_be_are_a_mistake_of_the_recipe(overrides: list[str]) -> None:
    with pytest.raises(Mistakes, match=r"loss\.chunks"):
        setting_of({}, *overrides)
