"""Reads the settings of a YAML file of another tool, with their places."""

from __future__ import annotations

import re
from dataclasses import replace

from tpshard.diagnostics.diagnostic import Mistakes
from tpshard.recipes.settings.stated import StatedSettings, of_tree
from tpshard.recipes.text.nodes import compose, decode


def read(data: bytes, file: str) -> StatedSettings:
    """The settings of a YAML file, by their paths with dots. Raises `Mistakes`.

    Other tools read YAML 1.1, whose traps in a recipe are mistakes (`off`, `012`); here they are read as the core
    schema does, so that a text such as `no` stays one, which the rows know. Of a key that occurs twice the last counts,
    as for them, with a warning.
    """
    text = re.sub(r"(?m)^---[ \t]*(#.*)?$", "", decode(data, file), count=1)
    tree = compose(text, file, mapping=False, foreign=True)
    if tree.kind != "map":
        raise Mistakes.one("the file holds no map of settings", where=tree.source, fix="is this the right file?")
    mistakes = [mistake for mistake in tree.mistakes if "YAML 1.1" not in mistake.message]
    if fatal := [mistake for mistake in mistakes if "occurs twice" not in mistake.message]:
        raise Mistakes(fatal)
    twice = (replace(mistake, severity="warning", why="the second, which counts") for mistake in mistakes)
    return StatedSettings(of_tree(tree), tuple(twice))
