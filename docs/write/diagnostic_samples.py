"""Runs sample mistakes, and says which diagnostic each of them shows.

A sample runs in an empty folder, in this process.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import io
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path
from unittest import mock

import command_mistakes
import device_mistakes
import recipe_mistakes
from diagnostic_entries import FILLED, Entry, entries
from mistake_sample import Sample
from tpshard.cli.main import run

SAMPLES = (*recipe_mistakes.SAMPLES, *device_mistakes.SAMPLES, *command_mistakes.SAMPLES)

BLOCK = re.compile(r"(?m)^(?:error|warning): (.*)\n(?:(?:  |\d+ \|| +\|).*\n)*")
"""A printed diagnostic, with its message as the first group."""


def samples() -> dict[Entry, tuple[Sample, str]]:
    """Diagnostic -> (sample, what is printed): the first sample that shows it."""
    shown: dict[Entry, tuple[Sample, str]] = {}
    for sample, blocks in all_printed():
        for message, text in blocks:
            entry = entry_of(message, text, frozenset(shown))
            if entry is not None:
                shown.setdefault(entry, (sample, text))
    return shown


@functools.cache
def all_printed() -> list[tuple[Sample, list[tuple[str, str]]]]:
    """Every sample with the (message, whole text) of each diagnostic that its command prints."""
    return [(sample, list(printed(sample))) for sample in SAMPLES]


def entry_of(message: str, text: str, shown: Collection[Entry] = ()) -> Entry | None:
    """The diagnostic that a printed message is; None if none fits.

    Of several that fit it is the one with the most words; of two in the same words the one that is not yet shown.
    """
    in_device = f"--> {device_mistakes.FILE}:" in text
    fitting = [entry for entry in entries() if entry.fits(message)]
    return max(
        fitting,
        key=lambda e: ((e.room == "devices") == in_device, len(e.message.replace(FILLED, "")), e not in shown),
        default=None,
    )


def printed(sample: Sample) -> Iterator[tuple[str, str]]:
    """Yields (message, whole text) of every diagnostic that the sample's command prints."""
    stderr, modules, whole_lines = io.StringIO(), set(sys.modules), mock.patch.dict(os.environ, {"COLUMNS": "0"})
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), whole_lines:
        files = {"recipe.yaml": sample.recipe, **(model_folder() if sample.model else {}), **sample.files}
        for name, content in files.items():
            if content:
                path = Path(name)
                path.parent.mkdir(parents=True, exist_ok=True)
                data = content if isinstance(content, bytes) else f"{content}\n".encode()
                path.write_bytes(gzip.compress(data) if path.suffix == ".gz" and isinstance(content, str) else data)
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(stderr):
            run(shlex.split(sample.command))
        text = stderr.getvalue().replace(f"{Path(folder).resolve()}", "/home/me")
    for name in set(sys.modules) - modules:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(folder):
            del sys.modules[name]  # the next sample has another net.py
    yield from ((block[1], block[0]) for block in BLOCK.finditer(text))


@functools.cache
def model_folder() -> dict[str, bytes]:
    """The files of a small model in Hugging Face format, without a tokenizer."""
    from tpshard.models import build, to_hf
    from tpshard.models.families.presets import preset

    with tempfile.TemporaryDirectory() as folder:
        to_hf(build(preset("tiny", {"layers": 1, "vocab": 300}), device="cpu"), f"{folder}/model")
        return {f"model/{path.name}": path.read_bytes() for path in Path(folder, "model").iterdir()}
