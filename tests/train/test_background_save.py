"""A checkpoint holds the values at its step while training goes on, and a failed or killed save costs only itself."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from patience import PATIENCE
from tpshard.parallelism.runtime.context import Context, alone
from tpshard.train.checkpoints import background_save, checkpoint
from tpshard.train.checkpoints.background_save import BackgroundSaver
from tpshard.train.checkpoints.checkpoint import owned, steps
from tpshard.train.checkpoints.restore import open_checkpoint
from tpshard.train.checkpoints.shards import Shard


def test_a_step_may_change_the_values_while_they_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the second save waits for the first: two are never in flight."""
    changed, real, running = threading.Event(), checkpoint.save, []

    def slow(*arguments: Any, **options: Any) -> Path:
        assert changed.wait(PATIENCE)
        running.append(threading.active_count())
        return real(*arguments, **options)

    monkeypatch.setattr(background_save, "save", slow)
    tensor = torch.zeros(1000)
    saver = BackgroundSaver(alone(), tmp_path, keep_last=2)
    saver.start(1, {"w": Shard.whole(tensor)}, {"at": 1})
    tensor.fill_(7.0)  # the next step's update
    assert steps(tmp_path) == {}
    with pytest.raises(AssertionError, match="finished first"):
        saver.start(2, {"w": Shard.whole(tensor)}, {})
    changed.set()
    result = saver.finish()
    assert result is not None and result.error is None and result.folder == tmp_path / "step-000001"
    saved = open_checkpoint(tmp_path / "step-000001")
    assert torch.equal(saved.tensor("w"), torch.zeros(1000)) and saved.meta == {"at": 1}
    assert saver.finish() is None


def test_a_failed_write_is_told_when_it_is_waited_for(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    saver = BackgroundSaver(alone(), tmp_path / "file" / "checkpoints", keep_last=2)
    saver.start(1, {"w": Shard.whole(torch.zeros(3))}, {})
    result = saver.finish()
    assert result is not None and result.folder is None and "step 1 was not written" in str(result.error)


def test_every_block_has_one_writer_and_copies_are_spread() -> None:
    blocks: Mapping[str, str] = {f"w{i}": "whole" for i in range(40)}
    parts = [
        owned(blocks | {"mine": str(rank)}, [blocks | {"mine": str(r)} for r in range(4)], rank) for rank in range(4)
    ]
    assert sorted(name for part in parts for name in part if name != "mine") == sorted(blocks)
    assert all("mine" in part and len(part) > 3 for part in parts)


def save_beside(context: Context, folder: str) -> list[str]:
    """Saves while the main thread uses collectives of its own."""
    saver = BackgroundSaver(context, Path(folder), keep_last=5)
    for step in (1, 2, 3):
        saver.start(step, {"w": Shard(torch.full((4,), float(step)), (8,), (4 * context.rank,))}, {"step": step})
        for _ in range(20):
            assert context.largest(context.rank) == 1
        result = saver.finish()
        assert result is not None and result.error is None, result
    return [path.name for path in steps(Path(folder)).values()]


def test_ranks_save_beside_their_steps(pool: Any, tmp_path: Path) -> None:
    assert pool.run(save_beside, str(tmp_path), world=2) == [["step-000001", "step-000002", "step-000003"]] * 2
    assert torch.equal(open_checkpoint(tmp_path / "step-000002").tensor("w"), torch.full((8,), 2.0))
