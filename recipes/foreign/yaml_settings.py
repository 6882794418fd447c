"""Reads the settings of a YAML file of another tool, with their places."""

from __future__ import annotations

import re

from tpshard.diagnostics.diagnostic import Mistakes
from tpshard.recipes.foreign.settings import StatedSettings, of_tree
from tpshard.recipes.text.nodes import compose, decode


def read(data: bytes, file: str) -> StatedSettings:
    """The settings of a YAML file, by their paths with dots. Raises `Mistakes`.

    Other tools read YAML 1.1, whose traps in a recipe are mistakes (`off`, `012`); here they are read as the core
    schema does, so that a text such as `no` stays one, which the rows know.
    """
    text = re.sub(r"(?m)^---\s*$", "", decode(data, file), count=1)
    tree = compose(text, file, mapping=False)
    if tree.kind != "map":
        raise Mistakes.one("the file holds no map of settings", where=tree.source, fix="is this the right file?")
    if fatal := [mistake for mistake in tree.mistakes if "YAML 1.1" not in mistake.message]:
        raise Mistakes(fatal)
    return StatedSettings(of_tree(tree))
