"""`extends`: the chain of files of a recipe, from the base to the recipe itself."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cache
from pathlib import Path

from tpshard.diagnostics.diagnostic import Exit, Mistakes, Source, did_you_mean
from tpshard.recipes.text.nodes import MAX_BYTES, Node, compose, read

MAX_CHAIN = 16


@cache
def builtins() -> dict[str, Path]:
    """The shipped recipes, by name."""
    return {path.stem: path for path in sorted(Path(__file__).parents[1].glob("*.yaml"))}


def layers(path: Path) -> list[Node]:
    """The trees of the recipe and of the files it extends, base first, without the key `extends`.

    Raises `Mistakes`, with the chain, when a file cannot be read, is not YAML, is outside the recipe's tree, or extends
    itself.
    """
    return _climb(_read(path, None, ""), path.parent, _root(path), [path])


def layers_of_text(text: str, file: str) -> list[Node]:
    """`layers` of a recipe given as text; its `extends` is relative to the working directory."""
    folder = Path.cwd()
    return _climb(compose(text, file), folder, folder.resolve(), [Path(file)])


def _climb(tree: Node, folder: Path, root: Path, chain: list[Path]) -> list[Node]:
    node = tree.get("extends")
    if node is None:
        return [tree]
    rest = replace(tree, entries=tuple((k, v) for k, v in tree.entries if k.text != "extends"))
    if node.kind != "scalar" or not node.text:
        message = "`extends` must be the path of one file, or the name of a shipped recipe"
        fix = "for example `extends: llama3-8b` or `extends: ../base.yaml`"
        raise Mistakes.one(message, where=node.source, fix=fix)
    base = _base(folder, node, root, _chain_text(chain))
    longer = [*chain, base]
    if any(base.resolve() == earlier.resolve() for earlier in chain):
        message = f"`extends` is circular: {_chain_text(longer)}"
        fix = "remove `extends` from the last of these files"
        raise Mistakes.one(message, where=node.source, why="back to the start", fix=fix)
    if len(chain) >= MAX_CHAIN:
        message = f"`extends` has a chain of more than {MAX_CHAIN} files: {_chain_text(chain)}"
        raise Mistakes.one(message, where=node.source, fix="join some of these files")
    extended = _read(base, node.source, f": {_chain_text(longer)}")
    return [*_climb(extended, base.parent, root, longer), rest]


def _base(folder: Path, node: Node, root: Path, chain: str) -> Path:
    name = node.text
    if "/" not in name and not name.endswith((".yaml", ".yml")):
        if name in builtins():
            return builtins()[name]
        message = f"there is no shipped recipe `{name}` to extend: {chain} -> {name}"
        fix = did_you_mean(name, builtins(), f"shipped: {', '.join(builtins())}; or a path such as ./{name}.yaml")
        raise Mistakes.one(message, where=node.source, why="not found", fix=fix)
    base = Path(os.path.normpath(folder / name))
    inside = base.resolve()
    if os.path.isabs(name) or not inside.is_relative_to(root):
        message = f"`extends: {name}` leads out of the recipe's tree: {chain} -> {name}"
        why = "absolute" if os.path.isabs(name) else f"outside of {root}"
        fix = "extend a file beside the recipe, or a shipped recipe by its name"
        raise Mistakes.one(message, where=node.source, why=why, fix=fix)
    return base


def _root(path: Path) -> Path:
    """The folder that must contain all files that a recipe extends.

    That is the outermost of these: the recipe's folder, the nearest project (`.git` or pyproject.toml) around it, and
    the working directory if it contains the recipe.
    """
    folder, working = path.resolve().parent, Path.cwd().resolve()
    above = [folder, *folder.parents]
    projects = [p for p in above if (p / ".git").exists() or (p / "pyproject.toml").exists()]
    return min([folder, *projects[:1], *(p for p in above if p == working)], key=lambda root: len(root.parts))


def _chain_text(chain: list[Path]) -> str:
    return " -> ".join(map(str, chain))


def _read(path: Path, where: Source | None, chain: str) -> Node:
    """The tree of a file; `where` it is extended, and the chain of files up to it, for messages."""
    code = Exit.RECIPE if where else Exit.USAGE
    if not path.is_file():
        fix = "write its path relative to the file that extends it" if where else ""
        raise Mistakes.one(f"there is no file {path}{chain}", exit=code, where=where, why="not found", fix=fix)
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        message, fix = f"cannot read {path}: {error.strerror}{chain}", "check who may read the file"
        raise Mistakes.one(message, exit=code, where=where, fix=fix) from None
    try:
        return read(data, str(path))
    except Mistakes as mistakes:
        also = ((where, "extended here"),) if where else ()
        raise Mistakes(replace(d, also=d.also + also) for d in mistakes.diagnostics) from None
