"""How devices of other trainers' parallelisms are a recipe's mesh, rules and storage."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tpshard.diagnostics.diagnostic import Exit, plural
from tpshard.recipes.foreign.translation import Conflict


@dataclass(frozen=True)
class RankSizes:
    """The sizes of the axes of a job."""

    dp: int = 1
    """Replicas of all parameters."""
    fsdp: int = 1
    """Data ranks over which parameters, or their optimizer alone, are sharded, those of `ep` left out."""
    ep: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    sequence: bool = True
    """Whether what is between the products of tensor parallelism is sharded along the sequence."""
    spread: bool = False
    """Whether experts are spread over the ranks of `tp` too, each whole on one."""
    stores: tuple[str, ...] = ("fsdp", "ep", "cp")
    """The axes that shard what is stored; (): none does."""

    @property
    def devices(self) -> int:
        """Devices of the job."""
        return math.prod((self.dp, self.fsdp, self.ep, self.cp, self.tp, self.pp))

    @property
    def data(self) -> int:
        """Ranks with sequences of their own."""
        return self.dp * self.fsdp * self.ep

    def with_whole_experts(self, ranks: int) -> RankSizes:
        """These with whole experts over so many ranks of data and `tp`; unchanged where they do not hold them."""
        outer = max(1, ranks // self.tp)
        if ranks % self.tp or self.data % outer:
            return self
        rest = self.data // outer
        return replace(self, dp=1 if self.stores else rest, fsdp=rest if self.stores else 1, ep=outer, spread=True)

    @property
    def mesh(self) -> dict[str, int]:
        """The mesh, outer to inner."""
        sizes = {"pp": self.pp, "dp": self.dp, "fsdp": self.fsdp, "ep": self.ep, "cp": self.cp, "tp": self.tp}
        return {axis: size for axis, size in sizes.items() if size > 1 or axis in ("dp", "fsdp", "tp")}

    @property
    def rules(self) -> dict[str, Any]:
        """The mesh axes of each dim."""
        rules: dict[str, Any] = {"batch": ["dp", "fsdp", "ep"] if self.ep > 1 else ["dp", "fsdp"]}
        rules |= dict.fromkeys(("vocab", "heads", *["mlp"] * (not self.spread)), "tp")
        experts = ["ep"] * (self.ep > 1) + ["tp"] * self.spread
        rules |= {"expert": experts if len(experts) > 1 else experts[0]} if experts else {}
        rules |= {"seq": "cp"} if self.cp > 1 else {}
        return rules | ({"seq_sp": cut} if (cut := self._cut) else {})

    @property
    def annotate(self) -> dict[str, Any]:
        """The activations that are sharded along the sequence."""
        return {"layers.*.residual": ["batch", "seq_sp", "embed"]} if self._cut else {}

    @property
    def _cut(self) -> list[str]:
        return ["cp"] * (self.cp > 1) + ["tp"] * (self.tp > 1 and self.sequence)

    @property
    def storage(self) -> str | list[str]:
        """The axes that shard what is stored."""
        sizes = {"fsdp": self.fsdp, "ep": self.ep, "cp": self.cp}
        axes = [axis for axis in self.stores if sizes[axis] > 1] or ["fsdp"]
        return axes if len(axes) > 1 else axes[0]

    @property
    def sections(self) -> dict[str, Any]:
        """The recipe's keys of the mesh."""
        keys = {"mesh": self.mesh, "sharding.rules": self.rules, "fsdp.axis": self.storage}
        return keys | ({"sharding.annotate": self.annotate} if self.annotate else {})


MESH = ("mesh", "sharding.rules", "sharding.annotate", "fsdp.axis")
"""The keys of `RankSizes.sections`."""


def rest_of(devices: int, fixed: int, sizes: str) -> int | Conflict:
    """How many times `fixed` ranks are in `devices`. sizes: those, for messages."""
    if devices % fixed:
        message = f"{sizes} make {plural(fixed, 'device')}, which {plural(devices, 'device')} do not hold evenly"
        near = -(-devices // fixed) * fixed
        return Conflict(
            message,
            fix=f"for example {near} devices, by cluster.nodes=... and cluster.devices_per_node=...",
            exit=Exit.FIT,
        )
    return devices // fixed


def product(sizes: Mapping[str, int]) -> tuple[int, str]:
    """The product of sizes, and them as text."""
    large = {name: size for name, size in sizes.items() if size > 1}
    return math.prod(large.values()), " x ".join(f"{name} {size}" for name, size in large.items()) or "1"
