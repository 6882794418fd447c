"""Laws of a recipe's sources: their forms of rows, their weights and their columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tpshard.diagnostics.diagnostic import Diagnostic
from tpshard.recipes.keys.data_keys import Data, DataSource
from tpshard.recipes.keys.schema import Recipe
from tpshard.recipes.keys.violation import violation


def form_of_rows(recipe: Recipe) -> Iterator[Diagnostic]:
    """Requires that one form of rows is named for each source: text, conversations, or prompts with completions."""
    data = recipe.data
    named = [("data.sources." + str(i), one) for i, one in enumerate(data.sources)]
    for path, one in (("data", data), *named):
        messages, prompt, completion = one.messages, one.prompt, one.completion
        if (prompt is None) != (completion is None):
            key, other = ("prompt", "completion") if completion is None else ("completion", "prompt")
            message = f"`{path}.{key}` needs `{path}.{other}`: what follows a prompt is learned"
            yield violation(recipe, f"{path}.{key}", message, fix=f"{other}: NAME_OF_ITS_COLUMN")
        forms = {"messages": messages, "completion": completion, "column": one.column if one is not data else None}
        both = [key for key, value in forms.items() if value is not None]
        if len(both) > 1:
            message = f"`{path}.{both[0]}` and `{path}.{both[1]}` name two forms of rows"
            also = {f"{path}.{both[1]}": "the other"}
            yield violation(recipe, f"{path}.{both[0]}", message, "a source's rows have one form", "keep one", also)
    stored = data.stored()
    talks = any("messages" in form for form in data.forms)
    made = stored["tokenizer"] is not None and data.made_tokens is not None
    if talks and made and data.chat_template is None:
        message, why = "a tokenizer that tpshard makes has no chat template", "`messages` are rendered by one"
        yield violation(recipe, "data.tokenizer", message, why, "data.chat_template: chatml")


def weights_of_sources(recipe: Recipe) -> Iterator[Diagnostic]:
    """Requires that a mixture has sources, whose weights have a sum, and names those that are never read."""
    sources = recipe.data.sources
    if not sources and recipe.where("data.sources").line and not recipe.where("data.source").line:
        why = "the sample would be read in their place"
        yield violation(recipe, "data.sources", "`data.sources` names no source", why, "a list of {source: ...}")
    if sources and not sum(one.weight for one in sources):
        message = "the weights of `data.sources` sum to nothing"
        yield violation(recipe, "data.sources.0.weight", message, "no source would be read", "a weight above 0")
        return
    for number, one in enumerate(sources):
        if not one.weight:
            message, why = f"`{one.source}` is never read", "its weight is 0"
            key = f"data.sources.{number}.weight"
            yield violation(recipe, key, message, why, "remove it, or a weight above 0", severity="warning")


def columns_of_sources(recipe: Recipe) -> Iterator[Diagnostic]:
    """Refuses columns and filters of sources that have no columns, and splits of the sample."""
    for number, one in enumerate(recipe.data.sources):
        why, place = columnless([one]), f"data.sources.{number}"
        for key in ("column", "filter"):
            if why and getattr(one, key):
                yield violation(
                    recipe, f"{place}.{key}", f"`{place}.{key}` is of a source without columns", why, "remove it"
                )
        if one.split is not None and one.stored()["source"] == "sample":
            yield violation(recipe, f"{place}.split", "the sample has no splits", fix="remove it")


def columnless(sources: Sequence[Data | DataSource]) -> str:
    """Why the sources have no column that could be named; "" where one may."""
    names = [str(one.stored()["source"]) for one in sources]
    if not names:
        return "each source names its own"
    if all(name == "sample" for name in names):
        return "the sample has one column of text"
    return "plain text has no columns" if all(name == "sample" or name.endswith(".txt") for name in names) else ""
