"""Documentation generated from the schema: the texts of keys, and JSON Schema for editors."""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Mapping
from dataclasses import MISSING, dataclass
from functools import cache
from typing import Any, Literal, get_args, get_origin

from tpshard.recipes.keys import adapter_keys, data_keys, model_keys, parallel_keys, schema, serving_keys, training_keys
from tpshard.recipes.keys.constraints import ALONE, BYTES, PERCENT, Constraint
from tpshard.recipes.reading.checker import legal
from tpshard.recipes.reading.hints import alternatives, hints, section_of, walk, wholly_section
from tpshard.recipes.text.section import Section, default_of
from tpshard.recipes.text.write import as_data


@cache
def texts() -> dict[str, dict[str, str]]:
    """For each section and key, the docstring below it in its module's source, or else that of the key's section."""
    by_section: dict[str, dict[str, str]] = {}
    for module in (schema, data_keys, model_keys, adapter_keys, parallel_keys, training_keys, serving_keys):
        for node in ast.parse(inspect.getsource(module)).body:
            if isinstance(node, ast.ClassDef):
                by_section[node.name] = _texts_of(node, getattr(module, node.name))
    return by_section


def _texts_of(source: ast.ClassDef, cls: type[Section]) -> dict[str, str]:
    inner = {key: section_of(hint) for key, hint in hints(cls).items()}
    keys = {key: inspect.cleandoc(section.__doc__ or "") for key, section in inner.items() if section is not None}
    for item, after in zip(source.body, source.body[1:]):
        match item, after:
            case ast.AnnAssign(target=ast.Name(key)), ast.Expr(value=ast.Constant(value=str(text))):
                keys[key] = inspect.cleandoc(text)
    return {key: text.replace("\n", " ") for key, text in keys.items()}


def json_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a recipe file, with the documentation of every key for editors."""
    definitions: dict[str, Any] = {}
    top = _object(schema.Recipe, definitions)
    extends = {
        "type": "string",
        "description": "The recipe to start from: a path relative to this file, or a shipped name.",
    }
    top["properties"] = {"extends": extends, **top["properties"]}
    top["required"] = []  # `extends` may supply them
    top["anyOf"] = [{"required": ["model"]}, {"required": ["extends"]}]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "tpshard recipe",
        **top,
        "$defs": definitions,
    }


def _object(cls: type[Section], definitions: dict[str, Any]) -> dict[str, Any]:
    properties, required = {}, []
    for key, hint in hints(cls).items():
        item = cls.__dataclass_fields__[key]
        described = _schema(hint, definitions)
        words = texts().get(cls.__name__, {}).get(key, "")
        if "derived" in item.metadata:
            described = {"anyOf": [described, {"type": "null"}]}
            words += f" Default: {item.metadata['derived']}."
        elif (value := default_of(item)) is MISSING:
            required.append(key)
        elif value is not None and not isinstance(value, Section):
            described["default"] = as_data(value)
        properties[key] = {"description": words, **described}
    return {
        "type": "object",
        "description": inspect.cleandoc(cls.__doc__ or ""),
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def _schema(hint: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    options = [_one(base, constraints, definitions) for base, constraints in alternatives(hint)]
    if hint is not Any and hint is not str:
        options.append({"type": "string", "pattern": r"\$\{"})  # any value may be an interpolation
    return options[0] if len(options) == 1 else {"anyOf": options}


def _one(base: Any, constraints: tuple[Constraint, ...], definitions: dict[str, Any]) -> dict[str, Any]:
    described: dict[str, Any]
    if base is Any:
        described = {}
    elif get_origin(base) is Literal:
        described = {"enum": list(get_args(base))}
    elif isinstance(base, type) and issubclass(base, Section):
        if base.__name__ not in definitions:
            definitions[base.__name__] = {}
            definitions[base.__name__] = _object(base, definitions)
        described = {"$ref": f"#/$defs/{base.__name__}"}
    elif get_origin(base) is Mapping:
        key, value = get_args(base)
        described = {"type": "object", "additionalProperties": _schema(value, definitions)}
        names = {k: v for _, limits in alternatives(key) for limit in limits for k, v in limit.json.items()}
        if names:
            described["propertyNames"] = names
    elif get_origin(base) is tuple and get_args(base)[1:] == (Ellipsis,):
        described = {"type": "array", "items": _schema(get_args(base)[0], definitions)}
    elif get_origin(base) is tuple:
        items = [_schema(part, definitions) for part in get_args(base)]
        described = {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}
    else:
        names_of = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null"}
        described = {"type": names_of[base]}
    for constraint in constraints:
        described |= constraint.json
    if BYTES in constraints:
        described = {"anyOf": [described, {"type": "string", "pattern": r"^[0-9.]+ *[kKMGT]?i?B?$"}]}
    if PERCENT in constraints:
        described = {"anyOf": [described, {"type": "string", "pattern": r"^[0-9.]+ ?%$"}]}
    if ALONE in constraints:
        described = {"anyOf": [described, described["items"], {"type": "null"}]}
    return described


@dataclass(frozen=True)
class DocumentedKey:
    """The documentation of one key."""

    path: str
    legal: str
    default: str
    text: str


def keys(prefix: str = "") -> list[DocumentedKey]:
    """All keys with a value below `prefix`, in the order of the schema."""
    documented = []
    for path, cls, hint in walk(schema.Recipe, wholly_section):
        key, item = ".".join(path), cls.__dataclass_fields__[path[-1]]
        if wholly_section(hint) is None and (not prefix or key == prefix or key.startswith(f"{prefix}.")):
            value = default_of(item)
            plain = "required" if value is MISSING else json.dumps(as_data(value)).replace('"', "")
            text = texts()[cls.__name__].get(path[-1], "")
            documented.append(DocumentedKey(key, legal(hint), item.metadata.get("derived", plain), text))
    return documented
