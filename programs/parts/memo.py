"""A cache of what building programs yields on the way, such as captured graphs, for variants that share it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from tpshard.programs.setting.setting import Setting

T = TypeVar("T")

MOST = 2
"""The default number of results kept per kind; few, because programs are large."""


class Memo:
    """The last few results of each kind, by key. A key has everything that its result depends on."""

    def __init__(self) -> None:
        self._last: dict[str, dict[str, object]] = {}

    def of(self, kind: str, key: str, make: Callable[[], T], most: int = MOST) -> T:
        """The kept result of a kind under a key, or else that of `make()`. The `most` last used of a kind are kept."""
        last = self._last.setdefault(kind, {})
        if key in last:
            result: T = last.pop(key)  # type: ignore[assignment]
        else:
            while len(last) >= most:  # before the next is made, because results are large
                del last[next(iter(last))]
            result = make()
        last[key] = result
        return result


def key_of_model(setting: Setting) -> tuple[object, ...]:
    """The part of a setting on which every captured graph depends: model, and dtypes of parameters and gradients."""
    fsdp = setting.recipe.fsdp
    dtypes = (fsdp.master_dtype, fsdp.param_dtype, fsdp.reduce_dtype, fsdp.accumulate.dtype)
    return (setting.recipe.model, setting.spec, setting.kept, dtypes, setting.stacking)


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
