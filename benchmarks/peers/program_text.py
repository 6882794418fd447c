"""Reads the cases' program text, Python-like with StableHLO's names, into statements."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

Shape = tuple[int, ...]
SHAPES = re.compile(r"\s*->\s*(\[[\d\[\], ]*\])")
"""The results' shapes in a comment."""


@dataclass(frozen=True)
class Name:
    """The name of a value that a statement reads."""

    text: str


@dataclass
class Call:
    """`results = function(args, options)`, with the shapes and the remarks of its comment."""

    results: list[str]
    function: str
    args: list[Any]
    options: dict[str, Any] = field(default_factory=dict)
    shapes: list[Shape] = field(default_factory=list)
    remarks: str = ""


@dataclass
class Text:
    """A program: arguments with their shapes, statements in order, and the names (or calls) it returns."""

    arguments: list[tuple[str, Shape]]
    calls: list[Call]
    returned: list[str]
    labels: dict[str, str] = field(default_factory=dict)
    """What is written behind an argument's shape: `(f01b)`, the dims of a convolution's operand."""


def read(program: str) -> Text:
    """Reads `def f(a: [2, 3]): ...`, or one bare expression whose operands carry their shapes. ValueError names what
    it does not understand."""
    lines = [line.rstrip() for line in program.strip().splitlines() if line.strip()]
    if not lines[0].startswith("def "):
        return _bare("\n".join(lines))
    head = re.fullmatch(r"def \w+\((.*)\)(?: -> .*)?:\s*(?:#.*)?", lines[0])
    if head is None:
        raise ValueError(f"not a program: {lines[0]!r}")
    text = Text([], [], [])
    for part in split(head[1]):
        name, _, shape = part.partition(":")
        text.arguments.append((name.strip(), shape_of(shape)))
        label = re.search(r"\((\w+)\)\s*$", shape)
        if label:
            text.labels[name.strip()] = label[1]
    for line in lines[1:]:
        body, _, comment = line.strip().partition("#")
        body = body.strip()
        if not body:
            continue
        if body.startswith("return"):
            for part in split(body.removeprefix("return")):
                text.returned.append(_flat(part, text, f"_returned{len(text.returned)}"))
            arrow = SHAPES.match(comment)
            if arrow and text.returned[0].startswith("_returned"):
                text.calls[-1].shapes = shapes_of(arrow[1])
            continue
        results, _, expression = body.partition(" = ") if re.match(r"[\w., ]+ = ", body) else ("", "", body)
        call = expression_of(expression, text)
        if isinstance(call, Name):
            call = Call([], "alias", [call])
        call.results = [r.strip() for r in results.split(",") if r.strip()]
        if arrow := SHAPES.match(comment):
            call.shapes = shapes_of(arrow[1])
            comment = comment[arrow.end() :]
        call.remarks = comment.strip(" ;")
        text.calls.append(call)
    return text


def _flat(part: str, text: Text, name: str) -> str:
    """The name of a returned expression, which gets a statement of its own where it is not a name."""
    returned = expression_of(part.strip(), text)
    if isinstance(returned, Name):
        return returned.text
    returned.results = [name]
    text.calls.append(returned)
    return name


def _bare(line: str) -> Text:
    """`cat([a0: [14,257], ...])`, `a0.flip([0])  with a0: [4]`, and an optional `# -> shape`."""
    body, _, comment = line.partition("#")
    body, _, arguments = body.partition("  with ")
    text = Text([], [], ["_returned0"])
    for part in split(arguments):
        name, _, shape = part.partition(":")
        text.arguments.append((name.strip(), shape_of(shape)))

    def argument(match: re.Match[str]) -> str:
        text.arguments.append((match[1], shape_of(match[2])))
        return match[1]

    body = re.sub(r"(\w+):\s*(\[[\d, ]*\])", argument, body)
    returned = expression_of(body.strip(), text)
    assert isinstance(returned, Call)
    returned.results = ["_returned0"]
    arrow = SHAPES.search(comment)
    returned.shapes = shapes_of(arrow[1]) if arrow else []
    text.calls.append(returned)
    return text


def expression_of(source: str, text: Text) -> Any:
    """A `Name`, or a `Call` whose nested calls have become statements of `text`."""
    source = source.strip()
    for symbol, function in ((" + ", "add"), (" - ", "sub"), (" * ", "mul"), (" / ", "div"), (" @ ", "matmul")):
        parts = split(source, symbol)
        if len(parts) == 2:
            return Call([], function, [value_of(p, text) for p in parts])
    if re.fullmatch(r"\w+(\.\d+)?", source):
        return Name(source)
    constant = re.match(r"constant\s*[\[(]", source)
    if constant:
        shape = re.search(r"\[([\d, ]*)\]", source)
        return Call([], "constant", [], {}, [shape_of(shape[0]) if shape else ()])
    index = re.fullmatch(r"(\w+)\[(.*)\]", source)
    if index and re.fullmatch(r"\w+", index[2]) and not index[2].isdigit():
        return Call([], "index", [Name(index[1]), Name(index[2])])
    if index:
        return Call([], "slice", [Name(index[1])], {"dims": [d.strip() for d in split(index[2])]})
    call = re.fullmatch(r"([\w.]+)\((.*)\)", source, re.DOTALL)
    if call is None:
        raise ValueError(f"not understood: {source!r}")
    function, args, options = call[1], [], {}
    owner = re.fullmatch(r"(\w+)\.(\w+)", function)
    if owner and owner[1] != "torch":
        args, function = [Name(owner[1])], owner[2]
    for part in split(call[2]):
        option = re.match(r"(\w+)\s*=(?!=)\s*(.*)", part, re.DOTALL)
        if option:
            options[option[1]] = value_of(option[2], text)
        else:
            args.append(value_of(part, text))
    return Call([], function.removeprefix("torch."), args, options)


def value_of(source: str, text: Text) -> Any:
    """A number, a string, a list, a `Name`; whatever else stays text."""
    source = re.sub(r"\s+\(\w+\)$", "", source.strip())  # a remark on an operand: `(f01b)`
    if re.fullmatch(r"-?\d+", source):
        return int(source)
    if re.fullmatch(r"-?\d*\.\d+(e-?\d+)?", source):
        return float(source)
    if source[:1] in "'\"":
        return source.strip("'\"")
    if source in ("True", "False", "true", "false"):
        return source.lower() == "true"
    if source.startswith("<"):
        return source
    if source[:1] in "[(" and _closes(source):
        return [value_of(part, text) for part in split(source[1:-1])]
    if re.fullmatch(r"[A-Za-z_]\w*(\.\d+)?", source):
        return Name(source)
    if re.fullmatch(r"[\w.]+\(.*\)|\w+\[.*\]|.* [-+*/@] .*", source, re.DOTALL) and not source.startswith("{"):
        expression = expression_of(source, text)
        if isinstance(expression, Call):
            expression.results = [f"_nested{len(text.calls)}"]
            text.calls.append(expression)
            return Name(expression.results[0])
        return expression
    return source


def _closes(source: str) -> bool:
    """Whether the bracket that opens a text closes at its end."""
    depth = 0
    for i, letter in enumerate(source):
        depth += (letter in "[({") - (letter in "])}")
        if depth == 0:
            return i == len(source) - 1
    return False


def split(source: str, by: str = ",") -> list[str]:
    """Parts between separators that lie outside of brackets and quotes."""
    parts, depth, quote, start, i = [], 0, "", 0, 0
    while i < len(source):
        letter = source[i]
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter in "[({":
            depth += 1
        elif letter in "])}":
            depth -= 1
        elif depth == 0 and source.startswith(by, i):
            parts.append(source[start:i])
            i += len(by)
            start = i
            continue
        i += 1
    parts.append(source[start:])
    return [p.strip() for p in parts if p.strip()]


def shape_of(source: str) -> Shape:
    return tuple(int(n) for n in re.findall(r"-?\d+", source.split("(")[0]))


def shapes_of(source: str) -> list[Shape]:
    """`[2, 3]`, or `[[2, 3], [4]]` of several results."""
    inner = source.strip()[1:-1]
    return [shape_of(p) for p in split(inner)] if inner.lstrip().startswith("[") else [shape_of(source)]


def numbers(source: Any) -> list[int]:
    """All whole numbers of a text or of nested lists."""
    if isinstance(source, int):
        return [source]
    if isinstance(source, (list, tuple)):
        return [n for item in source for n in numbers(item)]
    return [int(n) for n in re.findall(r"-?\d+", str(source))]
