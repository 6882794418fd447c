"""The recipe's key behind an option that a command does not have: `--port 8001` means serve.port=8001."""

from __future__ import annotations

from collections.abc import Sequence

from tpshard.diagnostics.diagnostic import join, suggestion
from tpshard.recipes.reading.checker import homes
from tpshard.recipes.text import other_tools


def option_fix(arguments: Sequence[str], option: str) -> str:
    """The fix of an unknown option among a command's arguments: keys of the recipe to write instead; "" for none."""
    written = next((text for text in arguments if text.partition("=")[0] == option or text.startswith(option)), option)
    name, equals, value = written.lstrip("-").replace("-", "_", written.count("-")).partition("=")
    if not equals:
        after = [*arguments, ""][arguments.index(written) + 1] if written in arguments else ""
        value = "" if after.startswith("-") or "=" in after else after
    elif equals:
        value = written.partition("=")[2]
    keys = keys_of(name, arguments[0] if arguments else "")
    if name in ("config", "config_file", "recipe", "yaml"):
        return "name the recipe itself, without an option"
    if not keys:
        return ""
    shown = join(f"`{key}={value or '...'}`" for key in keys)
    return f"keys of the recipe follow it as key=value: {shown}"


def keys_of(name: str, command: str = "") -> Sequence[str]:
    """The keys that an option's name can mean, of this tool or another; empty for none."""
    every = [path for paths in homes().values() for path in paths]
    last = name.rpartition(".")[2]
    if name in every:
        return [name]
    for word in (f"{command}.{last}", last):
        if word in every:
            return [word]
        if word in other_tools.KEYS:
            return other_tools.KEYS[word]
    if last in homes():
        return homes()[last][:3]
    close = suggestion(name, every)
    return [close] if close else []
