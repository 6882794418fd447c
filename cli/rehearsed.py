"""`tpshard plan --for serve`: plans a server under a load, by simulating its own scheduler."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tpshard.recipes.schema import Recipe


@dataclass(frozen=True)
class Load:
    """The options that describe a server's load; times in seconds."""

    prompt: int
    answer: int
    rate: float | None
    ttft: float | None
    tpot: float | None
    count: int
    seed: int


def run_rehearsal(recipe: Recipe, load: Load, *, search: bool, as_json: bool, svg: Path | None) -> int:
    """Prints the plan of the recipe's server under the load, and draws it into `svg`."""
    from tpshard.plan import save, serving_answers
    from tpshard.plan.serving_picture import draw
    from tpshard.programs.traffic import Traffic
    from tpshard.serve.rehearse import rehearse

    if svg is not None:
        save.check_writable(svg)
    traffic = Traffic(load.prompt, load.answer, load.rate, count=load.count, seed=load.seed)
    limits = serving_answers.TimeLimits(load.ttft, load.tpot)
    answers = serving_answers.answers(
        recipe, traffic, limits, rehearse, curve=0 if svg is None else 10, front=search,
        note=lambda text: print(text, file=sys.stderr),
    )  # fmt: skip
    if svg is not None:
        save.write(svg, draw(answers))
    shown = json.dumps(answers.to_json(), indent=1) + "\n" if as_json else serving_answers.screen(answers)
    sys.stdout.write(shown)
    return 0
