"""Parses YAML into a tree of nodes with their places in the file. No objects are constructed, so no code can run.

Only YAML that all versions read alike is accepted: plain scalars follow the core schema of YAML 1.2, and one that YAML
1.1 would read differently is a mistake (`trap`).
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import yaml
from tpshard.diagnostics.diagnostic import Diagnostic, Mistakes, Notes, Source

MAX_BYTES = 1 << 20
MAX_NODES = 20_000
MAX_DEPTH = 40

Path = tuple[str | int, ...]


@dataclass(frozen=True)
class Node:
    """One value of a file: a list has `items`, a map `entries`, a scalar `text` and whether it is `plain`
    (unquoted)."""

    kind: Literal["scalar", "list", "map"]
    source: Source
    text: str = ""
    plain: bool = False
    items: tuple[Node, ...] = ()
    entries: tuple[tuple[Node, Node], ...] = ()
    size: int = 1
    """Number of nodes in it, itself included, with aliases expanded."""
    mistakes: tuple[Diagnostic, ...] = ()
    """Of a whole file: the mistakes that need no schema and leave the tree usable."""

    def get(self, key: str) -> Node | None:
        """The value of a key of a map; None if it has no such key."""
        return next((value for name, value in self.entries if name.text == key), None)


def read(data: bytes, file: str) -> Node:
    """The tree of a recipe file. Raises `Mistakes` if it has none."""
    return compose(decode(data, file), file)


def compose(
    text: str, file: str, *, shown: str | None = None, offset: int = 0, mapping: bool = True, foreign: bool = False
) -> Node:
    """The tree of YAML `text`. Raises `Mistakes` if it has none.

    shown: the line to show in errors if the text is a part of it (an override), starting at character `offset`.
    mapping: whether anything but a map at the top is a mistake.
    foreign: whether maps are another tool's, read as PyYAML does: of a key that occurs twice the last counts, which
    stays a mistake, and merge keys are followed.
    """
    place = _Places(text, file, shown, offset)
    mistakes: list[Diagnostic] = []
    try:
        root: Any = _Composer(text, place, mistakes, foreign).get_single_node()
    except yaml.MarkedYAMLError as error:
        raise Mistakes([_syntax(error, place)]) from None
    except yaml.reader.ReaderError as error:
        before = text[: error.position] if isinstance(error.position, int) else ""
        where = place.at(before.count("\n") + 1, len(before) - before.rfind("\n"))
        message = f"the character U+{ord(text[error.position]):04X} is not allowed in YAML"
        fix = 'write it as an escape between double quotes, such as "\\x07"'
        raise Mistakes.one(message, where=where, fix=fix) from None
    top = root.tree if root is not None else Node("scalar", place.at(1, 1), "", True)
    if mapping and top.kind != "map":
        raise Mistakes(mistakes or [_no_map(top)])
    return replace(top, mistakes=tuple(mistakes))


def _no_map(top: Node) -> Diagnostic:
    shortest = "the shortest recipe is `model: {preset: tiny}`"
    if top.kind == "scalar" and top.plain and top.text in ("", "~", "null"):
        fix = f"{shortest}; `tpshard recipes ls` lists others to start from"
        return Diagnostic("the recipe is empty", where=top.source, fix=fix)
    kind = "a list" if top.kind == "list" else "text"
    return Diagnostic(f"a recipe is a map of keys, and this is {kind}", where=top.source, fix=shortest)


def trap(node: Node) -> str | None:
    """How YAML 1.1 reads this plain scalar, if differently; None if it is unambiguous."""
    if not node.plain:
        return None
    text, value = node.text, scalar(node)
    tag = _YAML_1_1.resolve(yaml.ScalarNode, text, (True, False))
    kind = tag.rpartition(":")[2]
    if kind == "timestamp":
        return "a date"
    if re.fullmatch(r"[-+]?0o[0-7]+", text):
        return f"the text {text!r}, and as {int(text.replace('0o', ''), 8)} by YAML 1.2"
    if kind not in ("bool", "int", "float") or len(text) > 400:
        return None
    other = _YAML_1_1.yaml_constructors[tag](_YAML_1_1, yaml.ScalarNode(tag, text))
    if other == value or other != other:
        return None
    return str(other).lower() if isinstance(other, bool) else f"{other:.12g}" if kind == "float" else str(other)


_YAML_1_1 = yaml.SafeLoader("")


# int() and float() accept underscores; the patterns allow no other extra characters, and ASCII digits only
_CORE: tuple[tuple[str, Callable[[str], bool | float | None]], ...] = (
    (r"|~|null|Null|NULL", lambda text: None),
    (r"true|True|TRUE|false|False|FALSE", lambda text: text.lower() == "true"),
    (r"[-+]?[0-9]+(?:_[0-9]+)*", lambda text: int(text) if len(text) < 400 else float(text)),
    (r"0x[0-9a-fA-F]+", lambda text: int(text, 16) if len(text) < 400 else float("inf")),
    (r"[-+]?(?:\.[0-9]+|[0-9]+(?:_[0-9]+)*(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?", float),
    (r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", lambda text: float(text.replace(".", ""))),
)


def scalar(node: Node) -> bool | int | float | str | None:
    """The value of a scalar by YAML 1.2's core schema; `1_000` is a number too. A quoted scalar is always text."""
    for pattern, value in _CORE if node.plain else ():
        if re.fullmatch(pattern, node.text):
            return value(node.text)
    return node.text


def dotted(path: Path) -> str:
    """A path as in overrides and messages, with dots."""
    return ".".join(map(str, path))


def written_at(raw: Any, path: Path) -> Any:
    """The value at a path of plain data; None if there is none."""
    for key in path:
        inside = dict(enumerate(raw)) if isinstance(raw, list) else raw
        raw = inside.get(key) if isinstance(inside, dict) else None
    return raw


def key_of(path: Path) -> str:
    """The key of a value: its path without the indices of lists."""
    return dotted(tuple(part for part in path if isinstance(part, str)))


def as_node(value: Any, where: Source) -> Node:
    """The scalar node that a value from no file, such as a default, would be written as."""
    if value is None or isinstance(value, bool):
        return Node("scalar", where, str(value).lower().replace("none", "null"), True)
    if isinstance(value, float) and not abs(value) < float("inf"):
        return Node("scalar", where, re.sub("(?=[in])", ".", str(value), count=1), True)
    return Node("scalar", where, str(value), not isinstance(value, str))


class _Places:
    """Converts the parser's marks to sources."""

    def __init__(self, text: str, file: str, shown: str | None, offset: int):
        # the line ends of YAML and of editors; str.splitlines splits at eight others too
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


class _Composer(yaml.SafeLoader):
    """PyYAML's composer, which also makes the `tree` of each node, a `Node`. It refuses tags, keys that YAML allows but
    recipes do not, and deep nesting: its time grows with the square of the depth."""

    def __init__(self, text: str, place: _Places, mistakes: list[Diagnostic], foreign: bool):
        super().__init__(text)
        self.place, self.mistakes, self.foreign, self.depth = place, mistakes, foreign, -1

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        where = self.place.of(event.start_mark, event.end_mark)
        if self.depth >= MAX_DEPTH:
            fix = "remove brackets: no value of a recipe is nested so deep"
            raise Mistakes.one(f"nested deeper than {MAX_DEPTH} levels", where=where, fix=fix)
        tag = getattr(event, "tag", None)
        if tag is not None and tag != "!":
            message = f"the tag `{tag.replace('tag:yaml.org,2002:', '!!')}` is not allowed"
            self.wrong(message, where, "recipes are plain data", "remove it; quote text that should stay text")
        self.depth += 1
        node: Any = super().compose_node(parent, index)
        self.depth -= 1
        if isinstance(event, yaml.ScalarEvent):
            node.tree = Node("scalar", where, node.value, event.style is None and tag is None)
        elif not isinstance(event, yaml.AliasEvent):
            node.tree = self.tree(node, self.place.of(node.start_mark))  # of a list or map only the opening is shown
        elif not hasattr(node, "tree"):
            where = self.place.of(node.start_mark)
            raise Mistakes.one("an alias contains itself", where=where, fix="write the value itself")
        return node

    def tree(self, node: yaml.CollectionNode, where: Source) -> Node:
        """Makes the `Node` of a list or map from the nodes of its parts."""
        if isinstance(node, yaml.SequenceNode):
            items = tuple(item.tree for item in node.value)
            tree = Node("list", where, items=items, size=1 + sum(item.size for item in items))
        else:
            entries: dict[str, tuple[Node, Node]] = {}
            merged: dict[str, tuple[Node, Node]] = {}
            for key, value in node.value:
                if self.foreign and key.tree.text == "<<" and key.tree.plain:
                    for one in value.tree.items or (value.tree,):
                        merged = {name.text: (name, inner) for name, inner in one.entries} | merged
                elif self.legal_key(key.tree, entries):
                    entries[key.tree.text] = key.tree, value.tree
            entries = merged | entries
            size = 1 + sum(1 + value.tree.size for _, value in node.value)
            tree = Node("map", where, entries=tuple(entries.values()), size=size)
        if tree.size > MAX_NODES:
            message = f"more than {MAX_NODES:,} values after expanding aliases"
            raise Mistakes.one(message, where=where, fix="write the values themselves, or use `extends`")
        return tree

    def legal_key(self, key: Node, before: dict[str, tuple[Node, Node]]) -> bool:
        if key.kind != "scalar":
            self.wrong("a key must be text", key.source, fix="write it without brackets, as in `steps: 100`")
        elif key.plain and key.text == "<<":
            self.wrong("merge keys are not supported", key.source, "not part of YAML 1.2", "use `extends: FILE`")
        elif (read_as := trap(key)) is not None:
            fix = f'write "{key.text}" with quotes if it is meant as text'
            self.wrong(f"unquoted `{key.text}` is read as {read_as} by YAML 1.1", key.source, "a key must be text", fix)
        elif key.text in before:
            message, first = f"the key `{key.text}` occurs twice in one map", before[key.text][0].source
            self.wrong(message, key.source, "the second", "keep one of them", ((first, "the first"),))
            return self.foreign
        else:
            return True
        return False

    def wrong(self, message: str, where: Source, why: str = "", fix: str = "", also: Notes = ()) -> None:
        self.mistakes.append(Diagnostic(message, where=where, why=why, fix=fix, also=also))


def _quoted(override: str | None) -> str:
    """How an override's value is quoted within the shell's quotes; "" for a file's."""
    if override is None:
        return ""
    key, _, value = override.partition("=")
    return f""": '{key}="{value}"'"""


def decode(data: bytes, file: str) -> str:
    top = Source(file, 1, 1, "")
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise Mistakes.one("the file is UTF-16", where=top, why="a recipe is UTF-8", fix="save it as UTF-8")
    if data.startswith(codecs.BOM_UTF8):
        message, fix = "the file begins with a byte order mark", "save it as UTF-8 without BOM"
        where = Source(file, 1, 1, data[3:].decode("utf-8", "replace").split("\n", 1)[0])
        raise Mistakes.one(message, where=where, why="three bytes before this", fix=fix)
    if len(data) > MAX_BYTES:
        message = f"the file has {len(data):,} bytes; a recipe has at most {MAX_BYTES:,}"
        raise Mistakes.one(message, where=top, fix="is this the right file? A recipe names data by its path")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        *before, start = data[: error.start].split(b"\n")
        shown = data.split(b"\n")[len(before)].decode("utf-8", "backslashreplace")
        where = Source(file, len(before) + 1, len(start.decode("utf-8")) + 1, shown, 4)
        message = f"the byte 0x{data[error.start]:02x} is not UTF-8"
        raise Mistakes.one(message, where=where, fix="save the file as UTF-8") from None


def _syntax(error: yaml.MarkedYAMLError, place: _Places) -> Diagnostic:
    where = place.of(error.problem_mark or error.context_mark)
    problem = error.problem or "cannot be read"
    message, fix = f"not YAML: {problem}", "quote the text, or check brackets and indentation"
    if "'\\t'" in problem or where.text[where.col - 1 : where.col] == "\t":
        message, fix = "a tab where YAML requires spaces", "indent with spaces"
    elif problem == "but found another document":
        message, fix = "a second document begins", "remove `---`, or put the second recipe into its own file"
        return Diagnostic(message, where=where, why="a recipe is one document", fix=fix)
    elif error.context in ("while scanning an alias", "while scanning an anchor"):
        sign = "*" if error.context.endswith("alias") else "&"
        message = f"`{sign}` begins an {error.context.rpartition(' ')[2]} in YAML, not text"
        fix = f"quote text that begins with `{sign}`" + _quoted(place.shown)
    elif problem.startswith("found undefined alias"):
        message = f"the alias `*{problem.split(chr(39))[1]}` names no anchor before it"
        fix = "write the value itself, or quote text that begins with `*`" + _quoted(place.shown)
    elif "expected ',' or" in problem or "<stream end>" in problem:
        fix = "close the bracket or brace, or quote text that holds `,` `:` `{` or `[`"
    elif "mapping values are not allowed" in problem:
        fix = "quote text that holds `: `, or check the indentation"
    elif "expected <block end>" in problem:
        fix = "check the indentation: keys of one map begin in the same column"
    begin, end = error.context_mark, error.problem_mark
    if error.context and begin and end and begin.line != end.line:
        return Diagnostic(message, where=where, fix=fix, also=((place.of(begin), error.context),))
    return Diagnostic(message, where=where, fix=fix)
