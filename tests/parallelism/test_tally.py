"""The bytes that a rank sends and holds are counted as they occur."""

from __future__ import annotations

import torch
from tpshard.parallelism.runtime.tally import Tally


def test_storages_count_once_and_only_while_they_live() -> None:
    before = torch.zeros(1000)
    tally = Tally([before])
    with tally:
        actual = before + 1
        view = actual.view(10, 100)
        twice = view * 2
        assert tally.held_bytes == 3 * 4000
        del actual  # the view holds its storage
        assert tally.held_bytes == 3 * 4000
        del view
        assert tally.held_bytes == 2 * 4000
    del twice
    assert (tally.held_bytes, tally.peak_bytes, tally.sent_bytes) == (4000, 3 * 4000, 0)
    with tally:
        assert (before + 1).sum() and tally.peak_bytes == 3 * 4000
