"""Results of the stages of building programs, kept by what each stage reads, for variants that share them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from tpshard.programs.setting import Setting

T = TypeVar("T")

MOST = 2
"""The results of a kind that are kept, unless its caller asks for another number: programs are large."""


class Memo:
    """The last few results of each kind, by key. A key has everything that its result depends on."""

    def __init__(self) -> None:
        self._last: dict[str, dict[str, object]] = {}

    def of(self, kind: str, key: str, make: Callable[[], T], most: int = MOST) -> T:
        """The result of a kind under a key: a kept one, or else that of `make()`; `most` of each kind are kept."""
        last = self._last.setdefault(kind, {})
        if key in last:
            result: T = last.pop(key)  # type: ignore[assignment]
        else:
            while len(last) >= most:  # before making another: these are large
                del last[next(iter(last))]
            result = make()
        last[key] = result
        return result


def key_of_model(setting: Setting) -> tuple[object, ...]:
    """The part of a setting on which every captured graph depends: model, and dtypes of parameters and gradients."""
    fsdp = setting.recipe.fsdp
    dtypes = (fsdp.master_dtype, fsdp.param_dtype, fsdp.reduce_dtype, fsdp.accumulate.dtype)
    return (setting.recipe.model, setting.config, setting.depth, dtypes, setting.stacking)


def key_of_capture(setting: Setting) -> str:
    """A key of the part of a setting on which the captured graph of a micro-batch depends."""
    batch = setting.batch
    rows = batch.per_device * batch.data_ranks
    return repr((*key_of_model(setting), setting.recipe.task, rows, setting.stacking and batch.data_ranks))


def key_of_partition(setting: Setting) -> str:
    """A key of the part of a setting on which the partitioned program of a micro-batch depends, before any pass."""
    recipe = setting.recipe
    return repr(
        (key_of_capture(setting), setting.mesh.axes, recipe.sharding, recipe.fsdp.axis, recipe.pipeline is None)
    )
