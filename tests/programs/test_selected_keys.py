"""A server of a class whose indexer selects each token's keys computes transformers' logits, step after step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import architectures
import numpy as np
import pytest
import torch
from servers import Lockstep
from torch import Tensor
from tpshard.diagnostics.diagnostic import Mistakes
from tpshard.kernels.attention.paged_selection import PAGED_SELECT, PAGED_SELECTED
from tpshard.models.transformers import attention_interface, patch_indexers
from tpshard.programs.server.captured_steps import can_capture
from tpshard.programs.server.serve_setting import ServeSetting, Size
from tpshard.programs.server.served import model_to_serve
from tpshard.programs.server.serving import ServingPrograms, build_serving
from tpshard.recipes.reading.load import loads
from tpshard.serve.engine.step import StepInput
from tpshard.serve.engine.weights import Weights

LENGTHS = (23, 12)
STEPS = [((0, 0, 5), (1, 0, 3)), ((0, 5, 13),), ((0, 13, 20), (1, 3, 4)), ((1, 4, 10), (0, 20, 21)),
         *(((1, 10 + i, 11 + i), (0, 21 + i, 22 + i)) for i in range(2))]  # fmt: skip
"""The parts (sequence, from, to) of each step of 8 rows: chunks of two prompts, then their next tokens."""


def tokens_of(sequence: int) -> np.ndarray:
    return (np.arange(LENGTHS[sequence]) * 7 + 11 * sequence + 3) % 61 + 3


def step_of(parts: Sequence[tuple[int, int, int]]) -> StepInput:
    """A step of these parts. The sequences' blocks are 3 and 1, and 2 and 4."""
    tables = np.array([[3, 1], [2, 4]])
    rows = [(sequence, at) for sequence, start, end in parts for at in range(start, end)]
    sequences, positions = (np.array(x) for x in zip(*rows))
    tokens = np.array([tokens_of(sequence)[at] for sequence, at in rows])
    slots = tables[sequences, positions // 16] * 16 + positions % 16
    return StepInput(tokens, positions, slots, sequences, tables, np.arange(len(rows)))


def programs_of(folder: Path, tp: int) -> ServingPrograms:
    recipe = loads(
        f"cluster: {{device: cpu}}\nmodel: {{transformers: '{folder}', seq_len: 12, dtype: fp32}}\n"
        f"serve: {{mesh: {{tp: {tp}}}}}\n"
    )
    return build_serving(ServeSetting.of(recipe, model_to_serve(recipe, "cpu"), "cpu"), [Size(8)])


def served(name: str, programs: ServingPrograms) -> list[Tensor]:
    """The logits [tokens, vocab] of both sequences."""
    values = architectures.values(name)

    def block(path: str, starts: Sequence[int], sizes: Sequence[int]) -> Tensor:
        return values[path][tuple(slice(start, start + size) for start, size in zip(starts, sizes))]

    weights = Weights({path: tuple(v.shape) for path, v in values.items()}, block)
    logits = [torch.empty(n, architectures.VOCAB) for n in LENGTHS]
    runner = Lockstep(programs, weights, blocks=4)
    for parts in STEPS:
        step, row = runner.logits(step_of(parts)), 0
        for sequence, start, end in parts:
            logits[sequence][start:end] = step[row : row + end - start]
            row += end - start
    return logits


def expected(name: str, **changes: Any) -> list[Tensor]:
    """transformers' logits of both sequences, each computed at once."""
    own, values = architectures.own(name), architectures.values(name)
    for module in own.modules():
        for key, value in changes.items():
            if hasattr(module, key):
                setattr(module, key, value)
    tokens = [torch.from_numpy(tokens_of(sequence))[None] for sequence in range(2)]
    with torch.no_grad():
        return [torch.func.functional_call(own, values, (one,)).logits[0] for one in tokens]


@pytest.mark.parametrize(
    ("name", "tp", "indexers"),
    [("deepseek_v32", 2, 2), ("glm_moe_dsa", 2, 1), ("hy_v4", 1, 2), ("hy_v4", 4, 2), ("dots3_note_text", 2, 1)],
)
def test_chunks_and_next_tokens_are_transformers_own(name: str, tp: int, indexers: int, tmp_path: Path) -> None:
    """GLM's second layer takes the selection of its first; Dots3's first layer has a window and no indexer."""
    programs = programs_of(architectures.folder(tmp_path, name), tp)
    targets = [node.target for node in programs.any.graph.nodes]
    assert targets.count(PAGED_SELECT) == indexers
    assert targets.count(PAGED_SELECTED) == (1 if name == "dots3_note_text" else 2)
    for logits, own, all_keys in zip(served(name, programs), expected(name), expected(name, index_topk=64)):
        torch.testing.assert_close(logits, own, rtol=1e-4, atol=1e-4)
        assert ((own - all_keys).abs().amax(1)[3:] > 1e-2).all(), "the selection matters in every later row"


def test_keys_and_values_of_selected_attention_are_cached_in_their_own_widths(tmp_path: Path) -> None:
    programs = programs_of(architectures.folder(tmp_path, "glm_moe_dsa", first_k_dense_replace=2), 2)
    caches = {p.name: (p.shape[2:], p.local[2]) for p in programs.any.inputs if p.kind == "cache"}
    assert caches == {
        "layers.0.cache.index": ((1, 8), 1),
        **{f"layers.{i}.cache.k": ((4, 12), 2) for i in range(2)},
        **{f"layers.{i}.cache.v": ((4, 8), 2) for i in range(2)},
    }
    assert not any("expert" in p.name for p in programs.any.inputs) and not can_capture(programs.any)


def _with_softcap(attend: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: attend(*args, **{**kwargs, "softcap": 5.0})


def _with_window(attend: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: attend(*args, **{**kwargs, "sliding_window": 4})


def _with_own_mask(attend: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: attend(*args[:4], args[4].clone(), **kwargs)


@pytest.mark.parametrize(
    ("changed", "asked"),
    [(_with_softcap, "softcap"), (_with_window, "sliding_window"), (_with_own_mask, "attention_mask")],
)
def test_what_attention_to_selected_keys_lacks_is_refused(
    changed: Callable[..., Any], asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_interface, "attend", changed(attention_interface.attend))
    with pytest.raises(Mistakes, match=f"keys that an indexer selects for `{asked}`, which a server does not support"):
        programs_of(architectures.folder(tmp_path, "deepseek_v32"), 1)


def test_a_selection_under_another_mask_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    select = patch_indexers._select

    def with_own_mask(module: Any, *args: Any, **kwargs: Any) -> Any:
        return select(module, *args[:3], args[3].clone(), *args[4:], **kwargs)

    monkeypatch.setattr(patch_indexers, "_select", with_own_mask)
    with pytest.raises(Mistakes, match="DeepseekV32Indexer selects keys under a mask of its own"):
        programs_of(architectures.folder(tmp_path, "deepseek_v32"), 1)
