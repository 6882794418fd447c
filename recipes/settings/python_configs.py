"""Reads what a function of a Python file returns, as far as its text tells. Nothing is imported or executed."""

from __future__ import annotations

import ast
import copy
import operator
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from tpshard.diagnostics.diagnostic import Exit, Mistakes, Source, did_you_mean
from tpshard.files.folder_json import read_regular
from tpshard.recipes.settings.stated import Unknown
from tpshard.recipes.text.nodes import decode

LARGEST = 1 << 18
"""Bytes of a file."""
MOST_CALLS, MOST_DIGITS = 200, 20
SIGNS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip


@dataclass
class Made:
    """What a call of something that is not in the file would make, such as a configuration."""

    name: str
    """As it is called, with dots."""
    where: Source
    args: tuple[Any, ...] = ()
    fields: dict[str, tuple[Any, Source]] = field(default_factory=dict)
    """Its keyword arguments, and what is assigned to its attributes."""


class PythonFile:
    """A file of functions that return configurations."""

    def __init__(self, text: str, file: str):
        self.file, self.lines, self.calls = file, text.split("\n"), 0
        try:
            self.tree = ast.parse(text)
        except (SyntaxError, ValueError, MemoryError) as error:
            line, col = getattr(error, "lineno", None) or 1, getattr(error, "offset", None) or 1
            where = Source(file, line, col, self.lines[min(line, len(self.lines)) - 1])
            raise Mistakes.one(
                f"not Python: {getattr(error, 'msg', error)}",
                where=where,
                fix="name the file of a registry's functions",
            ) from None
        self.functions = {one.name: one for one in self.tree.body if isinstance(one, ast.FunctionDef)}

    @cached_property
    def constants(self) -> dict[str, Any]:
        """The values of names that the file assigns outside of functions."""
        scope: dict[str, Any] = {}
        for statement in self.tree.body:
            if isinstance(statement, ast.Assign | ast.AnnAssign):
                self._statement(statement, scope)
        return scope

    @cached_property
    def imported(self) -> dict[str, tuple[str, str]]:
        """Module and name of what `from MODULE import NAME` brings, by its name here."""
        froms = [one for one in self.tree.body if isinstance(one, ast.ImportFrom) and one.module and not one.level]
        return {alias.asname or alias.name: (str(one.module), alias.name) for one in froms for alias in one.names}

    def configuration(self, name: str) -> Made:
        """What the function `name` returns; "" for the only one that needs no argument. Raises `Mistakes`."""
        listed = [
            one.name for one in self.functions.values()
            if not one.name.startswith("_") and len(one.args.args) == len(one.args.defaults)
            and any(isinstance(node, ast.Return) and node.value is not None for node in ast.walk(one))
        ]  # fmt: skip
        top = Source(self.file, 1, 1, self.lines[0])
        if name not in self.functions and (name or len(listed) != 1):
            shown = ", ".join(listed[:40]) or "none"
            message = f"there is no configuration `{name}`" if name else f"the file has {len(listed)} configurations"
            fix = did_you_mean(name, listed, f"one of them behind the file: {self.file}:NAME")
            raise Mistakes.one(message, exit=Exit.RECIPE, where=top, why=f"functions: {shown}", fix=fix)
        made = self.call(name or listed[0], (), {})
        if not isinstance(made, Made):
            function = self.functions[name or listed[0]]
            message = f"what `{function.name}` returns is known only by running it"
            raise Mistakes.one(message, where=self.place(function), fix="name one that returns a configuration")
        return made

    def place(self, node: ast.AST) -> Source:
        """The place of a part of the file."""
        line, col = getattr(node, "lineno", 1), getattr(node, "col_offset", 0)
        return Source(self.file, line, col + 1, self.lines[line - 1])

    def call(self, name: str, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
        """What a function of the file returns."""
        self.calls += 1
        if self.calls > MOST_CALLS:
            raise Mistakes.one(f"{self.file} calls more functions than are followed", fix="is this the right file?")
        function = self.functions[name]
        names = [one.arg for one in (*function.args.posonlyargs, *function.args.args)]
        given = dict(zip(names[len(names) - len(function.args.defaults) :], function.args.defaults))
        scope = {one: self.value(default, {}) for one, default in given.items()}
        scope |= {one.arg: Unknown(one.arg) for one in function.args.kwonlyargs}
        scope |= {**dict(zip(names, args)), **keywords}
        return self._block(function.body, scope)

    # ---- statements -------------------------------------------------------------------------------------------------
    def _block(self, body: list[ast.stmt], scope: dict[str, Any]) -> Any:
        """Follows statements; the value that they return, None without."""
        for statement in body:
            if isinstance(statement, ast.Return):
                return self.value(statement.value, scope) if statement.value is not None else None
            if isinstance(statement, ast.If) and isinstance(known := self.value(statement.test, scope), bool):
                returned = self._block(statement.body if known else statement.orelse, scope)
                if returned is not None:
                    return returned
            else:
                self._statement(statement, scope)
        return None

    def _statement(self, statement: ast.stmt, scope: dict[str, Any]) -> None:
        if isinstance(statement, ast.Assign):
            value = self.value(statement.value, scope)
            for target in statement.targets:
                self._assign(target, value, scope)
        elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
            self._assign(statement.target, self.value(statement.value, scope), scope)
        elif isinstance(statement, ast.Expr):
            self.value(statement.value, scope)
        else:  # loops, conditions that are not known and the like: what they assign is not known either
            for node in ast.walk(statement):
                targets = getattr(node, "targets", [getattr(node, "target", None)])
                if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
                    for target in targets:
                        self._assign(target, Unknown(ast.unparse(node)), scope)

    def _assign(self, target: ast.AST | None, value: Any, scope: dict[str, Any]) -> None:
        if isinstance(target, ast.Name):
            scope[target.id] = value
        elif isinstance(target, ast.Attribute):
            owner = self.value(target.value, scope)
            if not isinstance(owner, Made) and isinstance(target.value, ast.Attribute):
                owner = Made("", self.place(target))
                self._assign(target.value, owner, scope)
            if isinstance(owner, Made):
                owner.fields[target.attr] = value, self.place(target)

    # ---- values -----------------------------------------------------------------------------------------------------
    def value(self, node: ast.expr, scope: dict[str, Any]) -> Any:
        """The value of an expression: plain data, `Made`, or `Unknown`."""
        match node:
            case ast.Constant():
                return node.value
            case ast.List() | ast.Tuple():
                return [self.value(item, scope) for item in node.elts]
            case ast.Dict() if all(isinstance(key, ast.Constant) for key in node.keys):
                return {key.value: self.value(item, scope) for key, item in zip(node.keys, node.values)}  # type: ignore
            case ast.Name():
                known = scope.get(node.id, _MISSING)
                return self.constants.get(node.id, Unknown(node.id)) if known is _MISSING else known
            case ast.Attribute():
                owner = self.value(node.value, scope)
                if isinstance(owner, Made) and node.attr in owner.fields:
                    return owner.fields[node.attr][0]
            case ast.Subscript() if isinstance(index := self.value(node.slice, scope), str | int):
                return Unknown(f"{ast.unparse(node.value)}[{index!r}]")
            case ast.BinOp() if type(node.op) in SIGNS:
                return self._computed(node, scope)
            case ast.UnaryOp(op=ast.USub()) if type(number := self.value(node.operand, scope)) in (int, float):
                return -number
            case ast.Call():
                return self._called(node, scope)
        return Unknown(ast.unparse(node))

    def _computed(self, node: ast.BinOp, scope: dict[str, Any]) -> Any:
        pair = self.value(node.left, scope), self.value(node.right, scope)
        if all(type(one) in (int, float) and len(str(one)) <= MOST_DIGITS for one in pair):
            try:
                return SIGNS[type(node.op)](*pair)
            except ArithmeticError:
                pass
        return Unknown(ast.unparse(node))

    def _called(self, node: ast.Call, scope: dict[str, Any]) -> Any:
        name = ast.unparse(node.func)
        args = tuple(self.value(one, scope) for one in node.args if not isinstance(one, ast.Starred))
        keywords = {one.arg: (self.value(one.value, scope), self.place(one.value)) for one in node.keywords if one.arg}
        plain = {key: value for key, (value, _) in keywords.items()}
        if name in self.functions:
            return self.call(name, args, plain)
        if name in self.imported and (there := self._elsewhere(*self.imported[name])) is not None:
            return there.call(self.imported[name][1], args, plain)
        if name.rpartition(".")[2] in ("replace", "deepcopy", "copy") and args and isinstance(args[0], Made):
            made = copy.deepcopy(args[0])
            made.fields |= keywords
            return made
        if args and isinstance(args[0], Made) and args[0].name.endswith("Config") and not name.endswith("Config"):
            made = copy.deepcopy(args[0])  # with what another file's function makes of it
            made.fields[f"{name}(...)"] = Unknown(ast.unparse(node)), self.place(node)
            return made
        return Made(name, self.place(node), args, keywords)

    def _elsewhere(self, module: str, name: str) -> PythonFile | None:
        """The file of a module in a folder above this one, if it has the function."""
        path, folder = module.replace(".", os.sep) + ".py", os.path.dirname(os.path.abspath(self.file))
        while True:
            try:
                there = opened(os.path.join(folder, path))
                there.calls = self.calls + 1
                return there if name in there.functions and there.calls < MOST_CALLS else None
            except (OSError, ValueError):
                pass
            if folder == os.path.dirname(folder):
                return None
            folder = os.path.dirname(folder)


_MISSING = object()


def opened(file: str) -> PythonFile:
    """A Python file. Raises `Mistakes`, OSError and ValueError."""
    return PythonFile(decode(read_regular(file, LARGEST), file), file)
