"""Verifying a checkpoint on several ranks, which are threads here."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_checkpoint import Gathering, flip, model, save_on, shards
from tpshard.parallelism.runtime.watchdog import Watchdog
from tpshard.train.checkpoints import restore, verify
from tpshard.train.checkpoints.restore import newest
from tpshard.train.checkpoints.verify import Together, first_damage, shares


def on_ranks(world: int, work: Callable[[Together], Any]) -> tuple[list[Any], list[Watchdog]]:
    """What `work` returns on each of `world` threads that gather among themselves, and their watchdogs."""
    gather, watchdogs = Gathering(world), [Watchdog(rank, 60) for rank in range(world)]
    results: list[Any] = [None] * world

    def run(rank: int) -> None:
        results[rank] = work(Together(rank, world, lambda value: gather(rank, value), watchdogs[rank].beat))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results, watchdogs


@pytest.mark.parametrize("ranks", [1, 3, 9])
def test_ranks_read_each_file_once_and_agree_on_the_newest_that_is_whole(
    ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2):
        save_on(4, tmp_path, step, lambda rank, step=step: shards(model(step), 4, 1, rank))
    flip(tmp_path / "step-000002" / "rank-00002.safetensors")
    read: Counter[str] = Counter()
    real = verify.sha256_of

    def counted(path: Path, parts: verify.Read) -> str:
        read[f"{path.parent.name}/{path.name}"] += 1
        return real(path, parts)

    monkeypatch.setattr(restore, "sha256_of", counted)
    with caplog.at_level(logging.WARNING):
        found, _ = on_ranks(ranks, lambda ranks: newest(tmp_path, ranks))
    assert [one.step for one in found] == [1] * ranks
    assert read == {f"step-{step:06d}/rank-{rank:05d}.safetensors": 1 for step in (1, 2) for rank in range(4)}
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2 and "rank-00002.safetensors has changed" in told[0] and "falling back" in told[1], told


def test_what_one_rank_reads_is_progress_to_the_ranks_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "ROUND_S", 0.05)

    def slow(name: str, read: verify.Read) -> str:
        for _ in range(6 if name == "large" else 0):
            time.sleep(0.1)
            read(1)
        return ""

    _, watchdogs = on_ranks(3, lambda ranks: first_damage({"large": 10, "small": 1}, slow, ranks))
    assert all(watchdog.progress >= 4 for watchdog in watchdogs), [watchdog.progress for watchdog in watchdogs]


def test_a_rank_whose_disk_stands_still_is_no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "ROUND_S", 0.02)

    def stands(name: str, read: verify.Read) -> str:
        time.sleep(0.3)
        return f"{name} is missing"

    results, watchdogs = on_ranks(2, lambda ranks: first_damage({"b": 1, "a": 1}, stands, ranks))
    assert results == ["b is missing"] * 2, "the first in the manifest's order, on every rank"
    assert [watchdog.progress for watchdog in watchdogs] == [0, 0]


@given(st.dictionaries(st.text(max_size=3), st.integers(0, 1000), max_size=12), st.integers(1, 5))
def test_every_file_is_one_ranks_and_no_rank_reads_a_file_more_than_it_must(files: dict[str, int], ranks: int) -> None:
    mine = shares(files, ranks)
    assert sorted(name for some in mine for name in some) == sorted(files)
    loads = [sum(files[name] for name in some) for some in mine]
    assert max(loads) - min(loads) <= max(files.values(), default=0)


def test_a_tensor_of_a_checkpoint_that_ranks_verified_is_read_by_each(tmp_path: Path) -> None:
    save_on(2, tmp_path, 7, lambda rank: shards(model(), 2, 1, rank))
    found, _ = on_ranks(2, lambda ranks: newest(tmp_path, ranks))
    for name, tensor in model().items():
        assert all(torch.equal(one.tensor(name), tensor) for one in found)
