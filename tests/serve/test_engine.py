"""A request's tokens do not depend on other requests; nothing is computed twice, and no block is leaked."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tpshard.programs.scheduling.request import Logprob, Sampling, Sequence
from tpshard.serve.engine.engine import Engine
from tpshard.serve.engine.picks import Picked, Picks
from tpshard.serve.engine.runner import ProgramRunner
from tpshard.serve.engine.sampling import pick
from tpshard.serve.engine.step import StepInput

GREEDY = Sampling(temperature=0, logprobs=2)


def prompt(length: int, seed: int) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(draw.randrange(300) for _ in range(length))


def run(engine: Engine, sequences: list[Sequence]) -> dict[int, list[Logprob]]:
    scores: dict[int, list[Logprob]] = {s.id: [] for s in sequences}
    for s in sequences:
        engine.add(s)
    while engine.busy:
        events = engine.step()
        for event in events:
            if event.logprob is not None:
                scores[event.sequence.id].append(event.logprob)
    return scores


def alone(runner: ProgramRunner, s: Sequence) -> tuple[list[int], list[Logprob]]:
    copy = Sequence(s.prompt, s.sampling, s.max_tokens, s.choice)
    return copy.tokens, run(Engine(runner), [copy])[copy.id]


def crowd() -> list[Sequence]:
    drawn = Sampling(temperature=1.3, top_p=0.9, seed=5, logprobs=2)
    kinds = [GREEDY, drawn, Sampling(temperature=0.8, top_k=20, min_p=0.01, seed=6, logprobs=2)]
    lengths = (1, 7, 16, 33, 64, 65, 100)
    return [Sequence(prompt(n, n), kinds[i % 3], 12, choice=i % 2) for i, n in enumerate(lengths)]


def test_greedy_equals_the_model(model: torch.nn.Module, runner: ProgramRunner) -> None:
    sequences = [Sequence(prompt(n, n), GREEDY, 10) for n in (3, 20, 70, 200)]
    scores = run(Engine(runner), sequences)
    for s in sequences:
        logits = model(torch.tensor([s.tokens[:-1]]))[0, len(s.prompt) - 1 :]
        assert logits.argmax(-1).tolist() == s.answer
        expected = torch.log_softmax(logits.double(), -1).max(-1).values
        values = torch.tensor([x.logprob for x in scores[s.id]], dtype=torch.float64)
        torch.testing.assert_close(values, expected, rtol=0, atol=1e-4)


def test_tokens_and_logprobs_are_the_same_bits_in_every_batch(runner: ProgramRunner) -> None:
    together = crowd()
    scores = run(Engine(runner), together)
    assert len({tuple(s.answer) for s in together}) == len(together)
    for s in together:
        tokens, expected = alone(runner, s)
        assert s.tokens == tokens
        assert scores[s.id] == expected


def test_eight_blocks_force_preemption_and_give_the_same_text(runner: ProgramRunner) -> None:
    def requests() -> list[Sequence]:
        return [Sequence(prompt(n, n), GREEDY, 40) for n in (20, 24, 28, 40)]

    free, tight = requests(), requests()
    unlimited, limited = Engine(runner), Engine(runner, blocks=8)
    expected, actual = run(unlimited, free), run(limited, tight)
    assert unlimited.scheduler.preemptions == 0 < limited.scheduler.preemptions
    assert limited.computed_tokens > unlimited.computed_tokens
    for a, b in zip(free, tight):
        assert a.tokens == b.tokens
        assert expected[a.id] == actual[b.id]
    assert limited.pool.available == limited.pool.total == 8


def test_a_prefix_is_computed_once(runner: ProgramRunner) -> None:
    shared = prompt(96, 9)
    first, second = Sequence(shared + (1, 2), GREEDY, 1), Sequence(shared + (3, 4), GREEDY, 1)
    engine = Engine(runner)
    run(engine, [first, second])  # both at once: the second waits for what the first computes
    assert engine.computed_tokens == 98 + 2
    assert engine.scheduler.prefix_hit_tokens == 96
    run(engine, [Sequence(shared + (1, 2), GREEDY, 1)])
    assert engine.computed_tokens == 98 + 2 + 2


def test_a_reused_prefix_changes_no_bit(runner: ProgramRunner) -> None:
    engine = Engine(runner)
    run(engine, [Sequence(prompt(80, 3), GREEDY, 6)])
    again = Sequence(prompt(80, 3), GREEDY, 6)
    scores = run(engine, [again])
    assert engine.scheduler.prefix_hit_tokens == 64
    assert scores[again.id] == alone(runner, again)[1]


def test_a_temperature_near_zero_is_greedy(runner: ProgramRunner) -> None:
    greedy = alone(runner, Sequence(prompt(9, 1), GREEDY, 8))[0]
    for temperature in (1e-10, 1e-308, 5e-324):
        for more in ({}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 3}):
            cold = Sampling(temperature=temperature, seed=3, logit_bias=((1, -100.0),), **more)
            assert alone(runner, Sequence(prompt(9, 1), cold, 8))[0] == greedy


class Overflowing:
    """A runner whose logits are not finite after one token."""

    def __init__(self, runner: ProgramRunner, token: int, value: float) -> None:
        self.runner, self.token, self.value = runner, token, value

    def __getattr__(self, name: str) -> object:
        return getattr(self.runner, name)

    def step(self, batch: StepInput, picks: Picks) -> Picked:
        logits = self.runner.logits(batch)
        logits[torch.from_numpy(batch.tokens[batch.logit_rows] == self.token), 5] = self.value
        return pick(logits, picks)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_end_their_own_sequence_alone(runner: ProgramRunner, value: float) -> None:
    engine = Engine(Overflowing(runner, 299, value))  # type: ignore[arg-type]
    bad, good = Sequence((7, 299), GREEDY, 8), Sequence((7, 8), GREEDY, 8)
    scored = Sequence((7, 299, 9), GREEDY, 8, prompt_logprobs=True)
    errors = {}
    for s in (bad, good, scored):
        engine.add(s)
    while engine.busy:
        errors |= {e.sequence.id: e.error for e in engine.step() if e.finish == "error"}
    assert set(errors) == {bad.id, scored.id} and "not finite" in str(errors[bad.id])
    assert good.tokens == alone(runner, good)[0]
    assert engine.pool.available == engine.pool.total


def test_aborted_sequences_give_their_blocks_back(runner: ProgramRunner) -> None:
    engine = Engine(runner)
    sequences = crowd()
    for s in sequences:
        engine.add(s)
    for _ in range(3):
        engine.step()
    assert engine.pool.available < engine.pool.total
    for s in sequences:
        engine.abort(s)
        engine.abort(s)
    assert engine.pool.available == engine.pool.total
    assert not engine.busy


def test_prompt_scores_equal_the_model(model: torch.nn.Module, runner: ProgramRunner) -> None:
    engine = Engine(runner, blocks=16)
    sequences = [Sequence(prompt(n, n), GREEDY, 1, prompt_logprobs=True) for n in (100, 150, 2, 1)]
    run(engine, sequences)
    ours, rounded = [], []
    for s in sequences:
        assert [x.token for x in s.prompt_scores] == list(s.prompt[1:])
        values = torch.tensor(s.prompt[1:])[:, None]
        plain, exact = (
            torch.log_softmax(m(torch.tensor([s.prompt]))[0, :-1].double(), -1).gather(1, values)[:, 0]
            for m in (model, copy.deepcopy(model).double())
        )
        actual = torch.tensor([x.logprob for x in s.prompt_scores], dtype=torch.float64)
        ours.append((actual - exact).abs())
        rounded.append((plain - exact).abs())
    # sharpened weights make rounding large, and every CPU rounds otherwise: near the exact value as fp32 itself is
    assert torch.cat(ours).max() <= 2 * torch.cat(rounded).max() + 1e-5


def test_prompts_at_the_limit(runner: ProgramRunner) -> None:
    engine = Engine(runner)
    assert engine.limit == 512
    run(engine, [exact := Sequence(prompt(511, 1), GREEDY, 1)])
    assert len(exact.tokens) == 512
    run(engine, [scored := Sequence(prompt(512, 1), GREEDY, 0, prompt_logprobs=True)])
    assert len(scored.prompt_scores) == 511
    for length, new in ((512, 1), (513, 0), (511, 2), (0, 4)):
        with pytest.raises(ValueError, match="do not fit"):
            engine.add(Sequence(prompt(length, 1), GREEDY, new))


@settings(max_examples=15, deadline=None)
@given(
    blocks=st.integers(6, 24),
    sizes=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 24)), min_size=1, max_size=8),
    leave=st.integers(0, 30),
)
def test_everything_ends_and_all_blocks_come_back(
    runner: ProgramRunner, blocks: int, sizes: list[tuple[int, int]], leave: int
) -> None:
    engine = Engine(runner, blocks=blocks)
    sequences = [Sequence(prompt(n, n % 3), GREEDY, new) for n, new in sizes]
    for s in sequences:
        engine.add(s)
    steps = 0
    while engine.busy:
        engine.step()
        steps += 1
        assert steps < 2000
        if steps == leave:
            engine.abort(sequences[0])
        held = {b for s in engine.scheduler.running for b in s.blocks}
        assert len(held) + engine.pool.available == blocks
    assert engine.pool.available == blocks
    for s in sequences:
        assert s.finish == "abort" or len(s.answer) == s.max_tokens


def test_a_step_travels_as_bytes() -> None:
    def ints(*shape: int) -> np.ndarray:
        return np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape)

    step = StepInput(ints(5), ints(5), ints(5), ints(5), ints(2, 3), ints(2))
    back = StepInput.decode(step.encode())
    for name in ("tokens", "positions", "slots", "sequences", "tables", "logit_rows"):
        assert np.array_equal(getattr(step, name), getattr(back, name))
    for wrong in (step.encode()[:-1], step.encode() + b"x", b"", b"\x80\x04" + step.encode()):
        with pytest.raises(ValueError, match="message"):
            StepInput.decode(wrong)
