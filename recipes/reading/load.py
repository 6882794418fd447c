"""Loads recipes: from a file, a shipped name and overrides to a checked `Recipe`, or to all their mistakes."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import OmegaConf
from tpshard.diagnostics.diagnostic import Diagnostic, Exit, Mistakes, Source, did_you_mean
from tpshard.models.families.presets import PRESETS
from tpshard.recipes.keys import laws
from tpshard.recipes.keys.schema import SCHEMA_VERSION, Recipe
from tpshard.recipes.reading import extends
from tpshard.recipes.reading.checker import BAD, Checker, homes
from tpshard.recipes.reading.hints import below_key, mapping_of, section_of
from tpshard.recipes.reading.merge import Merged
from tpshard.recipes.text import other_tools
from tpshard.recipes.text.nodes import Node, compose, scalar, written_at


@dataclass(frozen=True)
class Examined:
    """A recipe with all its diagnostics, and the paths of its refused values. If there are errors, `recipe` has
    defaults in place of refused values."""

    recipe: Recipe
    diagnostics: tuple[Diagnostic, ...]
    bad: frozenset[str]
    """Paths whose value was refused; checks that depend on them are skipped."""

    def sound(self, *keys: str) -> bool:
        """Whether nothing under these keys was refused."""
        return not laws.touches(keys, self.bad)


class Origin(NamedTuple):
    """What a recipe was loaded from."""

    layers: tuple[Node, ...]
    """The trees of its file and of what that extends."""
    overrides: tuple[str, ...]
    name: str
    """The default of its name."""
    weights: bool = True
    """Whether models that it names on the hub are fetched with their weights."""


def load(path_or_builtin: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Recipe:
    """The recipe in a file, in a run's folder, or shipped under a name, with `key.path=value` overrides applied.

    Raises `Mistakes` with all errors in the recipe itself; callers check what depends on the model or the machine.
    """
    return _sound(examine(path_or_builtin, overrides))


def loads(text: str, overrides: Sequence[str] = (), *, file: str = "<text>") -> Recipe:
    """The recipe in `text`; `file` is its name in error messages. Its default name is `recipe`."""
    return _sound(_examine_layers(Origin(tuple(extends.layers_of_text(text, file)), tuple(overrides), "recipe")))


def with_changes(recipe: Recipe, changes: Sequence[str]) -> Recipe:
    """The recipe with further `key.path=value` overrides: what loading its file with them gives.

    Defaults that are derived from other keys are derived again. Raises `Mistakes` where the changes are wrong.
    """
    origin: Origin = recipe._origin
    return _sound(_examine_layers(origin._replace(overrides=(*origin.overrides, *changes))))


def with_steps(recipe: Recipe, steps: int) -> Recipe:
    """The recipe whose `data.epochs` make so many steps."""
    return _sound(_examine_layers(recipe._origin, steps))


def examine(
    path_or_builtin: str | os.PathLike[str], overrides: Sequence[str] = (), *, store: str | None = None,
    weights: bool = True,
) -> Examined:  # fmt: skip
    """Loads a recipe as `load` does, but returns its mistakes together with the usable rest.

    store: the place of the run in an object store whose small files the folder holds. weights: whether models that it
    names on the hub are fetched with their weights.

    Still raises `Mistakes` when nothing is usable: no file, no YAML, another schema.
    """
    path = find(os.fspath(path_or_builtin))
    of_run = path.name == "recipe.yaml" and path.parent.name  # a run's folder has the name of its recipe
    name, layers = path.resolve().parent.name if of_run else path.stem, extends.layers(path)
    origin = Origin(tuple(layers), tuple(overrides), name, weights)
    examined = _examine_layers(origin)
    if of_run and _has_moved(path.parent, examined.recipe, store):
        place = str(path.parent) if store is None else store
        examined = _examine_layers(origin._replace(overrides=(*overrides, f"run.dir={json.dumps(place)}")))
    return examined


def _has_moved(folder: Path, recipe: Recipe, store: str | None) -> bool:
    """Whether the recipe is that of the run in `folder` or `store`, which was in the `run.dir` that it says, seen from
    another working directory or before it was moved or copied. A `run.dir` of the command line means another run."""
    if store is None and not ((folder / "plan.json").is_file() and (folder / "metrics.jsonl").is_file()):
        return False
    if recipe.where("run.dir").file.startswith("<"):
        return False
    try:
        if store is not None:
            return (recipe.run.store or "").rstrip("/") != store.rstrip("/")
        if recipe.run.store is not None:  # the folder beside a run in a store holds no checkpoints
            return (folder / "checkpoints").is_dir()
        return recipe.run.folder.resolve() != folder.resolve()
    except (Mistakes, OSError, RuntimeError):  # an environment variable is not set, a loop of links
        return True


def in_order(diagnostics: Iterable[Diagnostic]) -> list[Diagnostic]:
    """The diagnostics from top to bottom, file by file, overrides last."""
    listed = list(diagnostics)
    files = {file: i for i, file in enumerate(dict.fromkeys(d.where.file for d in listed if d.where))}

    def place(d: Diagnostic) -> tuple[int, int, int]:
        if d.where is None:
            return (-1, 0, 0)
        number = re.fullmatch(r"<override (\d+)>", d.where.file)
        return (len(files) + int(number[1]) if number else files[d.where.file], d.where.line, d.where.col)

    return sorted(listed, key=place)


def find(name: str) -> Path:
    """The file named on a command line: a path, a folder with a recipe.yaml, or a shipped recipe."""
    path = Path(name)
    if path.is_dir() and (path / "recipe.yaml").is_file():
        return path / "recipe.yaml"
    if path.exists() and not path.is_dir():
        return path
    if name in extends.builtins():
        return extends.builtins()[name]
    looks_like_path = path.suffix in (".yaml", ".yml") or os.sep in name
    why = "a folder without a recipe.yaml" if path.is_dir() else "no such file" if looks_like_path else ""
    fix = did_you_mean(name, extends.builtins(), f"shipped recipes: {', '.join(extends.builtins())}")
    if path.is_dir() and any(path.glob("*.safetensors")) and not (path / "config.json").is_file():
        raise Mistakes.one(
            f"{name} has weights and no config.json", exit=Exit.CHECKPOINT, fix="copy the model's folder again, whole"
        )
    if (path / "config.json").is_file():
        why = "a Hugging Face folder, which is a model"
        fix = f"tpshard serve quickstart serve.checkpoint={name}; or a recipe with `model: {{hf: {name}}}`"
        if b'"tpshard_module"' in (path / "config.json").read_bytes()[:1_000_000]:
            why = "a folder of `tpshard quantize`, whose model is a module of your own"
            fix = f"name the recipe that it was made from, with serve.checkpoint={name}"
    elif hub := other_tools.hub_fix(name):
        fix = hub
    raise Mistakes.one(f"there is no recipe `{name}`", exit=Exit.USAGE, why=why, fix=fix)


def _sound(examined: Examined) -> Recipe:
    if any(d.severity == "error" for d in examined.diagnostics):
        raise Mistakes(examined.diagnostics)
    return examined.recipe


def _examine_layers(origin: Origin, steps: int | None = None) -> Examined:
    layers, overrides, name, weights = origin
    recorded = [mistake for layer in reversed(layers) for mistake in layer.mistakes]
    merged = Merged()
    for layer in layers:
        _version(layer.get("schema"))
        merged.drop(("name",))  # a recipe does not inherit the name of its base
        merged.add(layer)
    merged.fill()
    for number, text in enumerate(overrides, 1):
        try:
            merged.add(_override(text, number))
        except Mistakes as mistakes:
            recorded += mistakes.diagnostics
    if ("schema",) in merged.places:
        _version(merged.places[("schema",)][1])
    merged.fill()
    _derive(merged, name, steps)
    checker = Checker(merged, weights=weights)
    recipe = checker.section(merged.raw, Recipe, ())
    vars(recipe).update(_places=checker.places, _origin=origin)
    vars(recipe).update(file=layers[-1].source.file, mesh=_complete(recipe.mesh))
    if not any(path[:2] == ("serve", "mesh") for path in merged.places):
        vars(recipe.serve)["mesh"] = _served(recipe)
    rules = {dim: axes for dim, axes in recipe.sharding.rules.items() if axes}
    if "ep" in recipe.mesh and "batch" in rules and not recipe.where("sharding.rules.batch").line:
        rules["batch"] = (*rules["batch"], "ep")
        rules.setdefault("expert", ("ep",))
    if "ep" in recipe.serve.mesh and not recipe.where("sharding.rules.expert").line:
        rules.setdefault("expert", ("ep",))
    for stage in recipe.schedule.stages:
        if stage.tokens is not None and stage.steps is None:  # which a saved recipe omits
            steps_of_stage = -(-stage.tokens // (recipe.batch.global_sequences * recipe.model.seq_len))
            vars(stage).update(steps=steps_of_stage, _written={**stage._written, "steps": None})
    if recipe.pipeline is not None and recipe.pipeline.vectorized:
        rules["stage"] = recipe.sharding.rules.get("stage", ("pp",))  # null stays, and is refused
        if not recipe.where("sharding.rules.vocab").line:  # embedding and head are on no stage: all devices share them
            rules["vocab"] = ("pp", *rules.get("vocab", ()))
    vars(recipe.sharding)["rules"] = rules
    lawful = laws.check(recipe, checker.bad)
    return Examined(recipe, tuple(in_order([*recorded, *checker.mistakes, *lawful])), frozenset(checker.bad))


def _version(node: Node | None) -> None:
    version = scalar(node) if node is not None and node.kind == "scalar" else None
    if node is None or (type(version) is int and version == SCHEMA_VERSION):
        return
    message = f"there is no schema {version}"
    if type(version) is not int:
        message = "`schema` is the version of the keys, a whole number"
    elif version > SCHEMA_VERSION:
        message = f"the recipe has schema {version}, newer than this tpshard"
    raise Mistakes.one(message, where=node.source, why=f"supported: {SCHEMA_VERSION}", fix=f"schema: {SCHEMA_VERSION}")


def _override(text: str, number: int) -> Node:
    """Makes a tree with one leaf of `key.path=value`. OmegaConf parses dots, brackets, and `\\.` (a dot in a key)."""
    file = f"<override {number}>"
    key, *rest = re.split(r"(?<!\\)=", text, maxsplit=1)

    def syntax_mistake(why: str, col: int = 1, width: int = 1, fix: str = "for example train.steps=100") -> Mistakes:
        message, where = f"the override `{text}` is not key.path=value", Source(file, 1, col, text, max(1, width))
        return Mistakes.one(message, exit=Exit.USAGE, where=where, why=why, fix=fix)

    sign = re.match(r"[+~-]*", text)
    assert sign is not None
    if signs := sign.group():
        bare = text[len(signs) :]
        fix = f"drop the {'plus' if '+' in signs else signs[0]}: {bare}"
        if "~" in signs:
            fix = f"null gives a key its default: {bare.partition('=')[0]}=null"
        raise syntax_mistake(f"a key does not begin with `{signs}`", width=len(signs), fix=fix)
    if not rest:
        raise syntax_mistake("no `=`", width=len(text), fix=_without_equals(text))
    if not key.strip():
        raise syntax_mistake("no key before `=`")
    if re.search(r"\s", key):
        raise syntax_mistake("a space in the key", width=len(key))
    if key.count("[") != key.count("]"):
        raise syntax_mistake("an unmatched bracket", width=len(key))
    parts: list[str] = []
    below: Any = OmegaConf.to_container(OmegaConf.from_dotlist([f"{key}=null"]))
    while isinstance(below, dict):
        ((part, below),) = below.items()
        parts.append(part)
    if "" in parts:
        raise syntax_mistake("an empty part between dots", col=len(".".join(parts[: parts.index("")])) + 1)
    where = Source(file, 1, 1, text, len(key))
    if rest[0].strip():
        leaf = compose(rest[0], file, shown=text, offset=len(key) + 1, mapping=False)
        if leaf.mistakes:
            raise Mistakes(leaf.mistakes)
    else:  # a shell's `key=` is empty text, not null
        leaf = Node("scalar", Source(file, 1, len(key) + 1, text, 1))
    return _nest(parts, leaf, Recipe, where)


def _without_equals(text: str) -> str:
    """The fix of an override without `=`."""
    if re.match(r"[A-Za-z_][\w.]*:", text):
        return f"write {re.sub(': *', '=', text, count=1)}"
    if text in {path for paths in homes().values() for path in paths}:
        return f"write {text}=VALUE, without a space"
    if os.path.exists(text):
        return "quote a pattern, so that the shell does not replace it by files: 'data.source=\"*.jsonl\"'"
    return other_tools.hub_fix(text) or "for example train.steps=100"


def _nest(parts: list[str], leaf: Node, hint: Any, where: Source) -> Node:
    """Wraps a leaf in the maps of its path. In a map with free keys the rest of the path is one key (`layers.*.up`)."""
    if section_of(hint) is not None:
        inner = below_key(hint, parts[0])
        name, value = parts[0], _nest(parts[1:], leaf, inner, where) if parts[1:] and inner is not None else leaf
    elif mapping_of(hint) is not None:
        name, value = ".".join(parts), leaf
    else:
        message = f"there are no keys below `{where.text[: where.width].removesuffix('.' + '.'.join(parts))}`"
        raise Mistakes.one(message, where=where, fix="give the whole value: key=[a, b] or key={a: b}")
    return Node("map", where, entries=((Node("scalar", where, name), value),))


def _derive(merged: Merged, name: str, steps: int | None) -> None:
    """Sets the defaults derived from other keys; one derived from a wrong key stays missing. steps: if counted."""
    checker = Checker(merged)

    def read(key: str) -> Any:
        path = tuple(key.split("."))
        value = checker.value(written_at(merged.raw, path), reduce(below_key, path, Recipe), path)
        if value is BAD:
            raise LookupError(key)
        return value

    def preset(key: str, otherwise: Any) -> Any:
        return getattr(PRESETS.get(read("model.preset") or ""), key, otherwise)

    def default(path: str, value: Callable[[], Any]) -> None:
        keys = tuple(path.split("."))
        section = written_at(merged.raw, keys[:-1])
        with contextlib.suppress(LookupError):
            if isinstance(section, dict) and section[keys[-1]] is None:
                merged.put(keys, "???")  # OmegaConf's sign for a missing value, until there is one
                merged.put(keys, value())

    def steps_of(tokens: int) -> int:
        return -(-tokens // int(read("batch.global_sequences") * read("model.seq_len")))

    def sampled() -> bool:
        """Whether the first source is the sample, which has a tokenizer of its own."""
        sources = read("data.sources")
        return bool((sources[0].source if sources else read("data.source")) == "sample")

    default("name", lambda: name)
    default("model.seq_len", lambda: preset("seq_len", 2048))
    default("model.dtype", lambda: preset("dtype", "bf16"))
    default("fsdp.param_dtype", lambda: "bf16" if read("model.dtype") == "fp8" else read("model.dtype"))
    default("optimizer.state_dtype", lambda: read("fsdp.master_dtype"))
    _keep_last(merged, [("train", "steps"), ("train", "tokens"), ("data", "epochs")])
    default("train.steps", lambda: steps or 200_000 if read("train.tokens") is None else steps_of(read("train.tokens")))
    default("adapters.lora.alpha", lambda: float(read("adapters.lora.rank")))
    default("schedule.warmup_steps", lambda: min(2000, read("train.steps") // 10))
    default("schedule.decay_steps", lambda: read("train.steps"))
    default("schedule.decay_over", lambda: max(1, read("schedule.decay_steps") // 10))
    default("resume", lambda: read("checkpoint.resume"))
    default("data.tokenizer", lambda: None if sampled() else "${oc.env:TOKENIZER_DIR}")
    reshuffled = ("data.sources", "data.messages", "data.completion", "data.epochs")
    default("data.shuffle", lambda: 1000 if any(map(read, reshuffled)) else 0)
    if isinstance(mesh := merged.raw["mesh"], dict):
        merged.put(("mesh",), _complete(mesh))
    default(
        "cluster.devices_per_node",
        lambda: max(1, math.prod(s for s in read("mesh").values() if s != -1) // read("cluster.nodes")),
    )


def _keep_last(merged: Merged, paths: Sequence[tuple[str, ...]]) -> None:
    """Of keys of which one counts, keeps those of the highest layer that writes any."""
    levels = {p: merged.level(p) for p in paths if p in merged.places and written_at(merged.raw, p) is not None}
    for path in paths:
        if path in merged.places and levels.get(path, -1) < max(levels.values(), default=0):
            merged.drop(path)


def _served(recipe: Recipe) -> dict[str, int]:
    """The mesh of a server where none is written: tp 4, or 2 or 1 where the run itself has fewer devices."""
    devices = math.prod(recipe.mesh.values())
    if devices < 1:  # the axis of size -1 takes what the cluster has
        each = None if recipe.cluster is None else recipe.cluster.devices_per_node  # None too where `mesh` is no mesh
        devices = 4 if recipe.cluster is None or each is None else recipe.cluster.nodes * each
    return {"tp": next(tp for tp in (4, 2, 1) if tp <= devices)}


def _complete(mesh: Mapping[str, Any]) -> dict[str, Any]:
    """The mesh with omitted dp, fsdp and tp added with size 1, each outside of those that follow it."""
    names = list(mesh)
    usual = ("dp", "fsdp", "tp")
    for axis in reversed(usual):
        if axis not in names:
            inside = [names.index(other) for other in usual[usual.index(axis) :] if other in names]
            names.insert(min(inside, default=len(names)), axis)
    return {axis: mesh.get(axis, 1) for axis in names}
