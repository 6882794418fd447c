"""The tokenizer of a Hugging Face folder as all commands read it. Nothing in the folder is executed. No torch."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpshard.files.folder_json import read_regular
from tpshard.models.folders.hf_json import file_inside, read_json, refuse_code

if TYPE_CHECKING:
    from tokenizers import Encoding
    from tokenizers import Tokenizer as Rust

FAST = "tokenizer.json"
CONFIG = "tokenizer_config.json"
SLOW = ("tokenizer.model", "vocab.json", "merges.txt", "vocab.txt", "spiece.model", "tekken.json")
"""Older formats of a vocabulary, which transformers converts."""
END_NAMES = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "<|end|>")
"""Names of end-of-text tokens, tried in this order where no file of the folder names one."""
TOOL_USE, TOOL_USE_FILE = "tool_use", "additional_chat_templates/tool_use.jinja"
"""The name of a folder's chat template for conversations with tools, and its file."""
_LONGEST_TEMPLATE = 1 << 20
"""Bytes of a chat template."""
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class FolderTokenizer:
    """A tokenizer, with the ids that begin and end its texts, its chat template and the ids that stop generation.

    tokenizer.json decides the ids, without the truncation and padding that it may ask for. The special tokens are named
    by tokenizer_config.json and special_tokens_map.json.

    Args:
        folder: the tokenizer's folder.
        rows: the embedding rows of the model. Special tokens beyond them are dropped, so that no text produces them.
        models: folders of the model whose config.json and generation_config.json name further ids that stop.

    Raises:
        ValueError: the folder has no readable tokenizer, or a text can produce an id without an embedding row.
    """

    def __init__(self, folder: Path, rows: int | None = None, models: Sequence[Path] = ()) -> None:
        if not tokenizer_files(folder):
            raise ValueError(f"{folder}: {no_tokenizer(folder)}")
        self.folder = folder
        self.config = read_json(folder, CONFIG) if (folder / CONFIG).exists() else {}
        self._fast = (folder / FAST).exists()
        self._rust, self.special = self._load()
        self._rust.no_truncation()
        self._rust.no_padding()
        vocabulary = self._rust.get_vocab(with_added_tokens=True)
        self.size = max(vocabulary.values(), default=-1) + 1
        """The number of embedding rows that all ids need."""
        self._longest = max(map(len, vocabulary), default=1)
        self.chat_template = _template(folder, self.config)
        self.without_rows: tuple[str, ...] = ()
        """Special tokens beyond the model's rows, which are therefore ordinary text."""
        if rows is not None and self.size > rows:
            self._drop(rows, vocabulary)
        self.prefix, self.suffix = self._around()
        """The ids that the tokenizer itself puts before and after a text."""
        self.end = self._end()
        """The id of the end-of-text token."""
        self.begin = self._id("bos_token")
        """The id of the token that begins a text, whether or not the tokenizer adds it."""
        own = frozenset(() if self.end is None else (self.end,))
        self.stop_tokens = own.union(*map(stop_ids, (folder, *models)))
        """The ids that end a generated text."""
        self._plain = self.encode("a", special=False)
        self._texts: dict[int, str] = {}
        """The texts of single tokens, as they were asked for."""
        self._bytes: dict[int, bytes] = {}

    def encode(self, text: str, special: bool = True) -> list[int]:
        """The ids of a text; with `special` also those that the tokenizer puts around it. ValueError where its library
        fails, as one whose pattern backtracks without end does.
        """
        return list(_called(self._rust.encode, text, add_special_tokens=special).ids)

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """The ids of a text without what the tokenizer puts around it, each with its characters of the text. White
        space belongs to its token. ValueError as in `encode`."""
        encoded: Encoding = _called(self._untrimmed.encode, text, add_special_tokens=False)
        return list(encoded.ids), list(encoded.offsets)

    @cached_property
    def _untrimmed(self) -> Rust:
        """The tokenizer without its post-processor, which leaves white space out of a token's characters."""
        from tokenizers import Tokenizer as Rust

        plain = Rust.from_str(self._rust.to_str())
        plain.post_processor = None  # type: ignore[assignment]
        return plain

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """The ids of tokens that are no text but markers."""
        return frozenset(id for id, token in self._rust.get_added_tokens_decoder().items() if token.special)

    @cached_property
    def is_concatenative(self) -> bool:
        """Whether the text of ids is that of each, one after another, but for characters of several tokens."""
        from tokenizers.decoders import ByteLevel

        return isinstance(self._rust.decoder, ByteLevel)

    def decode(self, ids: Sequence[int], special: bool = False) -> str:
        """The text of ids, without special tokens unless `special`."""
        if len(ids) > 1 or special:
            return str(_called(self._rust.decode, list(ids), skip_special_tokens=not special))
        for id in ids:  # most of what is decoded while tokens are generated
            if id not in self._texts:
                self._texts[id] = str(_called(self._rust.decode, [id]))
            return self._texts[id]
        return ""

    def names(self, ids: Sequence[int]) -> list[str]:
        """The tokens of ids as the vocabulary writes them."""
        return [self._rust.id_to_token(id) or "" for id in ids]

    def token_bytes(self, token: int) -> bytes:
        """The UTF-8 bytes that a token adds to a text, possibly a part of a character; a special token's name."""
        if token not in self._bytes:
            self._bytes[token] = self._token_bytes(token)
        return self._bytes[token]

    def _token_bytes(self, token: int) -> bytes:
        name = self._rust.id_to_token(token) or ""
        plain = self.decode(self._plain)  # a decoder may strip the space that a text begins with
        text = self.decode([*self._plain, token])[len(plain) :] or name
        if "\N{REPLACEMENT CHARACTER}" not in text:
            return text.encode()
        if re.fullmatch("<0x[0-9A-Fa-f]{2}>", name):  # SentencePiece's bytes
            return bytes([int(name[3:5], 16)])
        return bytes(_BYTES[c] for c in name) if all(c in _BYTES for c in name) else text.encode()

    def token_text(self, token: int) -> str:
        """The text of a token beside its log-probability; part of a character as `bytes:\\xe2\\x82`."""
        raw = self.token_bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{b:02x}" for b in raw)

    def too_long(self, text: str, tokens: int) -> bool:
        """Whether the text certainly has more than this many tokens, judged by its length."""
        return len(text) > tokens * max(self._longest, 1)

    def id_of(self, token: str) -> int | None:
        """The id of a token by its name."""
        return self._rust.token_to_id(token)

    @cached_property
    def files_digest(self) -> hashlib._Hash:
        """The sha256 of the files that decide the ids of a text."""
        digest = hashlib.sha256()
        names = (FAST, "tokenizer.model") if (self.folder / FAST).exists() else SLOW
        for name in names:
            if (self.folder / name).exists():
                digest.update(read_regular(file_inside(self.folder, name)))
        return digest

    @property
    def notes(self) -> list[str]:
        """Sentences on what the folder says and is not done."""
        notes = []
        for key, id, ids in (("bos", self.begin, self.prefix), ("eos", self._id("eos_token"), self.suffix)):
            says = self.config.get(f"add_{key}_token")
            if isinstance(says, bool) and self._fast and id is not None and says != (id in ids):
                does = "adds one" if id in ids else "adds none"
                notes.append(
                    f"{self.folder / CONFIG} says `add_{key}_token: {str(says).lower()}`, but the post-processor of "
                    f"{FAST}, which transformers follows, {does}; `data.{key}` of a recipe can say otherwise"
                )
        if self.without_rows:
            names = ", ".join(self.without_rows[:3]) + (", ..." if self.without_rows[3:] else "")
            notes.append(f"the model has no embedding rows for {names} of {self.folder}: they are ordinary text")
        return notes

    def _load(self) -> tuple[Rust, dict[str, str]]:
        from tokenizers import Tokenizer as Rust

        if not self._fast:
            refuse_code(self.config, self.folder / CONFIG)
            return _converted(self.folder)
        try:
            rust = _called(Rust.from_str, read_regular(file_inside(self.folder, FAST)).decode())
        except ValueError as error:
            raise ValueError(f"{self.folder / FAST} cannot be read: {error}") from error
        _add(rust, self.folder, self.config)
        return rust, special_tokens(self.folder, self.config)

    def _around(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        encoded: Encoding = _called(self._rust.encode, "a", add_special_tokens=True)
        added, ids = encoded.special_tokens_mask, encoded.ids
        first = next((i for i, flag in enumerate(added) if not flag), len(ids))
        last = next((i for i, flag in enumerate(reversed(added)) if not flag), 0)
        return tuple(ids[:first]), tuple(ids[len(ids) - last :]) if first < len(ids) else ()

    def _id(self, key: str) -> int | None:
        name = self.special.get(key)
        return None if name is None else self.id_of(name)

    def _end(self) -> int | None:
        if "eos_token" in self.special:
            return self._id("eos_token")
        known = next((id for name in END_NAMES if (id := self.id_of(name)) is not None), None)
        return self.suffix[-1] if known is None and self.suffix else known

    def _drop(self, rows: int, vocabulary: Mapping[str, int]) -> None:
        """Removes the special tokens beyond `rows`, so that no text produces their ids."""
        from tokenizers import Tokenizer as Rust

        beyond = {id: name for name, id in vocabulary.items() if id >= rows}
        raw: dict[str, Any] = json.loads(self._rust.to_str())
        used = [self.special.get("bos_token"), self.special.get("eos_token")]
        producible, (prefix, suffix) = _producible(raw), self._around()
        needed = [
            name for id, name in sorted(beyond.items())
            if producible(name) or id in (*prefix, *suffix) or name in used or name in (self.chat_template or "")
        ]  # fmt: skip
        if needed:
            raise ValueError(
                f"{self.folder} has {self.size} tokens, and the model {rows} embedding rows: none for {needed[0]!r}, "
                "which texts can contain"
            )
        self.without_rows = tuple(beyond[id] for id in sorted(beyond))
        kept = [token for token in raw["added_tokens"] if token["content"] not in self.without_rows]
        self._rust = Rust.from_str(json.dumps(raw | {"added_tokens": kept}))


def mask_of(folder: str | Path | None) -> int:
    """The id of the mask token of a folder's tokenizer; 0 where there is none, or no tokenizer."""
    try:
        return 0 if folder is None else FolderTokenizer(Path(folder))._id("mask_token") or 0
    except (ValueError, OSError):  # a plan needs no tokenizer
        return 0


def _called(function: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """The result of a call of the tokenizers library. ValueError where it fails: it raises plain Exceptions, and its
    panics are none."""
    try:
        return function(*args, **named)
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise ValueError(f"the tokenizer's library failed: {' '.join(str(error).split())[:300]}") from None
        raise


def tokenizer_files(folder: Path) -> list[str]:
    """The names of the files from which a folder's tokenizer can be read; none where it has no tokenizer."""
    try:
        return [name for name in (FAST, CONFIG, *SLOW) if (folder / name).is_file()]
    except (OSError, ValueError):  # a name that is too long, no right to look
        return []


_OTHER_FORMATS = ("*.tiktoken", "tiktoken*", "*.model", "*.spm", "*.bpe", "encoder.json", "*.vocab", "*.gguf", "*.nemo")
_WAY_ON = (
    'where transformers reads it, AutoTokenizer.from_pretrained("DIR").save_pretrained("DIR") writes a tokenizer.json'
)


def no_tokenizer(folder: Path) -> str:
    """Why a folder without the files of `tokenizer_files` has no tokenizer: names those of other formats."""
    if not folder.is_dir():
        return "there is no such folder"
    others = [path.name for pattern in _OTHER_FORMATS for path in sorted(folder.glob(pattern))]
    if not others:
        return f"no {FAST} in it"
    return f"no {FAST} in it; the format of {others[0]} is not read, but {_WAY_ON}"


def stop_ids(folder: Path) -> frozenset[int]:
    """The ids that end a text, as config.json and generation_config.json of a folder say. ValueError for values that
    are no ids."""
    ids: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        if (folder / name).exists():
            raw = read_json(folder, name)
            for section in (raw, raw.get("text_config")):
                if isinstance(section, dict):
                    ids |= _ids(section.get("eos_token_id"), folder / name)
    return frozenset(ids)


def _ids(value: Any, where: Path) -> set[int]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(id, int) and not isinstance(id, bool) for id in ids):
        raise ValueError(f"{where}: `eos_token_id: {str(value)[:60]}` is neither a token's id nor a list of ids")
    return {id for id in ids if id >= 0}  # some folders write -1 for none


def special_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens that a folder with this tokenizer_config.json names, by key.

    As in transformers, special_tokens_map.json counts first, unless the config has the newer `added_tokens_decoder`.
    """
    name = "special_tokens_map.json"
    older = read_json(folder, name) if (folder / name).exists() else {}
    sources = [config, older] if "added_tokens_decoder" in config else [older, config]
    special: dict[str, str] = {}
    for source in sources:
        for key in _SPECIAL:
            value = source.get(key)
            content = value.get("content") if isinstance(value, dict) else value
            if content is not None and not isinstance(content, str):
                raise ValueError(f"{folder}: `{key}: {str(value)[:60]}` is not a token")
            if content:
                special.setdefault(key, content)
            elif key in source:
                special.setdefault(key, "")  # null: there is none, whatever an older file says
    return {key: content for key, content in special.items() if content}


def _add(rust: Rust, folder: Path, config: Mapping[str, Any]) -> None:
    """Adds the tokens that tokenizer_config.json has beyond those of tokenizer.json."""
    from tokenizers import AddedToken

    decoder = config.get("added_tokens_decoder") or {}
    try:
        entries = sorted((int(id), dict(entry)) for id, entry in decoder.items())
        missing = [(id, entry) for id, entry in entries if rust.token_to_id(entry["content"]) is None]
        for id, entry in missing:
            if id != rust.get_vocab_size(with_added_tokens=True):
                raise ValueError(f"`{entry['content']}` would get another id than {id}")
            flags = {key: bool(entry[key]) for key in ("lstrip", "rstrip", "normalized", "single_word") if key in entry}
            token = AddedToken(entry["content"], special=bool(entry.get("special")), **flags)
            rust.add_special_tokens([token]) if token.special else rust.add_tokens([token])
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{folder / CONFIG}: `added_tokens_decoder` cannot be read: {error}") from error


def _converted(folder: Path) -> tuple[Rust, dict[str, str]]:
    """A tokenizer of an older format, as transformers converts it, and its special tokens."""
    from transformers import AutoTokenizer

    try:
        loaded: Any = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
    except Exception as error:  # anything, for damaged files
        pieces = next((name for name in ("tokenizer.model", "spiece.model") if (folder / name).exists()), None)
        if pieces is not None and find_spec("sentencepiece") is None:
            why = "is read by the package sentencepiece, which is not installed: `pip install sentencepiece`; or, "
            raise ValueError(f"{folder / pieces} {why}{_WAY_ON}") from error
        raise ValueError(f"{folder} cannot be read: {' '.join(str(error).split())[:300]}") from error
    rust = getattr(loaded, "backend_tokenizer", None)
    if rust is None:
        raise ValueError(f"{folder}: {type(loaded).__name__} has no {FAST}; save one with transformers first")
    return rust, {key: str(token) for key, token in loaded.special_tokens_map.items() if isinstance(token, str)}


def _producible(raw: Mapping[str, Any]) -> Callable[[str], bool]:
    """Whether a text can produce a token, by its name: ordinary tokens that some merge yields, and added tokens that
    are not special."""
    model, added = raw["model"], {token["content"]: token["special"] for token in raw["added_tokens"]}
    ordinary = {entry if isinstance(entry, str) else entry[0] for entry in model["vocab"]}  # Unigram's have scores
    affixes = [model.get(key) or "" for key in ("continuing_subword_prefix", "end_of_word_suffix")]
    merged: set[str] | None = None
    if model["type"] == "BPE" and not model.get("ignore_merges"):
        pairs = (merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model["merges"])
        merged = {left + right.removeprefix(affixes[0]) for left, right in pairs}

    def producible(name: str) -> bool:
        if added.get(name) is False:
            return True
        if name in added and name not in ordinary:
            return False
        single = len(name.removeprefix(affixes[0]).removesuffix(affixes[1])) <= 1 or name.startswith("<0x")
        return merged is None or single or name in merged or name == model.get("unk_token")

    return producible


def _template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The chat template, from the newest of the places where folders keep it. Where a folder has another one for tools,
    as transformers reads it, the two are one that chooses."""
    named = _named_templates(folder, config)
    default, with_tools = named.get("default"), named.get(TOOL_USE)
    if default is None or with_tools is None:
        return default
    # the empty expressions and the line's end that is taken away keep the white space of both as it is
    first, second = (f"{{{{ '' }}}}{one.removesuffix(chr(10))}{{{{ '' }}}}" for one in (with_tools, default))
    return f"{{% if tools is not none %}}{first}{{% else %}}{second}{{% endif %}}"


def _named_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The chat templates of a folder by their names. ValueError for one that is too large."""
    if (folder / "chat_template.jinja").is_file():
        files = {"default": "chat_template.jinja", TOOL_USE: TOOL_USE_FILE}
        places = {name: file.rpartition("/") for name, file in files.items() if (folder / file).is_file()}
        return {
            name: read_regular(file_inside(folder, plain, below), _LONGEST_TEMPLATE).decode()
            for name, (below, _, plain) in places.items()
        }
    value = config.get("chat_template")
    if value is None and (folder / "chat_template.json").is_file():
        value = read_json(folder, "chat_template.json").get("chat_template")
    listed = value if isinstance(value, list) else [{"name": "default", "template": value}]
    pairs = ((one.get("name"), one.get("template")) for one in listed if isinstance(one, dict))
    named = {name: text for name, text in pairs if isinstance(name, str) and isinstance(text, str)}
    if (longest := max(map(len, named.values()), default=0)) > _LONGEST_TEMPLATE:
        raise ValueError(f"{folder}: a chat template of {longest:,} characters")
    return named


def _byte_names() -> Iterator[tuple[str, int]]:
    """The names of bytes in byte-level BPE vocabularies: printable ones as themselves, others from U+0100 (GPT-2)."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    yield from ((chr(b), b) for b in printed)
    yield from ((chr(256 + i), b) for i, b in enumerate(b for b in range(256) if b not in printed))


_BYTES = dict(_byte_names())
