"""The keys below `data`: what a run reads, and how rows become tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Any, ClassVar, Literal

from tpshard.diagnostics.diagnostic import Mistakes
from tpshard.files.hub_folder import PREFIX
from tpshard.recipes.keys.constraints import Count, CountOrZero, NonNegative, Share, limits
from tpshard.recipes.text.section import Section, derived

BYTE_TOKENS = 258
"""Tokens of the tokenizer `bytes`: a begin token, an end token and 256 bytes. A trained tokenizer has them too."""


class TokenizerTraining(Section):
    """A tokenizer that a run trains on its text: a byte-level BPE."""

    train: Annotated[int, limits(least=BYTE_TOKENS, most=2**20)]
    """Tokens at most; a short text gives fewer."""


class DataSource(Section):
    """One source of a mixture. Without `column`, `messages` or `completion` its rows are read as `data` says."""

    paths: ClassVar[tuple[str, ...]] = ("source",)

    source: str
    """As data.source."""
    weight: NonNegative = 1.0
    """Its part of the mixture, relative to the other weights."""
    column: str | None = None
    """As data.column."""
    messages: str | None = None
    """As data.messages."""
    prompt: str | None = None
    """As data.prompt."""
    completion: str | None = None
    """As data.completion."""
    split: str | None = None
    """The split of a data set on the hub to train on, or a word that the names of the training files contain."""
    filter: Mapping[str, Any] = field(default_factory=dict)
    """Only rows count whose columns have these values, such as {language: en}, or one of a list of them."""
    exhausted: Literal["repeat", "stop"] = "repeat"
    """What follows when all of it was read: repeat reads it again, in another order; stop leaves it out from then on,
    and the run ends when nothing of any source is left."""


class Data(Section):
    """The text or conversations that a run trains on."""

    paths: ClassVar[tuple[str, ...]] = ("source", "tokenizer")
    folders: ClassVar[tuple[str, ...]] = ("tokenizer",)

    source: str = "sample"
    """sample (generated on this machine); c4; hub:OWNER/NAME or hub:OWNER/NAME@REVISION:CONFIGURATION (also hf:),
    another data set on the Hugging Face hub; or a folder, file or pattern of *.jsonl, *.json.gz, *.parquet or *.txt."""
    sources: tuple[DataSource, ...] = ()
    """Several sources in place of `source`, mixed by their weights; each has a held-out loss of its own."""
    mix: Literal["rows", "tokens"] = "rows"
    """What the weights of `sources` count: documents, or their tokens."""
    column: str = "text"
    """The key of JSON lines, or the column of Parquet files, that holds the text."""
    messages: str | None = None
    """The key or column that holds conversations: lists of maps with a role and a content. They are rendered by the
    tokenizer's chat template, with the tools of a column `tools` if there is one; only answers are learned."""
    prompt: str | None = None
    """The key or column that holds the prompts of `completion`."""
    completion: str | None = None
    """The key or column of texts that follow a prompt; only they are learned."""
    too_long: Literal["truncate", "split", "drop"] = "truncate"
    """What happens to a conversation, or a prompt with its completion, of more tokens than model.seq_len. Others are
    never divided."""
    chat_template: str | None = None
    """The chat template of conversations, and of the trained model: chatml, or a template's file. Default: the
    tokenizer's own."""
    shuffle: CountOrZero = derived(default="1000 for sources, messages, completion and epochs; else 0")
    """Documents that are shuffled among each other, anew in each epoch and by `seed`, so that no source is read whole
    for it; 0: documents come in the order of the files, which is shuffled."""
    tokenizer: str | TokenizerTraining | None = derived(default='its own for sample, else "${oc.env:TOKENIZER_DIR}"')
    """Folder of a Hugging Face tokenizer, or hf:OWNER/NAME on the hub, read when a command needs it; {train: 8192}: one
    of so many tokens that a run trains on its text and keeps; bytes: the 256 bytes; null: the sample's own."""
    bos: Literal["tokenizer", "always", "never"] = "tokenizer"
    """Whether each document begins with the tokenizer's bos_token. tokenizer: with what the tokenizer itself puts
    before a text, as transformers reads it, be it nothing; always: with bos_token in any case. A conversation begins
    and ends as its template writes it."""
    eos: Literal["tokenizer", "always", "never"] = "always"
    """Whether each document ends with the tokenizer's eos_token. always: so that the model learns where to stop;
    tokenizer: with what the tokenizer itself puts after a text, which for most is nothing."""
    epochs: Count | None = None
    """How often each source is read, in place of train.steps: a run counts its steps first. An epoch's last step has
    the rows that are left. Sources of `exhausted: stop` are read once; weights decide the order alone."""
    bad_rows: Share = 0.01
    """Share of unreadable rows that stops the run."""

    @property
    def all_sources(self) -> tuple[DataSource, ...]:
        """The sources; `source` alone as one."""
        return self.sources or (DataSource(source=self.source),)

    @property
    def forms(self) -> list[Mapping[str, str | None]]:
        """`form_of` each source, whatever it is."""
        return [self.form_of(one) for one in self.sources or (DataSource(source=""),)]

    def form_of(self, source: DataSource) -> Mapping[str, str | None]:
        """The columns that a source's rows are read from, by key; those of `data` where it names none."""
        return self.own_form(source) or self.own_form(self)

    @staticmethod
    def own_form(source: DataSource | Data) -> Mapping[str, str | None]:
        """The columns that a source names itself, by key."""
        own = {key: getattr(source, key) for key in ("column", "messages", "prompt", "completion")}
        return {key: value for key, value in own.items() if value is not None}

    @property
    def made_tokens(self) -> int | None:
        """The most tokens of a tokenizer that tpshard makes, {train: SIZE} or bytes; None where a folder is named, or
        nothing."""
        if str(self.stored()["tokenizer"]).startswith(PREFIX):
            return None
        try:
            named = self.tokenizer
        except Mistakes:  # its environment variable is not set
            return None
        return named.train if isinstance(named, TokenizerTraining) else BYTE_TOKENS if named == "bytes" else None

    @property
    def tokenizer_folder(self) -> str | None:
        """The folder that `tokenizer` names, if it names one. Raises `Mistakes` where a variable is not set."""
        named = self.tokenizer
        return named if isinstance(named, str) and named != "bytes" else None
