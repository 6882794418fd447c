"""A model's weights with its adapters merged into them, read by blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor
from tpshard.models.adapters.adapted_model import AdaptedModel
from tpshard.models.adapters.lora import MAGNITUDE, A, B
from tpshard.models.adapters.lora_modules import merged

ReadBlock = Callable[[str, Sequence[int], Sequence[int]], Tensor]


def merged_blocks(spec: AdaptedModel, read: ReadBlock) -> ReadBlock:
    """The reader of the base's parameters with the adapters in them. read: that of the base's parameters and of the
    adapters'. ValueError for an adapter of a layer that shares its weight with another."""
    shared = [path for path, one in spec.adapters.items() if one.layer.shares]
    if shared:
        raise ValueError(f"`{shared[0]}` shares its weight with another layer, which its adapter does not change")

    weights = {one.layer.weight: path for path, one in spec.adapters.items()}

    def block(name: str, starts: Sequence[int], sizes: Sequence[int]) -> Tensor:
        if (path := weights.get(name)) is None:
            return read(name, starts, sizes)
        adapter = spec.adapters[path]

        def turned(dims: Sequence[int]) -> list[int]:
            return [*dims][::-1] if adapter.layer.turned else [*dims]

        (*stack, out, into), (*stacks, outs, intos) = turned(starts), turned(sizes)
        rank = adapter.rank
        if adapter.dora:  # a row's norm needs the whole row
            first, count, into, intos = into, intos, 0, adapter.layer.inputs
        weight = read(name, [*stack, *turned([out, into])], [*stacks, *turned([outs, intos])])
        a = read(adapter.name(A), [*stack, 0, into], [*stacks, rank, intos])
        b = read(f"{path}.{B}", [*stack, out, 0], [*stacks, outs, rank])
        magnitude = read(f"{path}.{MAGNITUDE}", [out], [outs]) if adapter.dora else None
        value = merged(weight, a, b, adapter, magnitude)
        return value.narrow(0 if adapter.layer.turned else -1, first, count) if adapter.dora else value

    return block
