"""Runs the shipped finetuning recipes as a user does, and keeps their held-out losses, times and an answer.

    python benchmarks/finetune.py [--record] [--json]

Trains the quickstart, then `finetune-chat` and `finetune-lora` from it, in an empty folder, and asks each one question.
`form` is whether the answer begins as the conversations' answers do. Exits with 1 if one does not.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

from record import Record, parser_of
from running import tpshard

RECIPES = ("finetune-chat", "finetune-lora")
QUESTION, FORM = "What is json.dumps?\n", "In short:"


def held_out_loss(run: Path) -> float:
    """The last held-out loss of a run, in nats per answered token."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return float([row["eval_loss"] for row in rows if "eval_loss" in row][-1])


def main() -> None:
    options = parser_of(__doc__).parse_args()
    record = Record("finetune", quiet=options.json)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        tpshard("train", "quickstart", cwd=folder)
        for recipe in RECIPES:
            began = time.perf_counter()
            tpshard("train", recipe, cwd=folder)
            record.figure(f"{recipe}.seconds", time.perf_counter() - began, "s")
            record.figure(f"{recipe}.loss", held_out_loss(folder / "runs" / recipe), "nats")
            answer = tpshard("chat", f"runs/{recipe}", cwd=folder, input=QUESTION)
            record.rows.append({"recipe": recipe, "answer": answer.strip(), "form": FORM in answer})
            record.say(f"{recipe}: {answer.strip()}")
    record.close(write=options.record, as_json=options.json)
    sys.exit(int(not all(row["form"] for row in record.rows)))


if __name__ == "__main__":
    main()
