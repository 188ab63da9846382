"""The settings of one of InsightFace's configs, checked for their types; those that the file leaves out are as in base.py."""

from typing import TypeGuard

from megaclass.errors import ConfigError
from megaclass.insightface.config.known_settings import BASE
from megaclass.insightface.config.lines import ConfigLines
from megaclass.insightface.config.values import Unreadable, printable

Settings = dict[str, object]
"""Settings of one section of a recipe."""
Sections = dict[str, Settings]
"""Settings of a recipe, by section."""


class GivenSettings:
    """Values by InsightFace's names. Errors name the line of the file."""

    def __init__(self, lines: ConfigLines) -> None:
        self._lines = lines

    def __contains__(self, name: str) -> bool:
        """Returns whether the file sets it."""
        return name in self._lines.values

    def is_readable(self, name: str) -> bool:
        """Returns whether the file sets it to a value that is known without executing the file."""
        return name in self and not isinstance(self._lines.values[name].value, Unreadable)

    def value(self, name: str) -> object:
        return self._lines.values[name].value if name in self else BASE[name]

    def number(self, name: str) -> float:
        value = self.value(name)
        if not is_number(value):
            raise self.error(name, "expected a number")
        return float(value)

    def integer(self, name: str, least: int) -> int:
        value = self.value(name)
        if not is_number(value) or value != int(value) or value < least:
            raise self.error(name, f"expected a whole number of at least {least}")
        return int(value)

    def text(self, name: str) -> str:
        value = self.value(name)
        if not isinstance(value, str) or not value:
            raise self.error(name, "expected text")
        return value

    def flag(self, name: str) -> bool:
        return bool(self.value(name)) if self.is_readable(name) else bool(BASE.get(name, False))

    def error(self, name: str, expected: str) -> ConfigError:
        """Returns the error that the value of the setting is not what was expected."""
        line = self._lines.values.get(name)
        assert line is not None, f"the default of {name} must be allowed"
        # A line that changes the value in place, or sets several at once, does not show it.
        shown = f" (which is {printable(repr(line.value))})" if "=" not in line.text else ""
        return self.line_error(name, f"{expected}{shown}.")

    def line_error(self, name: str, reason: str) -> ConfigError:
        """Returns an error about the line that sets it."""
        return self._lines.error(self._lines.values[name], reason)


def is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
