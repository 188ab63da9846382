"""Reads one of InsightFace's `configs/*.py` without executing it.

Published configs have lines of two kinds, `config = edict()` and `config.x = value`, where the value is a literal or
arithmetic over literals and earlier values of `config`. Any other line could change the training and is an error that names
the line. The one exception is the function lr_step_func of older configs, which becomes a remark.
"""

import ast
import math
import operator
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from megaclass_launch.errors import ConfigError

# Beyond these no setting makes sense, and 9**9**9 would occupy the machine.
_MAX_NUMBER, _MAX_EXPONENT = 1e18, 64
_ARITHMETIC: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}

# Defaults from InsightFace's configs/base.py, which every config overrides.
BASE: dict[str, object] = {
    "margin_list": (1.0, 0.5, 0.0),
    "network": "r50",
    "embedding_size": 512,
    "sample_rate": 1.0,
    "interclass_filtering_threshold": 0,
    "fp16": False,
    "batch_size": 128,
    "optimizer": "sgd",
    "lr": 0.1,
    "momentum": 0.9,
    "weight_decay": 5e-4,
    "verbose": 2000,
    "frequent": 10,
    "gradient_acc": 1,
    "seed": 2048,
    "num_workers": 2,
}


class _CannotReadError(Exception):
    """Raised for a statement or value that is not one of the two kinds; the text is the reason."""


@dataclass(frozen=True)
class Line:
    """The last assignment to `config.<name>`."""

    value: object
    number: int
    text: str
    """The line in the file, shortened and printable."""


@dataclass
class ConfigFile:
    """The settings of a file, checked for their types. A setting that the file does not contain has the value of base.py."""

    path: Path
    lines: dict[str, Line] = field(default_factory=dict)
    """By name, in the order of the last assignments."""
    remarks: list[str] = field(default_factory=list)
    """Everything that the recipe does not do in the same way."""

    def __contains__(self, name: str) -> bool:
        """Returns whether the file sets it."""
        return name in self.lines

    def remark(self, text: str) -> None:
        self.remarks.append(text)

    def value(self, name: str) -> object:
        return self.lines[name].value if name in self else BASE.get(name)

    def number(self, name: str) -> float:
        value = self.value(name)
        if not is_number(value):
            raise self.error(name, "expected a number")
        return float(value)

    def integer(self, name: str, least: int = 1) -> int:
        value = self.value(name)
        if not is_number(value) or value != int(value) or value < least:
            raise self.error(name, f"expected a whole number of at least {least}")
        return int(value)

    def text(self, name: str) -> str:
        value = self.value(name)
        if not isinstance(value, str) or not value:
            raise self.error(name, "expected text")
        return value

    def error(self, name: str, reason: str) -> ConfigError:
        """Returns an error about the line that sets it."""
        line = self.lines.get(name)
        assert line is not None, f"the default of {name} must be allowed"
        return ConfigError(f"{self.path}, line {line.number}: {line.text!r}: {reason}.")


def read_config_file(path: Path) -> ConfigFile:
    """Parses the file; refuses every statement that is neither `config = edict()` nor `config.x = value`."""
    found = ConfigFile(path)
    try:
        source = path.read_text(encoding="utf-8-sig")
        with warnings.catch_warnings():
            # "\d" in a string causes a SyntaxWarning, which is irrelevant here.
            warnings.simplefilter("ignore")
            statements = ast.parse(source).body
        source_lines = source.split("\n")
        for statement in statements:
            text = printable(source_lines[statement.lineno - 1])
            try:
                _follow(statement, text, found)
            except _CannotReadError as reason:
                raise ConfigError(f"{path}, line {statement.lineno}: {text!r}: {reason}.") from None
    except OSError as error:
        raise ConfigError(f"Cannot read {path}: {error.strerror}.") from error
    except SyntaxError as error:
        raise ConfigError(f"{path}, line {error.lineno or 1}: not Python: {printable(error.msg)}.") from error
    except (RecursionError, MemoryError) as error:
        raise ConfigError(f"{path} is nested too deeply for one of InsightFace's configs.") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not Python in UTF-8: {printable(str(error))}.") from error
    if not found.lines:
        raise ConfigError(f"{path} holds no lines like config.network = 'r50': is it one of InsightFace's configs?")
    return found


def printable(text: str, limit: int = 120) -> str:
    """Returns the text as one shortened line without control characters."""
    joined = " ".join(text.split())
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in joined)
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


def is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _follow(statement: ast.stmt, text: str, found: ConfigFile) -> None:
    match statement:
        case ast.Expr(ast.Constant(str())):  # a docstring
            pass
        case ast.ImportFrom("easydict", [ast.alias("EasyDict", "edict" | None)]):
            pass
        case ast.Assign([ast.Name("config")], ast.Call(ast.Name("edict" | "EasyDict" | "dict"), [], [])):
            found.lines.clear()
        case ast.FunctionDef("lr_step_func", decorator_list=[], args=ast.arguments(defaults=[], kw_defaults=[])):
            found.remark(
                f"lr_step_func in line {statement.lineno} was not carried over: the recipe has the polynomial schedule of "
                f"the current train_v2.py; for steps set optimizer.schedule = 'step' and optimizer.step_epochs"
            )
        case ast.Assign([ast.Attribute(ast.Name("config"), "lr_func")], ast.Name("lr_step_func")):
            pass  # the remark is that of the function
        case ast.Assign([ast.Attribute(ast.Name("config"), name)], value):
            # Removed first: lines are in the order of their last assignments.
            line = Line(_value(value, found), statement.lineno, text)
            found.lines.pop(name, None)
            found.lines[name] = line
        case _:
            raise _CannotReadError(
                "expected config = edict() or config.<name> = <literal or arithmetic>; the file is not executed"
            )


def _value(node: ast.expr, found: ConfigFile) -> Any:
    """Computes literals, arithmetic and earlier values of `config`."""
    match node:
        case ast.Constant(value):
            return _bounded(value)
        case ast.Tuple(parts):
            return tuple(_value(part, found) for part in parts)
        case ast.List(parts):
            return [_value(part, found) for part in parts]
        case ast.UnaryOp(operation, operand) if type(operation) in _ARITHMETIC:
            return _computed(operation, _value(operand, found))
        case ast.BinOp(left, operation, right) if type(operation) in _ARITHMETIC:
            return _computed(operation, _value(left, found), _value(right, found))
        case ast.Attribute(ast.Name("config"), name):
            if name not in found:
                raise _CannotReadError(f"config.{printable(name)} is not set above this line")
            return found.lines[name].value
        case _:
            raise _CannotReadError("the value is neither a literal nor arithmetic, and the file is not executed")


def _computed(operation: ast.operator | ast.unaryop, *values: Any) -> Any:
    is_text = isinstance(operation, ast.Add) and all(isinstance(value, str) for value in values)
    if not is_text and not all(map(is_number, values)):
        raise _CannotReadError("arithmetic is supported for numbers only")
    if isinstance(operation, ast.Pow) and abs(values[1]) > _MAX_EXPONENT:
        raise _CannotReadError(f"the exponent is above {_MAX_EXPONENT}")
    try:
        return _bounded(_ARITHMETIC[type(operation)](*values))
    except ArithmeticError as error:
        raise _CannotReadError(f"the value cannot be computed: {printable(str(error))}") from None


def _bounded(value: Any) -> Any:
    """Refuses values that no setting can have: huge or infinite numbers, bytes, complex numbers."""
    # The size comes first, because isfinite cannot convert huge integers.
    if is_number(value) and (abs(value) > _MAX_NUMBER or not math.isfinite(value)):
        raise _CannotReadError("the number is too large")
    if value is not None and not isinstance(value, bool | int | float | str):
        raise _CannotReadError(f"a value of type {type(value).__name__} is not a setting")
    return value
