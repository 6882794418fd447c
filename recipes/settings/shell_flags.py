"""Reads the flags that a shell script passes to its program."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from tpshard.diagnostics.diagnostic import Diagnostic, Mistakes, Source
from tpshard.recipes.settings.shell_script import Script
from tpshard.recipes.settings.shell_text import UNKNOWN, Text, flags_apart
from tpshard.recipes.settings.stated import Stated, StatedSettings, Unknown, by_key
from tpshard.recipes.text.nodes import Node, decode, scalar

LAUNCHER = r"--(nnodes|num-nodes|nproc-per-nodes?)"
"""Flags of launchers that say how many devices there are."""


def read(data: bytes, file: str) -> StatedSettings:
    """The flags that a script passes to its program. Raises `Mistakes` for a file without flags.

    The program is that of the command with most flags; in a script that only assigns variables, all their flags count.
    """
    text = decode(data, file)
    hosts = _directives(text)
    script = Script(text, file, {name: (value,) for name, value in hosts.items()})
    if UNKNOWN in text:
        where = script.place(text.index(UNKNOWN), 1)
        raise Mistakes.one("the script holds a null character", where=where, fix="is this a text file?")
    script.read()
    calls = sorted(script.found, key=lambda call: (_flags(call[0]), call[1]))
    words = calls[-1][0] if calls and _flags(calls[-1][0]) else []
    settings = _settings(words, script)
    if not words and not script.lost:
        for value in script.variables.values():
            settings += _settings([piece for one in value or () for piece in flags_apart(one)], script)
    by_name = {one.key: one for one in settings}
    for key, names in OF_SRUN.items():
        said = next((by_name[f"srun {name}"] for name in names if f"srun {name}" in by_name), None)
        count = said.value[0] if said is not None and isinstance(said.value, list) else said and said.value
        if said is not None and key not in by_name and isinstance(count, int):
            settings.append(said.meaning(key, count))
    known = {one.key for one in settings}
    for key, name in (("--nnodes", "SLURM_NNODES"), ("--nproc-per-node", "SLURM_GPUS_ON_NODE")):
        if key not in known and name in hosts and hosts[name].chars.isdigit():
            where = script.place(hosts[name].places[0], len(hosts[name].chars))
            settings.append(Stated(key, int(hosts[name].chars), where))
    lost = [one for words in script.lost for one in _settings(words, script)]
    if not settings and not lost:
        where = Source(file, 1, 1, text.split("\n", 1)[0])
        raise Mistakes.one("the file has no flags", where=where, fix="is this the script that starts the training?")
    return StatedSettings(by_key(settings), (*_lost(script), *script.absent, *_twice(settings)), tuple(lost))


OF_SRUN = {"--nnodes": ("--nodes",), "--nproc-per-node": ("--gpus-per-node", "--ntasks-per-node")}
"""Flags of `srun` that say how many devices there are, where no launcher behind it does."""
DIRECTIVES = (
    (r"(?:--nodes[= ]|-N ?)", ("SLURM_NNODES", "SLURM_JOB_NUM_NODES")),
    (r"(?:--gpus-per-node[= ]|--gres=gpu:|-G ?)(?:\w+:)?", ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE")),
    (r"--ntasks-per-node[= ]", ("SLURM_NTASKS_PER_NODE",)),
)
"""SLURM's directives of a script's head, and the variables that SLURM sets by them."""


def _directives(text: str) -> dict[str, Text]:
    """What SLURM sets by a script's `#SBATCH` lines."""
    found: dict[str, Text] = {}
    for pattern, names in DIRECTIVES:
        if match := re.search(rf"(?m)^#SBATCH\s+(?:.*\s)?{pattern}(\d+)\b", text):
            found |= dict.fromkeys(names, Text(match[1], tuple(range(*match.span(1)))))
    return found


def _flags(words: Sequence[Text]) -> int:
    return sum(word.chars.startswith("--") for word in words)


def _settings(words: Sequence[Text], script: Script) -> list[Stated]:
    """Flags with the words behind each."""
    settings: list[tuple[str, str, Source, list[Any]]] = []
    launcher = (words[0].chars.replace(UNKNOWN, "").rpartition("/")[2] if words else "") or "launcher"
    modules = {i + 1 for i, word in enumerate(words) if word.chars == "-m" and i}
    if launcher.startswith("python") and modules and min(modules) < len(words):  # python -m accelerate.commands.launch
        launcher = words[min(modules)].chars.partition(".")[0]
    behind = False  # whether a word stands behind the program, before its first flag
    for i, word in enumerate(words):
        if i + 1 in modules:
            continue
        if word.chars.endswith(".py") or i in modules:  # what is before the program is its launcher's
            behind = True
            settings = [(one[0] if re.fullmatch(LAUNCHER, one[0]) else f"{launcher} {one[0]}", *one[1:])
                        for one in settings]  # fmt: skip
        elif match := re.match(r"--([A-Za-z][\w-]*)(=)?", word.chars):
            where = script.place(word.places[0], len(match[0]))
            settings.append((f"--{match[1].replace('_', '-')}", f"--{match[1]}", where, []))
            behind = False
            if match[2]:
                settings[-1][-1].append(_value(word.chars[match.end() :]))
        elif behind and re.fullmatch(r"[^\s-][^\s]*\.(ya?ml|json)", word.chars):  # its settings' file
            settings.append(("--config", word.chars, script.place(word.places[0], len(word.chars)), [word.chars]))
            behind = False
        elif match := re.match(rf"{UNKNOWN}--([A-Za-z][\w-]*)[ =]?", word.chars):  # a flag under a condition
            where = script.place(word.places[0], 1)
            rest = Unknown(word.chars[match.end() :].replace(UNKNOWN, ""))
            settings.append((f"--{match[1].replace('_', '-')}", f"--{match[1]}", where, [rest]))
        elif settings and word.chars.strip() and not (settings[-1][-1] and word.chars.startswith(UNKNOWN)):
            settings[-1][-1].append(_value(word.chars))
        elif word.chars.startswith(UNKNOWN):
            where = script.place(word.places[0], 1)
            settings.append((word.chars.replace(UNKNOWN, ""), "", where, [_value(word.chars)]))
    return [Stated(key, _together(values), where, written) for key, written, where, values in settings]


def _together(values: list[Any]) -> Any:
    """The value of a flag from the words behind it."""
    if any(isinstance(value, Unknown) for value in values):
        return Unknown(" ".join(value.text if isinstance(value, Unknown) else str(value) for value in values))
    return True if not values else values[0] if len(values) == 1 else values


def _value(text: str) -> Any:
    if UNKNOWN in text:
        return Unknown(text.replace(UNKNOWN, ""))
    return scalar(Node("scalar", Source("", 0, 0, ""), text.strip("'\""), True))


def _lost(script: Script) -> Iterable[Diagnostic]:
    """A warning for each line that has lost its continuation."""
    for words in script.lost:
        where = script.place(words[0].places[0], len(words[0].chars))
        before = script.text[: script.text.rfind("\n", 0, words[0].places[0]) + 1].rstrip("\n")
        last = before[before.rfind("\n") + 1 :]
        why = "a space follows its backslash" if re.search(r"\\[ \t\r]+$", last) else "it does not end in a backslash"
        at = max(0, len(before) - 1)
        also = ((script.place(at, 1), why),)
        flags = _flags(words)
        message = f"a command begins with `{words[0].chars}`: the line before lost its continuation"
        reach = f"its {flags} flags do not reach the program" if flags > 1 else "it does not reach the program"
        yield Diagnostic(
            message, where=where, why=reach, fix="end the line before with `\\`", severity="warning", also=also
        )


def _twice(settings: Sequence[Stated]) -> Iterable[Diagnostic]:
    """A warning for each flag that is given twice with two values."""
    first: dict[str, Stated] = {}
    for one in settings:
        before = first.setdefault(one.key, one)
        if before.value != one.value:
            also = ((before.where, f"first {before.shown}"),)
            message = f"`{one.key}` is given twice; the last counts"
            yield Diagnostic(message, where=one.where, why=one.shown, fix="keep one", severity="warning", also=also)
            first[one.key] = one
