"""Shardings as the cases write them."""

from __future__ import annotations

import re

from tpshard.parallelism.mesh import Axis, Mesh, merge
from tpshard.parallelism.sharding import Layout, Sharding, parse


class NotExpressible(Exception):
    """A sharding that named axes cannot say."""


def mesh_of(case: dict[str, dict[str, int]]) -> Mesh:
    return Mesh(case["mesh"] or {"_": 1})


def sharding_of(text: str, rank: int, mesh: Mesh) -> Sharding:
    """`replicated` is all dims closed and whole; manual axes shard nothing inside of their region."""
    if text == "replicated":
        return Sharding(((),) * rank, (False,) * rank)
    if text.startswith("none"):
        return Sharding.unknown(rank)
    if "reversed" in text or "maximal" in text or "device" in text:
        raise NotExpressible(f"sharding {text!r}")
    return parse(re.sub(r"\s*manual=\{[^}]*\}", "", text), mesh)


def layout_of(text: str, rank: int, mesh: Mesh) -> Layout:
    sharding = sharding_of(text, rank, mesh)
    return Layout(sharding.dims, merge(sorted(sharding.unreduced)))


def axes_in(text: str, mesh: Mesh) -> tuple[Axis, ...]:
    """All axes of a text like `{x, y:(1)2}`, in order."""
    parts = re.findall(r"(\w+)(?::\((\d+)\)(\d+))?", text)
    return tuple(mesh.axis((n, int(p), int(s)) if p else n) for n, p, s in parts if n in mesh.axes)
