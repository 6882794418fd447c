"""Tokens are picked where the logits are: the right ones with the right frequency, the same in every batch."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from tpshard.parallelism.mesh import Mesh
from tpshard.parallelism.sharding import Layout
from tpshard.programs.scheduling.request import Sampling, Sequence
from tpshard.programs.server import token_choice
from tpshard.programs.server.sampling_programs import Choice, sampling_program, select_by_kernel
from tpshard.programs.server.token_choice import drawn, likeliest, nucleus, scores, selected
from tpshard.serve.engine.picks import CHOOSE, NOTHING, Picked, Picks, Told, picks_of
from tpshard.serve.engine.sampling import Recalled, pick

VOCAB = 5000
SETTINGS = [
    Sampling(temperature=0),
    Sampling(temperature=1.0, logprobs=3),
    Sampling(temperature=0.7, top_k=5),
    Sampling(temperature=1.3, top_p=0.9),
    Sampling(temperature=3.0, top_p=0.999),  # needs more than the candidates
    Sampling(temperature=1.0, min_p=0.05),
    Sampling(temperature=1.0, top_k=40, top_p=0.8, min_p=0.1, logprobs=0),
    Sampling(temperature=0.9, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.2, top_p=0.95),
    Sampling(temperature=0, logit_bias=((7, 100.0),), excluded=((7,),), not_first=(3,)),
]


def changed(logits: Tensor, picks: Picks) -> Tensor:
    """The logits that a step's tokens are chosen of."""
    recalled = Recalled(0, logits.shape[-1], len(logits), torch.device("cpu"))
    recalled.recall(picks.told)
    return recalled.change(logits, picks)


def sequence(number: int, s: Sampling) -> Sequence:
    draw = random.Random(number)
    made = Sequence(tuple(draw.randrange(VOCAB) for _ in range(9)), s, 100, choice=number)
    made.tokens += [draw.randrange(VOCAB) for _ in range(5)]
    return made


def expected_weights(logits: Tensor, s: Sampling) -> Tensor:
    """The distribution [vocab] in fp64, by sorting all tokens."""
    values, tokens = (logits.double() / s.temperature).sort(descending=True, stable=True)
    probabilities = torch.softmax(values[: s.top_k or None], 0)
    before = probabilities.cumsum(0) - probabilities
    keep = (before < s.top_p) & (probabilities >= s.min_p * probabilities[0])
    return torch.zeros(len(logits), dtype=torch.float64).index_put_(
        (tokens[: len(keep)],), probabilities.where(keep, 0.0)
    )


@pytest.mark.parametrize("s", [s for s in SETTINGS if s.temperature and s.repetition_penalty == 1], ids=str)
def test_draws_have_the_frequencies_of_the_distribution(s: Sampling) -> None:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1)) * 2
    weights = expected_weights(logits, s)
    wanted = weights / weights.sum()
    count = 300
    rows = [(Sequence((number,), s, 9, choice=number), CHOOSE) for number in range(count)]
    found = pick(logits.expand(count, -1), picks_of(rows))
    drawn = Counter(found.token(row) for row in range(count))
    assert all(wanted[token] > 0 for token in drawn)
    for token in wanted.topk(3).indices.tolist():
        spread = math.sqrt(count * float(wanted[token]))
        assert abs(drawn[token] - count * float(wanted[token])) < 5 * spread + 1


def test_a_row_alone_has_the_bits_that_it_has_among_others() -> None:
    logits = torch.randn(len(SETTINGS), VOCAB, generator=torch.Generator().manual_seed(2)) * 2
    rows = [(sequence(number, s), CHOOSE) for number, s in enumerate(SETTINGS)]
    together = pick(logits, picks_of(rows))
    for number, row in enumerate(rows):
        alone = pick(logits[number : number + 1], picks_of([row]))
        assert alone.token(0) == together.token(number)
        top = row[0].sampling.logprobs
        if top is not None:
            assert alone.logprob(0, top) == together.logprob(number, top)


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
@pytest.mark.parametrize("tp", [2, 4])
def test_parts_of_the_vocabulary_choose_the_same_tokens_with_the_same_bits(tp: int, kind: str) -> None:
    """What is chosen is what one device chooses of all logits, in each setting."""
    mesh = Mesh({"tp": tp})
    layout = Layout(((), (mesh.axis("tp"),)))

    def together(choice: Choice, *tensors: Tensor, **static: Any) -> list[Tensor]:
        program = sampling_program(choice, mesh, layout, len(tensors[0]), VOCAB, **static)
        program = program if kind == "cpu" else select_by_kernel(program)
        assert kind == "cpu" or not program.graph.find_nodes(op="call_function", target=torch.ops.aten.topk.default)
        return program.simulate(*tensors)

    logits = torch.randn(2 * len(SETTINGS), VOCAB, generator=torch.Generator().manual_seed(5)) * 4
    logits[len(SETTINGS) :] = (logits[len(SETTINGS) :] / 4).round()  # many equal ones, and flat
    picks = picks_of([(sequence(number, s), CHOOSE) for number, s in enumerate(2 * SETTINGS)])
    assert np.array_equal(pick(logits, picks).table, pick(logits, picks, choosing=together).table)


def test_logits_do_not_travel() -> None:
    mesh = Mesh({"tp": 8})
    for choice, most in ((likeliest, 4e3), (drawn, 7e3), (nucleus, 1.1e6), (selected, 1.7e6), (scores, 9e4)):
        count = 20 if choice is scores else None
        program = sampling_program(choice, mesh, Layout(((), (mesh.axis("tp"),))), 64, 128_256, count)
        assert sum(one.bytes for one in program.collectives) < most + 2e3, choice.__name__  # of 33 MB of logits


def test_ranks_are_told_news_alone() -> None:
    """Of sequences that come, go on and come back; a slot that another one had begins anew."""
    told, recalled = Told(2), Recalled(0, VOCAB, 2, torch.device("cpu"))
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(6))
    s = [Sampling(0, repetition_penalty=1.5, frequency_penalty=0.3), Sampling(0, logit_bias=((4, 2.0), (9, -1.0)))]
    all_three = [sequence(number, s[number % 2]) for number in range(3)]
    for step, now in enumerate(([0, 1], [0, 1], [2, 1], [0, 2], [0, 2])):
        rows = [(all_three[number], CHOOSE) for number in now]
        picks = Picks.decode(picks_of(rows, told).encode())
        recalled.recall(picks.told)
        alone = picks_of(rows)
        assert torch.equal(recalled.change(logits, picks), changed(logits, alone))
        assert (len(picks.told) < 3) == (step in (1, 4)) and len(alone.told) > 3
        for row in rows:
            row[0].tokens.append(17 + step)


def test_equal_logits_are_taken_in_the_order_of_their_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where more of them are equal than candidates were looked at."""
    logits = torch.zeros(1, 300)
    logits[0, 200:] = 1.0
    monkeypatch.setattr(token_choice, "CANDIDATES", 8)
    rows = [(Sequence((1,), Sampling(temperature=0.01, top_k=20), 9, choice=i), CHOOSE) for i in range(200)]
    found = pick(logits.expand(200, -1), picks_of(rows))
    assert {found.token(row) for row in range(200)} == set(range(200, 220))


def test_penalties_biases_and_excluded_tokens() -> None:
    s = Sampling(temperature=0, repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25,
                 logit_bias=((4, 1.5), (6, 1.0)), excluded=((2, 5), (9, 1), (99_999,)), min_tokens=9)  # fmt: skip
    one = Sequence((3, 4), s, 9, stop_tokens=frozenset({8}))
    one.tokens += [4, 4, 2]
    logits = torch.tensor([[1.0, 1, 1, -1, 2, 1, 1, 1, 1, 1]])
    found = changed(logits, picks_of([(one, CHOOSE)]))
    inf = math.inf
    assert found.tolist() == [[1.0, 1, 1 / 2 - 0.75, -2, 1 - 1.0 + 1.5, -inf, 2, 1, -inf, 1]]
    one.tokens.append(7)
    assert changed(logits, picks_of([(one, CHOOSE)]))[0, 7] == 1 / 2 - 0.75
    assert logits[0, 4] == 2, "the model's own logits stay for log-probabilities"


def test_scored_tokens_and_rows_that_are_not_needed() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(3))
    s = Sampling(temperature=0, logprobs=2)
    one = Sequence((1, 2, 3), s, 5)
    found = pick(logits, picks_of([(one, 17), (one, NOTHING), (one, CHOOSE)]))
    logprobs = torch.log_softmax(logits.double(), -1)
    assert found.token(0) == 17 and abs(found.logprob(0, 2).logprob - float(logprobs[0, 17])) < 1e-9
    assert [token for token, _ in found.logprob(2, 2).top] == logits[2].topk(2).indices.tolist()
    assert found.token(2) == int(logits[2].argmax()) == found.logprob(2, 1).top[0][0]
    many = Sequence((1,), Sampling(temperature=0, logprobs=80), 5)  # more than there are tokens
    assert len(pick(logits[:1], picks_of([(many, CHOOSE)])).logprob(0, 80).top) == 80


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_rows_that_are_not_finite_are_named_and_leave_others_alone(value: float) -> None:
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(4))
    rows = [(sequence(number, SETTINGS[3]), CHOOSE) for number in range(2)]
    before = pick(logits, picks_of(rows))
    logits[0, 5] = value
    after = pick(logits, picks_of(rows))
    assert not after.sound(0) and after.sound(1) and after.token(1) == before.token(1)


def test_requests_and_answers_travel_as_bytes() -> None:
    picks = picks_of([(sequence(number, s), CHOOSE) for number, s in enumerate(SETTINGS)])
    back = Picks.decode(picks.encode())
    for name in ("settings", "wanted", "changed", "told", "barred"):
        assert np.array_equal(getattr(picks, name), getattr(back, name))
    for wrong in (b"", picks.encode()[:-1], picks.encode() + b"x", b"\x80\x04" + picks.encode()):
        with pytest.raises(ValueError, match="no request"):
            Picks.decode(wrong)
    found = pick(torch.randn(len(SETTINGS), VOCAB), picks)
    assert np.array_equal(Picked.decode(found.encode()).table, found.table)
    none = pick(torch.zeros(0, VOCAB), picks_of([]))  # a step in the middle of a prompt
    assert Picked.decode(none.encode()).table.shape == none.table.shape
