"""C4 is streamed by `datasets` from a small hub on loopback, in a process of its own that reads HF_ENDPOINT."""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from c4_files import packed, texts
from forked import python
from loopback_hub import Hub
from test_text_formats import write

SCRIPT = """
import json, sys
sys.path.insert(0, {here!r})
from c4_files import bytes_tokenizer
from tpshard.diagnostics.diagnostic import Mistakes
from tpshard.train.data.open_data import Mixture
from tpshard.train.data.stream import Loader, merge_states
from tpshard.train.data.corpus import open_text
from tpshard.train.data.row_columns import Columns
out = dict()
for source in {sources!r}:
    try:
        corpus = open_text(source, Columns({column!r}), split={split!r})
        def loader(part=None):
            mixture = Mixture.of(corpus.train, bytes_tokenizer())
            return Loader(mixture, seq_len=32, global_sequences=8, part=part, bad_rows=0.05)
        whole = loader()
        first = [whole.next()["tokens"].tolist() for _ in range(6)]
        half = [loader(range(0, 4)), loader(range(4, 8))]
        for _ in range(3):
            for each in half: each.next()
        state = merge_states([each.state_dict() for each in half])
        again = loader()
        again.load_state_dict(state)
        mixture = Mixture.of(corpus.held_out, bytes_tokenizer(), 1)
        held_out = Loader(mixture, seq_len=32, global_sequences=4, checks=False)
        out[source] = dict(
            first=first, resumed=again.next()["tokens"].tolist(), files=[f.name for f in corpus.train.files],
            identities=[f.identity for f in corpus.train.files],
            held_out=[held_out.next()["tokens"].tolist() for _ in range(2)], bad=whole.readers[0].bad.bad,
        )
    except Mistakes as mistakes:
        out[source] = dict(exit=mistakes.exit, said=str(mistakes))
print(json.dumps(out))
"""


def run(
    endpoint: str, home: Path, *sources: str, column: str = "text", split: str | None = None, **more: str
) -> dict[str, Any]:
    """What is read of each source, or the mistake that its text is answered with."""
    env = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DOWNLOAD_TIMEOUT": "2", **more}
    env = {k: v for k, v in env.items() if not k.lower().endswith("_proxy")}
    script = SCRIPT.format(here=str(Path(__file__).parent), sources=sources, column=column, split=split)
    done = python(script, environment=env)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    out: dict[str, Any] = json.loads(done.stdout)
    return out


def shards() -> dict[str, bytes]:
    files = {f"c4-train.{i:05d}-of-00004.json.gz": packed([*texts(50, i), b"{bad"]) for i in range(4)}
    return {**files, "c4-validation.00000-of-00001.json.gz": packed(texts(20, 1000))}


def test_streaming_gives_the_same_text_as_the_same_files_on_disk(tmp_path: Path) -> None:
    folder = tmp_path / "c4"
    folder.mkdir()
    for name, data in shards().items():
        (folder / name).write_bytes(data)
    others = {"realnewslike/c4-train.00000-of-00001.json.gz": packed(texts(50, 9))}
    with Hub({f"en/{name}": data for name, data in shards().items()} | others) as hub:
        out = run(hub.url, tmp_path / "home", "c4", str(folder))
    hub_text, disk_text = out["c4"], out[str(folder)]
    hashes = [hashlib.sha1(shards()[name]).hexdigest() for name in hub_text["files"]]
    assert hub_text.pop("identities") == hashes and disk_text.pop("identities") == [""] * 4
    assert hub_text == {**disk_text, "bad": hub_text["bad"]}
    assert hub_text["resumed"] == hub_text["first"][3]
    assert not [name for name in hub.requested if "realnewslike" in name]


PARQUET = """---
configs:
- config_name: small
  data_files:
  - split: train
    path: small/train/*.parquet
  - split: test
    path: small/test/*.parquet
- config_name: large
  data_files: large/*.parquet
---
"""


def test_another_data_set_of_the_hub_by_configuration_and_column(tmp_path: Path) -> None:
    """Files of equal names in several folders; the test split is held out."""
    files: dict[str, bytes] = {"README.md": PARQUET.encode()}
    for i, name in enumerate(("small/train/0", "small/train/1", "small/test/0", "large/0")):
        documents = [row["text"] for row in texts(60, i)]
        files[f"{name}.parquet"] = write(tmp_path / "a.parquet", [*documents], column="body").read_bytes()
    folder = tmp_path / "copy"
    folder.mkdir()
    for name, path in (("0", "small/train/0"), ("1", "small/train/1"), ("validation", "small/test/0")):
        (folder / f"{name}.parquet").write_bytes(files[f"{path}.parquet"])
    with Hub(files, repo="some/one") as hub:
        pinned = f"hf:some/one@{hub.revision}:small"
        sources = ("hub:some/one:small", pinned, str(folder), "hub:some/one")
        streamed, other, local, unnamed = run(hub.url, tmp_path / "home", *sources, column="body").values()
    assert other == streamed
    assert all(streamed.pop("identities")) and not any(local.pop("identities"))
    assert streamed.pop("files") == local.pop("files") == ["0.parquet", "1.parquet"]
    assert streamed == local and streamed["resumed"] == streamed["first"][3]
    assert unnamed["exit"] == 6 and "hub:OWNER/NAME:CONFIGURATION" in unnamed["said"]


SPLITS = """---
configs:
- config_name: default
  data_files:
  - {split: train_sft, path: train_sft/*.jsonl}
  - {split: test_sft, path: test_sft/*.jsonl}
  - {split: train_gen, path: train_gen/*.jsonl}
---
"""


def test_a_split_is_named_where_several_are_there_and_its_own_test_split_is_held_out(tmp_path: Path) -> None:
    """A copy in the cache of the hub's library gives the same rows without a network."""
    files = {"README.md": SPLITS.encode()}
    for i, name in enumerate(("train_sft", "test_sft", "train_gen")):
        files[f"{name}/{name}.jsonl"] = b"".join(json.dumps(row).encode() + b"\n" for row in texts(60, i))
    home = tmp_path / "home"
    with Hub(files, repo="some/talks") as hub:
        unnamed = run(hub.url, home, "hf:some/talks")["hf:some/talks"]
        streamed = run(hub.url, home, "hf:some/talks", split="train_sft")["hf:some/talks"]
        fetch = "import huggingface_hub as hub; hub.snapshot_download('some/talks', repo_type='dataset')"
        done = python(fetch, environment={**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(home)})
        assert done.returncode == 0, done.stderr
    assert unnamed["exit"] == 6 and "train_sft, test_sft, train_gen" in unnamed["said"], unnamed
    for name, file in (("first", "0"), ("held_out", "1")):  # bytes are their own ids
        read = bytes(id for batch in streamed[name] for row in batch for id in row if id < 256).decode()
        assert {*re.findall(r"<(\d)\.", read)} == {file}
    for offline in ("0", "1"):  # nobody listens there any more
        cached = run(hub.url, home, "hf:some/talks", split="train_sft", HF_HUB_OFFLINE=offline)["hf:some/talks"]
        assert {**cached, "identities": streamed["identities"]} == streamed


def test_a_shard_cut_short_on_the_hub_is_a_data_error_that_names_it(tmp_path: Path) -> None:
    with Hub({f"en/{name}": data[:200] for name, data in shards().items()}) as hub:
        out = run(hub.url, tmp_path, "c4")["c4"]
    assert out["exit"] == 6 and "ends in the middle" in out["said"] and "c4-train." in out["said"]


@pytest.mark.parametrize("offline", ["1", "0"])
def test_a_hub_out_of_reach_is_a_data_error(offline: str, tmp_path: Path) -> None:
    with Hub({}) as hub:
        url = hub.url
    out = run(url, tmp_path, "c4", HF_HUB_OFFLINE=offline)["c4"]  # nobody listens there any more
    assert out["exit"] == 6 and "cannot be read from the hub" in out["said"]
