"""From a recipe's `data` to what its runs read: every source with its tokenizer, mixed, and its held-out part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from tpshard.diagnostics.diagnostic import Exit, Mistakes
from tpshard.recipes.keys.schema import Recipe
from tpshard.train.data.conversations import AnswerTokenizer, answer_tokenizer
from tpshard.train.data.corpus import Corpus, TextSource, open_text
from tpshard.train.data.row_columns import Columns
from tpshard.train.data.tokens import TextTokenizer

CHATML = """{% for message in messages %}<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] or [] %}
{{ part['text'] }}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""The template `data.chat_template: chatml`."""
LONGEST_TEMPLATE = 1 << 20
"""Bytes of a chat template's file."""


@dataclass(frozen=True)
class Share:
    """One source of a mixture."""

    text: TextSource
    tokenizer: TextTokenizer | AnswerTokenizer
    weight: float = 1.0
    epochs: int | None = None
    """How often it is read; None: as often as the run asks."""


@dataclass(frozen=True)
class Mixture:
    """What a run reads: its sources with their weights, which count documents or their tokens."""

    shares: tuple[Share, ...]
    by: Literal["rows", "tokens"] = "rows"
    window: int = 1
    """Documents of a chain that are shuffled among each other; 1: they come in the order of the files."""
    epochs: int | None = None
    """How many whole epochs a run has; None: it reads on and on."""

    @staticmethod
    def of(text: TextSource, tokenizer: TextTokenizer | AnswerTokenizer, epochs: int | None = None) -> Mixture:
        """A single source, in the order of its files."""
        return Mixture((Share(text, tokenizer, epochs=epochs),))

    @property
    def name(self) -> str:
        """The names of the sources."""
        return ", ".join(share.text.name for share in self.shares)

    @property
    def tokenizer(self) -> TextTokenizer | AnswerTokenizer:
        """The tokenizer of the first source; those of others differ in what they do with a row."""
        return self.shares[0].tokenizer

    def mistake(self, message: str, *, why: str = "", fix: str = "") -> Mistakes:
        """An error (exit 6) at the place of the recipe that names the first source."""
        return self.shares[0].text.mistake(message, why=why, fix=fix)


@dataclass(frozen=True)
class OpenedData:
    """A run's sources, opened."""

    mixture: Mixture
    held_out: tuple[tuple[TextSource, TextTokenizer | AnswerTokenizer], ...]
    """The held-out part of each source."""
    tokenizer: TextTokenizer


def columns_of(recipe: Recipe, number: int) -> Columns:
    """What is read of the rows of one of `data.all_sources`."""
    data, source = recipe.data, recipe.data.all_sources[number]
    form, own = data.form_of(source), recipe.source_key(number).rpartition(".")[0]
    said = any(recipe.where(f"{own}.{key}").line for key in form)
    shared = not said and any(recipe.where(f"data.{key}").line for key in form)
    where = {key: value if isinstance(value, tuple) else (value,) for key, value in source.filter.items()}
    return Columns(
        form.get("column") or "text",
        form.get("messages"),
        form.get("prompt"),
        form.get("completion"),
        where,
        "data" if shared else own,
        f"{own}.filter",
    )


def open_sources(recipe: Recipe, fallback: Path | None = None) -> list[Corpus]:
    """The texts of all sources. fallback: a folder for the sample where the user's cache cannot be written. Raises
    Mistakes (exit 6)."""
    return [
        open_text(one.source, columns_of(recipe, number), where=recipe.source_place(number), fallback=fallback,
                  split=one.split, key=recipe.source_key(number))
        for number, one in enumerate(recipe.data.all_sources)
    ]  # fmt: skip


def open_data(
    recipe: Recipe, length: int, tokenizer_of: Callable[[Corpus], TextTokenizer], fallback: Path | None = None
) -> OpenedData:
    """All that a recipe reads. length: tokens of a sequence. tokenizer_of: opens the tokenizer, which may be the first
    source's. Raises Mistakes (exit 6, or 3 for a tokenizer larger than the model)."""
    corpora = open_sources(recipe, fallback)
    tokenizer, data = tokenizer_of(corpora[0]), recipe.data
    template = template_of(recipe)

    def reads(text: TextSource) -> TextTokenizer | AnswerTokenizer:
        if text.columns.key == "column":
            return tokenizer
        where = recipe.where("data.tokenizer" if template is None else "data.chat_template")
        return answer_tokenizer(tokenizer, text.columns, length, data.too_long, where, template)

    tokenizers = [reads(corpus.train) for corpus in corpora]
    names = _unique([corpus.train.name for corpus in corpora])
    shares = tuple(
        Share(replace(corpus.train, name=name), one, source.weight, 1 if source.exhausted == "stop" else data.epochs)
        for corpus, one, source, name in zip(corpora, tokenizers, data.all_sources, names)
    )
    held_out = tuple((replace(c.held_out, name=name), one) for c, one, name in zip(corpora, tokenizers, names))
    return OpenedData(Mixture(shares, data.mix, max(1, data.shuffle), data.epochs), held_out, tokenizer)


def template_of(recipe: Recipe) -> str | None:
    """The source of the chat template that the recipe names; None where it names none. Mistakes (exit 6) for a
    template instead of a file, and for a file that cannot be read."""
    named = recipe.data.chat_template
    if named is None or named == "chatml":
        return None if named is None else CHATML
    if "{{" in named or "{%" in named:
        raise Mistakes.one(
            "a chat template stands where the name of its file is expected", exit=Exit.DATA,
            where=recipe.where("data.chat_template"), fix="write it into a file, such as template.jinja, and name that",
        )  # fmt: skip
    try:
        raw = Path(named).expanduser().read_bytes()
        if len(raw) > LONGEST_TEMPLATE:
            raise ValueError(f"it has {len(raw):,} bytes")
        return raw.decode()
    except (OSError, ValueError) as error:
        raise Mistakes.one(
            f"the chat template {named} cannot be read", exit=Exit.DATA, where=recipe.where("data.chat_template"),
            why=str(getattr(error, "strerror", None) or error), fix="chatml, or the path of a jinja template",
        ) from error  # fmt: skip


def _unique(names: list[str]) -> list[str]:
    """The names, those that occur again with their number."""
    return [
        name if names.count(name) == 1 else f"{name} ({names[: i + 1].count(name)})" for i, name in enumerate(names)
    ]
