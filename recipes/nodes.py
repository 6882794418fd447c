"""YAML text to a tree in which every key and value knows its place. Nothing is constructed, so nothing can run.

Only the part of YAML that all of its versions read alike is taken: plain scalars follow the core schema of YAML 1.2,
and one that YAML 1.1 would read as something else is a mistake (`trap`), not a surprise.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import yaml
from tpshard.recipes.diagnostic import Diagnostic, Mistakes, Source

MAX_BYTES = 1 << 20
MAX_NODES = 20_000
MAX_DEPTH = 40


@dataclass(frozen=True)
class Node:
    """One value of the file. A list has `items`, a map `entries`, a scalar its `text` and whether it is `plain`."""

    kind: Literal["scalar", "list", "map"]
    source: Source
    text: str = ""
    plain: bool = False
    items: tuple[Node, ...] = ()
    entries: tuple[tuple[Node, Node], ...] = ()

    def get(self, key: str) -> Node | None:
        return next((value for name, value in self.entries if name.text == key), None)


def read(data: bytes, file: str, found: list[Diagnostic] | None = None) -> Node:
    """The tree of a recipe file. Raises `Mistakes` with every mistake that can be told without the schema; those that
    leave a tree to go on with are added to `found` instead, where it is given."""
    return compose(_decode(data, file), file, found)


def compose(
    text: str,
    file: str,
    found: list[Diagnostic] | None = None,
    *,
    shown: str | None = None,
    offset: int = 0,
    mapping: bool = True,
) -> Node:
    """The tree of YAML `text`; mistakes as in `read`.

    `shown` is the line to show where the text is only a part of it (an override), which starts `offset` characters in.
    With `mapping`, anything but a map at the top is a mistake.
    """
    place = _Places(text, file, shown, offset)
    try:
        events = _shallow(yaml.parse(text, Loader=yaml.SafeLoader))
    except yaml.MarkedYAMLError as error:
        raise Mistakes([_syntax(error, place)]) from None
    except yaml.reader.ReaderError as error:
        before = text[: error.position] if isinstance(error.position, int) else ""
        where = place.at(before.count("\n") + 1, len(before) - before.rfind("\n"))
        raise Mistakes.one(
            f"the character U+{ord(text[error.position]):04X} may not stand in YAML",
            where=where,
            fix='write it as an escape between double quotes, such as "\\x07"',
        ) from None
    composer = _Composer(events, place)
    root = composer.document(mapping)
    if composer.mistakes and found is None:
        raise Mistakes(composer.mistakes)
    if found is not None:
        found += composer.mistakes
    return root


def _shallow(events: Iterable[yaml.Event]) -> list[yaml.Event]:
    """The events up to the first that is nested too deep, which the composer refuses: PyYAML's time grows with the
    square of the depth."""
    depth, found = 0, []
    for event in events:
        found.append(event)
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH + 1:
            break
    return found


def trap(node: Node) -> str | None:
    """What YAML 1.1 reads this plain scalar as, if that is not what it says; None for an honest one."""
    if not node.plain:
        return None
    text = node.text
    if re.fullmatch(r"yes|Yes|YES|on|On|ON", text):
        return "true"
    if re.fullmatch(r"no|No|NO|off|Off|OFF", text):
        return "false"
    if re.fullmatch(r"[-+]?[0-9][0-9_]*(?::[0-5]?[0-9])+(?:\.[0-9_]*)?", text):
        return _sexagesimal(text)
    if re.fullmatch(r"[-+]?0[0-7_]+", text):
        return str(int(text.replace("_", ""), 8))
    if re.fullmatch(r"[-+]?0b[01_]+", text):
        return str(int(text.replace("_", ""), 2))
    if re.fullmatch(r"[-+]?0o[0-7]+", text):
        return f"the text {text!r}, and as {int(text.replace('0o', ''), 8)} by YAML 1.2"
    if re.fullmatch(r"[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}(?:[Tt ].*)?", text):
        return "a date"
    return None


def scalar(node: Node) -> bool | int | float | str | None:
    """The value of a scalar by the core schema of YAML 1.2; `1_000` is a number too. Quoted is always text."""
    text = node.text
    if not node.plain:
        return text
    if text in ("", "~", "null", "Null", "NULL"):
        return None
    if text in ("true", "True", "TRUE"):
        return True
    if text in ("false", "False", "FALSE"):
        return False
    # int() and float() take underscores where Python does, and nothing else gets here; digits are ASCII by the pattern
    if re.fullmatch(r"[-+]?[0-9]+(?:_[0-9]+)*", text):
        return int(text) if len(text) < 400 else float(text)
    if re.fullmatch(r"0x[0-9a-fA-F]+", text):
        return int(text, 16) if len(text) < 400 else float("inf")
    if re.fullmatch(r"[-+]?(?:\.[0-9]+|[0-9]+(?:_[0-9]+)*(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?", text):
        return float(text)
    if re.fullmatch(r"[-+]?\.(?:inf|Inf|INF)", text):
        return float(text.replace(".", ""))
    if re.fullmatch(r"\.(?:nan|NaN|NAN)", text):
        return float("nan")
    return text


def _sexagesimal(text: str) -> str:
    sign = -1 if text.startswith("-") else 1
    total = 0.0
    for part in text.lstrip("+-").replace("_", "").split(":"):
        total = total * 60 + float(part or 0)
    return f"{sign * total:.12g}"


class _Places:
    """Marks of the parser to sources."""

    def __init__(self, text: str, file: str, shown: str | None, offset: int):
        # YAML and editors end lines here and nowhere else; str.splitlines knows eight more ends
        self.lines = re.split(r"\r\n|\r|\n|\x85|\u2028|\u2029", text)
        self.file, self.shown, self.offset = file, shown, offset

    def at(self, line: int, col: int, width: int = 1) -> Source:
        if self.shown is not None:
            return Source(self.file, 1, self.offset + (col if line == 1 else 1), self.shown, width)
        text = self.lines[line - 1] if line <= len(self.lines) else ""
        return Source(self.file, line, col, text, width)

    def of(self, mark: yaml.Mark | None, end: yaml.Mark | None = None) -> Source:
        if mark is None:
            return self.at(1, 1)
        width = end.column - mark.column if end is not None and end.line == mark.line else 1
        return self.at(mark.line + 1, mark.column + 1, max(1, width))


class _Composer:
    """Events of the parser to nodes, with what YAML allows and a recipe does not."""

    def __init__(self, events: list[yaml.Event], place: _Places):
        self.events: Iterator[yaml.Event] = iter(events)
        self.place = place
        self.anchors: dict[str, Node | None] = {}
        self.sizes: dict[int, int] = {}
        self.mistakes: list[Diagnostic] = []

    def document(self, mapping: bool) -> Node:
        roots: list[Node] = []
        for event in self.events:
            if isinstance(event, yaml.DocumentStartEvent):
                self.anchors = {}
                if roots:
                    raise Mistakes.one(
                        "a second document begins",
                        where=self.place.of(event.start_mark, event.end_mark),
                        why="a recipe is one document",
                        fix="remove `---`, or put the second recipe into a file of its own",
                    )
                roots.append(self.node(next(self.events), 0)[0])
        empty = not roots or (roots[0].kind == "scalar" and roots[0].plain and roots[0].text in ("", "~", "null"))
        if mapping and empty and not self.mistakes:
            raise Mistakes.one(
                "the recipe is empty",
                where=roots[0].source if roots else self.place.at(1, 1),
                fix="the shortest recipe is `model: {preset: tiny}`; `tpshard recipes ls` lists others to start from",
            )
        if not roots:
            return Node("scalar", self.place.at(1, 1), "", True)
        root = roots[0]
        if mapping and root.kind != "map" and not self.mistakes:
            found = "a list" if root.kind == "list" else "text"
            raise Mistakes.one(
                f"a recipe is a map of keys, and this is {found}",
                where=root.source,
                fix="the shortest recipe is `model: {preset: tiny}`",
            )
        return root

    def node(self, event: yaml.Event, depth: int) -> tuple[Node, int]:
        """The node that begins with `event`, and how many nodes it holds when aliases are written out."""
        where = self.place.of(event.start_mark, event.end_mark)
        if depth > MAX_DEPTH:
            raise Mistakes.one(f"nested deeper than {MAX_DEPTH} levels", where=where)
        if isinstance(event, yaml.AliasEvent):
            return self.alias(event, where)
        tag = getattr(event, "tag", None)
        if tag is not None and tag != "!":
            self.wrong(
                f"the tag `{tag.replace('tag:yaml.org,2002:', '!!')}` is not allowed",
                where,
                why="recipes are plain data",
                fix="remove it; quote text that should stay text",
            )
        anchor = getattr(event, "anchor", None)
        if anchor is not None:
            self.anchors[anchor] = None  # known, but not complete: an alias inside would be a cycle
        count = 1
        if isinstance(event, yaml.ScalarEvent):
            node = Node("scalar", where, event.value, event.style is None and tag is None)
        elif isinstance(event, yaml.SequenceStartEvent):
            items = []
            while not isinstance(event := next(self.events), yaml.SequenceEndEvent):
                item, size = self.node(event, depth + 1)
                items.append(item)
                count += size
            node = Node("list", where, items=tuple(items))
        else:
            node, count = self.map(where, depth)
        if anchor is not None:
            self.anchors[anchor] = node
            self.sizes[id(node)] = count
        if count > MAX_NODES:
            raise Mistakes.one(
                f"more than {MAX_NODES:,} values once its aliases are written out",
                where=where,
                fix="write the values themselves, or use `extends`",
            )
        return node, count

    def alias(self, event: yaml.AliasEvent, where: Source) -> tuple[Node, int]:
        node = self.anchors.get(event.anchor)
        if node is None:
            known = event.anchor in self.anchors
            raise Mistakes.one(
                f"the alias `*{event.anchor}` " + ("contains itself" if known else "names no anchor before it"),
                where=where,
            )
        return node, self.sizes[id(node)]

    def map(self, where: Source, depth: int) -> tuple[Node, int]:
        entries: list[tuple[Node, Node]] = []
        first: dict[str, Source] = {}
        count = 1
        while not isinstance(event := next(self.events), yaml.MappingEndEvent):
            key, _ = self.node(event, depth + 1)
            value, size = self.node(next(self.events), depth + 1)
            count += size + 1
            if self.legal_key(key, first):
                first[key.text] = key.source
                entries.append((key, value))
        return Node("map", where, entries=tuple(entries)), count

    def legal_key(self, key: Node, first: dict[str, Source]) -> bool:
        if key.kind != "scalar":
            self.wrong("a key must be text", key.source)
        elif key.plain and key.text == "<<":
            self.wrong("merge keys are not read", key.source, why="not part of YAML 1.2", fix="use `extends: FILE`")
        elif (read_as := trap(key)) is not None:
            self.wrong(
                f"unquoted `{key.text}` is read as {read_as} by YAML 1.1",
                key.source,
                why="a key must be text",
                fix=f'write "{key.text}" with quotes if it is meant as text',
            )
        elif key.text in first:
            self.wrong(
                f"the key `{key.text}` stands twice in one map",
                key.source,
                why="the second",
                fix="keep one of them",
                also=((first[key.text], "the first"),),
            )
        else:
            return True
        return False

    def wrong(
        self, message: str, where: Source, why: str = "", fix: str = "", also: tuple[tuple[Source, str], ...] = ()
    ) -> None:
        self.mistakes.append(Diagnostic(message, where=where, why=why, fix=fix, also=also))


def _decode(data: bytes, file: str) -> str:
    top = Source(file, 1, 1, "")
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise Mistakes.one("the file is UTF-16", where=top, why="a recipe is UTF-8", fix="save it as UTF-8")
    if data.startswith(codecs.BOM_UTF8):
        text = data[3:].decode("utf-8", "replace").split("\n", 1)[0]
        raise Mistakes.one(
            "the file begins with a byte order mark",
            where=Source(file, 1, 1, text),
            why="three bytes before this",
            fix="save it as UTF-8 without BOM",
        )
    if len(data) > MAX_BYTES:
        raise Mistakes.one(f"the file has {len(data):,} bytes; a recipe has at most {MAX_BYTES:,}", where=top)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        before = data[: error.start]
        line = before.count(b"\n") + 1
        begin = before.rfind(b"\n") + 1
        end = data.find(b"\n", error.start)
        shown = data[begin : end if end >= 0 else len(data)].decode("utf-8", "backslashreplace")
        col = len(before[begin:].decode("utf-8")) + 1
        raise Mistakes.one(
            f"the byte 0x{data[error.start]:02x} is not UTF-8",
            where=Source(file, line, col, shown, 4),
            fix="save the file as UTF-8",
        ) from None


def _syntax(error: yaml.MarkedYAMLError, place: _Places) -> Diagnostic:
    where = place.of(error.problem_mark or error.context_mark)
    problem = error.problem or "cannot be read"
    message, fix = f"not YAML: {problem}", ""
    if "'\\t'" in problem or where.text[where.col - 1 : where.col] == "\t":
        message, fix = "a tab where YAML wants spaces", "indent with spaces"
    elif "expected ',' or" in problem or "<stream end>" in problem:
        fix = "close the bracket or brace, or quote text that holds `,` `:` `{` or `[`"
    elif "mapping values are not allowed" in problem:
        fix = "quote text that holds `: `, or check the indentation"
    elif "expected <block end>" in problem:
        fix = "check the indentation: keys of one map begin in the same column"
    also: tuple[tuple[Source, str], ...] = ()
    if (
        error.context
        and error.context_mark
        and error.problem_mark
        and error.context_mark.line != error.problem_mark.line
    ):
        also = ((place.of(error.context_mark), error.context),)
    return Diagnostic(message, where=where, fix=fix, also=also)
