"""Runs test cases of other partitioners (Shardy's, XLA's), restated in plain text, against this engine.

    python benchmarks/peer_cases.py FILE [--json] [--kind KIND] [--fails]

FILE is a JSON list of cases: `id`, `kind`, `mesh`, `program` (Python-like text), `annotations` and `expected`. Each
becomes a graph of ATen ops as a torch user would write it (`peers/operations.py`); programs with ops that torch lacks
are skipped. A case of each kind holds if:

- propagation: every expected value has the expected sharding; exactly for Shardy's cases, at least as specific for
  XLA's (and untouched behind a barrier). `engine_mode` says which loops run.
- op_rule: the factors of the statement's ops, joined, are the expected ones up to renaming.
- explicit_reshards: the partitioned program sends no more bytes than the expected steps.
- reshard_plan: the plan reaches the layout and sends no more bytes than the expected collectives.
- partition: the collectives cost no more than the expected ones, matched one by one, and the result equals eager.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from typing import Any

sys.path.insert(0, os.path.dirname(__file__))

from peers import case_checks
from peers.operations import NoSuchOp
from peers.shardings import NotExpressible

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
        holds, got, reason = CHECKS[case["kind"]](case)
        return row | {"result": "holds" if holds else "fails", "got": got, "reason": reason}
    except (NoSuchOp, NotExpressible) as left:
        return row | {"reason": str(left)}
    except Exception as error:  # a crash of the engine is a failure of its case
        return row | {"result": "fails", "reason": f"{type(error).__name__}: {error}"}


def main() -> None:
    names = [a for a in sys.argv[1:] if not a.startswith("--")]
    kind = sys.argv[sys.argv.index("--kind") + 1] if "--kind" in sys.argv else None
    if kind in names:
        names.remove(kind)
    if len(names) != 1:
        sys.exit(__doc__)
    with open(names[0]) as file:
        cases = json.load(file)
    rows = [run(case) for case in cases if kind in (None, case["kind"])]
    if "--json" in sys.argv:
        print(json.dumps(rows, indent=1))
        return
    for row in rows:
        if row["result"] != "holds" or "--fails" not in sys.argv:
            print(f"{row['result']:<9} {row['kind']:<18} {row['id']}  {row['reason'][:200]}")
    print(f"\n{'kind':<20} {'holds':>6} {'fails':>6} {'left out':>9} {'share':>7}")
    sources = {c["id"]: "XLA" if "openxla/xla" in c["source"] else "Shardy" for c in cases}
    count = Counter((f"{r['kind']} ({sources[r['id']]})", r["result"]) for r in rows)
    for name in sorted({name for name, _ in count}):
        holds, fails, left = (count[name, result] for result in ("holds", "fails", "left_out"))
        share = f"{holds / (holds + fails):.1%}" if holds + fails else ""
        print(f"{name:<28} {holds:>6} {fails:>6} {left:>9} {share:>7}")


if __name__ == "__main__":
    main()
