"""Every diagnostic that the code can raise, read from its source.

`write_reference.py` makes the pages of docs/reference/diagnostics/ of them, with the samples of
`diagnostic_samples.py`. A diagnostic's text is a template: `…` stands for a name or a number that is filled in when it
is printed.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from tpshard.diagnostics.diagnostic import Exit, printable

ROOT = Path(__file__).resolve().parents[2]
ROOMS = {
    "recipes": ("Recipes", "keys and values of a recipe, `extends`, interpolation, overrides"),
    "cli": ("Commands and files", "options, files and folders that a command reads or writes, this machine"),
    "devices": ("Device files", "keys and values of a device file"),
    "models": ("Models", "a model's configuration, and a folder in Hugging Face's format"),
    "parallelism": ("Sharding", "shardings of tensors"),
    "programs": ("Programs", "model, mesh and device that do not fit each other; pipelines; fp8; a server's programs"),
    "plan": ("Plans", "`plan` and its options"),
    "train": ("Training and data", "text, tokenizers, checkpoints, a run's folder, the loss"),
    "serve": ("Serving", "a server's address and requests"),
}
"""Folder of the code -> title of its page, and what its diagnostics are about; in the order of the index."""
CALLS = {
    "Diagnostic": (0, 3), "one": (0, 9), "mistake": (0, 9), "wrong": (0, 2), "_wrong": (0, 1), "Contradiction": (0, 9),
    "violation": (2, 3),
}  # fmt: skip
"""Function that makes a diagnostic -> positions of its message and of why, which the fix follows. The checker's `wrong`
has a path before its message."""
FIXED = {"Contradiction"}
"""Functions whose diagnostics get their fix where they are reported."""
EXITS = {"corpus": "DATA", "bad_rows": "DATA", "stream": "DATA", "lanes": "DATA", "machine": "MACHINE"}
"""File -> exit code of the diagnostics whose call does not name one."""
FILLED = "…"


@dataclass(frozen=True)
class Entry:
    """One diagnostic of the code."""

    room: str
    file: str
    message: str
    why: str
    fix: str
    """"" if there is none, or if its text is computed."""
    has_fix: bool
    """Whether the code gives a fix, or says in the note at the place what the value must be."""
    exit: str
    """Names of `Exit`, joined by "or"."""
    severity: str

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        parts = re.escape(printable(self.message)).split("`")
        # text that is filled in between code marks has no code mark itself
        filled = (("[^`]*?", ".*?")[i % 2 == 0] for i in range(len(parts)))
        words = "`".join(part.replace(re.escape(FILLED), any_text) for part, any_text in zip(parts, filled))
        # before the message of a contradiction its section is printed
        return re.compile(rf"(`\w+`: (config.json: )?)?{words}")

    def fits(self, message: str) -> bool:
        """Whether a printed message is this entry filled in."""
        return self.pattern.fullmatch(message) is not None


@cache
def entries() -> list[Entry]:
    """Every diagnostic once, by room, file and line."""
    read = [entry for room in ROOMS for path in sorted((ROOT / room).rglob("*.py")) for entry in _of_file(room, path)]
    return list({(entry.room, entry.message): entry for entry in reversed(read)}.values())[::-1]


def _of_file(room: str, path: Path) -> Iterator[Entry]:
    text = path.read_text(encoding="utf-8")
    if not any(f"{name}(" in text for name in CALLS):
        return
    tree = ast.parse(text)
    nodes = list(ast.walk(tree))
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    last = 0
    for call in sorted(calls, key=lambda call: call.lineno):
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        if name not in CALLS or not call.args:
            continue
        around = [f for f in functions if f.lineno <= call.lineno <= (f.end_lineno or f.lineno)]
        inner = max(around, key=lambda f: f.lineno, default=None)
        texts = Texts(tree, inner, last + 1, call.end_lineno or call.lineno)
        last = call.end_lineno or call.lineno
        position, behind = CALLS[name]
        if name == "wrong" and texts.all(call.args[0]) == [FILLED]:
            position, behind = position + 1, behind + 1
        keywords = dict(zip(("why", "fix"), call.args[behind:])) | {k.arg: k.value for k in call.keywords if k.arg}
        unpacked = any(isinstance(argument, ast.Starred) for argument in call.args)
        has_fix = name in FIXED or unpacked or texts.all(keywords.get("fix", ast.Constant(""))) != [""]
        code = keywords.get("exit", call.args[1] if name == "Diagnostic" and len(call.args) > 1 else None)
        why = texts.joined(keywords.get("why"))
        for message in texts.all(call.args[position]):
            if not message.replace(FILLED, "").strip(" `:;,."):
                continue  # the text comes from elsewhere
            yield Entry(
                room,
                str(path.relative_to(ROOT)),
                message,
                why,
                texts.joined(keywords.get("fix")),
                has_fix or why.startswith("must be"),
                _exit(code, path),
                "warning" if "warning" in texts.joined(keywords.get("severity")) else "error",
            )


def _assign(values: dict[str, list[ast.expr]], target: ast.expr, value: ast.expr) -> None:
    """Adds an assignment's value to those of its variable, or of each of its variables."""
    if isinstance(target, ast.Name):
        values.setdefault(target.id, []).append(value)
    elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        for part, of in zip(target.elts, value.elts, strict=True):
            _assign(values, part, of)


class Texts:
    """The texts that an expression of a function may be: constants, f-strings, both sides of a condition, and variables
    of the function or its module that hold one of these.

    Of a variable that is assigned between the lines `first` and `last`, other assignments do not count: they are for
    another diagnostic.
    """

    def __init__(self, module: ast.Module, function: ast.FunctionDef | None, first: int, last: int):
        constants: dict[str, list[ast.expr]] = {}
        everywhere: dict[str, list[ast.expr]] = {}
        near: dict[str, list[ast.expr]] = {}
        for node in module.body:
            if isinstance(node, ast.Assign):
                _assign(constants, node.targets[0], node.value)
        for node in ast.walk(function) if function else ():
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    _assign(everywhere, target, node.value)
                    if first <= node.lineno <= last:
                        _assign(near, target, node.value)
        self.variables = constants | everywhere | near

    def all(self, node: ast.expr, depth: int = 0) -> list[str]:
        """The templates that the expression may be, each once; a computed text is `…`."""
        if isinstance(node, ast.Constant):
            return [node.value] if isinstance(node.value, str) else [FILLED]
        if isinstance(node, ast.JoinedStr):
            parts = [
                v.value if isinstance(v, ast.Constant) and isinstance(v.value, str) else FILLED for v in node.values
            ]
            return ["".join(parts)]
        if isinstance(node, ast.IfExp):
            return list(dict.fromkeys([*self.all(node.body, depth), *self.all(node.orelse, depth)]))
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            pairs = itertools.product(self.all(node.left, depth), self.all(node.right, depth))
            return [left + right for left, right in pairs]
        if isinstance(node, ast.Name) and node.id in self.variables and depth < 3:
            texts = [text for value in self.variables[node.id] for text in self.all(value, depth + 1)]
            return list(dict.fromkeys(texts))
        return [FILLED]

    def joined(self, node: ast.expr | None) -> str:
        """The texts in one line, without those that are computed."""
        texts = [] if node is None else [text for text in self.all(node) if text.strip(FILLED + " ,.:")]
        return "; or: ".join(texts)


def _exit(node: ast.expr | None, path: Path) -> str:
    names = [part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute)] if node is not None else []
    codes = [name for name in names if name in Exit.__members__]
    return " or ".join(codes) if codes else EXITS.get(path.stem, "RECIPE")
