"""Shell completion of overrides, with the documentation of their keys."""

from __future__ import annotations

from typing import Any, Literal, get_args, get_origin

from tpshard.models.families.family import DIMS
from tpshard.recipes.keys import schema
from tpshard.recipes.reading.document import texts
from tpshard.recipes.reading.hints import alternatives, hints, mapping_of, section_of, wholly_section
from tpshard.recipes.text.section import Section


def completions(incomplete: str) -> list[tuple[str, str]]:
    """Completions of an override `key.path=value`, with documentation.

    Keys are completed one level at a time; after `=`, the values of a key with few of them.
    """
    path, equals, value = incomplete.partition("=")
    parts = path.split(".")
    cls: type[Section] = schema.Recipe
    for depth, part in enumerate(parts[:-1]):
        hint = hints(cls).get(part)
        inner = section_of(hint) if hint is not None else None
        if inner is None:
            return _free(hint, ".".join(parts[: depth + 1]), parts[depth + 1 :], incomplete) if hint is not None else []
        cls = inner
    legal = hints(cls)
    prefix = ".".join(parts[:-1]) + ("." if len(parts) > 1 else "")
    if equals:
        hint = legal.get(parts[-1])
        return [(f"{path}={v}", "") for v in _values(hint) if v.startswith(value)] if hint is not None else []
    matching = []
    for key, hint in legal.items():
        if key.startswith(parts[-1]):
            below = wholly_section(hint) is not None or mapping_of(hint) is not None
            matching.append((f"{prefix}{key}{'.' if below else '='}", texts().get(cls.__name__, {}).get(key, "")))
    return matching


def _free(hint: Any, path: str, rest: list[str], incomplete: str) -> list[tuple[str, str]]:
    """Completions of a map with free keys, such as a mesh's axes: the names in common use."""
    usual = {"mesh": ("dp", "fsdp", "tp"), "serve.mesh": ("tp",), "sharding.rules": tuple(DIMS)}.get(path, ())
    if mapping_of(hint) is None or len(rest) != 1 or "=" in incomplete:
        return []
    return [(f"{path}.{name}=", "") for name in usual if name.startswith(rest[0])]


def _values(hint: Any) -> list[str]:
    choices = []
    for base, constraints in alternatives(hint):
        if get_origin(base) is Literal:
            choices += [str(choice) for choice in get_args(base)]
        elif base is bool:
            choices += ["true", "false"]
        elif base is type(None):
            choices.append("null")
        choices += [name for limit in constraints for name in limit.names]
    return choices
