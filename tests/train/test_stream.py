"""The global token stream is complete, and the same on any mesh and after any resume."""

from __future__ import annotations

import gzip
import io
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from c4_files import END, bytes_tokenizer, folder_of, packed, texts
from hypothesis import given, settings
from hypothesis import strategies as st
from tpshard.cli.main import run as tpshard
from tpshard.diagnostics.diagnostic import Exit, Mistakes
from tpshard.models.objectives.targets import IGNORE
from tpshard.train.data import bad_rows as bad_rows_module
from tpshard.train.data import corpus as corpus_module
from tpshard.train.data.corpus import Corpus, TextFile, open_text
from tpshard.train.data.open_data import Mixture
from tpshard.train.data.step_batch import StepBatch
from tpshard.train.data.stream import Loader, held_out_batch, merge_states

SEQ, ROWS = 48, 12


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return open_text(str(folder_of(tmp_path_factory.mktemp("c4"), files=3, documents=60)))


def loader(corpus: Corpus, part: Sequence[int] | None = None, rows: int = ROWS, seed: int = 0) -> Loader:
    return Loader(Mixture.of(corpus.train, bytes_tokenizer()), seq_len=SEQ, global_sequences=rows, part=part, seed=seed)


def split(ranks: int, rows: int = ROWS) -> list[range]:
    return [range(r * rows // ranks, (r + 1) * rows // ranks) for r in range(ranks)]


def together(batches: Sequence[StepBatch]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.cat([b[name] for b in batches]) for name in ("tokens", "targets", "documents", "positions"))


def same(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_the_stream_is_the_same_on_any_number_of_data_ranks_and_after_any_resume(corpus: Corpus) -> None:
    whole = loader(corpus)
    expected = [together([whole.next()]) for _ in range(60)]
    assert whole.epoch > 0, "the test should see the text begin again"
    step, state = 0, None
    for ranks, count in ((4, 7), (1, 1), (3, 9), (12, 2), (2, 0), (6, 30), (2, 11)):
        loaders = [loader(corpus, part) for part in split(ranks)]
        if state is not None:
            for each in loaders:
                each.load_state_dict(state)
                assert each.step == step
        for _ in range(count):
            assert same(together([each.next() for each in loaders]), expected[step]), (ranks, step)
            step += 1
        state = json.loads(json.dumps(merge_states([each.state_dict() for each in loaders])))
    assert step == 60


def test_rows_need_not_be_contiguous(corpus: Corpus) -> None:
    whole = loader(corpus)
    for part in ([0, 5, 11], [7]):
        mine = loader(corpus, part)
        whole = loader(corpus)
        for _ in range(5):
            assert torch.equal(mine.next()["tokens"], whole.next()["tokens"][list(part)])


def test_an_epoch_holds_every_document_once_and_in_one_piece(corpus: Corpus) -> None:
    every = loader(corpus)
    lanes: list[list[int]] = [[] for _ in range(ROWS)]
    while every.epoch < 3:
        for lane, row in zip(lanes, every.next()["tokens"].tolist()):
            lane += row
    read: list[str] = []
    for lane in lanes:
        documents = bytes(t if t != END else 0 for t in lane).decode().split("\0")
        read += documents[:-1]
    expected = {row["text"] for i in range(3) for row in texts(60, i)}
    assert set(read) == expected
    assert max(read.count(text) for text in expected) <= 5


def test_targets_documents_and_positions_keep_documents_apart(corpus: Corpus) -> None:
    every = loader(corpus)
    previous = None
    for _ in range(6):
        batch = every.next()
        for row in range(ROWS):
            tokens, targets, documents, positions = (
                batch[name][row].tolist() for name in ("tokens", "targets", "documents", "positions")
            )
            assert documents[0] == positions[0] == 0
            for i in range(SEQ):
                new = i > 0 and tokens[i - 1] == END
                assert documents[i] == (documents[i - 1] + new if i else 0)
                assert positions[i] == (0 if new or i == 0 else positions[i - 1] + 1)
                if tokens[i] == END:
                    assert targets[i] == IGNORE, "nothing is predicted across documents"
                elif i + 1 < SEQ:
                    assert targets[i] == tokens[i + 1]
                elif previous is not None:
                    assert targets[i] != IGNORE, "the last token of a row predicts the first of the lane's next"
            if previous is not None and previous["targets"][row, -1] != IGNORE:
                assert previous["targets"][row, -1] == tokens[0]
        previous = batch


def test_a_rank_opens_only_its_own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = open_text(str(folder_of(tmp_path, files=8, documents=30)))
    opened: set[str] = set()
    real = TextFile.open
    by_rank = []
    for part in split(4, 8):
        mine = loader(corpus, part, rows=8)
        mine.close()
        opened.clear()
        monkeypatch.setattr(TextFile, "open", lambda self: opened.add(self.name) or real(self))
        for _ in range(40):
            mine.next()
        mine.close()
        monkeypatch.setattr(TextFile, "open", real)
        by_rank.append(set(opened))
    assert [len(names) for names in by_rank] == [2, 2, 2, 2]
    assert len(set.union(*by_rank)) == 8


def test_the_seed_decides_the_order_and_nothing_else_does(corpus: Corpus) -> None:
    first = [loader(corpus, seed=seed).next()["tokens"] for seed in (0, 0, 1, 2, 3)]
    assert torch.equal(first[0], first[1])
    assert any(not torch.equal(first[0], other) for other in first[2:])


def test_a_batch_says_which_lines_are_in_it(corpus: Corpus) -> None:
    batch = loader(corpus).next()
    rows = {
        f"c4-train.{i:05d}-of-00003.json.gz:{n + 1}": r["text"] for i in range(3) for n, r in enumerate(texts(60, i))
    }
    for origin, tokens in zip(batch.origin, batch["tokens"].tolist()):
        text = "".join(rows[place] for place in origin.split())
        assert text.startswith(bytes(t for t in tokens if t != END).decode())


def test_text_that_ends_at_different_times_on_different_ranks_hangs_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for i, count in enumerate((1, 40, 3, 90)):  # files of very different sizes
        (tmp_path / f"{i}.json.gz").write_bytes(packed(texts(count, i)))
    (tmp_path / "validation.json.gz").write_bytes(packed(texts(2)))
    corpus = open_text(str(tmp_path))
    whole = loader(corpus, rows=4)
    loaders = [loader(corpus, part, rows=4) for part in split(4, 4)]
    with caplog.at_level(logging.INFO):
        for _ in range(50):
            assert same(together([each.next() for each in loaders]), together([whole.next()]))
    assert "starts over" in caplog.text
    assert {each.step for each in loaders} == {50}


@pytest.mark.parametrize("documents", [1, 3])
def test_text_smaller_than_one_batch_is_refused_by_name(documents: int, tmp_path: Path) -> None:
    (tmp_path / "a.json.gz").write_bytes(packed([{"text": "short text"}] * documents))
    (tmp_path / "validation.json.gz").write_bytes(packed(texts(2)))
    small = loader(open_text(str(tmp_path)))
    with pytest.raises(Mistakes, match="smaller than one batch") as caught:
        small.next()
    assert caught.value.exit == Exit.DATA
    assert f"{documents * 11} tokens" in str(caught.value) and str(SEQ * ROWS) in str(caught.value)
    with pytest.raises(Mistakes):
        small.next()
    with pytest.raises(Mistakes, match="smaller than one batch"):  # before programs are built
        loader(open_text(str(tmp_path))).read_first()


@pytest.mark.parametrize("tokenizer", ["bytes", "{train: 300}"])
def test_validate_refuses_what_is_smaller_than_one_batch(
    tokenizer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `train` does; not what is read by epochs, nor a text of one batch."""
    (tmp_path / "a.jsonl").write_text('{"text": "short text"}\n')
    command = ["validate", "tiny", f"data.source={tmp_path / 'a.jsonl'}", f"data.tokenizer={tokenizer}"]
    assert tpshard(command) == Exit.DATA
    assert "smaller than one batch" in capsys.readouterr().err
    assert tpshard([*command, "data.epochs=1"]) == Exit.DONE
    talk = '{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "long enough"}]}'
    (tmp_path / "a.jsonl").write_text(f"{talk}\n")
    talks = ["data.messages=messages", "data.chat_template=chatml", "data.too_long=drop", "model.seq_len=8"]
    assert tpshard([*command, *talks, "batch.global_sequences=1"]) == Exit.DATA
    assert "nothing to learn from" in capsys.readouterr().err
    (tmp_path / "a.jsonl").write_text('{"text": "short text"}\n' * 20)
    assert tpshard([*command, "batch.global_sequences=1", "model.seq_len=16"]) == Exit.DONE


def test_a_batch_that_was_read_first_is_the_next(tmp_path: Path) -> None:
    corpus = open_text(str(folder_of(tmp_path)))
    one, other = loader(corpus), loader(corpus)
    one.read_first()
    assert one.step == 0 and one.state_dict() == other.state_dict()
    for _ in range(3):
        assert same(together([one.next()]), together([other.next()]))
    assert one.state_dict() == other.state_dict()


def test_rows_smaller_than_one_batch_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "short text"}\n{"text": "another"}\n')
    command = ["data", "show", "tiny", f"data.source={tmp_path / 'a.jsonl'}", "data.tokenizer=bytes"]
    assert tpshard([*command, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    ((first, second),) = [row["documents"] for row in result["sequences"]]
    assert (first["from"], second["from"]) == ("a.jsonl:1", "a.jsonl:2")
    assert any("smaller than one batch" in note and "`train` refuses it" in note for note in result["notes"])


def test_a_few_long_documents_are_enough(tmp_path: Path) -> None:
    (tmp_path / "a.json.gz").write_bytes(packed([{"text": f"{i} " * 4000} for i in range(3)]))
    (tmp_path / "validation.json.gz").write_bytes(packed(texts(2)))
    corpus = open_text(str(tmp_path))
    whole, parts = loader(corpus), [loader(corpus, part) for part in split(3)]
    for _ in range(4):
        assert same(together([each.next() for each in parts]), together([whole.next()]))


def test_what_changed_since_the_last_run_is_named(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "c4")
    before = loader(open_text(str(folder)))
    before.next()
    state = before.state_dict()

    def refusal(**other: int) -> str:
        corpus = open_text(str(folder))
        arguments = {"seq_len": SEQ, "global_sequences": ROWS, "seed": 0, **other}
        with pytest.raises(Mistakes) as caught:
            Loader(Mixture.of(corpus.train, bytes_tokenizer()), **arguments).load_state_dict(state)
        assert caught.value.exit == Exit.DATA
        return str(caught.value)

    assert "batch.global_sequences was 12, is 6" in refusal(global_sequences=6)
    assert "model.seq_len was 48, is 32" in refusal(seq_len=32)
    name = "c4-train.00001-of-00003.json.gz"
    original = (folder / name).read_bytes()
    (folder / name).write_bytes(packed(texts(40, 77)))
    assert f"{name} has changed" in refusal()
    (folder / name).unlink()
    assert f"{name} is gone" in refusal()
    (folder / name).write_bytes(original)
    (folder / "more.json.gz").write_bytes(packed(texts(3)))
    assert "more.json.gz is new" in refusal()
    forced = loader(open_text(str(folder)))
    forced.load_state_dict(state, force=True)
    assert forced.step == 1 and forced.next()["tokens"].shape == (ROWS, SEQ)

    (folder / "more.json.gz").unlink()
    moved = folder.rename(tmp_path / "elsewhere")
    again = loader(open_text(str(moved)))
    again.load_state_dict(state)
    assert same(together([again.next()]), together([before.next()])), "the same files elsewhere are the same text"


def plain_rows(seed: int) -> bytes:
    """A file of JSON lines of about 300 KB: several blocks, the middle of which no fingerprint sees."""
    return b"".join(json.dumps(row).encode() + b"\n" for row in texts(2000, seed, 250))


def write_table(path: Path, data: bytes) -> None:
    """The same rows as a table."""
    from pyarrow import json as arrow_json
    from pyarrow import parquet

    parquet.write_table(arrow_json.read_json(io.BytesIO(data)), path, row_group_size=300)


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".parquet"])
@pytest.mark.parametrize(("small", "summed", "steps"), [(1 << 24, 1 << 24, 400), (0, 1 << 24, 1), (0, 0, 400)])
def test_a_file_that_changed_in_its_middle_is_named(
    suffix: str, small: int, summed: int, steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in a part that the first run did not read, where the file is summed before."""
    monkeypatch.setattr(bad_rows_module, "SMALL", small)
    monkeypatch.setattr(corpus_module, "SMALL", small)  # what is read once before the first step
    monkeypatch.setattr(corpus_module, "SUMMED", summed)
    data, path = plain_rows(1), tmp_path / f"a{suffix}"
    at = data.index(b"abc", 110_000) if b"abc" in data[110_000:] else 110_000
    other = data[:at] + data[at : at + 3].swapcase() + data[at + 3 :]
    assert len(other) == len(data) and other != data

    def put(content: bytes) -> None:
        if suffix == ".parquet":
            write_table(path, content)
        else:
            path.write_bytes(content if suffix == ".jsonl" else gzip.compress(content, 0, mtime=0))

    def opened() -> Loader:
        return loader(open_text(str(path)))

    put(data)
    before = opened()
    for _ in range(steps):  # 400 read about 230 of 300 KB
        batch = before.next()
    assert batch.epoch == 0
    state = json.loads(json.dumps(merge_states([before.state_dict()])))
    again = opened()
    again.load_state_dict(state)
    assert same(together([again.next()]), together([before.next()]))
    put(other)
    changed = opened()
    with pytest.raises(Mistakes, match=rf"a{suffix}.* has changed") as caught:
        changed.load_state_dict(state)
        changed.next()
    assert caught.value.exit == Exit.DATA and "resume=force" in str(caught.value)
    forced = opened()
    forced.load_state_dict(state, force=True)
    forced.next()
    assert forced.step == state["step"] + 1


def test_a_large_file_that_was_written_since_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is known of the part that no run has read: a warning tells it. A file of the hub has the hub's hash."""
    for module in (corpus_module, bad_rows_module):
        monkeypatch.setattr(module, "SMALL", 0)
    monkeypatch.setattr(corpus_module, "SUMMED", 0)
    path = tmp_path / "a.jsonl"
    path.write_bytes(plain_rows(1))
    before = loader(open_text(str(path)))
    before.next()
    state = before.state_dict()
    loader(open_text(str(path))).load_state_dict(state)
    assert not caplog.messages
    os.utime(path, (1, 1))
    loader(open_text(str(path))).load_state_dict(state)
    assert "a.jsonl was written since the saved run read it" in caplog.text
    on_hub = TextFile("a.jsonl", "hf://datasets/a/b@1/a.jsonl", identity="1")
    other = loader(open_text(str(path)))
    other.readers[0].files["a.jsonl"] = on_hub.fingerprint()
    other.load_state_dict({**state, "files": {"a.jsonl": ""}})
    with pytest.raises(Mistakes, match=r"a\.jsonl has changed"):
        other.load_state_dict({**state, "files": {"a.jsonl": "2"}})


def test_a_file_that_changes_while_a_run_reads_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (corpus_module, bad_rows_module):
        monkeypatch.setattr(module, "SMALL", 0)
    monkeypatch.setattr(corpus_module, "SUMMED", 0)
    path, data = tmp_path / "a.jsonl", plain_rows(1)
    path.write_bytes(data)
    run = loader(open_text(str(path)))
    while run.next().epoch == 0:
        pass
    path.write_bytes(data[:150_000] + data[150_000:150_050].upper() + data[150_050:])
    with pytest.raises(Mistakes, match=r"a\.jsonl .*has changed since it was read"):
        while run.next().epoch <= 2:
            pass


def test_the_sum_of_a_file_is_that_of_the_rank_that_read_furthest() -> None:
    states = [{"step": 1, "global_sequences": 1, "tokenizer": "t", "lanes": {}, "sums": sums} for sums in
              ({"a": [5, "x"], "b": [1, "y"]}, {"a": [9, "z"]}, {})]  # fmt: skip
    assert merge_states(states)["sums"] == {"a": [9, "z"], "b": [1, "y"]}


@pytest.mark.parametrize("small", [True, False])
def test_empty_files_among_good_ones_stop_no_run(small: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of(tmp_path / "c4", files=4, documents=60)
    plain = together([loader(open_text(str(folder))).next()])
    if not small:
        for module in (corpus_module, bad_rows_module):
            monkeypatch.setattr(module, "SMALL", 8)
    for name, content in (("a.json.gz", b""), ("b.json.gz", packed([])), ("c.json.gz", packed([b" ", b""]))):
        (folder / name).write_bytes(content)
    with_empty = loader(open_text(str(folder)))
    assert same(plain, together([with_empty.next()]))
    bad_rows_module.peek(open_text(str(folder)).train, 0.01)
    (warning,) = with_empty.warnings
    assert "no readable document in a.json.gz, b.json.gz, c.json.gz of" in warning
    (tables := tmp_path / "tables").mkdir()
    write_table(tables / "a.parquet", plain_rows(1))
    (tables / "b.parquet").write_bytes(b"")
    assert loader(open_text(str(tables))).warnings == [f"no readable document in b.parquet of {tables}: left out"]


def test_another_tokenizer_is_refused_on_resume(corpus: Corpus) -> None:
    from dataclasses import replace

    before = loader(corpus)
    other = Loader(
        Mixture.of(corpus.train, replace(bytes_tokenizer(), fingerprint="other")), seq_len=SEQ, global_sequences=ROWS
    )
    with pytest.raises(Mistakes, match="tokenizer") as caught:
        other.load_state_dict(before.state_dict())
    assert caught.value.exit == Exit.DATA


def test_ranks_at_different_steps_cannot_be_merged(corpus: Corpus) -> None:
    a, b = (loader(corpus, part) for part in split(2))
    a.next()
    with pytest.raises(AssertionError, match="different steps"):
        merge_states([a.state_dict(), b.state_dict()])


def test_held_out_batches_are_the_text_once_then_padding(corpus: Corpus) -> None:
    def batches(part: Sequence[int] | None = None) -> list[StepBatch]:
        loader = Loader(
            Mixture.of(corpus.held_out, bytes_tokenizer(), 1), seq_len=SEQ, global_sequences=6, part=part, checks=False
        )
        read = [loader.next() for _ in range(25)]
        loader.close()
        return read

    whole = batches()
    ends = sum(int((batch["tokens"] == END).logical_and(batch["documents"] >= 0).sum()) for batch in whole)
    counted = sum(int((batch["targets"] != IGNORE).sum()) for batch in whole)
    assert counted == sum(len(row["text"]) for row in texts(60, 1000)), "every token of the text is predicted once"
    assert ends > 60 and int((whole[-1]["targets"] != IGNORE).sum()) == 0
    parts = [batches(part) for part in split(3, 6)]
    for i in range(25):
        assert same(together([part[i] for part in parts]), together([whole[i]]))


def test_held_out_rows_are_as_many_as_asked_for_or_all_of_the_text(corpus: Corpus) -> None:
    """Where documents are fewer than rows, the long ones give several."""
    everything = sum(len(row["text"]) for row in texts(60, 1000))
    for asked, expected in ((3, 3), (100, 100), (5000, None)):
        batch = held_out_batch(corpus.held_out, bytes_tokenizer(), seq_len=SEQ, sequences=asked)
        counted = int((batch["targets"] != IGNORE).sum())
        assert all(batch.origin) and len(batch.origin) == (expected or len(batch.origin)) < 5000
        assert (counted == everything) == (expected is None)


@settings(max_examples=25, deadline=None)
@given(
    files=st.integers(1, 70),
    lanes=st.integers(1, 96),
)
def test_chains_share_lanes_evenly_and_files_nearly_so(files: int, lanes: int) -> None:
    from tpshard.train.data.source_reader import _chain_count

    chains = _chain_count(lanes, files)
    assert lanes % chains == 0
    sizes = [len(range(files)[c::chains]) for c in range(chains)]
    assert sum(sizes) == files and max(sizes) <= min(sizes) * 1.125 + (max(sizes) == min(sizes))
