"""Reads what a shell script passes to a program: its flags, with variables that are assigned literally put in.

A script is read as text and never executed. What depends on the environment, on arguments or on commands is `Unknown`.
"""

from __future__ import annotations

import ast
import bisect
import operator
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from tpshard.diagnostics.diagnostic import Diagnostic, Mistakes, Source
from tpshard.files.folder_json import read_regular
from tpshard.recipes.settings.shell_text import (
    UNKNOWN,
    Text,
    concatenated,
    divided,
    flags_apart,
    under_a_condition,
    unknown,
)
from tpshard.recipes.settings.shell_words import Command, Lexer, Word, WordPart
from tpshard.recipes.text.nodes import decode

SIGNS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.floordiv,
         ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod}  # fmt: skip
OPENS = {"if": "fi", "case": "esac", "for": "done", "while": "done", "until": "done"}
DECLARES = r"export|local|readonly|declare|typeset|-[A-Za-z]+"
NUMBERS = {"-gt": operator.gt, "-ge": operator.ge, "-lt": operator.lt, "-le": operator.le}
ASSIGNMENT = r"[A-Za-z_]\w*\+?="
MAX_TEXT = 200_000
"""The most characters that variables may be put in for."""
MAX_FILES, LARGEST = 64, 1 << 18
"""The most files that a script may source, and the bytes of all."""


@dataclass
class _Branch:
    """A construct that may or may not run, such as an `if`."""

    end: str
    holds: bool | None
    """Whether the branch at hand runs; None: not known."""
    decided: bool = False
    """Whether an earlier branch runs."""
    subject: str | None = None
    """Of `case`: the text that patterns are compared with; None: not known."""
    awaits: bool = False
    """Of `case`: whether a pattern comes next."""
    outer: dict[str, tuple[Text, ...] | None] | None = None
    """Of a function: the arguments around it."""


@dataclass
class Script:
    """What is known of a script after reading it from top to bottom."""

    text: str
    """The script's, and behind it those of the files that it sources."""
    file: str
    variables: dict[str, tuple[Text, ...] | None] = field(default_factory=dict)
    """Words of each variable; None: not known."""
    found: list[tuple[list[Text], bool]] = field(default_factory=list)
    """The words of each command, and whether it is sure to run."""
    lost: list[tuple[Text, ...]] = field(default_factory=list)
    """Words of commands that begin with a flag: the line before has lost its continuation."""
    absent: list[Diagnostic] = field(default_factory=list)
    """A warning for each sourced file that is not here."""
    starts: list[tuple[int, str]] = field(default_factory=list)
    """The offset at which each file's text begins, and its name."""
    reading: list[str] = field(default_factory=list)
    """The files that are being read, the sourced one last."""
    branches: list[_Branch] = field(default_factory=list)
    calls: dict[str, list[Command]] = field(default_factory=dict)
    """The calls of each of the script's functions."""
    entered: str = ""
    """The function whose body comes next."""
    budget: int = MAX_TEXT
    follows: bool | None = True
    """Whether a command runs by what is before it, as after `&&`; None: not known."""
    status: bool | None = True
    """Whether the last command that ran succeeded, which only tests and assignments tell."""

    def __post_init__(self) -> None:
        self.starts.append((0, self.file))

    def read(self) -> None:
        """Goes through the script's commands."""
        lexer = Lexer(self.text, 0)
        commands = list(lexer.commands())
        for number, command in enumerate(commands):
            if lexer.ends[number] == "(" and command and command[-1].literal:
                self.calls[command[-1].literal] = []
        for command in commands:
            if command and len(command) > 1 and command[0].literal in self.calls:
                self.calls[command[0].literal].append(command)
        self._read(0, self.file)

    def place(self, at: int, width: int) -> Source:
        """A place, by its offset, in the file that it is of."""
        begin, file = self.starts[bisect.bisect(self.starts, at, key=lambda start: start[0]) - 1]
        line = self.text.count("\n", begin, at) + 1
        start = max(begin, self.text.rfind("\n", 0, at) + 1)
        end = self.text.find("\n", at)
        row = self.text[start : end if end >= 0 else len(self.text)].rstrip("\r")
        return Source(file, line, at - start + 1, row, max(1, width))

    def _read(self, start: int, file: str) -> None:
        lexer, outer, follows = Lexer(self.text, start), len(self.branches), self.follows
        self.branches.append(_Branch("", follows))
        self.follows = True
        self.reading.append(os.path.realpath(file))
        for number, command in enumerate(lexer.commands()):
            end = lexer.ends[number]
            top = self.branches[-1] if self.branches else None
            if top is not None and top.end == "esac" and top.awaits and end in (")", "|"):
                self._pattern(top, command[-1:], end)
                continue
            self._command(command, end)
            self.follows = self._after(command, end)
            if self.branches and self.branches[-1].end == "esac" and end == ";;":
                self.branches[-1].awaits, self.branches[-1].holds = True, False
        del self.branches[outer:]
        self.follows = follows
        self.reading.pop()

    def _sourced(self, words: Sequence[Text]) -> None:
        """Reads the file that `source` names, where the command runs or beside the script: only running tells which
        folder `$DIR/name` is in."""
        whole = words[1].chars if len(words) > 1 else ""
        name = whole.rpartition(UNKNOWN)[2] if whole.startswith(UNKNOWN) and whole.count(UNKNOWN) == 2 else whole
        tail = name.lstrip("/")
        parts = tail.split("/") if UNKNOWN not in tail and tail and name[:1] not in ("~", "") else []
        folders = dict.fromkeys(os.path.dirname(file) for file in reversed(self.reading))
        places = [name] * (name == whole and bool(parts))
        places += [os.path.join(folder, *parts[n:]) for n in range(len(parts)) for folder in folders]
        for place in places:
            try:
                if os.path.realpath(place) in self.reading:
                    continue
                text = decode(read_regular(place, LARGEST), place)
            except (OSError, ValueError, Mistakes):
                continue
            if len(self.starts) > MAX_FILES or len(self.text) + len(text) > LARGEST or UNKNOWN in text:
                break
            start = len(self.text) + 1
            self.text += f"\n{text}"
            self.starts.append((start, place))
            self._read(start, place)
            return
        where = self.place(words[-1].places[0] if words[-1].places else words[0].places[0], len(tail))
        shown = whole.replace(UNKNOWN, "") or "what it names"
        message = f"`{words[0].chars} {shown}` is not read: what it sets is not known"
        fix = "put the file beside the script, where it sets flags"
        self.absent.append(Diagnostic(message, where=where, fix=fix, severity="warning"))

    def _after(self, command: Command, end: str) -> bool | None:
        """Whether the command behind this one runs. One that is no test is taken to succeed."""
        plain = bool(command) and all(re.match(ASSIGNMENT, word.literal) for word in command)
        if self.follows is not False:
            tests = bool(command) and command[0].literal in ("[", "[[")
            self.status = self._test(command) if tests else True if plain or end == "&&" else None
        if end not in ("&&", "||"):
            return True
        return self.status if self.status is None or end == "&&" else not self.status

    def _pattern(self, top: _Branch, words: Sequence[Word], end: str) -> None:
        """A pattern of `case`, such as `a | b)`."""
        pattern = "".join(text.chars for word in words for text in self._expand(word))
        known = top.subject is not None and UNKNOWN not in pattern
        fits = fnmatchcase(top.subject or "", pattern) if known else None
        top.holds = False if top.decided else True if fits or top.holds else None if fits is None else top.holds
        if end == ")":
            top.awaits, top.decided = False, top.decided or bool(top.holds)

    # ---- constructs -------------------------------------------------------------------------------------------------
    @property
    def _runs(self) -> bool | None:
        """Whether the place at hand is run: False if it surely is not, None if that is not known."""
        values = [*(branch.holds for branch in self.branches), self.follows]
        return False if False in values else None if None in values else True

    def _command(self, command: Command, end: str) -> None:
        while command:
            word = command[0].literal
            if word in OPENS:
                holds = self._test(command[1:]) if word == "if" else None
                if (end, holds) not in (("\n", holds), (";", holds), ("||", True), ("&&", False)):
                    holds = None
                if word == "for":
                    holds = self._loop(command)
                self.branches.append(_Branch(OPENS[word], holds, bool(holds)))
                if word == "case":
                    self._case(command, end)
                return
            if word in ("elif", "else") and self.branches:
                top = self.branches[-1]
                now = True if word == "else" else self._test(command[1:])
                top.holds = False if top.decided else (now if top.holds is False else None)
                top.decided = top.decided or bool(top.holds)
                if word == "elif":
                    return
            elif self.branches and word == self.branches[-1].end:
                for name, words in (self.branches.pop().outer or {}).items():
                    self.variables.pop(name, None)
                    self.variables |= {} if words is None else {name: words}
            elif word == "{" and (end in ("\n", ";") or self.entered):
                self.branches.append(_Branch("}", True, outer=self._arguments()))
            elif word not in ("then", "do", "function"):
                break
            command = command[1:]
        if end == "(" and len(command) == 1:  # a function, which may be called or not
            self.entered = command[0].literal
            return
        if command and self._runs is not False and not self._assigned(command):
            self._called(command)

    def _arguments(self) -> dict[str, tuple[Text, ...] | None]:
        """Puts in the arguments of the function that begins, where one command calls it; those around it."""
        calls, self.entered = self.calls.get(self.entered, []), ""
        words = [text for word in calls[0][1:] for text in self._expand(word)] if len(calls) == 1 else []
        names = {"@": tuple(words), "*": tuple(words)} | {str(n): (word,) for n, word in enumerate(words, 1)}
        outer = {name: self.variables.get(name) for name in names}
        if words:
            self.variables |= names
        return outer if words else {}

    def _loop(self, command: Command) -> bool | None:
        """Takes the variable of `for NAME in WORD ...`, which is known where there is one word; whether the body runs,
        None where that is not known."""
        if len(command) < 4 or command[2].literal != "in":
            return None
        words = [text for word in command[3:] for text in self._expand(word)]
        known = bool(words) and not any(UNKNOWN in text.chars for text in words)
        self.variables[command[1].literal] = (words[0],) if known and len(words) == 1 else None
        return True if known else None

    def _case(self, command: Command, end: str) -> None:
        """Begins `case WORD in`, which may have its first pattern behind it."""
        top = self.branches[-1]
        texts = [text.chars for text in self._expand(command[1])] if len(command) > 1 else []
        top.subject = texts[0] if len(texts) == 1 and UNKNOWN not in texts[0] else None
        top.holds, top.awaits = False, True
        if len(command) > 3 and end in (")", "|"):
            self._pattern(top, command[3:], end)

    def _test(self, words: Sequence[Word]) -> bool | None:
        """Whether a comparison of known texts holds; None where it is not known."""
        texts = ["".join(text.chars for text in self._expand(word)) for word in words]
        if (
            any(UNKNOWN in text for text in texts)
            or texts[:1] not in (["["], ["[["])
            or texts[-1:] not in (["]"], ["]]"])
        ):
            return None
        match texts[1:-1]:
            case [one, "=" | "==" | "-eq", other]:
                return one == other
            case [one, "!=" | "-ne", other]:
                return one != other
            case [one, "-gt" | "-ge" | "-lt" | "-le" as sign, other] if one.isdecimal() and other.isdecimal():
                return NUMBERS[sign](int(one), int(other))
            case ["-z", one]:
                return not one
            case ["-n", one]:
                return bool(one)
        return None

    def _assigned(self, command: Command) -> bool:
        """Takes a command's assignments; whether it has nothing else."""
        rest = [word for word in command if not re.fullmatch(DECLARES, word.literal)]
        assigned = [word for word in rest if re.match(ASSIGNMENT, word.literal)]
        if len(assigned) < len(rest) or not rest:
            return False
        for word in assigned:
            match = re.match(r"([A-Za-z_]\w*)(\+?)=", word.literal)
            assert match is not None
            first = word.parts[0]
            value = Word(
                (WordPart("text", first.text[match.end() :], first.at + match.end()), *word.parts[1:]), word.at
            )
            if word.items is not None:
                words = tuple(text for item in word.items for text in self._expand(item))
            else:
                words = (self._joined(value.parts),)
            before = self.variables.get(match[1], ())
            if match[2] and before is not None:
                words = (
                    (*before, *words)
                    if word.items is not None
                    else ((before[0] if before else Text("", ())) + words[0],)
                )
            elif match[2]:
                continue
            self.variables[match[1]] = self._assignment(match[1], words, bool(match[2]))
        return True

    def _assignment(self, name: str, words: tuple[Text, ...], added: bool) -> tuple[Text, ...] | None:
        """What a variable holds after an assignment that may not have run."""
        if self._runs:
            return words
        before = self.variables.get(name, ())
        if before and len(words) == len(before) == 1 and words[0].chars.startswith(before[0].chars):  # "$NAME more"
            new = under_a_condition(divided(words[0].cut(len(before[0].chars), len(words[0].chars))))
            return (concatenated([before[0], *(part for one in new for part in (Text(" ", one.places[:1]), one))]),)
        if added and before is not None:  # it holds at least what it held; the rest is marked
            return (*before, *under_a_condition(words[len(before) :]))
        same = before is not None and [text.chars for text in before] == [text.chars for text in words]
        return words if same else None

    def _called(self, command: Command) -> None:
        name = next((n for n, word in enumerate(command) if not re.match(ASSIGNMENT, word.literal)), 0)
        if command[name].literal in ("source", "."):
            self._assigned(command[:name])
            words = [text for word in command[name:] for text in self._expand(word)]
            self._sourced(words)
            return
        if command[name].literal in ("[", "[["):
            return
        if len(self.calls.get(command[name].literal, ())) == 1:
            return  # its words stand in the function
        if command[name].literal == "read":
            self._read_variable(command[name + 1 :])
            return
        words = [piece for word in command for text in self._expand(word) for piece in flags_apart(text)]
        if words and words[0].chars.startswith("--"):
            self.lost.append(tuple(words))
        elif words:
            self.found.append((words, self._runs is True))

    def _read_variable(self, words: Sequence[Word]) -> None:
        """Takes the text that `read` puts into its variable: a whole document with `-d ''`, else its first line."""
        names = [word.literal for word in words if re.fullmatch(r"[A-Za-z_]\w*", word.literal)]
        document = next((word for word in words if word.document), None)
        whole = any(re.match(r"-\w*d$", word.literal) for word in words)
        for name in names[:1] if document is not None else names:
            text = self._joined(document.parts) if document is not None else None
            if text is not None and not whole:
                text = text.cut(0, len(text.chars.partition("\n")[0]))
            self.variables[name] = self._assignment(name, (text,), False) if text is not None else None

    # ---- words ------------------------------------------------------------------------------------------------------
    def _expand(self, word: Word) -> list[Text]:
        """The words that a word becomes: unquoted variables are divided at spaces."""
        if word.items is not None:
            return []
        pieces: list[Text] = []
        open_word: Text | None = None
        for part in word.parts:
            values = self._values(part)
            if part.kind == "text" or part.quoted:
                several = values if part.kind == "variable" else [concatenated(values)]
            else:
                several = [piece for value in values for piece in divided(value)]
            for index, piece in enumerate(several):
                if index and open_word is not None:
                    pieces.append(open_word)
                    open_word = None
                open_word = piece if open_word is None else open_word + piece
        return [*pieces, *([open_word] if open_word is not None else [])]

    def _joined(self, parts: Iterable[WordPart]) -> Text:
        """A word as one text, as an assignment takes it."""
        whole = Text("", ())
        for part in parts:
            for index, value in enumerate(self._values(part)):
                whole = whole + (Text(" ", (part.at,)) if index else Text("", ())) + value
        return whole

    def _values(self, part: WordPart) -> list[Text]:
        """The words of a part: several for an array."""
        if part.kind == "text":
            return [Text(part.text, tuple(range(part.at, part.at + len(part.text))))]
        if part.kind == "sum" and (total := self._sum(part.text)) is not None:
            return [Text(str(total), (part.at,) * len(str(total)))]
        if part.kind == "variable" and part.sign == "+":
            if any(value.chars for value in self.variables.get(part.text) or ()):
                return [self._joined(part.default or ())]
            return [unknown(f"${{{part.text}:+...}}", (part.at,))] if part.text not in self.variables else []
        if part.kind == "variable":
            if self.variables.get(part.text) is not None:
                values = list(self.variables[part.text] or ())
                self.budget -= sum(len(value.chars) for value in values)
                if self.budget < 0:
                    where = self.place(part.at, 1)
                    fix = "write the values of long variables where they are used"
                    raise Mistakes.one("the script's variables grow beyond what is read", where=where, fix=fix)
                return values
            if part.default is not None and part.text not in self.variables:
                value = self._joined(part.default)
                if part.sign == "=":
                    self.variables[part.text] = (value,)
                return [value]
            return [unknown(f"${part.text}", (part.at,))]
        return [unknown(part.text, (part.at,))]

    def _sum(self, text: str) -> int | None:
        """The value of whole numbers with + - * / %; None where it is not known."""
        parts = [WordPart("variable", name, 0) for name in re.findall(r"\$?\{?([A-Za-z_]\w*)\}?", text)]
        values = {part.text: "".join(value.chars for value in self._values(part)) for part in parts}
        filled = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", lambda match: values[match[1]], text)
        if len(filled) > 200 or not re.fullmatch(r"[\d\s+*/%()-]+", filled):
            return None
        try:
            return _computed(ast.parse(filled.strip(), mode="eval").body)
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
            return None


def _computed(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in SIGNS:
        return int(SIGNS[type(node.op)](_computed(node.left), _computed(node.right)))
    raise ValueError
