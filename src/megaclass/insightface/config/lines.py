"""Reads the lines of one of InsightFace's `configs/*.py` without executing the file.

The file is parsed, and its statements are interpreted from top to bottom like Python does: assignments to `config`, plain
arithmetic, and `if` with a condition that can be computed. Nothing is skipped silently. A statement that is not understood
is an error that names the line if it could change `config`, and a remark if it could not.
"""

import ast
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megaclass.errors import ConfigError
from megaclass.insightface.config.values import (
    CannotFollowError,
    Expressions,
    Unreadable,
    called,
    config_key,
    is_config,
    printable,
)

_MAX_BYTES = 1 << 20
_MAKERS = ("edict", "EasyDict", "dict", "ConfigDict")
# Functions that reach every value of the file without naming it.
_REACHES_ALL = {"exec", "eval", "globals", "locals", "vars"}


@dataclass(frozen=True)
class Line:
    """The last assignment to `config.<name>`."""

    name: str
    value: object
    """A number, text, bool, None, list or tuple of them, or Unreadable."""
    number: int
    text: str
    """The statement as it stands in the file, shortened and printable."""


@dataclass
class ConfigLines:
    """Content of a file: the lines by name, and a remark about each statement that was ignored."""

    path: Path
    values: dict[str, Line] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)

    def error(self, line: Line, expected: str) -> ConfigError:
        return ConfigError(f"{self.path}, line {line.number}: {line.text!r}: {expected}")


def read_lines(path: Path) -> ConfigLines:
    """Parses the file; refuses other files than Python, and statements that could change `config` in an unknown way."""
    source = _read_source(path)
    try:
        with warnings.catch_warnings():
            # "\d" in a string causes a SyntaxWarning, which is irrelevant here.
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
        reader = _Reader(path, source)
        reader.follow(tree.body)
    except SyntaxError as error:
        raise ConfigError(f"{path}, line {error.lineno or 1}: not Python: {printable(error.msg)}.") from error
    except (RecursionError, MemoryError) as error:
        raise ConfigError(f"{path} is nested too deeply for one of InsightFace's configs.") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not Python: {printable(str(error))}.") from error
    if not reader.lines.values:
        raise ConfigError(f"{path} holds no lines like config.network = 'r50': is it one of InsightFace's configs?")
    return reader.lines


def _read_source(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"Cannot read {path}: {error.strerror}.") from error
    if len(data) > _MAX_BYTES:
        raise ConfigError(f"{path} is larger than {_MAX_BYTES:,} bytes: it is not one of InsightFace's configs.")
    if b"\0" in data:
        raise ConfigError(f"{path} holds null bytes: it is not a Python file.")
    try:
        # Like Python: the byte order mark is removed, and every line ends with "\n".
        return re.sub(r"\r\n?", "\n", data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: byte {error.start} is {data[error.start]:#04x}.") from error


class _Reader:
    """Interprets the statements.

    `lines.values` is the content of `config` so far, `_names` holds the other variables of the file, and `_imported` those
    of them that an import defined: calling an imported function cannot change a value of this file unless it is passed one.
    """

    def __init__(self, path: Path, source: str) -> None:
        self.lines = ConfigLines(path)
        self._source = source.split("\n")
        self._names: dict[str, Any] = {"__name__": f"configs.{path.stem}"}
        self._expressions = Expressions(self._config_value, self._names)
        self._imported: set[str] = set()

    def follow(self, statements: list[ast.stmt]) -> None:
        for statement in statements:
            match statement:
                case ast.Assign():
                    for target in statement.targets:
                        self._set(target, statement.value, statement)
                case ast.AnnAssign():
                    self._check_calls(statement, statement.annotation)
                    if statement.value is not None:
                        self._set(statement.target, statement.value, statement)
                case ast.AugAssign():
                    self._augmented(statement)
                case ast.Expr():
                    self._expression(statement)
                case ast.If():
                    self._if(statement)
                case ast.Import() | ast.ImportFrom():
                    self._import(statement)
                case ast.FunctionDef() | ast.ClassDef():
                    self._define(statement)
                case ast.Pass():
                    pass
                case _:
                    raise self._refusal(
                        statement, "this kind of statement is not executed, but could change the training"
                    )

    def _augmented(self, statement: ast.AugAssign) -> None:
        if isinstance(statement.target, ast.Name) and not isinstance(
            self._names.get(statement.target.id), (int, float, str)
        ):
            # In-place operations on other types would also change every other name of the same object.
            raise self._refusal(statement, "only numbers and text can be changed in place")
        old = ast.copy_location(_loaded(statement.target), statement)
        changed = ast.copy_location(ast.BinOp(old, statement.op, statement.value), statement)
        self._set(statement.target, changed, statement)

    def _set(self, target: ast.expr, value: ast.expr, statement: ast.stmt) -> None:
        if (name := config_key(target)) is not None:
            self._put(name, value, statement)
        elif is_config(target):
            self._begin(value, statement)
        elif isinstance(target, ast.Name):
            self._names[target.id] = self._readable(value, statement)
            self._imported.discard(target.id)
        else:
            raise self._refusal(statement, "expected config.<name> = <value>")

    def _put(self, name: str, value: ast.expr, statement: ast.stmt) -> None:
        line = Line(name, self._readable(value, statement), statement.lineno, self._text(statement))
        # Moved to the end: lines are in the order of their last assignments.
        self.lines.values.pop(name, None)
        self.lines.values[name] = line

    def _begin(self, value: ast.expr, statement: ast.stmt) -> None:
        """Interprets `config = edict()`, with or without entries."""
        entries = self._entries(value, statement)
        self.lines.values.clear()
        for name, entry in entries:
            self._put(name, entry, statement)

    def _entries(self, value: ast.expr, statement: ast.stmt) -> list[tuple[str, ast.expr]]:
        if isinstance(value, ast.Dict):
            entries = []
            for key, entry in zip(value.keys, value.values, strict=True):
                if not isinstance(key, ast.Constant) or not isinstance(key.value, str):
                    raise self._refusal(statement, "expected text for all keys")
                entries.append((key.value, entry))
            return entries
        if isinstance(value, ast.Call) and called(value) in _MAKERS:
            return self._arguments(value, statement)
        raise self._refusal(statement, "expected edict() or a dict literal")

    def _arguments(self, call: ast.Call, statement: ast.stmt) -> list[tuple[str, ast.expr]]:
        """Returns the entries of edict(…) and config.update(…): dicts first, then name=value."""
        entries = [entry for argument in call.args for entry in self._entries(argument, statement)]
        for keyword in call.keywords:
            if keyword.arg is None:
                entries += self._entries(keyword.value, statement)
            else:
                entries.append((keyword.arg, keyword.value))
        return entries

    def _expression(self, statement: ast.Expr) -> None:
        value = statement.value
        if isinstance(value, ast.Constant):
            return  # a docstring
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and is_config(value.func.value):
            if value.func.attr != "update":
                raise self._refusal(
                    statement, f"config.{value.func.attr}() is not executed; write config.<name> = <value>"
                )
            for name, entry in self._arguments(value, statement):
                self._put(name, entry, statement)
            return
        if isinstance(value, ast.Call) and called(value) == "setattr" and len(value.args) == 3:
            owner, key, entry = value.args
            if is_config(owner) and isinstance(key, ast.Constant) and isinstance(key.value, str):
                self._put(key.value, entry, statement)
                return
        is_print = isinstance(value, ast.Call) and called(value) == "print"
        if not is_print:
            self._check_names(statement, value)
        self.lines.remarks.append(f"line {statement.lineno} was not executed: {self._text(statement)}")

    def _if(self, statement: ast.If) -> None:
        try:
            is_true = bool(self._expressions.value(statement.test))
        except CannotFollowError as error:
            raise self._refusal(
                statement, f"the condition cannot be computed without executing the file: {error}"
            ) from None
        self.follow(statement.body if is_true else statement.orelse)
        if skipped := statement.orelse if is_true else statement.body:
            where = f"line {skipped[0].lineno}" + (f" to {skipped[-1].end_lineno}" if len(skipped) > 1 else "")
            self.lines.remarks.append(
                f"{where} was skipped: the condition in line {statement.lineno} is {is_true}: {self._text(statement)}"
            )

    def _import(self, statement: ast.Import | ast.ImportFrom) -> None:
        bound = {alias.asname or alias.name for alias in statement.names}
        is_base = isinstance(statement, ast.ImportFrom) and (statement.module or "").split(".")[-1] == "base"
        if is_base and bound == {"config"}:
            # InsightFace always starts from base.py.
            self.lines.values.clear()
            return
        if {"config", "*"} & bound:
            raise self._refusal(statement, "settings of other files are not read: write them into this file")
        for name in bound:
            self._names[name.split(".")[0]] = Unreadable(f"{name} is imported")
            self._imported.add(name.split(".")[0])

    def _define(self, statement: ast.FunctionDef | ast.ClassDef) -> None:
        if statement.name == "config":
            raise self._refusal(statement, "config must be an edict()")
        if isinstance(statement, ast.ClassDef):
            # Python executes a class body at once.
            self._check_names(statement, statement)
        else:
            self._check_calls(statement, statement.args, *statement.decorator_list)
        self._names[statement.name] = Unreadable(f"{statement.name} is a function or class")
        self._imported.discard(statement.name)
        self.lines.remarks.append(f"line {statement.lineno} was not executed: {self._text(statement)}")

    def _readable(self, node: ast.expr, statement: ast.stmt) -> Any:
        try:
            return self._expressions.value(node)
        except CannotFollowError as error:
            self._check_calls(statement, node)
            return Unreadable(str(error))

    def _check_calls(self, statement: ast.stmt, *nodes: ast.AST) -> None:
        """Refuses calls that could change a value of this file."""
        for node in nodes:
            if any(isinstance(part, (ast.Call, ast.NamedExpr)) for part in ast.walk(node)):
                self._check_names(statement, node)

    def _check_names(self, statement: ast.stmt, node: ast.AST) -> None:
        """Refuses code that refers to a value of this file, or may do so by a text."""
        named = set(_names_in(node))
        if hidden := _REACHES_ALL & named:
            raise self._refusal(statement, f"the line is not executed, but {min(hidden)}() could change config")
        if known := ({"config", *self._names} - self._imported) & named:
            raise self._refusal(statement, f"the line is not executed, but could change {', '.join(sorted(known))}")

    def _config_value(self, name: str) -> Any:
        if name not in self.lines.values:
            raise CannotFollowError(f"config.{name} is not set above this line")
        return self.lines.values[name].value

    def _refusal(self, statement: ast.stmt, reason: str) -> ConfigError:
        return ConfigError(f"{self.lines.path}, line {statement.lineno}: {self._text(statement)!r}: {reason}.")

    def _text(self, statement: ast.stmt) -> str:
        """Returns the first line of the statement."""
        first = self._source[statement.lineno - 1]
        # Column offsets count bytes.
        line = first.encode()[statement.col_offset :]
        if statement.end_lineno == statement.lineno:
            line = line[: (statement.end_col_offset or len(first)) - statement.col_offset]
        return printable(line.decode(errors="replace"))


def _loaded(target: ast.Name | ast.Attribute | ast.Subscript) -> ast.expr:
    """Returns an expression that reads the target of an assignment."""
    if isinstance(target, ast.Name):
        return ast.Name(target.id, ast.Load())
    if isinstance(target, ast.Attribute):
        return ast.Attribute(target.value, target.attr, ast.Load())
    return ast.Subscript(target.value, target.slice, ast.Load())


def _names_in(node: ast.AST) -> Iterator[str]:
    return (part.id for part in ast.walk(node) if isinstance(part, ast.Name))
