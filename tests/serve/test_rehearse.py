"""A rehearsal takes the same steps as the server, and its times follow from the steps' times."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tpshard.parallelism.pricing.cost import ServingOverhead
from tpshard.parallelism.pricing.fusion import CacheReads
from tpshard.plan.server.rehearse import rehearse
from tpshard.plan.server.traffic import Room, Traffic
from tpshard.programs.scheduling.request import Sampling, Sequence
from tpshard.serve.engine.engine import Engine
from tpshard.serve.engine.picks import Picked, Picks
from tpshard.serve.engine.sampling import pick
from tpshard.serve.engine.step import StepInput

ROOM = Room(blocks=40, rows=16, logit_rows=8, running=8, queue=4)


class Blank:
    """A runner that always predicts the same token, and records the cache blocks that each step reads."""

    blocks, block_size, max_rows, max_logit_rows, vocab, max_seq, slots = 40, 16, 16, 8, 4, 1000, 0

    def __init__(self, chunks: tuple[int, ...] | None = None) -> None:
        self.chunks = chunks
        self.seen: list[tuple[int, int]] = []

    def step(self, batch: StepInput, picks: Picks) -> Picked:
        ends = {s: int(batch.positions[batch.sequences == s].max()) // 16 + 1 for s in set(batch.sequences.tolist())}
        self.seen.append((len(batch.tokens), sum(ends.values())))
        return pick(torch.zeros(len(batch.logit_rows), self.vocab), picks)

    def close(self) -> None: ...


@pytest.mark.parametrize("chunks", [None, (4, 16), ()])
def test_a_rehearsal_takes_the_steps_of_the_engine(chunks: tuple[int, ...] | None) -> None:
    prompt, answer, count = 50, 60, 12  # more than the cache holds: some are preempted
    runner = Blank(chunks)
    engine = Engine(runner, max_running=8)
    for number in range(count):
        engine.add(Sequence((number, *([0] * (prompt - 1))), Sampling(temperature=0), answer))
    while engine.busy:
        engine.step()
    steps = []

    def step_s(rows: int, cached: CacheReads, chunk: bool = False) -> float:
        steps.append((rows, cached.blocks))
        assert not chunk or rows in (4, 16)
        return 1.0

    done = rehearse(replace(ROOM, chunks=chunks), Traffic(prompt, answer, clients=count, count=count), step_s)
    assert steps == runner.seen
    assert done.preempted == engine.scheduler.preemptions > 0
    assert done.seconds == done.steps == engine.steps


def test_times_of_a_request_alone_are_those_of_its_steps() -> None:
    done = rehearse(ROOM, Traffic(40, 5, rate=1e-6, count=10), lambda rows, *_: 0.5 if rows > 1 else 0.1)
    for one in done.answers:
        assert one.ttft == pytest.approx(3 * 0.5, rel=1e-3)  # 40 tokens in steps of 16
        assert one.tpot == pytest.approx(0.1, rel=1e-3)


def test_the_hosts_time_is_added_to_steps_tokens_and_requests() -> None:
    host = ServingOverhead(step_s=1.0, token_s=0.1, request_s=10.0)
    alone = rehearse(ROOM, Traffic(40, 5, rate=1e-6, count=10), lambda rows, *_: 0.5 if rows > 1 else 0.2, host)
    for one in alone.answers:
        assert one.ttft == pytest.approx(10.0 + 3 * (1.0 + 0.5) + 0.1, rel=1e-3)  # 40 tokens in steps of 16
        assert one.tpot == pytest.approx(0.2 + 1.0 + 0.1, rel=1e-3)
    together = rehearse(ROOM, Traffic(1, 5, clients=4, count=4), lambda rows, *_: 0.0, host)
    assert {round(one.tpot, 6) for one in together.answers} == {1.0 + 4 * 0.1}
    in_turn = rehearse(ROOM, Traffic(1, 1, clients=1, count=3), lambda rows, *_: 0.0, host)
    assert in_turn.seconds == pytest.approx(3 * (10.0 + 1.1)) and len(in_turn.answers) == 3


def test_a_queue_that_is_full_refuses() -> None:
    done = rehearse(ROOM, Traffic(16, 100, rate=1e3, count=60), lambda rows, *_: 0.1)
    assert done.refused == 60 - len(done.answers) > 0
    with pytest.raises(ValueError, match="do not fit a cache"):
        rehearse(ROOM, Traffic(600, 100, rate=1.0), lambda rows, *_: 0.1)
