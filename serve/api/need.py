"""The requirements of a server, computed before anything is loaded: memory, cache, kernels, collectives."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from tpshard.parallelism.program import Program
from tpshard.programs.server.act_order import Arrangement
from tpshard.programs.server.serving import BLOCK_SIZE, ServingPrograms

_MEANING = {
    "naive": "activations of all ranks gathered before each row-parallel one",
    "local_sort": "sorted within each rank",
    "tp_aware": "written by the linears before",
}


@dataclass(frozen=True)
class Need:
    """The memory and programs of one device of a server."""

    programs: ServingPrograms
    blocks: int

    @property
    def cache_bytes(self) -> int:
        """Bytes of the KV cache on one device, with the block that padding writes to, and of recurrent layers'
        states."""
        return (self.blocks + 1) * self.programs.bytes("cache") + self.programs.bytes("state")

    @property
    def collectives(self) -> list[dict[str, Any]]:
        """The collectives of the smallest step, and of choosing its tokens; bytes are those of one of its rows."""
        (size, program), *_ = self.programs.by_size.items()
        every = [c for one in (program, *self.programs.choosing(size.rows).values()) for c in one.collectives]
        counted = Counter((c.kind, ", ".join(map(str, c.axes)), c.bytes // size.rows) for c in every)
        return [
            {"kind": kind, "axes": axes, "bytes": size, "count": count} for (kind, axes, size), count in counted.items()
        ]

    @property
    def kernels(self) -> dict[str, str]:
        """The kernels that compute matrix products, with calls per step, and how quantized weights are laid out."""
        setting, served = self.programs.setting, self.programs.setting.served
        described = {"kernels": ", ".join(f"{count} {name}" for name, count in kernels(self.programs.any).items())}
        if served.quantized is not None:
            how = "" if served.coded_weights(setting.kind, self.programs.arrangement) else ", dequantized when loaded"
            meaning = _meaning(self.programs.arrangement, setting.recipe.serve.layout)
            described["quantized weights"] = f"{served.quantized}{how}; {meaning}"
        return described

    def as_json(self) -> dict[str, Any]:
        setting = self.programs.setting
        return {
            "tp": setting.mesh.ranks, "mesh": dict(setting.mesh.axes), "dtype": setting.served.dtype,
            "memory": {"parameters": self.programs.bytes("parameter"), "cache": self.cache_bytes},
            "cache": {"blocks": self.blocks, "block_size": BLOCK_SIZE, "tokens": self.blocks * BLOCK_SIZE},
            "programs": self.programs.listed, "kernels": self.kernels, "collectives_per_token": list(self.collectives),
            "padding": "; ".join(self.programs.notes),
        }  # fmt: skip

    def __str__(self) -> str:
        setting, ranks = self.programs.setting, self.programs.setting.mesh.ranks
        rows, chunks = (
            ", ".join(str(size.rows) for size in self.programs.by_size if size.chunk == chunk)
            for chunk in (False, True)
        )
        states = self.programs.bytes("state")
        lines = [
            f"on {f'each of {ranks} devices' if ranks > 1 else 'one device'}, in {setting.served.dtype}:",
            f"  parameters {self.programs.bytes('parameter') / 2**20:,.1f} MiB",
            f"  cache      {self.cache_bytes / 2**20:,.1f} MiB: {self.blocks} blocks of {BLOCK_SIZE}, "
            f"{self.blocks * BLOCK_SIZE:,} tokens",
            *(
                [f"  of it      {states / 2**20:,.1f} MiB for the states of {setting.pool_size - 1} requests"]
                if states
                else []
            ),
            f"  programs   for steps of {rows} tokens" + (f", and for chunks of {chunks}" if chunks else ""),
            *(f"  {kernel}: {how}" for kernel, how in self.kernels.items()),
            *(f"  {note}" for note in self.programs.notes),
        ]
        for c in self.collectives:
            lines.append(f"  per token {c['count']} {c['kind']} over {c['axes']}, {c['bytes']:,} bytes each")
        return "\n".join(lines + ([] if self.collectives else ["  no collectives"]))


def need(programs: ServingPrograms, free_bytes: int) -> Need:
    """The memory and cache that a server needs on one device with `free_bytes` of free memory."""
    return Need(programs, programs.cache_blocks(free_bytes))


def kernels(program: Program) -> dict[str, int]:
    """The number of calls of each custom kernel in a program; torch's own operations are left out."""
    calls: Counter[str] = Counter()
    for node in program.graph.nodes:
        name = str(node.target) if "tpshard." in str(node.target) else getattr(node.target, "__name__", "")
        if node.op == "call_function" and ("tpshard." in name or name.endswith(("linear", "gate", "experts"))):
            calls[name.removeprefix("tpshard.").removesuffix(".default")] += 1
    return dict(calls)


def _meaning(arrangement: Arrangement, layout: str) -> str:
    """A sentence on how a layout treats the act-order."""
    if not arrangement.rows:
        return "in order as they come"
    local = [name for name in arrangement.of if arrangement.rows[name].blocks > 1]
    if layout == "tp_aware" and local:
        return f"{layout}: written by the linears before, {len(local)} sorted within each rank"
    return f"{layout}: {_MEANING[layout]}"
