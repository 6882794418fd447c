"""Faults and bad input: each is produced for real, and what the command did is compared with what is promised.

    python benchmarks/faults.py [--record] [--docs] [--only WORDS,...] [--part N/M] [--rest] [--list]

Each case of `fault_cases.py` runs as a shell script in a folder of its own, with a recipe, a trained run and its
Hugging Face folder. It holds if the exit code and the words are the expected ones, and no process is left. `--only`
chooses the cases whose group or fault contains one of the words, `--part 1/3` every third case from the first on. Rows
of other cases stay in the record. All of them take less than an hour on two cores.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from fault_cases import CASES, PRELUDE, RECIPE, SCRIPTS, Case
from record import Record, close_with_table, load, parser_of

LONGEST_S = 400
"""Seconds after which a case counts as hanging."""
NEEDS = {
    "namespaces": "unshare --user --map-root-user --pid --fork --mount true",
    "network": "unshare --user --map-root-user --net true",
    "curl": "curl --version",
}
"""What a case may need of the machine, with a command that succeeds where it is there."""


def prepare(folder: Path) -> dict[str, str]:
    """Makes the folder that every case gets a copy of, and returns the environment of the cases."""
    binaries, template = folder / "bin", folder / "template"
    binaries.mkdir()
    template.mkdir()
    for name, script in SCRIPTS.items():
        (binaries / name).write_text(f"#!/bin/sh\n{script}\n")
        (binaries / name).chmod(0o755)
    hidden = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TPSHARD_API_KEY")
    env = {name: value for name, value in os.environ.items() if name not in hidden and not name.startswith("SLURM_")}
    env |= {
        "PATH": f"{binaries}:{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1",
        "TPSHARD_CACHE": str(folder / "cache"), "TMPDIR": str(folder / "tmp"), "COLUMNS": "100",
    }  # fmt: skip
    (folder / "tmp").mkdir()
    (template / "recipe.yaml").write_text(RECIPE)
    script = "tpshard train recipe.yaml && tpshard convert runs/small hf && cp -r $TPSHARD_CACHE/sample*/tokenizer tok"
    done = subprocess.run(["bash", "-ec", script], cwd=template, env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"the run that the cases start from failed:\n{done.stderr}")
    return env


def run(case: Case, folder: Path, env: Mapping[str, str]) -> dict[str, Any]:
    """Runs a case; returns its row."""
    row: dict[str, Any] = {"name": case.name, "group": case.group, "command": case.shown, "expected": list(case.codes)}
    if case.needs and subprocess.run(["bash", "-c", NEEDS[case.needs]], capture_output=True).returncode:
        return {**row, "exit": None, "said": f"this machine has no {case.needs}", "held": None}
    place = folder / "case"
    shutil.copytree(folder / "template", place)
    began = time.monotonic()
    process = subprocess.Popen(
        ["bash", "-c", f"{PRELUDE}\n{case.setup}\n{case.command}"], cwd=place, env=env, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True, errors="replace",
    )  # fmt: skip
    try:
        output, code = process.communicate(timeout=LONGEST_S)[0], process.returncode
    except subprocess.TimeoutExpired:
        output, code = f"no end within {LONGEST_S} s", None
    left = _left(process.pid, 0 if code is None else 10)
    for other in left:
        os.kill(other.pid, signal.SIGKILL)
    if code is None:
        output = process.communicate()[0] + output
    shutil.rmtree(place, ignore_errors=True)
    said = _said(output, case, place)
    held = code in case.codes and re.search(case.words, output, re.S) is not None and not left
    if left and code is not None:
        said += f" ({len(left)} processes are left)"
    return {**row, "exit": code, "said": said, "held": held, "seconds": round(time.monotonic() - began, 1)}


def _left(session: int, patience: float) -> list[psutil.Process]:
    """The processes of a case that are still there; its scripts wait for all that they started."""
    deadline = time.monotonic() + patience
    while True:
        living = []
        for process in psutil.process_iter():
            try:
                if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                    living.append(process)
            except (OSError, psutil.Error):
                continue
        if not living or time.monotonic() > deadline:
            return living
        time.sleep(0.2)


def _said(output: str, case: Case, place: Path) -> str:
    """The line of the output that tells most: with the expected words, else the first error, else the last."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    telling = [line for line in lines if re.search(case.words, line)] if case.words else []
    telling += [line for line in lines if line.startswith(("error:", "warning:"))] + lines[-1:]
    said = telling[0] if telling else ""
    said = re.sub(r"/\S*?tpshard-faults-[^/\s]*/(case|tmp|cache)", r"/\1", said)
    return re.sub(r"process \d+ on \S+", "process N on HOST", said)[:160]


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The cases as Markdown, a table for each group."""
    held, skipped = sum(row["held"] is True for row in rows), sum(row["held"] is None for row in rows)
    parts = [f"{held} of {len(rows)} hold; {skipped} could not be tried on this machine."]
    for group in dict.fromkeys(row["group"] for row in rows):
        lines = [f"## {group}", "", "| fault | command | exit | said |", "|---|---|---|---|"]
        for row in (row for row in rows if row["group"] == group):
            wanted = "" if row["held"] is not False else f" (expected {' or '.join(map(str, row['expected']))})"
            code = "not tried" if row["held"] is None else f"{row['exit']}{wanted}"
            lines.append(f"| {row['name']} | {_code(row['command'])} | {code} | {_code(row['said'])} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _code(text: str) -> str:
    """Text as code in a cell of a table."""
    text = " ".join(text.split()).replace("|", "\\|")
    return f"`` {text} ``" if text else ""


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--docs", action="store_true", help="write the tables into docs/faults.md")
    parser.add_argument("--only", default="", metavar="WORDS,...")
    parser.add_argument("--part", default="1/1", metavar="N/M")
    parser.add_argument("--rest", action="store_true", help="the cases that the record lacks, or that did not hold")
    parser.add_argument("--list", action="store_true", help="list the cases and run none")
    options = parser.parse_args()
    number, parts = map(int, options.part.split("/"))
    words = options.only.lower().split(",")
    chosen = [case for case in CASES if any(one in f"{case.group} {case.name}".lower() for one in words)]
    chosen = chosen[number - 1 :: parts]
    if options.rest:
        held = {row["name"] for row in load("faults")["rows"] if row["held"]}
        chosen = [case for case in chosen if case.name not in held]
    if options.list:
        print("\n".join(f"{case.group}: {case.name}" for case in chosen))
        return 0
    record = Record("faults", quiet=options.json)
    with tempfile.TemporaryDirectory(prefix="tpshard-faults-") as name:
        env = prepare(Path(name)) if chosen else {}
        for case in chosen:
            row = run(case, Path(name), env)
            record.rows.append(row)
            record.say(
                f"{({True: 'ok', False: 'FAILED', None: 'skipped'})[row['held']]:<8}{row['exit']!s:<5}{case.name}"
            )
            if row["held"] is False:
                record.say(f"        {row['said']}")
    failed = sum(row["held"] is False for row in record.rows)
    record.keep_others([case.name for case in CASES])
    close_with_table(record, table(record.rows), "faults.md", options)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
