"""`tpshard plan --for serve`: plans a server under a load, by simulating its own scheduler."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tpshard.plan.questions.serving_answers import TimeLimits
    from tpshard.plan.server.traffic import Traffic
    from tpshard.recipes.keys.schema import Recipe


def run_rehearsal(
    recipe: Recipe, traffic: Traffic, limits: TimeLimits, *, search: bool, as_json: bool, svg: Path | None
) -> int:
    """Prints the plan of the recipe's server under the load, and draws it into `svg`."""
    from tpshard.plan import saved_plan
    from tpshard.plan.questions import serving_answers
    from tpshard.plan.questions.serving_picture import draw

    if svg is not None:
        saved_plan.check_writable(svg)
    answers = serving_answers.answers(
        recipe, traffic, limits, curve=0 if svg is None else 10, front=search,
        note=lambda text: print(text, file=sys.stderr),
    )  # fmt: skip
    if svg is not None:
        saved_plan.write(svg, draw(answers))
    shown = json.dumps(answers.to_json(), indent=1) + "\n" if as_json else serving_answers.screen(answers)
    sys.stdout.write(shown)
    return 0
