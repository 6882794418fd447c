"""Conversations are packed whole, answers alone are learned, and what is left out is named and counted."""

from __future__ import annotations

import gzip
import json
import logging
import random
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_folders import CHATML, chat_folder
from tpshard.diagnostics.diagnostic import Exit, Mistakes
from tpshard.models.objectives.targets import IGNORE
from tpshard.train.data.bad_rows import peek
from tpshard.train.data.conversations import AnswerTokenizer, TooLong, answer_tokenizer, renders
from tpshard.train.data.corpus import open_text, rows
from tpshard.train.data.open_data import Mixture, Share
from tpshard.train.data.row_columns import Columns
from tpshard.train.data.stream import Loader, merge_states
from tpshard.train.data.tokens import load_tokenizer

SEQ, ROWS = 96, 8
TALK = Columns(messages="messages")


def conversation(chance: random.Random, number: int) -> dict[str, Any]:
    messages = []
    for _ in range(chance.randint(1, 2)):
        messages.append({"role": "user", "content": f"{number} plus {chance.randint(0, 9)}?"})
        messages.append({"role": "assistant", "content": "It is " + "four " * chance.randint(1, 5)})
    return {"messages": messages}


def write(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def tokenizer(
    folder: Path, columns: Columns = TALK, too_long: TooLong = "truncate", length: int = SEQ
) -> AnswerTokenizer:
    text = load_tokenizer(chat_folder(folder / "tokenizer", CHATML))
    return answer_tokenizer(text, columns, length, too_long)


@pytest.fixture
def talks(tmp_path: Path) -> Path:
    chance = random.Random(0)
    return write(tmp_path / "talks.jsonl", [conversation(chance, i) for i in range(60)])


def mixture(talks: Path, window: int = 16) -> Mixture:
    text = write(talks.parent / "text.jsonl", [{"text": f"{i} " + "sunny " * (i % 7)} for i in range(50)])
    encoder = tokenizer(talks.parent)
    return Mixture(
        (
            Share(open_text(str(talks), TALK).train, encoder, 3.0),
            Share(open_text(str(text)).train, encoder.text, 1.0),
        ),
        window=window,
    )


@pytest.mark.parametrize("by", ["rows", "tokens"])
def test_a_mixture_is_the_same_on_any_number_of_ranks_and_after_any_resume(talks: Path, by: Any) -> None:
    mixed = replace(mixture(talks), by=by)

    def loader(part: Sequence[int] | None = None) -> Loader:
        return Loader(mixed, seq_len=SEQ, global_sequences=ROWS, part=part)

    whole = loader()
    expected = [whole.next() for _ in range(24)]
    assert whole.epoch > 1
    step, state = 0, None
    for ranks, count in ((4, 5), (1, 3), (8, 6), (2, 10)):
        loaders = [loader(range(r * ROWS // ranks, (r + 1) * ROWS // ranks)) for r in range(ranks)]
        for each in loaders if state is not None else ():
            each.load_state_dict(state)
        for _ in range(count):
            batches = [each.next() for each in loaders]
            for name in ("tokens", "targets", "documents", "positions"):
                assert torch.equal(torch.cat([b[name] for b in batches]), expected[step][name]), (ranks, step)
            step += 1
        state = json.loads(json.dumps(merge_states([each.state_dict() for each in loaders])))


def test_a_mixture_goes_on_where_its_sources_are_named_from_elsewhere(
    talks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = Loader(mixture(talks), seq_len=SEQ, global_sequences=ROWS)
    loader.next()
    state, expected = json.loads(json.dumps(merge_states([loader.state_dict()]))), loader.next()
    monkeypatch.chdir(talks.parent)
    again = Loader(mixture(Path(talks.name)), seq_len=SEQ, global_sequences=ROWS)
    again.load_state_dict(state)
    assert torch.equal(again.next()["tokens"], expected["tokens"])


@pytest.mark.parametrize(("by", "bound"), [("rows", 0.02), ("tokens", 0.02)])
def test_sources_are_read_by_their_weights(talks: Path, by: Any, bound: float) -> None:
    loader = Loader(replace(mixture(talks), by=by), seq_len=SEQ, global_sequences=ROWS)
    for _ in range(150):
        loader.next()
    if by == "tokens":
        taken = [sum(lane.taken[i] for lane in loader._lanes) for i in range(2)]
    else:
        rows = [0, 0]
        loader.close()
        for lane in loader._lanes:
            lane.chosen = 0
            for _ in range(200):
                rows[lane._choose()] += 1
        taken = rows
    assert abs(taken[0] / sum(taken) - 0.75) < bound


def test_sources_have_their_share_of_tokens_from_the_first_steps_on(talks: Path) -> None:
    """Weights of tokens hold in a short run too, where lanes have read a few documents each."""
    mixed = replace(mixture(talks), by="tokens")
    loader = Loader(mixed, seq_len=SEQ, global_sequences=32)
    for _ in range(6):
        loader.next()
    loader.close()
    taken = [sum(lane.taken[i] for lane in loader._lanes) for i in range(2)]
    assert abs(taken[0] / sum(taken) - 0.75) < 0.05, taken


@pytest.mark.parametrize("epochs", [None, 2])
def test_only_a_source_that_starts_over_is_said_to_and_once(
    talks: Path, caplog: pytest.LogCaptureFixture, epochs: int | None
) -> None:
    mixed = mixture(talks)
    kept, stops = replace(mixed.shares[0], epochs=epochs), replace(mixed.shares[1], epochs=1)
    mixed = replace(mixed, shares=(kept, stops), epochs=epochs)

    def read_on(state: Any = None) -> Any:
        loader = Loader(mixed, seq_len=SEQ, global_sequences=2)
        if state is not None:
            loader.load_state_dict(state)
        while loader.epoch < 1 or state is not None:
            loader.next()
            state = None
        loader.close()
        return json.loads(json.dumps(merge_states([loader.state_dict()])))

    with caplog.at_level(logging.INFO):
        state = read_on()
        assert caplog.text.count("starts over") == 1 and f"{talks.name} starts over: epoch 1" in caplog.text
        assert "text.jsonl" not in caplog.text
        read_on(state)
    assert caplog.text.count("starts over") == 1


def test_each_epoch_has_every_row_once_and_its_own_order(talks: Path) -> None:
    text = open_text(str(talks), TALK).train
    loader = Loader(Mixture((Share(text, tokenizer(talks.parent)),), window=16), seq_len=SEQ, global_sequences=1)
    seen: list[list[str]] = [[], [], []]
    while loader._lanes[0].epoch < 2:
        places = loader.next().origin[0].split()
        seen[loader._lanes[0].epoch] += places
    first, second = seen[0][: len(set(seen[0]))], seen[1]
    assert len(set(seen[0])) == len(seen[0]) >= 55, "rows but those held out, each once, until the next epoch began"
    assert first[:20] != second[:20] != sorted(second[:20])


def test_an_epoch_has_every_row_once_in_full_steps_and_a_short_last_one(talks: Path) -> None:
    """On any number of ranks, which count the steps together, and after any resume."""
    mixed = replace(mixture(talks), epochs=3)
    mixed = replace(mixed, shares=tuple(replace(share, epochs=3) for share in mixed.shares))

    def loaders(ranks: int) -> list[Loader]:
        parts = [range(r * ROWS // ranks, (r + 1) * ROWS // ranks) for r in range(ranks)]
        return [Loader(mixed, seq_len=SEQ, global_sequences=ROWS, part=part) for part in parts]

    whole, ranks = loaders(1)[0], loaders(4)
    together, lists = threading.Barrier(4), [[0]] * 4

    def count(rank: int) -> int:
        def gather(own: list[int]) -> list[list[int]]:
            lists[rank] = own
            together.wait()
            everyone = list(lists)
            together.wait()
            return everyone

        return ranks[rank].count_steps(rank, 4, gather)

    with ThreadPoolExecutor(4) as pool:
        (steps,) = set(pool.map(count, range(4)))
    expected = [whole.next() for _ in range(steps)]
    assert not any(whole.next().origin)
    counts: list[list[int]] = [[], [], []]
    rows: list[Counter[str]] = [Counter(), Counter(), Counter()]
    for batch in expected:
        filled = [bool(origin) for origin in batch.origin]
        counts[batch.epoch].append(sum(filled))
        assert filled == sorted(filled, reverse=True), "rows of padding stand last"
        blank = batch["targets"][sum(filled) :]
        assert (blank == IGNORE).all()
        rows[batch.epoch].update(line for row in batch.origin for line in row.split() if "talks" in line)
    assert all(one[:-1] == [ROWS] * (len(one) - 1) and 0 < one[-1] <= ROWS for one in counts)
    assert any(one[-1] < ROWS for one in counts), "the test should see a short step"
    assert rows[0] == rows[1] == rows[2] and set(rows[0].values()) == {1}
    assert [list(one) for one in rows[:2]] != [list(rows[1])] * 2, "each epoch has its own order"
    state: dict[str, Any] = {}
    for number, at, end in ((4, 0, 3), (1, 3, steps // 2), (2, steps // 2, steps)):
        again = loaders(number) if at else ranks
        for each in again if at else ():
            each.load_state_dict(state)
        for step in range(at, end):
            batches = [each.next() for each in again]
            for name in ("tokens", "targets", "documents", "positions"):
                assert torch.equal(torch.cat([b[name] for b in batches]), expected[step][name]), (number, step)
        state = json.loads(json.dumps(merge_states([each.state_dict() for each in again])))
    endless = Loader(replace(mixed, epochs=None), seq_len=SEQ, global_sequences=ROWS)
    with pytest.raises(Mistakes, match="rows were dealt by whole epochs, are dealt without end"):
        endless.load_state_dict(state)
    with pytest.raises(Mistakes, match="rows were dealt without end, are dealt by whole epochs"):
        whole.load_state_dict(endless.state_dict())


def test_the_tokens_of_epochs_are_counted_once_and_a_rank_tokenizes_its_own_rows(talks: Path) -> None:
    text, read = open_text(str(talks), TALK).train, tokenizer(talks.parent)
    seen: Counter[str] = Counter()

    def learned(row: Mapping[str, Any]) -> tuple[list[int], list[bool]]:
        seen[row["messages"][0]["content"]] += 1
        return read.learned(row)

    one = Mixture((Share(text, replace(read, learned=learned), epochs=2),), epochs=2)
    loader = Loader(one, seq_len=SEQ, global_sequences=ROWS, part=range(2), checks=False)
    steps = loader.count_steps()
    assert set(seen.values()) == {1}
    for _ in range(steps):
        loader.next()
    assert sum(seen.values()) < 2 * len(seen), "a quarter of the rows of two epochs"


def test_conversations_stay_whole_and_no_target_crosses_their_borders(talks: Path) -> None:
    encoder = tokenizer(talks.parent)
    loader = Loader(Mixture.of(open_text(str(talks), TALK).train, encoder), seq_len=SEQ, global_sequences=4)
    for _ in range(10):
        batch = loader.next()
        for row in range(4):
            tokens, targets, documents, positions = (
                batch[name][row].tolist() for name in ("tokens", "targets", "documents", "positions")
            )
            for number in set(documents):
                at = [i for i, one in enumerate(documents) if one == number]
                assert [positions[i] for i in at] == list(range(len(at)))
                assert targets[at[-1]] == IGNORE
                part = [tokens[i] for i in at]
                if part[0] == encoder.end:
                    assert all(targets[i] == IGNORE for i in at), "padding"
                    continue
                read = encoder.text.encode("")
                assert read == [] and part.count(part[0]) >= 1
                assert [targets[i] for i in at if targets[i] != IGNORE] == [
                    tokens[i + 1] for i in at[:-1] if targets[i] != IGNORE
                ]


@pytest.mark.parametrize("too_long", ["truncate", "split", "drop"])
def test_what_is_too_long_is_treated_as_the_recipe_says_and_counted(tmp_path: Path, too_long: TooLong) -> None:
    talk = {"messages": [{"role": "user", "content": "two?"}, {"role": "assistant", "content": "It is " * 200}]}
    short = {"messages": [{"role": "user", "content": "two?"}, {"role": "assistant", "content": "It is four."}]}
    path = write(tmp_path / "a.jsonl", [talk] + [short] * 30)
    text = open_text(str(path), TALK).train
    loader = Loader(Mixture.of(text, tokenizer(tmp_path, too_long=too_long)), seq_len=SEQ, global_sequences=1)
    (warning,) = loader.warnings
    done = {"truncate": "truncated", "split": "split into several sequences", "drop": "dropped"}[too_long]
    said = f"1 row longer than the {SEQ} tokens of model.seq_len: {done} (the first: a.jsonl, line 1)"
    assert warning == f"{text.name}: {said}"
    rows = [loader.next() for _ in range(9)]
    long = [row for row in rows if any(place.endswith(":1") for place in row.origin[0].split())]
    assert len(long) == {"truncate": 1, "drop": 0}.get(too_long, len(long)) and (too_long != "split" or len(long) > 3)
    assert list(loader.notes.values()) == [1]


def test_sequences_of_a_split_row_without_a_target_are_left_out_and_counted(tmp_path: Path) -> None:
    """All that would be learned is, from the same tokens; the row begins a sequence, so that its parts are whole."""
    asks, says = {"role": "user", "content": "two and two? " * 60}, {"role": "assistant", "content": "It is " * 40}
    short = {"messages": [{"role": "user", "content": "two?"}, {"role": "assistant", "content": "It is four."}]}
    path = write(tmp_path / "a.jsonl", [short, {"messages": [asks, says, asks, says]}, *[short] * 5])
    text, encoder = open_text(str(path), TALK).train, tokenizer(tmp_path, too_long="split")
    loader = Loader(Mixture.of(text, encoder, 1), seq_len=SEQ, global_sequences=1)
    row = next(row for row in rows(text, text.files[0]) if row.number == 1)
    ids, learned = encoder.learned(json.loads(row.text or ""))
    parts = [range(at, min(at + SEQ, len(ids))) for at in range(0, len(ids), SEQ)]
    empty = [part for part in parts if not any(learned[part.start : part.stop + 1])]
    assert len(empty) > 3 and parts.index(empty[-1]) > 6, "before each of the answers"
    (split, left_out) = loader.warnings
    assert "1 row longer than" in split and f"{len(empty)} sequences without a target" in left_out
    wanted = [(ids[i], ids[i + 1]) for i in range(len(ids) - 1) if learned[i + 1]]
    taught = []
    while (batch := loader.next()).origin[0]:
        tokens, targets = batch["tokens"][0].tolist(), batch["targets"][0].tolist()
        assert any(target != IGNORE for target in targets)
        if "a.jsonl:2" in batch.origin[0].split():
            first = batch["documents"][0] == batch["documents"][0][0]
            taught += [(tokens[i], targets[i]) for i in range(SEQ) if first[i] and targets[i] != IGNORE]
    assert taught == wanted
    assert loader.notes[next(note for note in loader.notes if note.startswith("sequence"))] == len(empty)


@pytest.mark.parametrize(
    ("messages", "fault"),
    [
        ("text", "is a text, not a list of messages"),
        ([{"role": "user", "content": [{"type": "image", "url": "x"}]}], "a part of the type image, which is not"),
        ([{"role": "user", "content": [{"image_url": {"url": "x"}}]}], "a part of the type image_url, which is not"),
        ([{"role": "user", "content": [{"type": "text", "text": 1}]}], 'a part whose "text" is a number'),
        ([{"role": "user", "content": [None]}], "a part that is null"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}], "message 1 calls tools, which"),
        ([{"role": None, "content": "a"}], 'message 1 of "messages" has the role null'),
        ([{"from": "human", "value": "a"}], "has no role; its keys are from, value"),
        ([{"role": "user", "content": None}], "(user) has no content"),
        ([{"role": "user", "content": "a"}, {"role": "asistant", "content": "b"}], "its roles are user, asistant"),
        ([], "no answer"),
        ([{"role": "assistant", "content": "a", "weight": 0.5}], "has the weight 0.5, which is neither 0 nor 1"),
        ([{"role": "usr", "content": "c"}, {"role": "assistant", "content": "b"}], "unknown role 'usr'"),
    ],
)
def test_a_conversation_that_cannot_be_learned_is_named_by_file_and_line(
    tmp_path: Path, messages: Any, fault: str
) -> None:
    good = {"messages": [{"role": "user", "content": "two?"}, {"role": "assistant", "content": "It is four."}]}
    path = write(tmp_path / "a.jsonl", [good] * 5 + [{"messages": messages}])
    text = open_text(str(path), TALK).train
    with pytest.raises(Mistakes) as caught:
        Loader(Mixture.of(text, tokenizer(tmp_path)), seq_len=SEQ, global_sequences=1, bad_rows=0.001)
    assert caught.value.exit == Exit.DATA
    assert "a.jsonl, line 6: " in str(caught.value) and fault in str(caught.value)
    few = Loader(Mixture.of(text, tokenizer(tmp_path)), seq_len=SEQ, global_sequences=1, bad_rows=0.5)
    assert any("unreadable: left out (the first: " in warning for warning in few.warnings)


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (json.dumps([{"messages": []}], indent=1).encode(), "line 1: one list of JSON, not an object a line"),
        (gzip.compress(b"{}", mtime=0), "line 1: invalid UTF-8: a compressed file, whose name must end in .gz"),
    ],
    ids=["list", "gzip"],
)
def test_a_file_of_another_format_than_its_name_says_is_told_as_such(
    tmp_path: Path, content: bytes, fault: str
) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(Mistakes) as caught:
        peek(open_text(str(tmp_path / "a.jsonl"), TALK).train, 0.01)
    assert fault in caught.value.diagnostics[0].why


def test_tools_may_be_a_text_of_json_as_tables_hold_them() -> None:
    messages, tools = [{"role": "assistant", "content": "a"}], [{"type": "function", "function": {"name": "f"}}]
    one, other = (TALK.row(0, {"messages": messages, "tools": value}) for value in (tools, json.dumps(tools)))
    assert one == other and one is not None and json.loads(one.text or "")["tools"] == tools
    for wrong in ("{", '"f"'):
        row = TALK.row(0, {"messages": messages, "tools": wrong})
        assert row is not None and "not a list of tools" in row.fault, row


def test_a_few_rows_are_judged_before_a_run_by_their_share(tmp_path: Path) -> None:
    rows = [conversation(random.Random(0), i) for i in range(50)]
    rows[7]["messages"][0]["role"] = "usr"
    text = open_text(str(write(tmp_path / "talks.jsonl", rows)), TALK).train
    learn = tokenizer(tmp_path).labelled
    with pytest.raises(Mistakes, match=r"1 of \d+ rows") as refused:
        peek(text, 0.01, learn=learn)
    assert "line 8: message 1 has the unknown role 'usr'" in refused.value.diagnostics[0].why
    peek(text, 0.05, learn=learn)


def test_what_leaves_nothing_to_learn_from_is_refused_before_a_run(tmp_path: Path) -> None:
    path = write(tmp_path / "talks.jsonl", [conversation(random.Random(0), i) for i in range(120)])
    learn = replace(tokenizer(tmp_path), length=3).labelled
    with pytest.raises(Mistakes, match="nothing to learn from"):
        peek(open_text(str(path), TALK).train, 0.01, learn=learn)
    with pytest.raises(Mistakes, match="the chat template of the recipe writes nothing"):
        renders("{{ '' }}", None)


def test_of_a_prompt_with_its_completion_only_the_completion_is_learned(tmp_path: Path) -> None:
    encoder = tokenizer(tmp_path, Columns(prompt="q", completion="a"))
    labelled = encoder.labelled(json.dumps({"prompt": "two plus two?", "completion": " It is four."}))
    answer = [id for id, label in zip(labelled.ids, labelled.labels) if label != IGNORE]
    assert answer == [*encoder.text.encode(" It is four."), encoder.end]
