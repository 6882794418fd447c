"""The trainers whose configurations `tpshard recipes from` reads."""

from __future__ import annotations

from tpshard.recipes.foreign import accelerate, axolotl, megatron, torchtitan

TOOLS = {tool.name: tool for tool in (torchtitan.TOOL, megatron.TOOL, axolotl.TOOL, accelerate.TOOL)}
"""By name. A new one is a file with its rows, and its name here."""
