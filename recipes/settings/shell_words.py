"""Divides a shell script into commands and words, each character with its place. Nothing is executed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True)
class WordPart:
    """A part of a word."""

    kind: Literal["text", "variable", "sum", "other"]
    """other: what only running it would tell, such as $(...)."""
    text: str
    """Text; the variable's name; the arithmetic; or how it is written."""
    at: int
    """Its offset in the script."""
    quoted: bool = False
    default: tuple[WordPart, ...] | None = None
    """Of a variable: what stands for it where it is not set; after `+`, where it is."""
    sign: str = ""
    """What is before `default`: `-`, `=`, which sets the variable too, or `+`."""


@dataclass(frozen=True)
class Word:
    """A word, or the list of an array's assignment."""

    parts: tuple[WordPart, ...]
    at: int
    items: tuple[Word, ...] | None = None
    """The words between brackets in NAME=(...)."""
    document: bool = False
    """Whether it is the text behind `<<NAME`."""

    @property
    def literal(self) -> str:
        """Its unquoted text, as far as a keyword or a name's assignment needs it."""
        return self.parts[0].text if self.parts and self.parts[0].kind == "text" and not self.parts[0].quoted else ""


Command = tuple[Word, ...]
_NAME = re.compile(r"[A-Za-z_]\w*|[0-9@*#?!$-]")


class Lexer:
    """Reads commands from a script."""

    def __init__(self, text: str, start: int = 0):
        self.text, self.at = text, start
        self.ends: list[str] = []
        """The sign after each command: a newline, `;`, `&&`, ..."""
        self._closings: dict[str, dict[int, int]] = {}

    def commands(self) -> Iterator[Command]:
        """The commands in order; what ended each is in `ends`."""
        words: list[Word] = []
        while self.at < len(self.text):
            char = self.text[self.at]
            if char in " \t\r" or self._continues():
                self.at += 1 if char != "\\" else self._continues()
            elif char == "#":
                self.at = self._line_end()
            elif match := re.compile(r"&&|\|\||;;|[\n;|()]|&(?!>)").match(self.text, self.at):
                self.at = match.end()
                if words or match[0] in ("(", ")", ";;"):
                    self.ends.append(match[0])
                    yield tuple(words)
                words = []
            elif match := re.compile(r"<<-?\s*(['\"]?)(\w+)\1").match(self.text, self.at):
                document = self._document(match)
                if any(word.literal == "read" for word in words[:2]):  # the text of its variable
                    words.append(document)
            elif match := re.compile(r"(?:\d?[<>]+&?|&>>?)[ \t]*").match(self.text, self.at):
                self.at = match.end()
                if self.text[self.at : self.at + 1] not in tuple("\n;|&()") + ("",):
                    self._word()  # a redirection's file, which is no argument
            else:
                words.append(self._word())
        if words:
            self.ends.append("\n")
            yield tuple(words)

    def _continues(self) -> int:
        match = re.compile(r"\\\r?\n").match(self.text, self.at)
        return len(match[0]) if match else 0

    def _line_end(self) -> int:
        end = self.text.find("\n", self.at)
        return len(self.text) if end < 0 else end

    def _document(self, match: re.Match[str]) -> Word:
        """The document behind `<<NAME`, as one word, quoted where its name is."""
        line = self.text.find("\n", match.end())
        begin = line + 1 if line >= 0 else len(self.text)
        end = re.compile(rf"^[ \t]*{match[2]}[ \t]*\r?$", re.MULTILINE).search(self.text, begin)
        stop = end.start() if end else len(self.text)
        self.at = end.end() if end else len(self.text)
        return Word(_document(self.text[begin:stop], begin, bool(match[1])), begin, document=True)

    def _word(self) -> Word:
        start, parts = self.at, list[WordPart]()
        while self.at < len(self.text):
            char = self.text[self.at]
            if char in " \t\r\n;|&<>)" or (char == "(" and not self._assigns(parts)):
                break
            if char == "(":
                return Word(_joined(parts), start, self._list())
            if length := self._continues():
                self.at += length
                continue
            parts += self._piece(quoted=False)
        return Word(_joined(parts), start)

    @staticmethod
    def _assigns(parts: list[WordPart]) -> bool:
        return re.fullmatch(r"[A-Za-z_]\w*\+?=", "".join(part.text for part in parts)) is not None

    def _list(self) -> tuple[Word, ...]:
        self.at += 1
        words: list[Word] = []
        while self.at < len(self.text) and self.text[self.at] != ")":
            char = self.text[self.at]
            if char in " \t\r\n":
                self.at += 1
            elif length := self._continues():
                self.at += length
            elif char == "#":
                self.at = self._line_end()
            else:
                before = self.at
                words.append(self._word())
                self.at += self.at == before  # a sign that no list has
        self.at += 1
        return tuple(words)

    def _piece(self, *, quoted: bool) -> list[WordPart]:
        """The part of a word at this place."""
        start, char = self.at, self.text[self.at]
        if char == "'" and not quoted:
            end = self.text.find("'", start + 1)
            end = len(self.text) if end < 0 else end
            self.at = end + 1
            return [WordPart("text", self.text[start + 1 : end], start + 1, True)]
        if char == '"' and not quoted:
            self.at += 1
            parts = [WordPart("text", "", self.at, True)]
            while self.at < len(self.text) and self.text[self.at] != '"':
                parts += self._piece(quoted=True)
            self.at += 1
            return parts
        if char == "\\":
            self.at += 2
            after = self.text[start + 1 : start + 2]
            if quoted and after == "\n":
                return []
            return [WordPart("text", after if not quoted or after in '$`"\\' else "\\" + after, start + 1, True)]
        if char == "`":
            end = self.text.find("`", start + 1)
            self.at = len(self.text) if end < 0 else end + 1
            return [WordPart("other", self.text[start : self.at], start, quoted)]
        if match := re.compile(r"\$\(\s*cat\s*(<<-?\s*(['\"]?)(\w+)\2)[ \t]*\r?\n").match(self.text, start):
            opened = re.compile(r"<<-?\s*(['\"]?)(\w+)\1").match(self.text, match.start(1))
            assert opened is not None
            document = self._document(opened)
            close = re.compile(r"\s*\)").match(self.text, self.at)
            self.at = close.end() if close else self.at
            return [replace(part, quoted=quoted) for part in document.parts]
        if char == "$":
            return [self._expansion(quoted)]
        self.at += 1
        return [WordPart("text", char, start, quoted)]

    def _expansion(self, quoted: bool) -> WordPart:
        """What begins with a dollar sign."""
        start = self.at
        if self.text.startswith("$((", start):
            self.at = self._closing(start + 1)
            return WordPart("sum", self.text[start + 3 : self.at - 2], start, quoted)
        if self.text.startswith("$(", start):
            self.at = self._closing(start + 1)
            return WordPart("other", self.text[start : self.at], start, quoted)
        if self.text.startswith("${", start):
            self.at = self._closing(start + 1)
            inner = self.text[start + 2 : self.at - 1]
            match = re.fullmatch(r"(\w+|[@*])(\[[@*]\])?(?:(:?[-=+])(.*))?", inner, re.DOTALL)
            if match is None:
                return WordPart("other", self.text[start : self.at], start, quoted)
            default = _inside(match[4], start + 2 + match.start(4)) if match[3] else None
            return WordPart("variable", match[1], start, quoted, default, (match[3] or "")[-1:])
        match = _NAME.match(self.text, start + 1)
        self.at = start + 1 + (len(match[0]) if match else 0)
        return WordPart("variable", match[0], start, quoted) if match else WordPart("text", "$", start, quoted)

    def _closing(self, at: int) -> int:
        """The offset behind the bracket that closes the one at `at`; the end of the line where there is none."""
        opening = self.text[at]
        if opening not in self._closings:  # of all brackets of a kind in one go
            pairs, opened = dict[int, int](), list[int]()
            for match in re.finditer(r"[()]" if opening == "(" else r"[{}]", self.text):
                if match[0] == opening:
                    opened.append(match.start())
                elif opened:
                    pairs[opened.pop()] = match.end()
            self._closings[opening] = pairs
        return self._closings[opening].get(at) or self._line_end()


def _document(text: str, offset: int, plain: bool) -> tuple[WordPart, ...]:
    """The parts of a document; `plain`: without variables."""
    if plain:
        return (WordPart("text", text, offset, True),)
    lexer, parts = Lexer(text), list[WordPart]()
    while lexer.at < len(text):
        parts += lexer._piece(quoted=True)
    return _joined([replace(part, at=part.at + offset) for part in parts])


def _inside(text: str, offset: int) -> tuple[WordPart, ...]:
    """The parts of a variable's default."""
    lexer = Lexer(text)
    parts: list[WordPart] = []
    while lexer.at < len(text):
        parts += lexer._piece(quoted=False)
    return _joined([replace(part, at=part.at + offset) for part in parts])


def _joined(parts: list[WordPart]) -> tuple[WordPart, ...]:
    """Neighbouring characters as one part."""
    joined: list[WordPart] = []
    for part in parts:
        last = joined[-1] if joined else None
        if (
            last
            and last.kind == part.kind == "text"
            and last.quoted == part.quoted
            and last.at + len(last.text) == part.at
        ):
            joined[-1] = WordPart("text", last.text + part.text, last.at, part.quoted)
        else:
            joined.append(part)
    return tuple(joined)
