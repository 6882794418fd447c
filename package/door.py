"""What `import tpshard` offers to Python: each function is a command's work on values instead of files.

Nothing here imports torch before it is called. Mistakes are the exception `tpshard.Mistakes`, which the command line
prints: `diagnostics` has them as data.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from tpshard.models.model_spec import ModelSpec
    from tpshard.models.open_model import ModelSection
    from tpshard.plan.report.report import Report
    from tpshard.programs.step.training_step import TrainingPrograms
    from tpshard.recipes.keys.schema import Recipe


class RecipeWarning(UserWarning):
    """What the command line would print as a warning."""


def load(recipe: str | os.PathLike[str], *overrides: str) -> Recipe:
    """The recipe of a file, of a run's folder, or of a shipped name, with overrides such as `mesh.tp=2`.

    Raises Mistakes with all errors of its text. Whether model and mesh fit is asked by `plan`, `build` and `train`.
    """
    from tpshard.recipes.reading.load import load as read

    return read(os.fspath(recipe), overrides)


def _fitting(recipe: Recipe | str | os.PathLike[str]) -> Recipe:
    """A recipe, or the one that `load` reads. Raises Mistakes where model, mesh and batch do not fit each other;
    warnings are `RecipeWarning`s."""
    import warnings

    from tpshard.cli.preflight.model_checks import model_errors
    from tpshard.diagnostics.diagnostic import Mistakes

    recipe = load(recipe) if isinstance(recipe, (str, os.PathLike)) else recipe
    diagnostics = model_errors(recipe)
    if any(one.severity == "error" for one in diagnostics):
        raise Mistakes(diagnostics)
    for one in diagnostics:
        warnings.warn(one.message, RecipeWarning, stacklevel=3)
    return recipe


def open_model(of: ModelSection | str | os.PathLike[str]) -> ModelSpec:
    """The model of a recipe's section, `recipe.model`, or of a Hugging Face folder.

    Raises Mistakes where it cannot be had.
    """
    from tpshard.diagnostics.diagnostic import Exit, Mistakes
    from tpshard.models.open_model import open_model as opened

    try:
        return opened(Path(of) if isinstance(of, (str, os.PathLike)) else of)
    except (ValueError, OSError) as error:
        fix = getattr(error, "fix", "correct it, or name another")
        raise Mistakes.one(str(error), exit=Exit.RECIPE, fix=fix) from error


def plan(recipe: Recipe | str | os.PathLike[str], what: Literal["train", "prefill", "decode"] = "train") -> Report:
    """The plan of a training step, or of a server's step: what goes where, what is sent, memory and time."""
    from tpshard.plan import planner

    recipe = _fitting(recipe)
    return planner.report(recipe, recipe.file, what)


def stage(
    recipe: Recipe | str | os.PathLike[str], name: str, of: str = "",
    what: Literal["train", "prefill", "decode"] = "train",
) -> str:  # fmt: skip
    """What `plan --stage` prints: a step's graph, shardings or program (`partition`), or the program after a pass.

    of: a pattern of modules and values to which the text is limited.
    """
    from tpshard.plan.questions import stage_texts

    recipe = _fitting(recipe)
    return stage_texts.text(stage_texts.stage(recipe, what, name, of))


def build(recipe: Recipe | str | os.PathLike[str]) -> TrainingPrograms:
    """The programs that `train` runs: `micro`, the program of a micro-batch, and `update`."""
    from tpshard.plan import planner
    from tpshard.programs.setting.cluster import devices_of
    from tpshard.programs.setting.setting import Setting

    recipe = _fitting(recipe)
    return planner.build_programs(Setting.of(recipe, devices_of(recipe)))


def train(recipe: Recipe | str | os.PathLike[str]) -> Path:
    """Trains on processes of this machine, as `tpshard train` does, and returns the run's folder.

    Progress and errors of the processes go to stdout and stderr. Raises Mistakes, with the command's exit code, where
    the run does not end as it should.
    """
    import tempfile

    from tpshard.cli.train import start
    from tpshard.diagnostics.diagnostic import Exit, Mistakes
    from tpshard.train.run.resuming import kept_recipe

    recipe = load(recipe) if isinstance(recipe, (str, os.PathLike)) else recipe
    with tempfile.TemporaryDirectory(prefix="tpshard-") as place:
        path = Path(place, "recipe.yaml")
        path.write_text(kept_recipe(recipe), encoding="utf-8")
        code = start(str(path), [f"resume={recipe.resume}"] if recipe.resume else [], None)
    if code:
        raise Mistakes.one(
            f"the run ended with exit code {code}", exit=Exit(code), where=recipe.where("run.dir"),
            why="its processes have said why", fix=f"see the logs in {recipe.run.folder / 'logs'}",
        )  # fmt: skip
    return recipe.run.folder


class CallableRoom(ModuleType):
    """A room whose name is a function's too: `tpshard.plan` holds files, and `tpshard.plan(recipe)` plans."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return getattr(importlib.import_module("tpshard.door"), self.__name__.rpartition(".")[2])(*arguments, **options)
