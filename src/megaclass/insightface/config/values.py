"""Values in one of InsightFace's `configs/*.py`: literals, arithmetic and earlier values. The file is not executed."""

import ast
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

# Beyond these no setting makes sense, and 9**9**9 would occupy the machine.
_MAX_NUMBER = 1e18
_MAX_EXPONENT = 64
_MAX_TEXT = 4096
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


class CannotFollowError(Exception):
    """Raised for a value that cannot be computed without executing the file; the text is the reason."""


class Expressions:
    """Computes expressions from the values that are known so far."""

    def __init__(self, config: Callable[[str], Any], names: Mapping[str, Any]) -> None:
        """config: returns the value of config.<name>. names: the other variables of the file."""
        self._config = config
        self._names = names

    def value(self, node: ast.expr) -> Any:
        """Computes literals, arithmetic, comparisons and earlier values; raises CannotFollowError for anything else."""
        if isinstance(node, ast.Constant):
            return _bounded(node.value)
        if isinstance(node, ast.Tuple):
            return tuple(self.value(part) for part in node.elts)
        if isinstance(node, ast.List):
            return [self.value(part) for part in node.elts]
        if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
            return _computed(_UNARY[type(node.op)], self.value(node.operand))
        if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
            return self._binary(type(node.op), self.value(node.left), self.value(node.right))
        if isinstance(node, ast.BoolOp):
            result: Any = None
            for part in node.values:
                result = self.value(part)
                if bool(result) == isinstance(node.op, ast.Or):
                    break
            return result
        if isinstance(node, ast.Compare):
            return self._compare(node)
        if isinstance(node, ast.IfExp):
            return self.value(node.body if self.value(node.test) else node.orelse)
        if isinstance(node, ast.JoinedStr):
            return _bounded("".join(map(self._piece, node.values)))
        if (name := config_key(node)) is not None:
            return _known(self._config(name))
        if isinstance(node, ast.Name):
            if node.id not in self._names:
                raise CannotFollowError(f"{printable(node.id)} is not a value of this file")
            return _known(self._names[node.id])
        if isinstance(node, ast.Call) and _is_plain_function(node) and called(node) not in self._names:
            values = [self.value(part) for part in node.args]
            if values and all(map(_is_number, values)):
                return _computed(_FUNCTIONS[called(node)], *values)
        raise CannotFollowError("the value is neither a literal nor arithmetic")

    def _binary(self, kind: type[ast.operator], left: Any, right: Any) -> Any:
        is_text = kind is ast.Add and isinstance(left, str) and isinstance(right, str)
        if not is_text and not (_is_number(left) and _is_number(right)):
            raise CannotFollowError("arithmetic is supported for numbers only")
        if kind is ast.Pow and abs(right) > _MAX_EXPONENT:
            raise CannotFollowError(f"the exponent is above {_MAX_EXPONENT}")
        return _computed(_BINARY[kind], left, right)

    def _compare(self, node: ast.Compare) -> bool:
        left = self.value(node.left)
        for comparison, other in zip(node.ops, node.comparators, strict=True):
            right = self.value(other)
            if not _computed(_COMPARE[type(comparison)], left, right):
                return False
            left = right
        return True

    def _piece(self, node: ast.expr) -> str:
        if isinstance(node, ast.FormattedValue) and node.conversion == -1 and node.format_spec is None:
            return str(self.value(node.value))
        if isinstance(node, ast.Constant):
            return str(node.value)
        raise CannotFollowError("format specifications in text are not supported")


def printable(text: str, limit: int = 120) -> str:
    """Returns the text as one shortened line without control characters."""
    joined = " ".join(text.split())
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in joined)
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


def is_config(node: ast.expr) -> bool:
    """Returns whether the expression is the name `config`."""
    return isinstance(node, ast.Name) and node.id == "config"


def config_key(node: ast.expr) -> str | None:
    """Returns the name in config.name or config["name"]."""
    if isinstance(node, ast.Attribute) and is_config(node.value):
        return node.attr
    if isinstance(node, ast.Subscript) and is_config(node.value) and isinstance(node.slice, ast.Constant):
        return node.slice.value if isinstance(node.slice.value, str) else None
    return None


def called(call: ast.Call) -> str:
    """Returns the last part of the name of the called function."""
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""


def _is_plain_function(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Name) and call.func.id in _FUNCTIONS and not call.keywords


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float))


def _known(value: Any) -> Any:
    if isinstance(value, Unreadable):
        raise CannotFollowError(value.reason)
    return value


def _computed(function: Callable[..., Any], *values: Any) -> Any:
    try:
        return _bounded(function(*values))
    except (ArithmeticError, TypeError, ValueError) as error:
        raise CannotFollowError(f"the value cannot be computed: {printable(str(error))}") from None


def _bounded(value: Any) -> Any:
    """Refuses values that no setting can have: huge or infinite numbers, long text, bytes, complex numbers."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        # The size comes first, because isfinite cannot convert huge integers.
        if abs(value) > _MAX_NUMBER or not math.isfinite(value):
            raise CannotFollowError("the number is too large")
    elif isinstance(value, str):
        if len(value) > _MAX_TEXT:
            raise CannotFollowError("the text is too long")
    elif value is not None and not isinstance(value, (bool, list, tuple)):
        raise CannotFollowError(f"a value of type {type(value).__name__} is not a setting")
    return value
