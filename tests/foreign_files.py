"""Files of other trainers, read and translated for tests."""

from __future__ import annotations

from typing import Any

from tpshard.recipes.foreign.recipe_text import text_of
from tpshard.recipes.foreign.tools import TOOLS
from tpshard.recipes.foreign.translation import Translation, translate
from tpshard.recipes.settings.stated import Stated

ACCELERATE = """\
distributed_type: FSDP
fsdp_config:
  fsdp_activation_checkpointing: true
  fsdp_sharding_strategy: HYBRID_SHARD
mixed_precision: bf16
num_machines: 2
num_processes: 16
"""


def translated(tool: str, text: str, **overrides: Any) -> tuple[Translation, str]:
    """A file of a tool as a recipe, and its text. overrides: keys of the recipe, with two underscores for a dot."""
    file = "file.yaml" if tool in ("axolotl", "accelerate") else "file"
    settings = TOOLS[tool].read(text.encode(), file)
    where = next(iter(settings.said.values())).where
    keys = {key.replace("__", "."): value for key, value in overrides.items()}
    translation = translate(TOOLS[tool], settings, {key: Stated(key, value, where) for key, value in keys.items()})
    return translation, text_of(TOOLS[tool], file, translation)


def names(translation: Translation) -> set[str]:
    """The settings that a recipe does not say, and that matter."""
    return {one.key for one in translation.left if one.matters}
