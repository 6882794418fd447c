"""What lists of a recipe come to: its patterns of what is trained, frozen, adapted and in groups of the optimizer, and
the stages of its schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tpshard.diagnostics.diagnostic import plural
from tpshard.diagnostics.patterns import picks
from tpshard.models.adapters.adapted_model import AdaptedModel
from tpshard.models.model_spec import ModelSpec
from tpshard.programs.fit.parameter_groups import members_of, trained_of
from tpshard.recipes.keys.schema import Recipe


@dataclass(frozen=True)
class Pick:
    """What a pattern, or the patterns of a group, pick."""

    key: str
    """The recipe's, with the number of an entry of a list."""
    patterns: tuple[str, ...]
    tensors: int
    """Parameters; of `targets` the adapted layers. In a group those that no later one has."""
    elements: int
    """Their elements; of adapters those of their factors."""
    names: tuple[str, ...]
    """The first of them and the last."""

    def __str__(self) -> str:
        unit = "layer" if self.key.startswith("adapters.lora.targets") else "parameter"
        size = f"{plural(self.tensors, unit)} ({self.elements:,} values)"
        return f"{self.key} `{', '.join(self.patterns)}`: {size}, {' ... '.join(self.names)}"


@dataclass(frozen=True)
class StageSteps:
    """The steps of a stage of the schedule."""

    key: str
    first: int
    last: int
    shape: str
    to: float
    """The rate at its end, as a share of the peak."""

    def __str__(self) -> str:
        return f"{self.key}: steps {self.first:,} to {self.last:,}, {self.shape}, to {self.to:g} of the peak"


@dataclass(frozen=True)
class TrainedParts:
    """What is trained of a model, what each pattern that says so picks, and in which steps each stage is."""

    elements: int
    of: int
    """Elements of all parameters, adapters among them."""
    picks: tuple[Pick, ...]
    stages: tuple[StageSteps, ...]

    def rows(self) -> list[str]:
        """Lines of text."""
        return [
            f"trains  {self.elements:,} of {self.of:,} values",
            *(f"  {one}" for one in (*self.picks, *self.stages)),
        ]

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


def trained_parts(recipe: Recipe, spec: ModelSpec) -> TrainedParts | None:
    """None for a recipe that has no such pattern. For classes of transformers and modules this builds the module."""
    if not (recipe.train.freeze or recipe.adapters.lora or recipe.optimizer.groups or recipe.schedule.stages):
        return None
    sizes = {name: math.prod(shape) for name, shape in spec.shapes.items()}
    whole = sum(map(math.prod, (*spec.plain.shapes.values(), *spec.added.values())))
    chosen = tuple(_picks(recipe, spec, sizes))
    return TrainedParts(
        sum(size for name, size in sizes.items() if name not in spec.frozen), whole, chosen, tuple(_stages(recipe))
    )


def _stages(recipe: Recipe) -> Iterator[StageSteps]:
    last = recipe.schedule.warmup_steps
    for i, stage in enumerate(recipe.schedule.stages):
        first, last = last + 1, last + (stage.steps or 0)
        yield StageSteps(f"schedule.stages.{i}", first, last, stage.name, stage.to)


def _picks(recipe: Recipe, spec: ModelSpec, sizes: Mapping[str, int]) -> Iterator[Pick]:
    def pick(key: str, patterns: Sequence[str], names: Sequence[str], size: Callable[[str], int]) -> Pick:
        ends = tuple(dict.fromkeys((names[0], names[-1]))) if names else ()
        return Pick(key, tuple(patterns), len(names), sum(map(size, names)), ends)

    if isinstance(spec, AdaptedModel) and spec.lora is not None:
        adapters, targets = spec.adapters, spec.lora.targets
        for i, target in enumerate((targets,) if isinstance(targets, str) else targets):
            layers = [path for path, one in adapters.items() if spec.lora.is_target(target, one.layer)]
            yield pick(f"adapters.lora.targets.{i}", [target], layers,
                       lambda path: sum(map(math.prod, adapters[path].shapes.values())))  # fmt: skip
        if spec.saved:
            yield pick("adapters.lora.modules_to_save", spec.lora.modules_to_save, spec.saved, sizes.__getitem__)
    else:
        called = spec.called()
        for i, pattern in enumerate(recipe.train.freeze):
            names = [name for name, each in called.items() if any(picks(pattern, one) for one in each)]
            yield pick(f"train.freeze.{i}", [pattern], names, sizes.__getitem__)
    members = members_of(recipe, trained_of(recipe, spec))
    for i, group in enumerate(recipe.optimizer.groups):
        names = [name for name, number in members.items() if number == i]
        yield pick(f"optimizer.groups.{i}", group.match, names, sizes.__getitem__)
