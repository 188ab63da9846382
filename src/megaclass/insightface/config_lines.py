"""Reads the lines of one of InsightFace's `configs/*.py` without executing the file.

The file is parsed, and its statements are interpreted from top to bottom like Python does: assignments to `config`, plain
arithmetic, and `if` with a condition that can be computed. Nothing is skipped silently. A statement that is not understood
is an error that names the line if it could change `config`, and a remark if it could not.
"""

import ast
import math
import operator
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megaclass.errors import ConfigError

_MAX_BYTES = 1 << 20
_MAX_NUMBER = 1e18
_MAX_EXPONENT = 64
_MAX_TEXT = 4096
_MAKERS = ("edict", "EasyDict", "dict", "ConfigDict")
_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
    ast.Not: operator.not_,
}
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "int": int,
    "float": float,
    "round": round,
    "abs": abs,
    "min": min,
    "max": max,
}


@dataclass(frozen=True)
class Unreadable:
    """Stands for a value that is known only after executing the file."""

    reason: str


@dataclass(frozen=True)
class Line:
    """The last assignment to `config.<name>`."""

    name: str
    value: Any
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


def printable(text: str, limit: int = 120) -> str:
    """Returns the text as one shortened line without control characters."""
    joined = " ".join(text.split())
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in joined)
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


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


class _CannotFollowError(Exception):
    """Raised for a value that cannot be computed without executing the file; the text is the reason."""


class _Reader:
    """Interprets the statements.

    `lines.values` is the content of `config` so far, `_names` holds the other variables of the file, and `_imported` those
    of them that an import defined: calling an imported function cannot change a value of this file unless it is passed one.
    """

    def __init__(self, path: Path, source: str) -> None:
        self.lines = ConfigLines(path)
        self._source = source.split("\n")
        self._names: dict[str, Any] = {"__name__": f"configs.{path.stem}"}
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
        if (name := _config_key(target)) is not None:
            self._put(name, value, statement)
        elif _is_config(target):
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
        if isinstance(value, ast.Call) and _called(value) in _MAKERS:
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
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and _is_config(value.func.value):
            if value.func.attr != "update":
                raise self._refusal(
                    statement, f"config.{value.func.attr}() is not executed; write config.<name> = <value>"
                )
            for name, entry in self._arguments(value, statement):
                self._put(name, entry, statement)
            return
        if isinstance(value, ast.Call) and _called(value) == "setattr" and len(value.args) == 3:
            owner, key, entry = value.args
            if _is_config(owner) and isinstance(key, ast.Constant) and isinstance(key.value, str):
                self._put(key.value, entry, statement)
                return
        is_print = isinstance(value, ast.Call) and _called(value) == "print"
        if not is_print:
            self._check_names(statement, value)
        self.lines.remarks.append(f"line {statement.lineno} was not executed: {self._text(statement)}")

    def _if(self, statement: ast.If) -> None:
        try:
            is_true = bool(self._value(statement.test))
        except _CannotFollowError as error:
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
            return self._value(node)
        except _CannotFollowError as error:
            self._check_calls(statement, node)
            return Unreadable(str(error))

    def _check_calls(self, statement: ast.stmt, *nodes: ast.AST) -> None:
        """Refuses calls that could change a value of this file."""
        for node in nodes:
            if any(isinstance(part, (ast.Call, ast.NamedExpr)) for part in ast.walk(node)):
                self._check_names(statement, node)

    def _check_names(self, statement: ast.stmt, node: ast.AST) -> None:
        """Refuses code that refers to a value of this file."""
        if known := ({"config", *self._names} - self._imported) & set(_names_in(node)):
            raise self._refusal(statement, f"the line is not executed, but could change {', '.join(sorted(known))}")

    def _value(self, node: ast.expr) -> Any:
        """Computes literals, arithmetic, comparisons and earlier values; raises _CannotFollowError for anything else."""
        if isinstance(node, ast.Constant):
            return _bounded(node.value)
        if isinstance(node, ast.Tuple):
            return tuple(self._value(part) for part in node.elts)
        if isinstance(node, ast.List):
            return [self._value(part) for part in node.elts]
        if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
            return _computed(_UNARY[type(node.op)], self._value(node.operand))
        if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
            return self._binary(type(node.op), self._value(node.left), self._value(node.right))
        if isinstance(node, ast.BoolOp):
            result: Any = None
            for part in node.values:
                result = self._value(part)
                if bool(result) == isinstance(node.op, ast.Or):
                    break
            return result
        if isinstance(node, ast.Compare):
            return self._compare(node)
        if isinstance(node, ast.IfExp):
            return self._value(node.body if self._value(node.test) else node.orelse)
        if isinstance(node, ast.JoinedStr):
            return _bounded("".join(map(self._piece, node.values)))
        if (name := _config_key(node)) is not None:
            if name not in self.lines.values:
                raise _CannotFollowError(f"config.{name} is not set above this line")
            return _known(self.lines.values[name].value)
        if isinstance(node, ast.Name):
            if node.id not in self._names:
                raise _CannotFollowError(f"{printable(node.id)} is not a value of this file")
            return _known(self._names[node.id])
        if isinstance(node, ast.Call) and _is_plain_function(node) and _called(node) not in self._names:
            values = [self._value(part) for part in node.args]
            if values and all(map(_is_number, values)):
                return _computed(_FUNCTIONS[_called(node)], *values)
        raise _CannotFollowError("the value is neither a literal nor arithmetic")

    def _binary(self, kind: type[ast.operator], left: Any, right: Any) -> Any:
        is_text = kind is ast.Add and isinstance(left, str) and isinstance(right, str)
        if not is_text and not (_is_number(left) and _is_number(right)):
            raise _CannotFollowError("arithmetic is supported for numbers only")
        if kind is ast.Pow and abs(right) > _MAX_EXPONENT:
            raise _CannotFollowError(f"the exponent is above {_MAX_EXPONENT}")
        return _computed(_BINARY[kind], left, right)

    def _compare(self, node: ast.Compare) -> bool:
        left = self._value(node.left)
        for comparison, other in zip(node.ops, node.comparators, strict=True):
            right = self._value(other)
            if not _computed(_COMPARE[type(comparison)], left, right):
                return False
            left = right
        return True

    def _piece(self, node: ast.expr) -> str:
        if isinstance(node, ast.FormattedValue) and node.conversion == -1 and node.format_spec is None:
            return str(self._value(node.value))
        if isinstance(node, ast.Constant):
            return str(node.value)
        raise _CannotFollowError("format specifications in text are not supported")

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


def _is_config(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "config"


def _config_key(node: ast.expr) -> str | None:
    """Returns the name in config.name or config["name"]."""
    if isinstance(node, ast.Attribute) and _is_config(node.value):
        return node.attr
    if isinstance(node, ast.Subscript) and _is_config(node.value) and isinstance(node.slice, ast.Constant):
        return node.slice.value if isinstance(node.slice.value, str) else None
    return None


def _called(call: ast.Call) -> str:
    """Returns the last part of the name of the called function."""
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""


def _is_plain_function(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Name) and call.func.id in _FUNCTIONS and not call.keywords


def _loaded(target: ast.Name | ast.Attribute | ast.Subscript) -> ast.expr:
    """Returns an expression that reads the target of an assignment."""
    if isinstance(target, ast.Name):
        return ast.Name(target.id, ast.Load())
    if isinstance(target, ast.Attribute):
        return ast.Attribute(target.value, target.attr, ast.Load())
    return ast.Subscript(target.value, target.slice, ast.Load())


def _names_in(node: ast.AST) -> Iterator[str]:
    return (part.id for part in ast.walk(node) if isinstance(part, ast.Name))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float))


def _known(value: Any) -> Any:
    if isinstance(value, Unreadable):
        raise _CannotFollowError(value.reason)
    return value


def _computed(function: Callable[..., Any], *values: Any) -> Any:
    try:
        return _bounded(function(*values))
    except (ArithmeticError, TypeError, ValueError) as error:
        raise _CannotFollowError(f"the value cannot be computed: {printable(str(error))}") from None


def _bounded(value: Any) -> Any:
    """Refuses values that no setting can have: huge or infinite numbers, long text, bytes, complex numbers."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        # The size comes first, because isfinite cannot convert huge integers.
        if abs(value) > _MAX_NUMBER or not math.isfinite(value):
            raise _CannotFollowError("the number is too large")
    elif isinstance(value, str):
        if len(value) > _MAX_TEXT:
            raise _CannotFollowError("the text is too long")
    elif value is not None and not isinstance(value, (bool, list, tuple)):
        raise _CannotFollowError(f"a value of type {type(value).__name__} is not a setting")
    return value
