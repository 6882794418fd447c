"""Interpolation in OmegaConf's grammar: other keys, the environment, and text decoded as a value.

Other resolvers are refused, so that no recipe can import a module, run code or read a file.
"""

from __future__ import annotations

import os
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.basecontainer import BaseContainer
from omegaconf.errors import GrammarParseError, OmegaConfBaseException
from tpshard.recipes.diagnostic import Diagnostic, Source, suggestion
from tpshard.recipes.nodes import Path, dotted

ALLOWED = ("oc.env", "oc.decode", "oc.select", "oc.dict.keys", "oc.dict.values")
"""Resolvers that a recipe may use. Others of OmegaConf, such as `oc.coerce`, import modules."""

MAX_COMPLETED = 2_000
"""The maximal number of interpolations of a recipe after expansion."""

ERRORS = (OmegaConfBaseException, RecursionError, LookupError, AttributeError, TypeError, ValueError)
"""The errors that OmegaConf raises for an interpolation that cannot be resolved."""

_RESOLVER = re.compile(r"\$\{\s*([A-Za-z_][\w.-]*)\s*:")
_KEY = re.compile(r"\$\{\s*(\.*)([^${}:]+?)\s*\}")
_LOCK = threading.RLock()


@dataclass
class Environment:
    """The environment variables that resolving a value read, and those that are unset and required."""

    read: list[str] = field(default_factory=list)
    unset: list[str] = field(default_factory=list)


@contextmanager
def allowed_resolvers() -> Iterator[Environment]:
    """A context in which OmegaConf has only the allowed resolvers; yields the environment variables they read."""
    reads = Environment()
    with _LOCK, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about an empty default, `${oc.env:NAME,}`
        every = BaseContainer._resolvers

        def environment(root: Any, parent: Any, node: Any, args: tuple[Any, ...], words: tuple[str, ...]) -> Any:
            reads.read.append(str(args[0]))
            if len(args) == 1 and str(args[0]) not in os.environ:
                reads.unset.append(str(args[0]))
            return every["oc.env"](root, parent, node, args, words)

        BaseContainer._resolvers = {n: every[n] for n in ALLOWED if n in every} | {"oc.env": environment}
        try:
            yield reads
        finally:
            BaseContainer._resolvers = every


def unreadable(text: str) -> str | None:
    """The error in the syntax of the interpolations in `text`; None if there is none."""
    refused = next((name for name in _RESOLVER.findall(text) if name not in ALLOWED), None)
    if refused is not None:
        return f"`{refused}` is not allowed; {', '.join(ALLOWED)} are"
    try:
        OmegaConf.create([text])
    except GrammarParseError as error:
        return str(error).splitlines()[0]
    return None


def value_at(config: DictConfig, path: Path) -> Any:
    """The value with all interpolations resolved, as maps, lists and scalars.

    Raises one of `ERRORS`. Call it inside `allowed_resolvers`.
    """
    value: Any = reduce(lambda inside, key: inside[key], path, config)
    return OmegaConf.to_container(value, resolve=True, throw_on_missing=True) if OmegaConf.is_config(value) else value


def written_at(raw: Any, path: Path) -> Any:
    """The value at a path of plain data. Raises LookupError if there is none."""
    for key in path:
        if isinstance(raw, list) and str(key).isdigit():
            raw = raw[int(key)]
        elif isinstance(raw, dict):
            raw = raw[key]
        else:
            raise LookupError(key)
    return raw


def or_none(raw: Any, path: Path) -> Any:
    """The value at a path of plain data, or None."""
    try:
        return written_at(raw, path)
    except LookupError:
        return None


def keys_in(raw: Any, path: Path) -> list[Path]:
    """The keys to which the text at a path refers, as absolute paths."""
    text = or_none(raw, path)
    keys: list[Path] = []
    for dots, key in _KEY.findall(text) if isinstance(text, str) else ():
        at: Path = path[: len(path) - len(dots)] if dots else ()
        for part in re.findall(r"[^.\[\]]+", key):
            inside = or_none(raw, at)
            if isinstance(inside, str):
                break  # the key is itself an interpolation, which is followed later
            at = (*at, int(part) if isinstance(inside, list) and part.isdigit() else part)
        keys.append(at)
    return keys


def size(raw: Any, path: Path, sizes: dict[Path, int]) -> int:
    """The number of interpolations to resolve for the value at a path. `sizes` caches earlier results."""
    if path not in sizes:
        sizes[path] = 0  # for a circle, which `cause` reports
        value = or_none(raw, path)
        inside = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
        keys = keys_in(raw, path)
        sizes[path] = len(keys) + sum(size(raw, key, sizes) for key in keys + [(*path, key) for key in inside])
    return sizes[path]


def dependencies(raw: Any, path: Path) -> list[Path]:
    """All keys that the value at a path depends on, each once, nearest first."""
    keys: list[Path] = []
    todo = [path]
    while todo:
        for key in keys_in(raw, todo.pop(0)):
            if key not in (path, *keys) and or_none(raw, key) is not None:
                keys.append(key)
                todo.append(key)
    return keys


def cause(
    raw: Any, path: Path, place: Callable[[Path], Source], fails: Callable[[Path], Exception | None]
) -> tuple[Path, Diagnostic]:
    """The mistake that prevents resolving the value at a path, and the path of that mistake.

    The mistake may be in a value that this one refers to. `fails` resolves the value at a path and returns its error.
    """
    chain = [path]
    while True:
        keys = keys_in(raw, chain[-1])
        if again := next((key for key in keys if key in chain), None):
            return _circle(chain[chain.index(again) :], place)
        broken = next((key for key in keys if _is_written(raw, key, place) and fails(key)), None)
        if broken is None or broken in chain:
            break
        chain.append(broken)
    at = chain[-1]
    text = or_none(raw, at)
    also = tuple((place(p), "needed here") for p in chain[:-1])
    missing = next((key for key in keys if or_none(raw, key) in (None, "???")), None)
    if text == "???":
        return at, to_be_given(at, place(at), also)
    if missing is not None:
        message, why = f"`{dotted(at)}: {text}` refers to `{dotted(missing)}`", "that key has no value"
        close = suggestion(dotted(missing), (dotted(p) for p in _all(raw) if p not in (at, missing)))
    else:
        message, why = f"`{dotted(at)}: {text}` cannot be resolved", str(fails(at) or "").partition("\n")[0]
        close = ""
    return at, Diagnostic(message, where=place(at), why=why, fix=f"did you mean `{close}`?" if close else "", also=also)


def to_be_given(path: Path, where: Source, also: tuple[tuple[Source, str], ...] = ()) -> Diagnostic:
    """The mistake for a value that is still OmegaConf's `???`."""
    fix = "give it in a recipe that extends this one, or as an override"
    return Diagnostic(f"`{dotted(path)}` must be given", where=where, why="`???` means no value", fix=fix, also=also)


def _is_written(raw: Any, path: Path, place: Callable[[Path], Source]) -> bool:
    """Whether the text at a path was written by the user, and may itself be wrong."""
    text = or_none(raw, path)
    return isinstance(text, str) and (text != "???" or place(path).line > 0)


def _all(raw: Any, path: Path = ()) -> Iterator[Path]:
    if not isinstance(raw, dict):
        yield path
    else:
        for key, value in raw.items():
            yield from _all(value, (*path, key))


def _circle(paths: list[Path], place: Callable[[Path], Source]) -> tuple[Path, Diagnostic]:
    start = paths.index(min(paths, key=dotted))
    first, *rest = paths[start:] + paths[:start]
    words = " -> ".join(f"`{dotted(path)}`" for path in (first, *rest, first))
    also = tuple((place(path), "and here") for path in rest)
    fix = "give one of them a value of its own" if rest else "give it a value"
    return first, Diagnostic(f"circular interpolation: {words}", where=place(first), fix=fix, also=also)


def unset(name: str, where: Source | None) -> Diagnostic:
    """The mistake for a value that needs an unset environment variable."""
    fix = f"export {name}=..., or give a default: ${{oc.env:{name},default}}"
    return Diagnostic(f"the environment variable {name} is not set", where=where, why="needed now", fix=fix)
