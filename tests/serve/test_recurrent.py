"""Models with recurrent layers: a server computes what transformers does, and states do not pass to other sequences."""

from __future__ import annotations

import random
from collections.abc import Sequence as Items
from pathlib import Path

import architectures
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from servers import Lockstep, lockstep, sequences_for
from torch import Tensor
from tpshard.models.transformers import patch_recurrences
from tpshard.models.transformers.patch_attention import Step
from tpshard.programs.scheduling.blocks import BlockPool
from tpshard.programs.scheduling.recurrent_scheduler import RecurrentScheduler
from tpshard.programs.scheduling.request import Sampling, Sequence
from tpshard.programs.server.serve_setting import ServeSetting, Size
from tpshard.programs.server.served import model_to_serve
from tpshard.programs.server.serving import ServingPrograms, build_serving
from tpshard.recipes.reading.load import loads
from tpshard.serve.engine.engine import Engine
from tpshard.serve.engine.weights import Weights

GREEDY = Sampling(temperature=0, logprobs=2)


def setting_of(name: str, place: Path, *overrides: str) -> ServeSetting:
    folder = architectures.folder(place, name)
    text = f"model: {{transformers: '{folder}', seq_len: 64}}\nserve: {{mesh: {{tp: 1}}, dtype: fp32}}\n"
    recipe = loads(text, ["serve.requests=4", *overrides])
    return ServeSetting.of(recipe, model_to_serve(recipe, "cpu"), "cpu")


def programs_of(name: str, place: Path, *overrides: str) -> ServingPrograms:
    return build_serving(setting_of(name, place, "serve.step_tokens=16", *overrides))


@pytest.fixture(scope="module", params=[1, 2])
def qwen3_next(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ServingPrograms:
    """Programs of the largest class, for one device and for two."""
    return programs_of("qwen3_next", tmp_path_factory.mktemp("qwen3_next"), f"serve.mesh.tp={request.param}")


one_device = pytest.mark.parametrize("qwen3_next", [1], indirect=True, ids=[""])
two_devices = pytest.mark.parametrize("qwen3_next", [2], indirect=True, ids=[""])


def weights_of(name: str) -> Weights:
    values = architectures.values(name)

    def block(path: str, starts: Items[int], sizes: Items[int]) -> Tensor:
        return values[path][tuple(slice(start, start + size) for start, size in zip(starts, sizes))]

    return Weights({path: tuple(value.shape) for path, value in values.items()}, block)


def logits_of(name: str, tokens: Items[int]) -> Tensor:
    """transformers' own logits [tokens, vocab] of a sequence."""
    own = architectures.own(name)
    with torch.no_grad():
        row = torch.tensor([list(tokens)])
        return torch.func.functional_call(own, architectures.values(name), (row,)).logits[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize(("name", "tp"), [("falcon_h1", 1), ("lfm2", 1), ("mamba", 2)])
def test_chunks_and_single_tokens_continue_a_sequence(name: str, tp: int, tmp_path: Path) -> None:
    assert_continued(programs_of(name, tmp_path, f"serve.mesh.tp={tp}"), name)


@two_devices
def test_chunks_and_single_tokens_continue_a_sequence_on_two_devices(qwen3_next: ServingPrograms) -> None:
    assert_continued(qwen3_next, "qwen3_next")


def assert_continued(programs: ServingPrograms, name: str) -> None:
    chunks = programs.setting.chunks
    assert chunks == (4, 16)
    logits = lockstep(programs, weights_of(name), blocks=3)
    expected = torch.cat([logits_of(name, tokens.tolist()) for tokens in sequences_for(chunks)])
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)  # without states they differ by 5


def test_a_module_that_forgets_its_state_computes_single_tokens(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:  # fmt: skip
    """As transformers' own scan of Mamba does, where several tokens continue a sequence."""
    own = patch_recurrences.scan_selectively
    forgetful = lambda _, *args, **kwargs: own(Step(), *args, **kwargs)  # noqa: E731
    monkeypatch.setitem(patch_recurrences._OWN, "mamba_selective_scan", forgetful)
    programs = programs_of("mamba", tmp_path)
    assert programs.setting.chunks == () and any("one token of a prompt" in note for note in programs.notes)
    logits = lockstep(programs, weights_of("mamba"), blocks=3)
    expected = torch.cat([logits_of("mamba", tokens.tolist()) for tokens in sequences_for(())])
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)  # without states they differ by 5


@two_devices
def test_states_are_sharded_where_their_layers_are(qwen3_next: ServingPrograms) -> None:
    programs = qwen3_next
    pools = {port.name: port for port in programs.any.inputs if port.kind == "state"}
    assert {name: (port.shape, port.local) for name, port in pools.items()} == {
        "layers.0.conv.0": ((9, 64, 4), (9, 32, 4)),
        "layers.0.recurrent.0": ((9, 4, 8, 8), (9, 2, 8, 8)),
    }
    assert programs.bytes("state") == 4 * 9 * (32 * 4 + 2 * 8 * 8)
    assert all([port.name for port in program.inputs if port.kind == "state"] == [*pools]
               for program in programs.by_size.values())  # fmt: skip


def answers(runner: Lockstep, sequences: list[Sequence], blocks: int | None = None) -> Engine:
    engine = Engine(runner, blocks=blocks)
    for s in sequences:
        engine.add(s)
    while engine.busy:
        engine.step()
    return engine


@one_device
@pytest.mark.parametrize("blocks", [16, 5])
def test_answers_are_those_of_the_model(blocks: int, qwen3_next: ServingPrograms) -> None:
    """More sequences than states; with few blocks, some are preempted and computed again."""
    runner = Lockstep(qwen3_next, weights_of("qwen3_next"), blocks)
    draw = random.Random(0)
    sequences = [
        Sequence(tuple(draw.randrange(64) for _ in range(n)), GREEDY, 9, prompt_logprobs=n == 21)
        for n in (1, 3, 21, 30, 4, 17, 2, 5, 6, 7)
    ]
    engine = answers(runner, sequences)
    assert (engine.scheduler.preemptions > 0) == (blocks == 5)
    assert engine.pool.free == blocks and engine.scheduler.prefix_hit_tokens == 0
    for s in sequences:
        logits = logits_of("qwen3_next", s.tokens[:-1])
        assert logits[len(s.prompt) - 1 :].argmax(-1).tolist() == s.answer
        if s.prompt_logprobs:
            scores = torch.log_softmax(logits.double(), -1)
            expected = [float(scores[i, token]) for i, token in enumerate(s.prompt[1:])]
            assert [score.logprob for score in s.prompt_scores] == pytest.approx(expected, abs=1e-4)


def test_a_sequence_does_not_inherit_a_state(tmp_path: Path) -> None:
    runner = Lockstep(programs_of("lfm2", tmp_path, "serve.requests=1"), weights_of("lfm2"), 4)
    first, second, again = (Sequence(prompt, GREEDY, 5) for prompt in ((5,) * 9, (7, 2), (5,) * 9))
    answers(runner, [first, second, again])
    assert second.answer == logits_of("lfm2", second.tokens[:-1])[1:].argmax(-1).tolist()
    assert again.answer == first.answer


def test_a_prompt_has_few_steps(tmp_path: Path) -> None:
    setting = setting_of("lfm2", tmp_path)
    assert setting.steps_of_prompt(64 + 2 * 16 + 4 + 3) == {
        Size(64, True): 1, Size(16, True): 2, Size(4, True): 1, Size(2): 3
    }  # fmt: skip
    assert setting.rows == (2, 4, 8), "a row for each of 4 requests, padded"


class Watched:
    """A scheduler whose sequences get random tokens."""

    def __init__(self, chunks: tuple[int, ...], blocks: int) -> None:
        self.pool = BlockPool(blocks, 4)
        self.scheduler = RecurrentScheduler(self.pool, 64, 64, 3, chunks)

    def step(self) -> list[int]:
        """The number of tokens in each slice of a step."""
        slices = self.scheduler.schedule()
        for piece in slices:
            s = piece.sequence
            assert s.state and -(-(piece.start + piece.count) // 4) <= len(s.blocks)
            ends = piece.ends
            self.scheduler.advance(piece)
            if ends:
                s.tokens.append(1)
                if len(s.answer) == s.max_tokens:
                    self.scheduler.remove(s)
        states = [s.state for s in self.scheduler.running]
        assert len(states) == len(set(states))
        return [piece.count for piece in slices]


def test_chunks_and_tokens_alternate() -> None:
    watched = Watched((4, 16), 64)
    for length in (41, 1, 2):
        watched.scheduler.add(Sequence((1,) * length, GREEDY, 4))
    assert [watched.step() for _ in range(7)] == [[16], [1, 1], [16], [1, 1], [4], [1, 1], [4]]


@settings(deadline=None, max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=8),
    chunks=st.sampled_from([(), (4,), (4, 16), (2, 8, 32)]),
    blocks=st.integers(17, 40),
)
def test_all_sequences_end_and_give_their_states_back(
    lengths: list[int], chunks: tuple[int, ...], blocks: int
) -> None:  # fmt: skip
    watched = Watched(chunks, blocks)
    sequences = [Sequence((1,) * length, GREEDY, 3) for length in lengths]
    for s in sequences:
        watched.scheduler.add(s)
    for _ in range(5000):
        if not watched.step():
            break
    assert all(len(s.answer) == 3 for s in sequences)
    assert watched.pool.free == blocks and sorted(watched.scheduler._states) == [1, 2, 3]
