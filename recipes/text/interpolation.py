"""Resolves interpolations in OmegaConf's grammar: of other keys, of the environment, and of text decoded as a value.

Other resolvers are refused, so that no recipe can import a module, run code or read a file.
"""

from __future__ import annotations

import os
import re
import threading
import warnings
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.base import Container, Node
from omegaconf.basecontainer import BaseContainer
from omegaconf.errors import GrammarParseError, OmegaConfBaseException
from tpshard.diagnostics.diagnostic import Diagnostic, Notes, Source
from tpshard.recipes.text.nodes import Path
from tpshard.recipes.text.other_tools import MADE_TOKENIZERS

ALLOWED = ("oc.env", "oc.decode", "oc.select", "oc.dict.keys", "oc.dict.values")
"""Resolvers that a recipe may use. Others of OmegaConf, such as `oc.coerce`, import modules."""

MAX_RESOLVED = 2_000
"""The maximal number of interpolations that are resolved for one recipe."""

ERRORS = (OmegaConfBaseException, RecursionError, LookupError, AttributeError, TypeError, ValueError)
"""The errors that OmegaConf raises for an interpolation that cannot be resolved."""

FORMS = 'write "${oc.env:NAME,default}" or "${key.path}"; a default with signs in it needs quotes of its own'
"""The fix for an interpolation that OmegaConf refuses."""

_RESOLVER = re.compile(r"\$\{\s*([A-Za-z_][\w.-]*)\s*:")
_LOCK = threading.RLock()


@dataclass
class Resolved:
    """A value with its interpolations resolved, or the error, and what OmegaConf read on the way."""

    value: Any = None
    error: Exception | None = None
    read: list[str] = field(default_factory=list)
    """Environment variables."""
    unset: list[str] = field(default_factory=list)
    """Environment variables that are not set and have no default."""
    keys: list[tuple[int, Path]] = field(default_factory=list)
    """Other keys of the recipe, each with the length of the chain of keys that leads to it."""
    broken: list[Path] = field(default_factory=list)
    """The keys that lead from the value to the error, each named by the one before it."""
    count: int = 0
    """Number of interpolations of keys."""


def resolve_at(config: DictConfig, path: Path) -> Resolved:
    """The value at a path as maps, lists and scalars, with all interpolations resolved by OmegaConf.

    Meanwhile OmegaConf has only the allowed resolvers, and what it reads is recorded.
    """
    resolved, chain = Resolved(), [path]  # the keys that are being resolved, from this one to the innermost

    def read_environment(root: Any, parent: Any, node: Any, args: tuple[Any, ...], words: tuple[str, ...]) -> Any:
        resolved.read.append(str(args[0]))
        if len(args) == 1 and str(args[0]) not in os.environ:
            resolved.unset.append(str(args[0]))
        return resolvers["oc.env"](root, parent, node, args, words)

    def follow_key(parent: Container, inter_key: Any, **caches: Any) -> Node:
        resolved.count += 1
        if resolved.count > MAX_RESOLVED:
            raise RecursionError
        if not chain:
            return follow(parent, inter_key, **caches)
        dots = inter_key.relative_dots
        start = _path_of(parent)[: 1 - dots or None] if dots else ()
        chain.append((*start, *inter_key.parts))
        resolved.keys.append((len(chain), chain[-1]))
        try:
            return follow(parent, inter_key, **caches)
        except BaseException:
            resolved.broken = resolved.broken or list(chain)
            raise
        finally:
            chain.pop()

    with _LOCK, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # OmegaConf warns of an empty default, `${oc.env:NAME,}`
        resolvers, follow = BaseContainer._resolvers, Container._resolve_node_interpolation
        BaseContainer._resolvers = {n: resolvers[n] for n in ALLOWED} | {"oc.env": read_environment}
        Container._resolve_node_interpolation = follow_key  # type: ignore[method-assign, assignment]
        try:
            value: Any = reduce(lambda inside, key: inside[key], path, config)
            chain.clear()  # keys named by values inside a map are not recorded
            is_tree = OmegaConf.is_config(value)
            resolved.value = OmegaConf.to_container(value, resolve=True, throw_on_missing=True) if is_tree else value
        except ERRORS as error:
            resolved.error = error
        finally:
            BaseContainer._resolvers = resolvers
            Container._resolve_node_interpolation = follow  # type: ignore[method-assign]
    return resolved


def _path_of(container: Container) -> Path:
    parent = container._get_parent_container()
    return () if parent is None else (*_path_of(parent), container._key())


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


def unresolvable(text: str, resolved: Resolved, where: Source, also: Notes = ()) -> Diagnostic:
    """The mistake for an interpolation that OmegaConf can parse, but not resolve: an unset variable, or its error."""
    if resolved.unset:
        name = resolved.unset[0]
        message = f"the environment variable {name} is not set"
        fix = f"export {name}=..., or give a default: ${{oc.env:{name},default}}"
        if where.file.startswith("<default "):  # nobody wrote this interpolation
            fix = f"give `{where.text}` a value, or export {name}=..."
            if where.text == "data.tokenizer":
                fix += f"; {MADE_TOKENIZERS}"
        return Diagnostic(message, where=where, why="needed now", fix=fix, also=also)
    why = str(resolved.error).partition("\n")[0]
    return Diagnostic(f"`{text}` cannot be resolved", where=where, why=why, fix=FORMS, also=also)
