"""Writes docs/reference/: what the command line, the schema, the device files, the records and the exit codes say.

python docs/write/write_reference.py            a test fails where the pages and the code differ
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from diagnostic_entries import ROOMS, Entry, entries
from diagnostic_samples import samples
from json_outputs import OUTPUTS
from mistake_sample import VALIDATE, Sample
from tpshard.cli.main import COMMANDS, command
from tpshard.devices import read as devices
from tpshard.diagnostics import exits
from tpshard.recipes.reading import document
from tpshard.train.records.records import STEP_KEYS

FOLDER = Path(__file__).resolve().parents[1] / "reference"
FILES_SHOWN, LINES_SHOWN, BYTES_SHOWN = 3, 16, 60
HEAD = "<!-- Written by docs/write/write_reference.py; change the code instead. -->\n\n"


def pages() -> dict[str, str]:
    """File name -> text of every page."""
    texts = {
        "commands.md": commands(), "recipe.md": recipe(), "devices.md": device_files(), "metrics.md": metrics(),
        "exit-codes.md": exit_codes(), "json.md": json_outputs(), **diagnostics(),
    }  # fmt: skip
    return {name: HEAD + text for name, text in texts.items()}


def table(titles: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A Markdown table; bars in cells are escaped."""
    lines = [titles, tuple("---" for _ in titles), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


# ---- the command line ----------------------------------------------------------------------------------------------
def commands() -> str:
    """The page of every command with its arguments and options."""
    parts = ["# Commands\n\n`tpshard COMMAND --help` says the same.\n"]
    for name, about in COMMANDS.items():
        parts.append(f"\n## tpshard {name}\n\n")
        app = command(name)
        inner = getattr(app, "commands", None)
        if inner is None:
            parts.append(_command(f"tpshard {name}", app))
            continue
        parts.append(f"{about}\n")
        for word in inner:
            parts.append(f"\n### tpshard {name} {word}\n\n" + _command(f"tpshard {name} {word}", inner[word]))
    return "".join(parts)


def _command(words: str, command: Any) -> str:
    shown = [p for p in command.params if not p.hidden and p.name != "help"]
    arguments = [p.metavar or p.name.upper() for p in shown if p.param_type_name == "argument"]
    options = [p for p in shown if p.param_type_name == "option"]
    usage = " ".join([words, *(["[OPTIONS]"] if options else []), *arguments])
    text = f"    {usage}\n\n{inspect.cleandoc(command.help or command.short_help or '')}\n"
    rows = []
    for option in options:
        value = "" if option.is_flag else f" {option.metavar or 'N'}"
        names = ", ".join([*option.opts, *option.secondary_opts])
        rows.append((f"`{names}{value}`", " ".join((option.help or "").split())))
    return text + ("\n" + table(("option", "what it does"), rows) if rows else "")


# ---- recipes and devices -------------------------------------------------------------------------------------------
def recipe() -> str:
    """The page of every key of a recipe."""
    rows = [(f"`{key.path}`", key.text, key.legal, f"`{key.default}`") for key in document.keys("")]
    about = "`tpshard recipes keys PREFIX` prints the same; [Recipes](../recipes.md) explains layers."
    head = f"# Recipe keys\n\n{about}\n\n"
    return head + table(("key", "what it does", "may be", "default"), rows)


def device_files() -> str:
    """The page of the shipped devices, with the first comment of each file."""
    rows = []
    for path in sorted(Path(devices.__file__).parent.glob("*.yaml")):
        about = [line.removeprefix("#").strip() for line in path.read_text(encoding="utf-8").splitlines()]
        comment = " ".join(about[: next(i for i, line in enumerate(about) if line.startswith("schema"))])
        device = devices.device(path.stem)
        memory = f"{device.memory_bytes / 2**30:.0f} GiB"
        rows.append((f"`{path.stem}`", comment, memory, f"{device.memory_bandwidth / 1e12:.2g} TB/s"))
    head = (
        "# Devices\n\nThe shipped devices, which `cluster.device` can name. It can also be the path of your own file; "
        "[Planning](../planning.md#devices) explains its keys.\n\n"
    )
    return head + table(("device", "what it is", "memory", "bandwidth"), rows)


# ---- records and exit codes ----------------------------------------------------------------------------------------
def metrics() -> str:
    """The page of what a row of metrics.jsonl holds."""
    head = (
        "# Metrics\n\n`runs/NAME/metrics.jsonl` has one JSON object per line; wandb gets the same. A row of a "
        "training step has these keys, with null for an unknown figure:\n\n"
    )
    rows = [(f"`{name}`", text) for name, text in STEP_KEYS.items()]
    tail = (
        "\nA model with experts adds `experts`: `busiest` (most tokens of one expert over the mean of its layer), "
        "`dropped` (share of choices that no expert computed), `gathered` where tokens travel by all-to-all (share of "
        "choices without a slot), and `load` for each layer. A row of an evaluation has "
        "`step`, `eval_loss` (nats per target token) and `eval_tokens` (target tokens), with several sources also "
        "`eval_losses` (of each source), and no `loss`. A row of a "
        "resume that changed the recipe has `step`, `changed` (for each key the values before and after) and `forced`, "
        "and no `loss`. `tpshard evaluate` appends evaluation rows with `eval_data` and `eval_sequences`, or rows with "
        "`eval_tasks`.\n"
    )
    return head + table(("key", "what it is"), rows) + tail


def exit_codes() -> str:
    """The page of the exit codes, with their docstrings."""
    tree = ast.parse(inspect.getsource(exits.Exit))
    body = tree.body[0].body  # type: ignore[attr-defined]
    rows = []
    for statement, after in zip(body, [*body[1:], None]):
        if isinstance(statement, ast.Assign):
            name = statement.targets[0].id  # type: ignore[attr-defined]
            meaning = after.value.value if isinstance(after, ast.Expr) else ""  # type: ignore[attr-defined]
            rows.append((str(int(exits.Exit[name])), f"`{name}`", " ".join(meaning.split())))
    head = "# Exit codes\n\nAll commands use the same exit codes. Of several mistakes, the lowest of 2 to 5 counts.\n\n"
    return head + table(("code", "name", "when"), rows)


# ---- diagnostics ---------------------------------------------------------------------------------------------------
def diagnostics() -> dict[str, str]:
    """File name -> text: an index, and for each room of the code a page with its diagnostics."""
    listed, shown = entries(), samples()
    texts, rows = {}, []
    for room, (title, about) in ROOMS.items():
        in_room = [entry for entry in listed if entry.room == room]
        if not in_room:
            continue
        page = f"diagnostics/{room}.md"
        head = f"# Diagnostics: {title}\n\nAbout {about}. [Diagnostics](../diagnostics.md) explains the entries.\n"
        texts[page] = head + "".join(_diagnostic(entry, shown.get(entry)) for entry in in_room)
        rows.append((f"[{title}]({page})", about, str(len(in_room))))
    index = (
        "# Diagnostics\n\nThese pages list all errors and warnings about a user's input. Each page has those of one "
        "part of tpshard.\n\n"
        + table(("page", "about", "entries"), rows)
        + "\nIn the title of an entry, `…` stands for a name or a number. Below it is an example: a recipe or a "
        "command, and what tpshard prints. An entry without an example says the reason and the fix.\n\n"
        "The exit code is 3 unless the entry names another ([exit codes](exit-codes.md)). A diagnostic names its place "
        "as `file:line:col`; `--json` prints it as data.\n"
    )
    return {"diagnostics.md": index, **texts}


def _diagnostic(entry: Entry, sample: tuple[Sample, str] | None) -> str:
    codes = " or ".join(f"{int(exits.Exit[name])} ({name})" for name in entry.exit.split(" or "))
    head = f"\n## {_heading(entry.message)}\n\n"
    if entry.severity == "warning":
        head += "A warning. "
    elif entry.exit != "RECIPE":
        head += f"Exit code {codes}. "
    if sample is None:
        why = f"Why: {entry.why}. " if entry.why else ""
        return head + why + (f"Fix: {entry.fix}." if entry.fix else "") + "\n"
    mistake, printed = sample
    files = {"recipe.yaml": mistake.recipe, **mistake.files}
    shown = [_file(name, text, len(mistake.files) > 0 or not mistake.recipe) for name, text in files.items() if text]
    command_line = "" if mistake.command == VALIDATE else f"$ tpshard {mistake.command}\n"
    shown += ["\nA small model is in the folder `model`.\n"] if mistake.model else []
    omitted = [f"\nand {len(shown) - FILES_SHOWN} more of these files\n"] if len(shown) > FILES_SHOWN else []
    blocks = [*shown[:FILES_SHOWN], *omitted, f"\n```text\n{command_line}{printed.rstrip()}\n```\n"]
    return f"{head.rstrip()}\n" + "".join(blocks)


def _file(name: str, text: str | bytes, named: bool) -> str:
    """A file of a sample, cut where it is long; bytes that are no text are written as in Python."""
    if isinstance(text, bytes):
        text = f"{text[:BYTES_SHOWN]!r}" + (f" and {len(text) - BYTES_SHOWN} more" if len(text) > BYTES_SHOWN else "")
    elif any(ord(character) < 32 and character not in "\n\t" for character in text):
        text = repr(text)
    elif len(lines := text.splitlines()) > LINES_SHOWN:
        text = "\n".join([*lines[:3], f"... and {len(lines) - 3} more lines"])
    title = f"\n`{name}`:\n" if named else ""
    return f"{title}\n```{'yaml' if name.endswith('.yaml') else 'text'}\n{text}\n```\n"


def json_outputs() -> str:
    """The page of every key of what commands print with `--json`."""
    parts = [
        "# JSON outputs\n\nWith `--json` a command prints one JSON document on stdout, and notes and errors as text on "
        "stderr; only `validate --json` prints errors as data. Sizes are in bytes and times in seconds, and both are "
        "those of one device unless the key says otherwise. `[]` stands for each entry of a list, `*` for any name.\n"
    ]
    for output in OUTPUTS:
        rows = [(f"`{key}`", text) for key, text in {**output.keys, **output.sometimes}.items()]
        parts.append(f"\n## tpshard {output.title} --json\n\n" + table(("key", "what it is"), rows))
    return "".join(parts)


def _heading(message: str) -> str:
    """The message as the text of a Markdown heading: without code marks, and with `<`, `*`, `_`, `[`, `]` escaped."""
    return re.sub(r"([*_<\[\]])", r"\\\1", message.replace("`", ""))


if __name__ == "__main__":
    (FOLDER / "diagnostics").mkdir(parents=True, exist_ok=True)
    for file, text in pages().items():
        (FOLDER / file).write_text(text, encoding="utf-8")
        print(FOLDER / file)
