"""Runs test cases of other partitioners (Shardy's, XLA's), restated in plain text, against this engine.

    python benchmarks/peer_cases.py FILE [--json] [--kind KIND] [--fails] [--record]

FILE is a JSON list of cases: `id`, `kind`, `mesh`, `program` (Python-like text), `annotations` and `expected`. Each
becomes a graph of ATen ops as a torch user would write it (`peers/operations.py`); programs with ops that torch lacks
are skipped. A case of each kind holds if:

- propagation: every expected value has the expected sharding; exactly for Shardy's cases, at least as specific for
  XLA's (and untouched behind a barrier). `engine_mode` says which loops run.
- op_rule: the factors of the statement's ops, joined, are the expected ones up to renaming. A factor of another kind
  holds if sharding it sends no more bytes; `got` has both figures.
- explicit_reshards: the partitioned program sends no more bytes than the expected steps, with what the ops themselves
  send in the layouts that these steps bring.
- reshard_plan: the plan reaches the layout and sends no more bytes than the expected collectives. An expected
  collective that cannot move uneven pieces as it says costs what the cheapest plan of that step does.
- partition: the collectives cost no more than the expected ones, matched one by one, or in bytes where their shapes are
  known; and the result equals eager.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from typing import Any

sys.path.insert(0, os.path.dirname(__file__))

from peers import case_checks
from peers.operations import NoSuchOp
from peers.shardings import NotExpressible
from record import Record

CHECKS = {
    "propagation": case_checks.propagation, "op_rule": case_checks.op_rule, "reshard_plan": case_checks.reshard_plan,
    "explicit_reshards": case_checks.explicit_reshards, "partition": case_checks.partition,
}  # fmt: skip


def run(case: dict[str, Any]) -> dict[str, Any]:
    """One case's `{id, kind, result, got, reason}`."""
    row = {"id": case["id"], "kind": case["kind"], "result": "left_out", "got": None, "reason": ""}
    if case["kind"] not in CHECKS:
        return row | {"reason": f"unknown kind `{case['kind']}`"}
    try:
        holds, actual, reason = CHECKS[case["kind"]](case)
        return row | {"result": "holds" if holds else "fails", "got": actual, "reason": reason}
    except (NoSuchOp, NotExpressible) as left:
        return row | {"reason": str(left)}
    except Exception as error:  # a crash of the engine is a failure of its case
        return row | {"result": "fails", "reason": f"{type(error).__name__}: {error}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", help="a JSON list of cases")
    parser.add_argument("--kind", choices=list(CHECKS), help="only cases of this kind")
    parser.add_argument("--fails", action="store_true", help="list only the cases that do not hold")
    parser.add_argument("--json", action="store_true", help="print the cases' results as a JSON list")
    parser.add_argument("--record", action="store_true", help="write the shares into benchmarks/records")
    options = parser.parse_args()
    with open(options.file) as file:
        cases = json.load(file)
    record = Record("peer_cases", quiet=True) if options.record else None
    rows = [run(case) for case in cases if options.kind in (None, case["kind"])]
    if record is not None:
        record.rows = [{key: row[key] for key in ("id", "kind", "result", "reason")} for row in rows]
        for kind in CHECKS:
            count = Counter(row["result"] for row in rows if row["kind"] == kind)
            if count["holds"] + count["fails"]:
                record.figure(f"{kind}.cases", count.total(), "cases")
                record.figure(f"{kind}.holds", 100 * count["holds"] / (count["holds"] + count["fails"]), "percent")
                record.figure(f"{kind}.left-out", count["left_out"], "cases")
        record.close(write=True)
    if options.json:
        print(json.dumps(rows, indent=1))
        return
    for row in rows:
        if row["result"] != "holds" or not options.fails:
            print(f"{row['result']:<9} {row['kind']:<18} {row['id']}  {row['reason'][:200]}")
    print(f"\n{'kind':<28} {'holds':>6} {'fails':>6} {'left out':>9} {'share':>7}")
    sources = {c["id"]: "XLA" if "openxla/xla" in c["source"] else "Shardy" for c in cases}
    counts = Counter((f"{r['kind']} ({sources[r['id']]})", r["result"]) for r in rows)
    for name in sorted({name for name, _ in counts}):
        holds, fails, left = (counts[name, result] for result in ("holds", "fails", "left_out"))
        share = f"{holds / (holds + fails):.1%}" if holds + fails else ""
        print(f"{name:<28} {holds:>6} {fails:>6} {left:>9} {share:>7}")


if __name__ == "__main__":
    main()
