"""Whether shipped recipes are the fastest of what they leave free, by the search of `plan --search`.

    python benchmarks/recipe_winners.py [NAME ...] [--record] [--json]      default: the finetuning recipes

Prices every mesh, recomputation and micro-batch that the recipe's lines allow, which takes minutes a recipe. Exits with
1 where a step is more than 2% faster than the recipe's own.
"""

from __future__ import annotations

import sys
import time

from tpshard.plan import planner
from tpshard.plan.search import search
from tpshard.recipes.reading.load import load

from plan_speed import cpu_seconds
from record import Record, parser_of

FINETUNING = ("llama3-8b-lora", "llama3-70b-qlora")
MOST = 0.02
"""The largest share of the recipe's step that a faster one may save."""


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: {', '.join(FINETUNING)}")
    options = parser.parse_args()
    record, beaten = Record("recipe_winners", quiet=options.json), False
    for name in options.names or FINETUNING:
        start, cpu, recipe = time.perf_counter(), cpu_seconds(), load(name)
        own = planner.report(recipe, name).pricing.step_s
        result = search.search(recipe, lambda note: print(note, file=sys.stderr), 2)
        best = own if result.best is None else min(own, result.best.price.step_s)
        changes = [] if result.best is None or best == own else result.best.changes
        total_s, used = time.perf_counter() - start, cpu_seconds() - cpu
        record.rows.append({"case": name, "step_s": own, "best_s": best, "best": changes, "total_s": total_s,
                            "untried": len(result.untried), "cpu_s": used})  # fmt: skip
        record.figure(f"{name}.saved", 1 - best / own, "of the recipe's step")
        record.say(f"{name:<18} {own:.3f} s, fastest {best:.3f} s {changes}; {total_s:.0f} s ({used:.0f} s of CPU)")
        beaten |= best < own * (1 - MOST)
    record.close(write=options.record, as_json=options.json)
    sys.exit(beaten)


if __name__ == "__main__":
    main()
