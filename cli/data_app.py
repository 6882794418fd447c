"""`tpshard data`: prints the rows of a recipe's data as the model reads them."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Annotated, Any

import typer
from tpshard.cli.main import Command, colorful, group
from tpshard.cli.shared.arguments import Json, Overrides, RecipeArgument, load
from tpshard.diagnostics.diagnostic import plural, printable

if TYPE_CHECKING:
    from tpshard.models.folders.folder_tokenizer import FolderTokenizer
    from tpshard.train.data.step_batch import StepBatch
    from tpshard.train.data.stream import Loader

app = group("Print the rows of a recipe's data as the model reads them.")
Count = Annotated[int, typer.Option("-n", min=1, metavar="N", help="Sequences to print.")]
HeldOut = Annotated[bool, typer.Option("--held-out", help="Of the held-out text.")]
TARGET, END = "\033[32m", "\033[0m"


@app.callback()
def data() -> None:
    """Keeps `show` a subcommand while it is the only one."""


@app.command(cls=Command)
def show(
    recipe: RecipeArgument, overrides: Overrides = None, n: Count = 3, held_out: HeldOut = False, as_json: Json = False
) -> None:
    """Print the first sequences as the model gets them: their documents, tokens and targets, and what was left out.

    Targets are green, or in brackets where there is no colour. A document attends to itself alone, and its positions
    begin at 0. Nothing is trained; a tokenizer that a run trains is not known before.
    """
    from tpshard.programs.setting.setting import Setting
    from tpshard.train.data.bad_rows import UNREADABLE
    from tpshard.train.data.open_data import Mixture
    from tpshard.train.data.source_reader import TooLittle
    from tpshard.train.data.stream import Loader
    from tpshard.train.data.tokens import read_tokenizer
    from tpshard.train.run.run_data import opened_data

    loaded = load(recipe, overrides or ())
    setting = Setting.of(loaded, 1 if loaded.cluster is None and -1 in loaded.mesh.values() else None)
    data = opened_data(setting, loaded.run.folder)
    texts = [Mixture.of(*one, 1) for one in data.held_out] if held_out else [data.mixture]
    read = read_tokenizer(data.mixture.tokenizer.folder)
    rows: list[dict[str, Any]] = []
    notes: list[str] = []
    for text in texts:
        loader = partial(
            Loader, seq_len=setting.seq_len, global_sequences=setting.batch.global_sequences, seed=loaded.seed,
            bad_rows=loaded.data.bad_rows,
        )  # fmt: skip
        try:
            shown = _first(opened := loader(text), read, n - len(rows))
        except TooLittle as error:
            opened.close()
            notes += [f"{one.message}: `train` refuses it; shown as data.epochs reads it" for one in error.diagnostics]
            once = tuple(replace(share, epochs=1) for share in text.shares)
            shown = _first(opened := loader(replace(text, shares=once, epochs=1)), read, n - len(rows))
        rows += shown
        notes += opened.warnings
        for reader in opened.readers:
            if any(UNREADABLE in warning for warning in reader.warnings):
                continue  # all of them were counted
            bad = {id(one): one for chain in reader.chains for one in (chain.bad, chain.unlearned) if one.bad}.values()
            notes += [f"left out: {one.first}" + (f", and {one.bad - 1:,} more" if one.bad > 1 else "") for one in bad]
        opened.close()
    if not rows:
        notes.append(f"no document is {'held out' if held_out else 'read'}")
    window = plural(data.mixture.window, "document")
    order = "in the order of the files" if data.mixture.window == 1 else f"shuffled in windows of {window}"
    names = [f"{share.text.name} (weight {share.weight:g})" for share in data.mixture.shares]
    result = {"schema": 1, "sources": names, "order": order, "sequences": rows[:n], "notes": notes}
    print(json.dumps(result, ensure_ascii=False) if as_json else _text(result, read, colorful(sys.stdout)))


def _first(loader: Loader, read: FolderTokenizer, most: int) -> list[dict[str, Any]]:
    """The first rows with documents of a loader, at least `most` if there are so many."""
    rows: list[dict[str, Any]] = []
    while len(rows) < most and any((batch := loader.next()).origin):
        rows += [row for row in _rows(batch, read) if row["documents"]]
    return rows


def _rows(batch: StepBatch, read: FolderTokenizer) -> Iterator[dict[str, Any]]:
    """The rows of a batch as JSON values, divided into documents; padding at the end is one number."""
    from tpshard.models.objectives.targets import IGNORE

    fields = {name: batch[name].tolist() for name in ("tokens", "targets", "documents", "positions")}
    for row, origin in enumerate(batch.origin):
        ids, targets, numbers = (fields[name][row] for name in ("tokens", "targets", "documents"))
        places = re.findall(r"\S.*?:\d+(?= |$)", origin)
        documents = []
        for number, place in enumerate(places):
            at = [i for i, one in enumerate(numbers) if one == number]
            learned = [False] + [targets[i] != IGNORE for i in at[:-1]]
            tokens = [ids[i] for i in at]
            documents.append(
                {
                    "from": place, "tokens": tokens, "text": [read.token_text(id) for id in tokens],
                    "targets": [targets[i] if targets[i] != IGNORE else None for i in at], "learned": learned,
                    "positions": [fields["positions"][row][i] for i in at],
                }
            )  # fmt: skip
        used = sum(len(document["tokens"]) for document in documents)
        yield {"documents": documents, "padding": len(ids) - used}


def _text(result: dict[str, Any], read: FolderTokenizer, color: bool) -> str:
    """The rows as text; targets in green, or in brackets without colour."""
    lines = [f"{', '.join(result['sources'])}: {result['order']}"]
    for number, row in enumerate(result["sequences"], 1):
        documents = row["documents"]
        count = sum(target is not None for document in documents for target in document["targets"])
        total = sum(len(document["tokens"]) for document in documents) + row["padding"]
        facts = f"{total} tokens, {plural(count, 'target')}, {plural(len(documents), 'document')}"
        lines.append(f"--- sequence {number}: {facts}, {row['padding']} of padding")
        for document in documents:
            parts = [read.token_bytes(id) for id in document["tokens"]]
            lines += [f"  | {document['from']}", _shown(parts, document["learned"], color)]
    lines += [f"note: {note}" for note in result["notes"]]
    return "\n".join(lines)


def _shown(parts: Sequence[bytes], learned: Sequence[bool], color: bool) -> str:
    """A document's text, with what is learned marked. parts: the bytes of its tokens, which divide characters."""
    opens, closes = (TARGET, END) if color else ("[", "]")
    shown = ""
    for inside, run in groupby(zip(parts, learned), key=itemgetter(1)):
        text = b"".join(part for part, _ in run).decode(errors="replace")
        text = "\n".join(map(printable, text.split("\n")))
        shown += f"{opens}{text}{closes}" if inside else text
    return shown
