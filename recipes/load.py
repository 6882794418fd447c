"""From a file, a shipped name and overrides to a checked `Recipe`, or to every mistake in them."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any

from tpshard.models.presets import PRESETS
from tpshard.recipes import extends, laws
from tpshard.recipes.check import Checker, hints, mapping_of, section_of, suggestion
from tpshard.recipes.diagnostic import Diagnostic, Exit, Mistakes, Source
from tpshard.recipes.nodes import Node, compose, scalar
from tpshard.recipes.schema import SCHEMA_VERSION, Recipe
from tpshard.recipes.section import default_of, waits


@dataclass(frozen=True)
class Examined:
    """What came of a recipe. With errors among the diagnostics, `recipe` has defaults in place of what was refused."""

    recipe: Recipe
    diagnostics: tuple[Diagnostic, ...]
    bad: frozenset[str]
    """Paths whose value was refused; nothing that depends on them can be told."""

    def sound(self, *keys: str) -> bool:
        """Whether nothing under these keys was refused."""
        return not laws.touches(keys, self.bad)


def load(path_or_builtin: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Recipe:
    """The recipe in a file, in a run's folder, or shipped under a name, with `key.path=value` overrides put on top.

    Raises `Mistakes` with everything that is wrong with the recipe by itself; what needs the model or the machine is
    checked by whoever has them.
    """
    return _sound(examine(path_or_builtin, overrides))


def loads(text: str, overrides: Sequence[str] = (), *, file: str = "<text>") -> Recipe:
    """The recipe in `text`; `file` is what its places are called. Named `recipe` unless it says otherwise."""
    found: list[Diagnostic] = []
    return _sound(_examined(extends.layers_of_text(text, file, found), overrides, "recipe", found))


def examine(path_or_builtin: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Examined:
    """As `load`, but mistakes are handed over with what is left, for those who can tell more of it.

    Still raises `Mistakes` when nothing is left: no file, no YAML, another schema.
    """
    path = find(os.fspath(path_or_builtin))
    found: list[Diagnostic] = []
    return _examined(extends.layers(path, found), overrides, _name_of(path), found)


def in_order(diagnostics: Iterable[Diagnostic]) -> list[Diagnostic]:
    """From top to bottom, file by file, overrides last."""
    found = list(diagnostics)
    files = {file: i for i, file in enumerate(dict.fromkeys(d.where.file for d in found if d.where))}

    def place(d: Diagnostic) -> tuple[int, int, int]:
        if d.where is None:
            return (-1, 0, 0)
        number = re.fullmatch(r"<override (\d+)>", d.where.file)
        return (len(files) + int(number[1]) if number else files[d.where.file], d.where.line, d.where.col)

    return sorted(found, key=place)


def find(name: str) -> Path:
    """The file that a command line means: a path, a folder that holds a recipe.yaml, or a shipped recipe."""
    path = Path(name)
    if path.is_dir() and (path / "recipe.yaml").is_file():
        return path / "recipe.yaml"
    if path.exists() and not path.is_dir():
        return path
    if name in extends.builtins():
        return extends.builtins()[name]
    close = suggestion(name, extends.builtins())
    looks_like_path = path.suffix in (".yaml", ".yml") or os.sep in name
    why = "a folder without a recipe.yaml" if path.is_dir() else "no such file" if looks_like_path else ""
    raise Mistakes.one(
        f"there is no recipe `{name}`",
        exit=Exit.USAGE,
        why=why,
        fix=f"did you mean {close}?" if close else f"shipped recipes: {', '.join(extends.builtins())}",
    )


def _name_of(path: Path) -> str:
    # a run's folder is named after its recipe
    return path.resolve().parent.name if path.name == "recipe.yaml" and path.parent.name else path.stem


def _sound(examined: Examined) -> Recipe:
    if any(d.severity == "error" for d in examined.diagnostics):
        raise Mistakes(examined.diagnostics)
    return examined.recipe


def _examined(layers: list[Node], overrides: Sequence[str], name: str, found: list[Diagnostic]) -> Examined:
    for layer in layers:
        _version(layer)
    tree = layers[0]
    for layer in layers[1:]:
        tree = merged(_without(tree, "name"), layer, Recipe)
    for number, text in enumerate(overrides, 1):
        try:
            tree = merged(tree, _override(text, number, tree), Recipe)
        except Mistakes as mistakes:
            found += mistakes.diagnostics
    if overrides:
        _version(tree)
    checker = Checker()
    recipe = checker.section(tree, Recipe, "")
    object.__setattr__(recipe, "_places", checker.places)
    object.__setattr__(recipe, "_file", layers[-1].source.file)
    _derive(recipe, name)
    lawful = laws.check(recipe, checker.bad)
    object.__setattr__(recipe, "_warnings", tuple(d for d in lawful if d.severity == "warning"))
    return Examined(recipe, tuple(in_order([*found, *checker.mistakes, *lawful])), frozenset(checker.bad))


def _version(layer: Node) -> None:
    node = layer.get("schema")
    given = scalar(node) if node is not None and node.kind == "scalar" else None
    if node is None or (type(given) is int and given == SCHEMA_VERSION):
        return
    if not isinstance(given, int) or isinstance(given, bool):
        message = "`schema` is the version of the keys, a whole number"
    elif given > SCHEMA_VERSION:
        message = f"the recipe has schema {given}, newer than this tpshard"
    else:
        message = f"there is no schema {given}"
    raise Mistakes.one(message, where=node.source, why=f"supported: {SCHEMA_VERSION}", fix=f"schema: {SCHEMA_VERSION}")


def _without(node: Node, name: str) -> Node:
    return Node("map", node.source, entries=tuple((k, v) for k, v in node.entries if k.text != name))


def merged(base: Node, over: Node, hint: Any) -> Node:
    """`over` on top of `base`: maps key by key where the schema has a map of known or free keys, else replaced."""
    inner = section_of(hint)
    pair = mapping_of(hint) if inner is None else None
    if base.kind != "map" or over.kind != "map" or (inner is None and pair is None):
        return over
    news = {key.text: (key, value) for key, value in over.entries}
    entries = []
    exclusive = getattr(inner, "exclusive", ())
    chosen = [name for name in exclusive if name in news]
    for key, value in base.entries:
        if key.text in news:
            hint_inside = hints(inner).get(key.text) if inner is not None else pair[1] if pair else None
            new_key, new = news.pop(key.text)
            entries.append((new_key, merged(value, new, hint_inside)))
        elif not (chosen and key.text in exclusive):
            entries.append((key, value))
    return Node("map", over.source, entries=(*entries, *news.values()))


def _override(text: str, number: int, tree: Node) -> Node:
    """`key.path=value` as a tree with one leaf."""
    file = f"<override {number}>"
    key, equals, value = text.partition("=")

    def malformed(why: str, col: int = 1, width: int = 1) -> Mistakes:
        return Mistakes.one(
            f"the override `{text}` is not key.path=value",
            exit=Exit.USAGE,
            where=Source(file, 1, col, text, max(1, width)),
            why=why,
            fix="for example train.steps=100",
        )

    if not equals:
        raise malformed("no `=`", width=len(text))
    if not key.strip():
        raise malformed("no key before `=`")
    if key != key.strip() or re.search(r"\s", key):
        raise malformed("a space in the key", width=len(key))
    parts = key.split(".")
    if "" in parts:
        raise malformed("an empty part between dots", col=len(".".join(parts[: parts.index("")])) + 1)
    if value.strip():
        leaf = compose(value, file, shown=text, offset=len(key) + 1, mapping=False)
    else:  # a shell's `key=` is empty text, and no null
        leaf = Node("scalar", Source(file, 1, len(key) + 1, text, 1))
    return _nested(parts, leaf, Recipe, Source(file, 1, 1, text, len(key)), tree)


def _nested(parts: list[str], leaf: Node, hint: Any, where: Source, base: Node | None) -> Node:
    """The maps around the leaf. Inside a map of free keys the rest of the path is one key (`layers.*.residual`), and
    what the default holds stays."""
    inner = section_of(hint)
    if inner is not None:
        name, rest = parts[0], parts[1:]
        known = hints(inner).get(name)
        below = base.get(name) if base is not None else None
        value = _nested(rest, leaf, known, where, below) if rest and known is not None else leaf
        if rest and known is None:
            value = Node("scalar", where)
        if rest and known is not None and below is None and section_of(known) is None and mapping_of(known) is not None:
            item = inner.__dataclass_fields__[name]  # type: ignore[attr-defined]
            value = merged(_as_node(default_of(item), name), value, known)
        return Node("map", where, entries=((Node("scalar", where, name), value),))
    if mapping_of(hint) is not None:
        return Node("map", where, entries=((Node("scalar", where, ".".join(parts)), leaf),))
    raise Mistakes.one(
        f"nothing lies below `{where.text[: where.width].removesuffix('.' + '.'.join(parts))}`",
        where=where,
        fix="give the whole value: key=[a, b] or key={a: b}",
    )


def _as_node(value: Any, path: str) -> Node:
    where = Source(f"<default {path}>", 0, 0, f"{path}: {value}")
    if isinstance(value, dict):
        entries = tuple((Node("scalar", where, k), _as_node(v, f"{path}.{k}")) for k, v in value.items())
        return Node("map", where, entries=entries)
    if isinstance(value, tuple):
        return Node("list", where, items=tuple(_as_node(v, path) for v in value))
    if value is None or value is MISSING:
        return Node("map", where)
    return Node("scalar", where, str(value), not isinstance(value, str))


def _derive(recipe: Recipe, name: str) -> None:
    """Fill in the defaults that come from other keys."""

    def default(section: Any, key: str, value: Any) -> None:
        if section.stored()[key] is None:
            object.__setattr__(section, key, value)
            if not section.__dataclass_fields__[key].metadata["saved"]:
                object.__setattr__(section, "_unsaved", section._unsaved | {key})
            if waits(type(section), key, value):
                where = Source(f"<default {key}>", 0, 0, f"{key}: {value}")
                object.__setattr__(section, "_lazy", {**section._lazy, key: where})

    model, data = recipe.model, recipe.data
    default(recipe, "name", name)
    known = PRESETS.get(model.preset or "")
    default(model, "seq_len", 2048 if known is None else known.seq_len)
    default(model, "dtype", "bf16" if known is None else known.dtype)
    default(recipe.fsdp, "param_dtype", model.dtype)
    default(recipe.schedule, "warmup_steps", min(2000, recipe.train.steps // 10))
    if data.stored()["source"] != "sample":
        default(data, "tokenizer", "${oc.env:TOKENIZER_DIR}")
    directory = recipe.run.stored()["dir"].replace("${name}", recipe.stored()["name"])
    object.__setattr__(recipe.run, "dir", directory)
    if not waits(type(recipe.run), "dir", directory):
        object.__setattr__(recipe.run, "_lazy", {})
    object.__setattr__(recipe, "mesh", _complete(recipe.mesh))
    if recipe.cluster is not None:
        sized = math.prod(size for size in recipe.mesh.values() if size != -1)
        default(recipe.cluster, "devices_per_node", max(1, sized // recipe.cluster.nodes))
    rules = {name: axes for name, axes in recipe.sharding.rules.items() if axes}
    if "ep" in recipe.mesh and "batch" in rules and not recipe.where("sharding.rules.batch").line:
        rules["batch"] = (*rules["batch"], "ep")
        rules.setdefault("expert", ("ep",))
    object.__setattr__(recipe.sharding, "rules", rules)


def _complete(mesh: Mapping[str, int]) -> dict[str, int]:
    """The mesh with dp, fsdp and tp of size 1 where they are left out, each outside of those that follow it."""
    names = list(mesh)
    usual = ("dp", "fsdp", "tp")
    for axis in reversed(usual):
        if axis not in names:
            inside = [names.index(other) for other in usual[usual.index(axis) :] if other in names]
            names.insert(min(inside, default=len(names)), axis)
    return {axis: mesh.get(axis, 1) for axis in names}


__all__ = ["Examined", "examine", "find", "in_order", "load", "loads"]
