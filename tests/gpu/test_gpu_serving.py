"""A server's steps on a device equal those of the CPU: dense, quantized and recurrent, whatever else is in a batch."""

from __future__ import annotations

import copy
import random
from pathlib import Path

import architectures
import gptq_folders
import pytest
import torch
from servers import folder_runner, prompts, runner_of
from torch import Tensor
from tpshard.models import build
from tpshard.models.families.presets import PRESETS
from tpshard.programs.scheduling.request import Logprob, Sampling, Sequence
from tpshard.serve.engine.engine import Engine
from tpshard.serve.engine.runner import ProgramRunner
from tpshard.serve.engine.sampling import alone

pytestmark = pytest.mark.gpu
LENGTHS = (1, 7, 16, 33, 64, 65, 100)


def crowd() -> list[Sequence]:
    draw = random.Random(0)
    kinds = Sampling(temperature=0, logprobs=2), Sampling(temperature=1.3, top_p=0.9, seed=5, logprobs=2)
    return [
        Sequence(tuple(draw.randrange(500) for _ in range(length)), kinds[i % 2], 12)
        for i, length in enumerate(LENGTHS)
    ]


def answered(runner: ProgramRunner, sequences: list[Sequence]) -> dict[int, list[Logprob]]:
    engine, scores = Engine(runner), dict[int, list[Logprob]]()
    for s in sequences:
        engine.add(s)
    while engine.busy:
        for event in engine.step():
            if event.logprob is not None:
                scores.setdefault(event.sequence.id, []).append(event.logprob)
    return scores


def test_a_batch_has_the_bits_of_each_alone_and_the_values_of_the_model() -> None:
    model = build(PRESETS["tiny"], device="cpu", seed=1).float()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)
    runner = runner_of(copy.deepcopy(model).cuda(), "serve.batch_invariant=true", blocks=256)
    together = crowd()
    scores = answered(runner, together)
    assert all(type(run).__name__ == "Captured" for size, run in runner._run.items() if size.rows <= 64)
    for s in together:
        one = Sequence(s.prompt, s.sampling, s.max_tokens, s.choice)
        assert answered(runner, [one])[one.id] == scores[s.id] and one.tokens == s.tokens
        expected = torch.log_softmax(model(torch.tensor([s.tokens[:-1]]))[0, len(s.prompt) - 1 :].double(), -1)
        picked = expected.gather(1, torch.tensor(s.answer)[:, None])[:, 0]
        assert [x.logprob for x in scores[s.id]] == pytest.approx(picked.tolist(), abs=2e-3)


def test_tokens_chosen_by_replayed_programs_are_those_of_one_device() -> None:
    model = build(PRESETS["tiny"], device="cpu", seed=1).float()
    answers = []
    for replayed in (False, True):
        runner = runner_of(copy.deepcopy(model).cuda(), "serve.batch_invariant=true", blocks=256)
        if not replayed:
            runner._choosing = alone
        kinds = [
            Sampling(temperature=0, logprobs=2), Sampling(temperature=0.8, top_k=7, seed=1), Sampling(seed=3),
            Sampling(temperature=1.3, top_p=0.9, seed=5, logprobs=2), Sampling(min_p=0.05, seed=9, temperature=1.1),
            Sampling(temperature=0, presence_penalty=0.7, frequency_penalty=0.2, logit_bias=((5, 2.0),)),
        ]  # fmt: skip
        sequences = [Sequence(tuple(range(3, 10 + i)), kinds[i % len(kinds)], 10) for i in range(12)]
        scores = answered(runner, sequences)
        answers.append(([s.tokens for s in sequences], [scores.get(s.id) for s in sequences]))
        if replayed:
            chosen = runner._choosing._run  # type: ignore[attr-defined]
            assert chosen and all(type(run).__name__ == "Captured" for run in chosen.values())
    assert answers[0] == answers[1]


def step_of(folder: Path, device: str, *overrides: str) -> Tensor:
    """Logits of two prompts at once."""
    return folder_runner(folder, *overrides, device=device).logits(prompts()).double().cpu()


@pytest.mark.parametrize("invariant", ["true", "false"])
@pytest.mark.parametrize("name", ["llama", "mixtral", "gpt2"])
def test_quantized_folders(name: str, invariant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Act-ordered folders of transformers, with and without experts, and one whose matrices are transposed."""
    config = architectures.CONFIGS[name]
    wider = {key: value for key, value in gptq_folders.WIDER.items() if key in config}
    monkeypatch.setitem(architectures.CONFIGS, name, {**config, **wider})
    folder, _ = gptq_folders.quantized(name, tmp_path / name)
    reference = step_of(folder, "cpu", "serve.dtype=fp32")
    actual = step_of(folder, "cuda", f"serve.batch_invariant={invariant}")
    assert (actual - reference).norm() <= 3e-2 * reference.norm()


@pytest.mark.parametrize("name", ["gemma2", "qwen3_next", "mamba"])
def test_dense_folders(name: str, tmp_path: Path) -> None:
    """Windows and soft caps, the delta rule, and the selective scan, whose prompts come in chunks."""
    folder = architectures.folder(tmp_path, name, weights=True)
    scores = []
    for place in ("cpu", "cuda"):
        sequences = [Sequence(tuple(range(3, 3 + n)), Sampling(temperature=0, logprobs=2), 8) for n in (1, 20, 37)]
        found = answered(folder_runner(folder, "serve.dtype=fp32", blocks=64, device=place), sequences)
        scores.append([x.logprob for s in sequences for x in found[s.id]])
    assert scores[1] == pytest.approx(scores[0], abs=5e-3)
