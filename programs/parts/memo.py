"""A cache of what building programs yields on the way, such as captured graphs, for variants that share it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar

from tpshard.programs.setting.setting import Setting

T = TypeVar("T")


def _model(setting: Setting) -> Any:
    """What every captured graph depends on: model, and dtypes of parameters and gradients."""
    fsdp = setting.recipe.fsdp
    dtypes = (fsdp.master_dtype, fsdp.param_dtype, fsdp.reduce_dtype, fsdp.accumulate.dtype)
    return setting.recipe.model, setting.spec, setting.kept, dtypes, setting.stacking, setting.expert_groups


def _rows(setting: Setting) -> Any:
    batch = setting.batch
    recipe = setting.recipe
    return recipe.task, recipe.loss, batch.per_device * batch.data_ranks, setting.stacking and batch.data_ranks


def _shardings(setting: Setting) -> Any:
    return setting.recipe.sharding, setting.recipe.fsdp.axis, setting.recipe.pipeline is None


def _optimizer(setting: Setting) -> Any:
    return setting.recipe.optimizer, setting.recipe.train.clip_grad_norm


def _recipe(setting: Setting) -> Any:
    """All that a recipe says but its schedule and recomputation, and the division of its batch."""
    names = (field.name for field in fields(setting.recipe) if field.name not in ("pipeline", "remat"))
    return setting.batch, {name: getattr(setting.recipe, name) for name in names}


def _layer(setting: Setting) -> Any:
    """What the activations of a layer depend on besides recomputation: the rows of a micro-batch, what is gathered
    again, and the axes other than those of data and stages."""
    recipe = setting.recipe
    named = {axis for dim, axes in recipe.sharding.rules.items() if dim != "batch" for axis in axes}
    axes = {axis: size for axis, size in setting.mesh.axes.items() if axis in named or axis not in ("pp", "dp", "fsdp")}
    return axes, setting.batch.per_device, recipe.fsdp.reshard_after_forward, recipe.staged


PARTS: dict[str, Callable[[Any], Any]] = {
    "model": _model, "rows": _rows, "mesh": lambda setting: (setting.mesh.axes, setting.pipeline_axis),
    "shardings": _shardings, "optimizer": _optimizer, "recipe": _recipe,
    "remat": lambda setting: (setting.recipe.remat, setting.recipe.offload), "layer": _layer,
    "server": lambda setting: (setting.mesh.axes, setting.pool_size, setting.slots),
}  # fmt: skip
"""The parts of a setting, of training or of a server, on which products depend."""

PRODUCTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "graph of a micro-batch": (16, ("model", "rows")),
    "graph of an update": (2, ("model", "optimizer")),
    "micro-batch": (4, ("model", "rows", "mesh", "shardings")),
    "micro-batch of few layers": (4, ("model", "rows", "mesh", "shardings")),
    "transfer": (8, ("model", "mesh")),
    "update": (4, ("model", "mesh", "optimizer")),
    "device's programs": (6, ("model", "rows", "mesh", "shardings", "recipe")),
    "stages by kind": (2, ("model", "rows", "mesh", "shardings", "recipe", "remat")),
    "activations of a layer": (1_000, ("layer", "remat")),
    "server's step": (1_000, ("server",)),
}  # fmt: skip
"""Product -> how many a `Memo` keeps (few, because programs are large; but captured graphs of few layers are small, and
one serves many meshes; a search holds all of its servers' steps), and the parts of a setting on which it depends."""


def key(setting: Any, product: str, *arguments: object) -> str:
    """A key of everything on which a product depends: its parts of the setting, and arguments of its own."""
    return repr(([PARTS[part](setting) for part in PRODUCTS[product][1]], arguments))


class Memo:
    """The last few results of each product, by `key`."""

    def __init__(self) -> None:
        self._last: dict[str, dict[str, object]] = {}

    def of(self, product: str, setting: Any, make: Callable[[], T], *arguments: object) -> T:
        """The stored result of a product, or else that of `make()`. Callers must not change it."""
        last, own = self._last.setdefault(product, {}), key(setting, product, *arguments)
        if own in last:
            result: T = last.pop(own)  # type: ignore[assignment]
        else:
            while len(last) >= PRODUCTS[product][0]:  # before the next is made, because results are large
                del last[next(iter(last))]
            result = make()
        last[own] = result
        return result
