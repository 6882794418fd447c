"""Ties in a random program: where eager mode's own answer is one of several that are equally right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fuzzed.writer import Case

aten = torch.ops.aten
ORDERS = {aten.topk, aten.sort, aten.kthvalue, aten.median, aten.nanmedian, aten.mode}
"""Ops that return indices of any of several equal elements. A stable sort, argmax and argmin are bound to the first."""
RUNS = 16
"""Orders that are tried: two equal elements keep theirs in all of them once in 65,536 times."""
NOISE = 1e-12
"""Noise that reorders equal elements, as a share of the largest; far below any tolerance."""


class _Reordering(TorchDispatchMode):
    """Adds noise to what ops of `ORDERS` read, so that equal elements change their order."""

    def __init__(self, seed: int):
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = kwargs or {}
        if func.overloadpacket in ORDERS and args[0].is_floating_point() and not keywords.get("stable"):
            x = args[0]
            scale = NOISE * (1 + x.abs().amax()) if x.numel() else 0.0
            noise = torch.rand(x.shape, generator=self.generator, dtype=x.dtype)
            args = (x + noise * scale, *args[1:])
        return func(*args, **keywords)


def ambiguous(case: Case, expected: Sequence[Tensor], close: float) -> list[Tensor]:
    """For each result the elements that differ between orders of equal elements, in eager mode alone."""
    masks = [torch.zeros_like(result, dtype=torch.bool) for result in expected]
    for seed in range(RUNS):
        with _Reordering(seed):
            again = case.expected()
        masks = [mask | ~torch.isclose(a, e, close, close, True) for mask, a, e in zip(masks, again, expected)]
    return masks


def only_ties(case: Case, actual: Sequence[Tensor], expected: Sequence[Tensor], close: float) -> bool:
    """Whether all elements in which results differ from eager mode's are ambiguous, and there are such elements."""
    if [a.shape for a in actual] != [e.shape for e in expected] or case.draws:
        return False
    masks = ambiguous(case, expected, close)
    differ = [~torch.isclose(a.to(e.dtype), e, close, close, True) for a, e in zip(actual, expected)]
    return any(bool(d.any()) for d in differ) and all(bool((m | ~d).all()) for m, d in zip(masks, differ))
