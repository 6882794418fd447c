"""Compares random programs, partitioned and simulated, with eager mode: how many are wrong, crash or are refused.

    python benchmarks/fuzz.py --seeds 1000 [--start 0] [--family NAME ...] [--json] [--show] [--seconds 600]
    python benchmarks/fuzz.py --join PIECE.json ... [--record]

Each program is one op of a family with a random tail, half of them with gradients, on a random mesh, with random
shardings of arguments and results: uneven sizes, parts of axes, several axes on one dim. `refused` is a ValueError
before anything runs, counted by its reason; `crash` is any other exception. `tied` differs from eager mode only in
elements that another order of equal elements changes in eager mode too, as `topk` may return any of them. Programs that
draw random numbers are compared with their own unsharded program, since eager mode draws others. Exits with 1 if a
program is wrong or crashed.
`--family NAME --only SEED --show` repeats one program. `--join` adds up what earlier runs printed with `--json`, and
`--record` writes it to benchmarks/records/fuzz.json.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import time
import warnings
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tpshard.parallelism import Program, partition

from fuzzed import FAMILIES, Case, case
from fuzzed.ties import only_ties
from record import Record, in_one_line


class Outcome(NamedTuple):
    kind: str
    """One of `KINDS`."""
    detail: str = ""
    """What went wrong, as one line."""


KINDS = ("right", "tied", "wrong", "crash", "refused")


def run(program_case: Case) -> Outcome:
    """The outcome of a program."""
    try:
        expected = program_case.expected()
    except ValueError as error:
        return Outcome("refused", str(error))
    try:
        program = partition(
            program_case.fn, program_case.args, program_case.mesh, program_case.in_shardings, program_case.out_shardings
        )
    except ValueError as error:
        return Outcome("refused", str(error))
    except Exception as error:
        return Outcome("crash", in_one_line(error))
    try:
        actual = program.simulate(*program_case.args)
    except Exception as error:
        return Outcome("crash", in_one_line(error))
    if len(actual) != len(expected):
        return Outcome("wrong", f"{len(actual)} results instead of {len(expected)}")
    close = closeness(program)
    for i, (mine, theirs) in enumerate(zip(actual, expected)):
        gap = difference(mine, theirs, close)
        if gap:
            tied = only_ties(program_case, actual, expected, close)
            return Outcome("tied" if tied else "wrong", f"result {i}: {gap}")
    return Outcome("right")


TOLERANCE = {torch.float16: 2e-2, torch.bfloat16: 1e-1, torch.float32: 1e-4, torch.complex64: 1e-4}
"""Tolerances of dtypes coarser than float64, in which most programs compute."""


def closeness(program: Program) -> float:
    """The tolerance of a program: wider where it computes in coarser dtypes than float64."""
    return 1e-4 if any(record.dtype in TOLERANCE for record in program.records.values()) else 1e-6


def difference(actual: torch.Tensor, expected: torch.Tensor, close: float) -> str:
    """The difference of two tensors as text; empty where they agree to `close` or to their dtype's precision."""
    finite = expected[torch.isfinite(expected)] if expected.is_floating_point() else expected
    scale = 1 + (float(finite.abs().max()) if finite.numel() and expected.dtype.is_floating_point else 0.0)
    close = max(close, TOLERANCE.get(expected.dtype, 0.0))
    try:
        torch.testing.assert_close(actual, expected, rtol=close, atol=close * scale, equal_nan=True)
    except AssertionError as error:
        return " ".join(str(error).split())
    return ""


def _shape_of(reason: str) -> str:
    """A reason without its names and numbers, for counting."""
    return re.sub(r"\d+", "#", reason)[:110]


def join(paths: list[str], write: bool) -> None:
    """Adds up the outcomes of several runs; no number of a program may be in two of them."""
    record = Record("fuzz")
    starts: set[int] = set()
    total: Counter[str] = Counter()
    for path in paths:
        piece = json.loads(Path(path).read_text())
        if piece["start"] in starts:
            sys.exit(f"{path} has the programs from {piece['start']} on, as has a file before it")
        starts.add(piece["start"])
        total.update(piece["total"])
        record.rows.append({"torch": piece["torch"], "start": piece["start"], "seconds": piece["seconds"],
                            **piece["total"], "seen": piece["seen"]})  # fmt: skip
    for kind in KINDS:
        record.figure(kind, total[kind], "programs")
    record.figure("programs", total.total(), "programs")
    record.figure("families", len(FAMILIES), "families")
    record.figure("refused-share", 100 * total["refused"] / total.total(), "%")
    record.close(write=write)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=len(FAMILIES) * 10, help="programs, over all families in turn")
    parser.add_argument("--start", type=int, default=0, help="number of the first program")
    parser.add_argument("--family", nargs="*", choices=list(FAMILIES), default=list(FAMILIES), metavar="NAME")
    parser.add_argument("--only", type=int, help="one seed of the family")
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after this time")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--show", action="store_true", help="print every program that is not right")
    parser.add_argument("--join", nargs="+", metavar="PIECE.json", help="add up earlier runs with --json")
    parser.add_argument("--record", action="store_true", help="with --join: write the record")
    options = parser.parse_args()
    if options.join:
        join(options.join, options.record)
        return
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    names = options.family
    numbers = range(options.start, options.start + options.seeds)
    pairs = [(names[n % len(names)], n // len(names)) for n in numbers]
    if options.only is not None:
        pairs = [(name, options.only) for name in names]
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    examples: dict[tuple[str, str], list[tuple[str, int, str]]] = defaultdict(list)
    began = time.perf_counter()
    for name, seed in pairs:
        if time.perf_counter() - began > options.seconds:
            break
        drawn = case(name, seed)
        outcome = run(drawn)
        counts[name][outcome.kind] += 1
        if outcome.kind != "right":
            group = name if outcome.kind in ("wrong", "tied") else _shape_of(outcome.detail)
            examples[outcome.kind, group].append((name, seed, outcome.detail))
            if options.show:
                print(f"--- {outcome.kind}: {outcome.detail}\n{drawn}", flush=True)
    _report(counts, examples, time.perf_counter() - began, options.start, options.json)
    if any(c["wrong"] or c["crash"] for c in counts.values()):
        raise SystemExit(1)


def _report(
    counts: dict[str, Counter[str]], examples: dict[Any, Any], seconds: float, start: int, as_json: bool
) -> None:
    total: Counter[str] = sum(counts.values(), Counter())
    if as_json:
        everything = {k: total[k] for k in KINDS}
        summary = [{"kind": kind, "count": len(cases), "family": cases[0][0], "seed": cases[0][1], "told": cases[0][2]}
                for (kind, _), cases in examples.items()]  # fmt: skip
        families = {name: {k: c[k] for k in KINDS} for name, c in counts.items()}
        whole = {"torch": torch.__version__, "start": start, "seconds": round(seconds, 1), "total": everything}
        print(json.dumps(whole | {"families": families, "seen": summary}, indent=1))
        return
    print(f"{'family':<18} {'programs':>8}" + "".join(f"{kind:>8}" for kind in KINDS))
    for name, c in [*counts.items(), ("all", total)]:
        print(f"{name:<18} {sum(c.values()):>8}" + "".join(f"{c[kind]:>8}" for kind in KINDS))
    print(f"torch {torch.__version__}, {seconds:.0f} s")
    for (kind, _), cases in sorted(examples.items(), key=lambda item: (item[0][0], -len(item[1]))):
        name, seed, what = cases[0]
        print(f"{kind} x{len(cases)}, as {name} {seed}: {what[:300]}")


if __name__ == "__main__":
    main()
