"""Writes a recipe as YAML: complete, interpolations as written, secrets masked."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml
from tpshard.diagnostics.diagnostic import Mistakes, Source
from tpshard.recipes.text.nodes import Node, scalar, trap
from tpshard.recipes.text.section import Section, changed

MASK = "***"
_SECRET = re.compile("key|apikey|token|secret|password|passwd|passphrase|pwd|credentials?|auth|bearer")


def dump(data: Any) -> str:
    """Plain data as YAML."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, width=110, default_flow_style=None, allow_unicode=True)


def as_data(value: Any, name: str = "", resolved: bool = False, named: bool = False) -> Any:
    """A recipe or a part of it as maps, lists and scalars; unset keys whose default is null are omitted.

    named: the keys of maps name arguments, such as `model.args`, of which any may be a secret. Other maps' keys name
    dims, parameters (`attention.key.weight`) and columns.
    """
    if isinstance(value, Section):
        items = (value.stored() | (_resolved_values(value) if resolved else {})).items()
        fields = type(value).__dataclass_fields__
        shown = {k: v for k, v in items if v is not None or fields[k].default is not None}
        return {k: as_data(v, k, resolved, named=k == "args") for k, v in shown.items()}
    if isinstance(value, Mapping):
        return {k: as_data(v, k if named else "", resolved, named) for k, v in value.items()}
    if may_be_secret(name, value):
        return mask(value)
    if isinstance(value, tuple | list):
        return [as_data(item) for item in value]
    return value


def secrets_of(recipe: Section) -> Iterator[tuple[str, Any]]:
    """The values that are masked in a recipe's text, as written, with their keys."""

    def below(path: str, value: Any, named: bool) -> Iterator[tuple[str, Any]]:
        if isinstance(value, Section | Mapping):
            for key, item in (value.stored() if isinstance(value, Section) else value).items():
                yield from below(f"{path}.{key}" if path else key, item, named or key == "args")
        elif (named or path == "serve.api_key") and may_be_secret(path.rpartition(".")[2], value):
            yield path, value

    return below("", recipe, False)


def _resolved_values(section: Section) -> dict[str, Any]:
    """The values of a section that depend on no unset environment variable."""
    values = {}
    for key, written in section.stored().items():
        with contextlib.suppress(Mistakes):
            if not looks_secret(key) and written is not None:
                values[key] = changed(getattr(section, key), _literal)
    return values


def _literal(value: Any) -> Any:
    """Text escaped, so that nothing in it is read as an interpolation."""
    return value.replace("${", r"\${") if isinstance(value, str) else value


def looks_secret(key: str) -> bool:
    """Whether a key's name suggests a secret: `api_key`, `hfToken`, `PASSWORD`."""
    words = re.findall(r"[a-z]+|[A-Z]+(?![a-z])|[A-Z][a-z]*", key)
    return any(_SECRET.fullmatch(word.lower()) for word in words)


def may_be_secret(key: str, value: Any) -> bool:
    """Whether a key suggests a secret, and its value can be one, which no number is: `pad_token: 0`."""
    return looks_secret(key) and not (value is None or isinstance(value, bool | int | float))


def mask(value: Any) -> Any:
    """Masks a secret: an interpolation keeps the variable's name and hides its default; other values are hidden."""
    if isinstance(value, str) and (match := re.fullmatch(r"\$\{(oc\.env:[A-Za-z0-9_]+)(,.*)?\}", value, re.DOTALL)):
        return f"${{{match[1]}{',' + MASK if match[2] else ''}}}"
    return MASK


class _Dumper(yaml.SafeDumper):
    """A YAML dumper whose output all versions of YAML read alike."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    plain = Node("scalar", Source("", 0, 0, ""), text, True)
    honest = isinstance(scalar(plain), str) and trap(plain) is None
    style = "|" if "\n" in text else None if honest else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)
