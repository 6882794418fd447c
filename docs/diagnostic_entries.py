"""Every diagnostic that the code can raise, read from its source, and sample recipes that show what tpshard prints.

`write_reference.py` makes docs/reference/diagnostics.md of them. A diagnostic's text is a template: `…` stands for a
name or a number that is filled in when it is printed.
"""

from __future__ import annotations

import ast
import contextlib
import itertools
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tpshard.cli.preflight import load_checked
from tpshard.recipes.diagnostic import Diagnostic, Exit, Mistakes, as_text

ROOT = Path(__file__).resolve().parents[1]
ROOMS = {
    "recipes": "Recipes",
    "cli": "Commands and files",
    "models": "Models",
    "parallelism": "Sharding",
    "programs": "Programs",
    "plan": "Plans",
    "train": "Training and data",
    "serve": "Serving",
}
"""Folder of the code -> heading on the page, in the order of the page."""
CALLS = {"Diagnostic": 0, "one": 0, "mistake": 0, "wrong": 0, "Contradiction": 0, "_violation": 2}
"""Function that makes a diagnostic -> position of its message."""
FILLED = "…"


@dataclass(frozen=True)
class Entry:
    """One diagnostic of the code."""

    room: str
    file: str
    message: str
    why: str
    fix: str
    exit: str
    """Names of `Exit`, joined by "or"."""
    severity: str

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        words = re.escape(self.message).replace(re.escape(FILLED), ".+?")
        return re.compile(rf"(`\w+`: )?{words}", re.DOTALL)  # a contradiction is printed after its section

    def printed(self, diagnostic: Diagnostic) -> bool:
        """Whether a diagnostic is this entry filled in."""
        return self.pattern.fullmatch(diagnostic.message) is not None


def entries() -> list[Entry]:
    """Every diagnostic once, by room, file and line."""
    read = [entry for room in ROOMS for path in sorted((ROOT / room).rglob("*.py")) for entry in _of_file(room, path)]
    return list({(entry.room, entry.message): entry for entry in reversed(read)}.values())[::-1]


def _of_file(room: str, path: Path) -> Iterator[Entry]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    last = 0
    for call in sorted(calls, key=lambda call: call.lineno):
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        if name not in CALLS or not call.args or (name == "wrong" and len(call.args) < 2):
            continue
        around = [f for f in functions if f.lineno <= call.lineno <= (f.end_lineno or f.lineno)]
        inner = max(around, key=lambda f: f.lineno, default=None)
        texts = Texts(inner, last + 1, call.end_lineno or call.lineno)
        last = call.end_lineno or call.lineno
        position = CALLS[name]
        if name == "wrong" and getattr(call.args[1], "attr", "") != "source":
            position = 1  # wrong(path, message, source, ...) of the checker; that of the parser has no path
        if name == "wrong" and texts.all(call.args[position]) == [FILLED]:
            continue
        keywords = {keyword.arg: keyword.value for keyword in call.keywords}
        behind = {"wrong": 2, "_violation": 1}.get(name, len(call.args))
        rest = dict(zip(("why", "fix"), call.args[position + behind :]))
        for message in texts.all(call.args[position]):
            if len(message.replace(FILLED, "").split()) < 2:
                continue  # the text comes from elsewhere
            yield Entry(
                room,
                str(path.relative_to(ROOT)),
                message,
                texts.joined(keywords.get("why", rest.get("why"))),
                texts.joined(keywords.get("fix", rest.get("fix"))),
                _exit(keywords.get("exit"), path),
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
    """The texts that an expression of a function may be: constants, f-strings, both sides of a condition, and local
    variables that hold one of these.

    Of a variable that is assigned between the lines `first` and `last`, other assignments do not count: they are for
    another diagnostic.
    """

    def __init__(self, function: ast.FunctionDef | None, first: int, last: int):
        everywhere: dict[str, list[ast.expr]] = {}
        near: dict[str, list[ast.expr]] = {}
        for node in ast.walk(function) if function else ():
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    _assign(everywhere, target, node.value)
                    if first <= node.lineno <= last:
                        _assign(near, target, node.value)
        self.locals = everywhere | near

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
        if isinstance(node, ast.Name) and node.id in self.locals and depth < 3:
            texts = [text for value in self.locals[node.id] for text in self.all(value, depth + 1)]
            return list(dict.fromkeys(texts))
        return [FILLED]

    def joined(self, node: ast.expr | None) -> str:
        """The texts in one line, without those that are computed."""
        texts = [] if node is None else [text for text in self.all(node) if text.strip(FILLED + " ,.:")]
        return "; or: ".join(texts)


def _exit(node: ast.expr | None, path: Path) -> str:
    names = [part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute)] if node is not None else []
    codes = [name for name in names if name in Exit.__members__]
    return " or ".join(codes) if codes else "DATA" if path.stem in ("corpus", "stream", "lanes") else "RECIPE"


SAMPLES = (
    "modle: {preset: tiny}",
    "model: {preset: tiny, hf: folder}",
    "model: {preset: null}",
    "model: {preset: tiny, args: {width: 8}}",
    "model: {preset: tiny, dims: {head.weight: [vocab, embed]}}",
    "model: {transformers: folder, layers: 4}",
    "model: {preset: tiny}\noptimizer: {lr: -1}",
    "model: {preset: tiny}\ntrain: {steps: [100]}",
    "model: {preset: tiny}\ntrain: {steps: fast}",
    "model: {preset: tiny}\ncompile: jit",
    "model: {preset: tiny}\noptimizer: {lr: .inf}",
    "model: {preset: tiny}\noptimizer: {betas: [0.9]}",
    "model: {preset: tiny}\nfsdp: {bucket: {size: 4}}",
    "model: {preset: tiny}\nmodel: {preset: 1b}",
    "model: {preset: tiny}\non: {lr: 1}",
    "model: {preset: tiny}\n<<: {name: base}",
    "model: {preset: tiny}\n1: one",
    "model: {preset: tiny}\n\tname: a",
    "model: {preset: tiny}\n---\nmodel: {preset: 1b}",
    "model: [preset: tiny",
    "model: {preset: tiny}\nmesh: {fsdp: -1, tp: -1}",
    "model: {preset: tiny}\nmesh: {fsdp: 4, tp: 2}\ncluster: {device: h100-sxm-80g, devices_per_node: 4, nodes: 1}",
    "model: {preset: tiny}\nmesh: {fsdp: 2}\nsharding: {rules: {mlp: tpp}}",
    "model: {preset: tiny}\nmesh: {fsdp: 2, expert: 4}",
    "model: {preset: tiny}\nsharding: {rules: {mpl: tp}}",
    "model: {preset: tiny}\nsharding: {priority: {embed: 1}}",
    "model: {preset: tiny}\nsharding: {annotate: {tokens: [batch, frames]}}",
    "model: {preset: tiny}\nsharding: {rules: {mlp: [tp, tp]}}",
    "model: {preset: tiny}\nsharding: {pin: {output.weight: [tp, tp]}}",
    "model: {preset: tiny}\nmesh: {tp: 2}\nsharding: {rules: {mlp: tp}, annotate: {output.weight: [mlp, mlp]}}",
    "model: {preset: tiny}\nmesh: {tp: 2}\nsharding: {rules: {embed: tp, mlp: tp}}",
    "model: {preset: tiny}\nsharding: {annotate: {hidden.weight: [mlp, null]}}",
    "model: {preset: tiny}\nsharding: {annotate: {output.weight: [mlp]}}",
    "model: {preset: tiny}\nmesh: {fsdp: 3}",
    "model: {preset: tiny}\nmesh: {fsdp: 2}\nbatch: {global_sequences: 8, per_device: 3}",
    "model: {preset: tiny}\nmesh: {tp: 3}",
    "model: {preset: tiny}\nmesh: {tp: 8}",
    "model: {preset: granite-tiny, seq_len: 100000}",
    "model: {preset: tiny}\nschedule: {warmup_steps: 500}\ntrain: {steps: 100}",
    "model: {preset: tiny}\noptimizer: {name: lion, momentum: 0.9}",
    "model: {preset: tiny-moe, experts: 8, top_k: 99}",
    "model: {preset: tiny}\nmesh: {pp: 2}\npipeline: {schedule: gpipe, form: vectorized}\n"
    "sharding: {rules: {stage: tp}}",
    "model: {preset: tiny}\npipeline: {schedule: 1f1b}",
    "model: {preset: tiny}\nmesh: {pp: 2}\npipeline: {schedule: 1f1b}\n"
    "sharding: {rules: {stage: pp}, annotate: {norm.weight: [stage]}}",
    "model: {preset: tiny}\nmesh: {pp: 2}\npipeline: {schedule: 1f1b, stages: 4}",
    "model: {preset: tiny}\nmesh: {pp: 2}\npipeline: {schedule: 1f1b, rounds: 2}",
    "model: {preset: tiny}\nmesh: {pp: 2}\npipeline: {schedule: 1f1b}\nsharding: {rules: {mlp: pp}}",
    "model: {preset: tiny}\nmesh: {pp: 2}\npipeline: {schedule: 1f1b, form: vectorized}",
    "model: {preset: tiny}\nmesh: {pp: 2}\npipeline: {schedule: gpipe, form: vectorized, split: [1, 3]}",
    "model: {preset: tiny}\nname: ${train.stepz}",
    "model: {preset: tiny}\nname: ${run.dir}\nrun: {dir: '${name}'}",
    "model: {preset: tiny}\ntrain: {steps: '${oc.env:NAME_OF_NO_VARIABLE}'}",
    "model: {preset: tiny}\ntrain: {steps: '???'}",
    "model: {preset: tiny}\nname: '${oc.create:{}}'",
    "model: {preset: tiny}\n${name}: 1",
    "extends: no-such-recipe",
    "extends: [a, b]",
    "extends: recipe.yaml",
    "extends: ./base.yaml",
    "schema: 99\nmodel: {preset: tiny}",
    "schema: one\nmodel: {preset: tiny}",
    "schema: 0\nmodel: {preset: tiny}",
    "- tiny",
    "# nothing",
    "model: *base",
    "model: &a {preset: *a}",
    "model: !!python/name:os.system {}",
    "model: {preset: tiny}\n[name]: a",
    "model: " + "[" * 42,
    "extends: /etc/base.yaml",
    "model: {preset: tiny}\nname: '${oc.decode:${seed}}'",
    "model: {preset: tiny, heads: 8, kv_heads: 3}",
    "model: {preset: tiny, head_dim: 5}",
    "model: {preset: tiny, experts: 4}",
    "model: {preset: tiny-moe, dtype: fp8}",
    "model: {preset: tiny, dtype: fp8, seq_len: 100}",
    "model: {preset: tiny, dtype: fp8}\nmesh: {tp: 2}",
    "model: {preset: tiny, dtype: fp8}\nmesh: {pp: 2}\npipeline: {schedule: gpipe, form: vectorized}",
)
"""Recipes with mistakes, each short enough to be read at a glance."""


def printed(text: str) -> tuple[Diagnostic, ...]:
    """What `tpshard validate recipe.yaml` says of a file with this text."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        Path("recipe.yaml").write_text(text + "\n", encoding="utf-8")
        try:
            return tuple(load_checked("recipe.yaml", [])[1])
        except Mistakes as mistakes:
            return mistakes.diagnostics


def samples() -> dict[str, tuple[str, str]]:
    """Message template -> (recipe, what is printed): the first sample that shows it."""
    shown: dict[str, tuple[str, str]] = {}
    listed = entries()
    for text in SAMPLES:
        for diagnostic in printed(text):
            fitting = [entry for entry in listed if entry.printed(diagnostic)]
            entry = max(fitting, key=lambda entry: len(entry.message), default=None)
            if entry is not None:
                shown.setdefault(entry.message, (text, as_text([diagnostic])))
    return shown
