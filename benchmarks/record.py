"""The record of a benchmark: its machine, versions, command and results, printed and written as JSON.

    record = Record("tp_aware")                         prints the machine, the versions and the command
    record.rows.append({"ranks": 4, "naive_ms": 1.2})   raw measurements, row by row
    record.figure("mlp.naive", ratios, "times")         a figure that README and docs may cite: median and spread
    record.close(write=True)                            benchmarks/records/tp_aware.json

`python benchmarks/record.py` lists the numbers of README and docs that differ from the records; `--write` replaces
them. Such a number is followed by its source: `2.07<!--tp_aware:mlp.naive-->`. A code block after `<!--quickstart:text
train-->` shows lines of a command's output; `...` stands for omitted ones.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "benchmarks" / "records"
SCHEMA = 1
PACKAGES = ("torch", "triton", "transformers", "numpy")
"""Packages whose versions every record lists; a benchmark adds its peers."""


def machine() -> dict[str, Any]:
    """A description of this machine without its name: processor, cores, vector units, memory, GPUs, load."""
    import psutil
    import torch

    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": [f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB" for gpu in gpus],
        "system": f"{platform.system()} {platform.release()}",
        "load": round(os.getloadavg()[0], 2),
    }


def _processor() -> str:
    with open("/proc/cpuinfo", encoding="utf-8") as info:
        names = re.findall(r"^model name\s*:\s*(.+)$", info.read(), re.M)
    return names[0] if names else platform.machine()


def versions(*peers: str) -> dict[str, str]:
    """Versions of Python, of this checkout and of packages; "none" where a package is not installed."""
    by_package = {"python": platform.python_version(), "tpshard": _commit()}
    for package in (*PACKAGES, *peers):
        try:
            by_package[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            by_package[package] = "none"
    import torch

    if torch.version.cuda:
        by_package["cuda"] = torch.version.cuda
    return by_package


def _commit() -> str:
    """The checkout's commit, with a `+` if files differ from it; "" outside of a repository."""
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty=+", "--exclude=*"], cwd=ROOT, capture_output=True, text=True
    )
    return described.stdout.strip()


def _show(argument: str) -> str:
    """An argument of the command line; paths are reduced to their names."""
    path = Path(argument)
    return path.name if path.is_absolute() or ".." in path.parts else argument


@dataclass(frozen=True)
class Figure:
    """The median of some measurements, with quartiles."""

    median: float
    low: float
    high: float
    count: int
    unit: str

    @staticmethod
    def of(values: float | Sequence[float], unit: str) -> Figure:
        """One value stands for itself."""
        many = sorted([float(values)] if isinstance(values, int | float) else map(float, values))
        low, _, high = statistics.quantiles(many, n=4) if len(many) > 1 else (many[0],) * 3
        return Figure(statistics.median(many), low, high, len(many), unit)

    def __str__(self) -> str:
        spread = f" ({self.low:.4g} to {self.high:.4g}, of {self.count})" if self.count > 1 else ""
        return f"{self.median:.4g} {self.unit}{spread}"


class Record:
    """One run of one benchmark. With `quiet` only `close(as_json=True)` prints."""

    def __init__(self, name: str, *peers: str, quiet: bool = False):
        self.name, self.out = name, sys.stderr if quiet else sys.stdout
        self.rows: list[dict[str, Any]] = []
        self.figures: dict[str, Figure] = {}
        self.texts: dict[str, str] = {}
        """Output of commands, for transcripts in README and docs."""
        script = Path(sys.argv[0]).resolve()
        shown = str(script.relative_to(ROOT)) if script.is_relative_to(ROOT) else script.name
        self.command = " ".join(["python", shown, *map(_show, sys.argv[1:])])
        self.date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self.machine, self.versions = machine(), versions(*peers)
        self._begun = time.monotonic()
        self.say(f"# {self.command}")
        self.say(f"# {', '.join(f'{key} {value}' for key, value in self.machine.items() if value)}")
        self.say(f"# {', '.join(f'{key} {value}' for key, value in self.versions.items())}; {self.date}")

    def say(self, text: str = "") -> None:
        print(text, file=self.out, flush=True)

    def figure(self, name: str, values: float | Sequence[float], unit: str) -> Figure:
        """Adds a figure under a name of words, dots and dashes."""
        if not re.fullmatch(r"[\w.-]+", name):
            raise ValueError(f"a figure's name is of letters, digits, dots and dashes, not {name!r}")
        self.figures[name] = Figure.of(values, unit)
        return self.figures[name]

    def keep_others(self, names: Iterable[str]) -> None:
        """Adds the rows that the written record has of those of `names` that were not measured now; sorts by these."""
        try:
            before = load(self.name)["rows"]
        except FileNotFoundError:
            before = []
        by_name = {row["name"]: row for row in [*before, *self.rows]}
        self.rows = [by_name[name] for name in names if name in by_name]

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "benchmark": self.name,
            "command": self.command,
            "date": self.date,
            "seconds": round(time.monotonic() - self._begun, 1),
            "machine": self.machine,
            "versions": self.versions,
            "figures": {name: vars(figure) for name, figure in self.figures.items()},
            "texts": self.texts,
            "rows": self.rows,
        }

    def close(self, *, write: bool = False, as_json: bool = False) -> None:
        """Prints the figures; `write` also writes the record to `benchmarks/records`, `as_json` prints it as JSON."""
        for name, figure in self.figures.items():
            self.say(f"{name:<40} {figure}")
        text = json.dumps(self.to_json(), indent=1) + "\n"
        if as_json:
            print(text, end="")
        if write:
            RECORDS.mkdir(exist_ok=True)
            (RECORDS / f"{self.name}.json").write_text(text)
            self.say(f"# benchmarks/records/{self.name}.json")


def with_table(text: str, script: str, table: str, mark: str = r"\w+") -> str:
    """A page's text with a table between the comments `<!--MARK: python benchmarks/SCRIPT.py --docs-->` and `<!--/`."""
    marks = rf"(?s)(<!--{mark}: python benchmarks/{script}\.py --docs-->\n\n).*?(\n\n<!--/)"
    return re.sub(marks, lambda between: f"{between[1]}{table}{between[2]}", text)


def close_with_table(record: Record, table: str, page: str, options: argparse.Namespace) -> None:
    """Prints a gallery's table, puts it between comments of a page of docs/ with `--docs`, and closes the record."""
    record.say(table)
    if options.docs:
        path = ROOT / "docs" / page
        path.write_text(with_table(path.read_text(encoding="utf-8"), record.name, table), encoding="utf-8")
    record.close(write=options.record, as_json=options.json)


def parser_of(about: str | None) -> argparse.ArgumentParser:
    """A parser with a script's docstring, and the options that all benchmarks share: --json and --record."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print only the record, as JSON")
    parser.add_argument("--record", action="store_true", help="write it into benchmarks/records")
    return parser


def in_one_line(error: Exception) -> str:
    """The type and the message of an exception, and the line of code that raised it."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    message = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {message} ({Path(frame.filename).name}:{frame.lineno})"


# ---- numbers in README and docs ------------------------------------------------------------------------------------
SOURCE = re.compile(r"(?P<number>-?[\d,]*\d(?:\.\d+)?)(?P<mark><!--(?P<record>[\w-]+):(?P<figure>[\w.-]+)-->)")
"""A number with its source, which Markdown does not display."""
BLOCK = re.compile(r"<!--(?P<record>[\w-]+):text (?P<text>[\w.-]+)-->\n+```\w*\n(?P<lines>.*?)```", re.S)
"""A code block with lines of a command's output."""
VARIES = re.compile(r"\d[\d.,:]*|[0-9a-f]{12,}")
"""Parts that differ between two runs of a command: numbers and random names."""


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def load(name: str) -> dict[str, Any]:
    """A record by name. FileNotFoundError if it does not exist."""
    record: dict[str, Any] = json.loads((RECORDS / f"{name}.json").read_text())
    return record


def as_written(value: float, like: str) -> str:
    """A record's value with as many decimals, and commas, as the number in the text."""
    decimals = len(like.partition(".")[2])
    return f"{value:,.{decimals}f}" if "," in like else f"{value:.{decimals}f}"


def differences(text: str) -> Iterator[tuple[str, str]]:
    """(written number, recorded number) for each number that differs from its record.

    KeyError for an unknown figure.
    """
    for number in SOURCE.finditer(text):
        value = load(number["record"])["figures"][number["figure"]]["median"]
        if (recorded := as_written(value, number["number"])) != number["number"]:
            yield number[0], recorded + number["mark"]
    for block in BLOCK.finditer(text):
        printed = load(block["record"])["texts"][block["text"]].splitlines()
        for line in block["lines"].splitlines():
            if not line.startswith(("$", "...")) and line.strip() and line not in printed:
                yield line, _like(line, printed)


def _like(line: str, printed: Sequence[str]) -> str:
    """The printed line that differs in numbers alone, in the fewest of them; "" if there is none."""
    words = line.split()
    pattern = re.compile(r"\s+".join(".+".join(map(re.escape, VARIES.split(word))) for word in words))
    alike = [other for other in printed if pattern.fullmatch(other.strip())]
    return max(alike, key=lambda other: sum(a == b for a, b in zip(words, other.split())), default="")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the records' numbers into the pages")
    write, wrong = parser.parse_args().write, 0
    for page in pages():
        text = page.read_text(encoding="utf-8")
        for written, recorded in list(differences(text)):
            wrong += not write or not recorded
            print(f"{page.relative_to(ROOT)}: {written} should be {recorded or 'another line: none is like it'}")
            text = text.replace(written, recorded or written)
        if write:
            page.write_text(text, encoding="utf-8")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
