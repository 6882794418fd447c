"""Writes a recipe as YAML: complete, interpolations as written, secrets masked."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
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


def as_data(value: Any, name: str = "", resolved: bool = False) -> Any:
    """A recipe or a part of it as maps, lists and scalars; unset keys whose default is null are omitted."""
    if isinstance(value, Section):
        items = (value.stored() | (_resolved_values(value) if resolved else {})).items()
        fields = type(value).__dataclass_fields__
        return {k: as_data(v, k, resolved) for k, v in items if v is not None or fields[k].default is not None}
    if isinstance(value, Mapping):
        return {k: as_data(v, k, resolved) for k, v in value.items()}
    if looks_secret(name) and value is not None and not isinstance(value, bool):
        return mask(value)
    if isinstance(value, tuple | list):
        return [as_data(item) for item in value]
    return value


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
