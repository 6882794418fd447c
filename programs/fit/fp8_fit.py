"""Checks whether a model's linear layers, its sequences and its mesh fit fp8 products (`model.dtype: fp8`)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from tpshard.diagnostics.diagnostic import Diagnostic, Exit, join
from tpshard.kernels.fp8.fp8_blocks import BLOCK
from tpshard.models.families.config import ModelConfig
from tpshard.recipes.keys.schema import Recipe

_MOST = 64


def fp8_misfits(recipe: Recipe, c: ModelConfig | None, mesh: Mapping[str, int]) -> Iterator[Diagnostic]:
    """Everything that does not fit `model.dtype: fp8`; nothing for another dtype.

    The products of a linear layer (forward, gradient of its input, gradient of its weight) contract its inputs, its
    outputs and the sequence. Each of these dims must consist of whole blocks of `BLOCK` elements on every device.
    """
    if recipe.model.dtype != "fp8":
        return
    if c is None or c.experts is not None:
        yield Diagnostic(
            "`model.dtype: fp8` multiplies the linear layers of tpshard's own dense families",
            exit=Exit.FIT,
            where=recipe.where("model.dtype"),
            why="this model has experts" if c is not None else "this model is computed by another class",
            fix="dtype: bf16",
        )
        return
    if recipe.pipeline is not None and recipe.pipeline.vectorized:
        yield Diagnostic(
            "`pipeline.form: vectorized` does not suit `model.dtype: fp8`",
            exit=Exit.FIT,
            where=recipe.where("pipeline.form"),
            why="it multiplies the layers of all stages at once, for which there is no fp8 product",
            fix="form: staged, or model.dtype: bf16",
        )
    rules = recipe.sharding.rules
    seq = recipe.model.seq_len
    yield from _check(recipe, mesh, seq, rules.get("seq", ()), "model.seq_len", f"sequences of {seq:,} tokens")
    checked: set[tuple[str, int]] = set()
    for path, leaf in c.leaves.items():
        if leaf.kind != "linear" or not path.startswith("layers."):
            continue
        for dim in leaf.dims:
            size = c.size(dim, leaf)
            if (dim, size) in checked:
                continue
            checked.add((dim, size))
            axes = rules.get("heads", ()) if dim == "kv_heads" and dim not in rules else rules.get(dim, ())
            most = c.kv_heads if dim == "kv_heads" else None  # over more devices KV heads are replicated
            kind = path.partition(".")[2].partition(".")[2]
            yield from _check(recipe, mesh, size, axes, "model.dtype", f"{size:,} {dim} of `{kind}`", most)


def _check(
    recipe: Recipe, mesh: Mapping[str, int], size: int, axes: tuple[str, ...], key: str, what: str,
    most: int | None = None,
) -> Iterator[Diagnostic]:  # fmt: skip
    """A mistake unless devices along `axes` hold whole blocks of a dim of `size`, cut into at most `most` parts."""
    if size % BLOCK:
        around = [n for n in (size // BLOCK * BLOCK, -(-size // BLOCK) * BLOCK) if n]
        yield Diagnostic(
            f"fp8 products need {what} to be a multiple of {BLOCK}",
            exit=Exit.FIT,
            where=recipe.where(key),
            why=f"each block of {BLOCK} along a contraction has one scale, and {size} = {size // BLOCK} x {BLOCK} "
            f"+ {size % BLOCK}",
            fix=f"{join(str(n) for n in around)}, or dtype: bf16",
        )
        return
    ways = math.prod(mesh.get(axis, 1) for axis in axes)
    if _whole(size, ways, most):
        return
    axis = [axis for axis in axes if mesh.get(axis, 1) > 1][-1]
    others = ways // mesh[axis]
    legal = [n for n in range(1, _MOST + 1) if _whole(size, n * others, most)]
    nearby = sorted(sorted(legal, key=lambda n: abs(math.log(n / mesh[axis])))[:4])
    yield Diagnostic(
        f"`mesh.{axis}: {mesh[axis]}` cuts the fp8 blocks of {what}",
        exit=Exit.FIT,
        where=recipe.where(f"mesh.{axis}"),
        why=f"{size // BLOCK} blocks of {BLOCK} do not divide among {ways} devices",
        fix=(f"{axis} {join(map(str, nearby))}, or " if nearby else "") + "model.dtype: bf16",
    )


def _whole(size: int, ways: int, most: int | None) -> bool:
    """Whether `ways` devices hold whole blocks of a dim of `size`, which is cut into at most `most` parts."""
    return size // BLOCK % (ways if most is None else min(ways, most)) == 0
