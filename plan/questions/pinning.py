"""`plan --pin`: writes a recipe with its inferred shardings pinned, so that later code cannot change them unnoticed.

Used parameters and all named activations are pinned. The storage of a parameter follows from `fsdp.axis` and is not
pinned. The programs of the pinned recipe are built and compared: they must be the same, or it is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tpshard.diagnostics.diagnostic import Exit, Mistakes
from tpshard.plan import planner
from tpshard.plan.report.pattern import pattern
from tpshard.plan.report.planned import Planned
from tpshard.plan.report.report import Tensor
from tpshard.recipes.keys.schema import Recipe
from tpshard.recipes.reading.load import loads

Pins = dict[str, tuple[tuple[str, ...], ...]]
"""For each name or pattern, the mesh axes of each dim, as in a recipe's `sharding.pin`."""


@dataclass(frozen=True)
class Pinned:
    """A recipe with its shardings pinned, and what could not be pinned."""

    recipe: str
    """The recipe as YAML."""
    pins: Pins
    unpinned: tuple[str, ...]
    """Names that could not be pinned."""
    fingerprints: Mapping[str, str]
    """The fingerprint of each part's program, the same for both recipes."""


def pin(planned: Planned, recipe: Recipe) -> Pinned:
    """The pinned form of a planned training recipe. Raises `Mistakes` (exit 4) if its shardings cannot be pinned."""
    report, program, expected = planned.report, planned.program, planned.fingerprints
    parameters = [tensor for tensor in report.tensors if tensor.kind == "parameter"]
    every = [*parameters, *(tensor for tensor in report.tensors if tensor.kind == "activation")]
    for chosen in (every, parameters):
        pins, unpinned = pins_of([tensor for tensor in chosen if _same_layout(tensor, program.records)])
        written = recipe.to_yaml(pins=pins)
        try:
            fingerprints = planner.planned(loads(written, file=recipe.name), recipe.name).fingerprints
        except Mistakes:
            continue
        if fingerprints == expected:
            pinned = {tensor.name for tensor in chosen if _same_layout(tensor, program.records)}
            names = dict.fromkeys(pattern(tensor.name) for tensor in every if tensor.name not in pinned)
            return Pinned(written, pins, (*unpinned, *names), expected)
    raise Mistakes.one(
        f"the shardings of `{report.job.name}` cannot be pinned", exit=Exit.FIT,
        why="with them the recipe gives another program",
        fix="save the plan and train with --plan, which refuses another program",
    )  # fmt: skip


def pins_of(tensors: list[Tensor]) -> tuple[Pins, tuple[str, ...]]:
    """The pins of these tensors by name or pattern, and the names that are left out.

    A tensor sharded over a part of a mesh axis is left out, because recipes cannot express that.
    """
    groups: dict[str, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(pattern(tensor.name), []).append(tensor)
    pins: Pins = {}
    unpinned: list[str] = []
    for name, members in groups.items():
        alike = {tensor.sharding for tensor in members}
        for own, sharding in [(name, alike.pop())] if len(alike) == 1 else [(t.name, t.sharding) for t in members]:
            dims = [_axes(dim) for dim in sharding]
            if None in dims:
                unpinned.append(own)
            else:
                pins[own] = tuple(dim for dim in dims if dim is not None)
    return pins, tuple(unpinned)


def _axes(dim: Any) -> tuple[str, ...] | None:
    """The axes of a dim in the public form; None for a part of an axis."""
    if dim is None:
        return ()
    if isinstance(dim, str):
        return (dim,)
    return tuple(dim) if all(isinstance(axis, str) for axis in dim) else None


def _same_layout(tensor: Tensor, records: Mapping[str, Any]) -> bool:
    """Whether all values matched by a pin of this name have one layout: for an activation also its gradient.

    A parameter's gradient has the layout of the used parameter.
    """
    named = [record for record in records.values() if record.label == tensor.name]
    return tensor.kind == "parameter" or len({(len(record.shape), record.layout.dims) for record in named}) <= 1


def text(result: Pinned, name: str) -> str:
    """The pinned recipe, with a comment that names its programs and what is not pinned."""
    head = [f"`{name}` with its shardings pinned"]
    for part, fingerprint in result.fingerprints.items():
        named = part == "schedule" or part.startswith("program of")  # the parts of a pipeline
        head.append(f"{part if named else f'program of the {part}'}: {fingerprint}")
    if result.unpinned:
        head.append(f"not pinned: {', '.join(result.unpinned)}")
    return "".join(f"# {line}\n" for line in head) + result.recipe
