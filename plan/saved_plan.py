"""Saved plans: the report, the programs that `train --plan` runs, and the inputs they were built from.

Reading a plan and comparing it with a recipe needs no torch, so that a refusal takes no longer than reading a recipe.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import platform
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpshard.diagnostics.diagnostic import Exit, Mistakes, Source
from tpshard.files.atomic import write_file
from tpshard.files.folder_json import parse_object, read_regular
from tpshard.models.module_model import code_identity
from tpshard.plan.report import report_file
from tpshard.plan.report.report import Report
from tpshard.plan.step.units import SCHEMA
from tpshard.programs.fit.recipe_model import model_of
from tpshard.recipes.keys.schema import Recipe
from tpshard.recipes.reading.values import shorten, values

if TYPE_CHECKING:
    from tpshard.plan.report.planned import Planned

ELSEWHERE = (
    "name", "data", "evaluate", "timeout_s", "launch", "run", "resume", "checkpoint", "logging", "quantize", "serve",
)  # fmt: skip
"""Sections of a recipe in which it may differ from its plan: they do not say what a run computes."""

UNREADABLE = (
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    RuntimeError,
    AssertionError,
    ArithmeticError,
    MemoryError,
)
"""What making use of a file, where numbers, names and lists may stand for one another, can raise."""

_MOST_BYTES = 2 << 30
"""Of a saved plan."""

ROOMS = ("devices", "diagnostics", "files", "kernels", "models", "parallelism", "programs", "recipes")
"""The packages of tpshard whose code decides a plan's programs."""


@dataclass(frozen=True)
class SavedPlan:
    """A plan read from its file."""

    path: str
    recipe: str
    """The recipe as YAML, interpolations kept."""
    values: Mapping[str, Any]
    """The recipe's dotted keys with their values; see `recipes.values`."""
    mesh: Mapping[str, int]
    versions: Mapping[str, str]
    """The versions of the packages, code and files that built the programs; see `versions`."""
    fingerprints: Mapping[str, str]
    """The fingerprint of each program; of a training run also of those that a plan does not price."""
    step: str | None
    """The packed programs of a training run; None for other plans."""
    printed: Mapping[str, Any]
    """The plan as `plan --json` prints it."""
    report: Report | None
    """The plan's report; None in a file of another version."""
    text: str
    """The whole file."""


def dumps(planned: Planned, recipe: Recipe, *, with_programs: bool = True) -> str:
    """The text of `plan.json`; the same recipe and code give the same bytes.

    with_programs: whether `train --plan` can run it. Storing the programs takes about as long as building them.
    """
    from tpshard.programs.step import saved_step  # imports torch

    held = {
        "schema": SCHEMA, "recipe": recipe.to_yaml(), "values": values(recipe, ELSEWHERE), "versions": versions(recipe),
        "programs": planned.fingerprints if planned.step is None else planned.step.fingerprints,
        "plan": planned.report.to_json(),
        "report": report_file.dumps(planned.report),
        "step": saved_step.pack(planned.step) if with_programs and planned.step is not None else None,
    }  # fmt: skip
    return json.dumps(held, indent=1, sort_keys=True) + "\n"


def versions(recipe: Recipe) -> dict[str, str]:
    """Versions of the packages, and hashes of tpshard's code and of files that the recipe names."""
    result = packages()
    result["the code of tpshard"] = code_of(ROOMS)
    result |= model_of(recipe, weights=False).identity
    if ":" in recipe.task:
        result |= code_identity(recipe.task)
    return result | {str(path): hashlib.sha256(path.read_bytes()).hexdigest()[:16] for path in _files(recipe)}


def packages() -> dict[str, str]:
    """The versions of Python and of the packages that decide what a program computes."""
    found = {"python": platform.python_version()}
    for name in ("tpshard", "torch"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # run from a checkout that is not installed
            found[name] = "not installed"
    return found


def code_of(rooms: Iterable[str]) -> str:
    """A hash of the code and data files of some packages of tpshard."""
    code = hashlib.sha256()
    for room in rooms:
        spec = importlib.util.find_spec(f"tpshard.{room}")
        assert spec is not None and spec.submodule_search_locations is not None
        folder = Path(spec.submodule_search_locations[0])
        for path in sorted(p for kind in ("*.py", "*.yaml", "*.txt") for p in folder.rglob(kind)):
            code.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes() + b"\0")
    return code.hexdigest()[:16]


def _files(recipe: Recipe) -> Iterator[Path]:
    """Yields the files of the device and of buckets, which decide programs too."""
    for name in (recipe.cluster.device if recipe.cluster is not None else "", getattr(recipe.fsdp.bucket, "file", "")):
        if name and Path(name).is_file():
            yield Path(name)


def write(path: Path, text: str) -> None:
    """Writes a file atomically, by renaming a temporary one. Raises `Mistakes` (exit 5) where it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, text)
    except OSError as error:
        why = error.strerror or str(error)
        raise _unwritable(path, why) from error


def check_writable(path: Path) -> None:
    """Raises `Mistakes` (exit 5) if `write` would fail, before the plan is made. Creates nothing."""
    ancestor = path.parent
    while not os.path.lexists(ancestor) and ancestor != ancestor.parent:
        ancestor = ancestor.parent
    if path.is_dir():
        why = "it is a folder"
    elif os.path.lexists(path) and not path.is_file() and not path.is_symlink():
        why = "it is a device, a pipe or a socket"
    elif not ancestor.is_dir():
        why = f"{ancestor} is no folder"
    elif not os.access(ancestor, os.W_OK | os.X_OK):
        why = f"no permission to write in {ancestor}"
    else:
        return
    raise _unwritable(path, why)


def _unwritable(path: Path, why: str) -> Mistakes:
    fix = "choose a file in a writable folder, on a disk with room"
    return Mistakes.one(f"{path} cannot be written", exit=Exit.MACHINE, why=why, fix=fix)


def is_recipe(path: str) -> bool:
    """Whether a file is a recipe that is written as JSON, which is YAML too."""
    try:
        held = parse_object(read_regular(path, _MOST_BYTES).decode("utf-8"), "it")
    except (OSError, ValueError):
        return False
    return "programs" not in held and bool(held.keys() & {field.name for field in fields(Recipe)} - {"schema"})


def read(path: str) -> SavedPlan:
    """Reads a saved plan. Raises `Mistakes` (exit 3) if the file is not one."""
    fix = "`tpshard plan RECIPE`, without --dry-run, saves one in the run's folder"
    try:
        text = read_regular(path, _MOST_BYTES).decode("utf-8")
        held = parse_object(text, "it")
        if held.get("schema") != SCHEMA:
            raise ValueError(f"schema {SCHEMA} expected")
        if "collectives" in held:
            raise ValueError("it is what `plan --json` prints, which holds no programs")
        printed, hashes = dict(held["plan"]), dict(held["programs"])
        return SavedPlan(
            path, str(held["recipe"]), dict(held.get("values", {})), dict(printed.get("mesh", {})),
            dict(held.get("versions", {})), hashes, _text_or_none(held.get("step")), printed,
            report_file.loads(str(held.get("report")), Report), text,
        )  # fmt: skip
    except OSError as error:
        raise Mistakes.one(f"the plan {path} cannot be read", why=error.strerror or str(error), fix=fix) from error
    except (ValueError, TypeError, KeyError) as error:
        raise Mistakes.one(f"{path} is not a saved plan", why=str(error), fix=fix) from error


def _text_or_none(value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise ValueError("its step is not text")
    return value


def check(saved: SavedPlan, recipe: Recipe, world: int) -> None:
    """Refuses a plan made from another recipe, for other devices or by other versions.

    Raises `Mistakes` (exit 4) with all differences.
    """
    if saved.step is None:
        nowhere = Source(saved.path, 0, 0, "")
        differences = [(nowhere, "it holds no programs of a training run, or another version wrote it")]
    else:
        differences = list(_differences(saved, recipe, world))
    if differences:
        (where, why), *also = differences
        raise Mistakes.one(
            f"the plan {saved.path} is for another program", exit=Exit.FIT, where=where, why=why,
            fix="plan again with `tpshard plan`, or train without --plan", also=tuple(also),
        )  # fmt: skip


def _differences(saved: SavedPlan, recipe: Recipe, world: int) -> Iterator[tuple[Source, str]]:
    """Yields what differs between a saved plan and a recipe on `world` devices, each with its place and a sentence."""
    now = values(recipe, ELSEWHERE)
    for key in dict.fromkeys((*now, *saved.values)):
        if now.get(key) != saved.values.get(key):
            then = f"planned with {shorten(saved.values[key])}" if key in saved.values else "planned without it"
            yield recipe.where(key), f"`{key}: {shorten(now.get(key))}`, {then}"
    mesh = recipe.mesh_on(world)
    if mesh != dict(saved.mesh):
        yield recipe.where("mesh"), f"{_sizes(mesh)} on these devices, planned for {_sizes(saved.mesh)}"
    used = versions(recipe)
    for name in dict.fromkeys((*used, *saved.versions)):
        if used.get(name) != saved.versions.get(name):
            hashed = name.startswith("the code") or name not in ("python", "tpshard", "torch", "transformers")
            before, after = saved.versions.get(name, "none"), used.get(name, "none")
            words = f"{name} has changed since" if hashed else f"{name} {after}, planned with {before}"
            yield Source(saved.path, 0, 0, ""), words


def _sizes(mesh: Mapping[str, int]) -> str:
    return "{" + ", ".join(f"{axis}: {size}" for axis, size in mesh.items() if size != 1) + "}"
