"""Reads settings from TOML files and `key=value` arguments into the dataclasses of `schema.py`, and writes them as TOML."""

import dataclasses
import difflib
import importlib
import json
import sys
import tomllib
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from megaclass.config.schema import REMOVED, Config
from megaclass_launch.errors import ConfigError

T = TypeVar("T")


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Reads a TOML file, or a recipe of the package by its name; then `section.key=value` arguments, which take precedence."""
    values = _read_toml(recipe_path(path))
    for override in overrides:
        _apply(values, override)
    return load_config_values(values, where=str(path))


def flat_values(config: Config) -> dict[str, Any]:
    """Returns all settings by section.key."""
    return {
        f"{section.name}.{key.name}": getattr(getattr(config, section.name), key.name)
        for section in dataclasses.fields(config)
        for key in dataclasses.fields(getattr(config, section.name))
    }


def changes_refused_on_resume(old: Config, new: Config) -> Iterator[tuple[str, Any, Any]]:
    """Yields (section.key, old value, new value) of every setting that differs and may not change on resume."""
    for section in dataclasses.fields(Config):
        before, now = getattr(old, section.name), getattr(new, section.name)
        for key in dataclasses.fields(now):
            values = getattr(before, key.name), getattr(now, key.name)
            if values[0] != values[1] and not key.metadata.get("may_change_on_resume"):
                yield f"{section.name}.{key.name}", *values


def load_config_values(values: dict[str, Any], *, where: str) -> Config:
    """Builds settings from nested tables, checked like those of a file; error messages call their origin `where`."""
    return _build(Config, values, prefix="", where=where)


def to_toml(config: Config) -> str:
    """Returns the settings as TOML that load_config reads back to an equal Config; unset values are left out."""
    lines: list[str] = []
    for section in dataclasses.fields(config):
        lines.append(f"[{section.name}]")
        part = getattr(config, section.name)
        for key in dataclasses.fields(part):
            value = getattr(part, key.name)
            if value is not None:
                lines.append(f"{key.name} = {_toml_value(value)}")
        lines.append("")
    return "\n".join(lines)


def _recipes_near(path: Path) -> str:
    """Returns the recipe that was probably meant, and those that there are."""
    if not path.parent.is_dir() and path.stem in recipe_names():
        # README's lines are for a clone, whose folder `recipes` an installed package does not have.
        return f" The package has it, by its name: megaclass train {path.stem}"
    near = sorted(p.name for p in path.parent.glob("*.toml")) if path.parent.is_dir() else []
    shipped = recipe_names() if len(path.parts) == 1 else []
    known = {name.removesuffix(".toml"): str(path.parent / name) for name in near} | {name: name for name in shipped}
    name = path.name.removesuffix(".toml")
    close = [one for one in known if one.startswith(name)] or difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    meant = f" Did you mean {known[close[0]]}?" if close else ""
    found = f" That folder has: {', '.join(near[:8])}." if near else ""
    return f"{meant}{found}" + (f" Recipes of the package: {', '.join(shipped)}." if shipped else "")


def _meant_by_folder(path: Path) -> str:
    """Returns the line to type for a run folder, or for a folder of images."""
    if (path / "config.toml").is_file():
        return f"To continue that run: megaclass train {path / 'config.toml'} --resume"
    return f"To train on the images in it: megaclass train {path}"


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        # A path joins the two slashes of an address.
        if path.parts[:1] and path.parts[0].endswith(":"):
            raise ConfigError(
                f"{path} is not a recipe. Data at an address is given to one: megaclass train own-small data.path=ADDRESS"
            ) from None
        raise ConfigError(f"There is no configuration file {path}.{_recipes_near(path)}") from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a folder, and a recipe was expected. {_meant_by_folder(path)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"Cannot read the configuration file {path}: {error}") from error
    # TOMLDecodeError is a ValueError; numbers of thousands of digits and deep nesting raise the others.
    except (ValueError, RecursionError) as error:
        hint = " To convert an InsightFace config, use megaclass import-config." if path.suffix == ".py" else ""
        raise ConfigError(f"{path} is not valid TOML: {error}.{hint}") from error


def _apply(values: dict[str, Any], override: str) -> None:
    """Applies one `section.key=value`; the value is parsed as TOML if possible, otherwise taken as a string."""
    name, equals, text = override.partition("=")
    section, dot, key = name.strip().partition(".")
    if not (equals and dot and section and key):
        meant = [f"{full}={text}" for full in settings_named(name.strip())] if equals else []
        hint = f"; did you mean {meant[0]}?" if meant else ", for example train.epochs=2."
        raise ConfigError(f"Cannot read the argument {override!r}: expected section.key=value{hint}")
    try:
        parsed: dict[str, Any] = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        parsed = {}
    # More than one key means that the text contained a line break outside a value.
    value = parsed["value"] if len(parsed) == 1 else text
    table = values.setdefault(section, {})
    if not isinstance(table, dict):
        raise ConfigError(f"{section} is {table!r} in the file, not a section: {override!r} cannot be applied.")
    table[key] = _Argument(text, value)


@dataclass(frozen=True)
class _Argument:
    """A value from the command line: the text as typed, for settings that are text, and the same parsed as TOML."""

    text: str
    value: Any


def overrides_of(name: str, value: object) -> Iterator[str]:
    """Yields `section.key=value` for a keyword: a setting by its own name (epochs=5), or a section (head={"scale": 32.0}).

    None leaves a setting as it is.
    """
    if isinstance(value, Mapping):
        if name not in _hints(Config):
            raise ConfigError(f"{name} is given as {value!r}, but sections are {', '.join(_hints(Config))}.")
        for key, one in value.items():
            yield from _override(f"{name}.{key}", one)
        return
    found = _settings_called(name)
    if not found:
        meant = settings_named(name)
        hint = (
            f"did you mean {meant[0].partition('.')[2]}?" if meant else "megaclass train demo --show-config lists all."
        )
        raise ConfigError(f"There is no setting {name!r}; {hint}")
    if len(found) > 1:
        section, _, key = found[0].partition(".")
        raise ConfigError(f"{name} may be {' or '.join(found)}: write {section}={{{key!r}: …}}.")
    yield from _override(found[0], value)


def _override(name: str, value: object) -> Iterator[str]:
    if value is not None:
        yield f"{name}={_toml_value(str(value) if isinstance(value, Path) else value)}"


def _from_home(value: Any) -> Any:
    """Returns paths that start with ~/ with the home folder: a shell leaves the ~ in data.path=~/photos as it is."""
    if isinstance(value, tuple):
        return tuple(_from_home(one) for one in value)
    return str(Path(value).expanduser()) if isinstance(value, str) and value.startswith("~/") else value


def value_given(overrides: Sequence[str], section: str, key: str) -> str:
    """Returns the text that these `section.key=value` give a setting; empty if they do not set it."""
    values: dict[str, Any] = {}
    for override in overrides:
        _apply(values, override)
    given = values.get(section, {}).get(key)
    if given is None:
        return ""
    return str(_from_home(given.value if isinstance(given.value, str) else given.text))


def _is_removed(name: str, given: Any, where: str) -> bool:
    """Tells whether this is a removed setting with a value that can be ignored; raises if the value asks for more."""
    if name not in REMOVED:
        return False
    value = given.value if isinstance(given, _Argument) else given
    if value not in REMOVED[name]:
        allowed = " or ".join(repr(one) for one in REMOVED[name])
        raise ConfigError(
            f"{_place(given, where)}: {name} = {value!r}, but this setting was removed, and only {allowed} can still be "
            f"read: leave {name} out."
        )
    return True


def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _build(cls: type[T], values: dict[str, Any], prefix: str, where: str) -> T:
    hints = _hints(cls)
    values = {key: value for key, value in values.items() if not _is_removed(f"{prefix}{key}", value, where)}
    for key in values:
        if key not in hints:
            raise ConfigError(
                f"{_place(values[key], where)}: unknown setting {prefix}{key}; {_nearest(key, hints, prefix)}"
            )
    arguments: dict[str, Any] = {}
    for member in dataclasses.fields(cls):  # type: ignore[arg-type]
        name, hint = member.name, hints[member.name]
        if dataclasses.is_dataclass(hint):
            table = values.get(name, {})
            if not isinstance(table, dict):
                raise ConfigError(f"{where}: {prefix}{name} is {table!r}; expected a section [{name}].")
            arguments[name] = _build(typing.cast("type[Any]", hint), table, f"{prefix}{name}.", where)
        elif name in values:
            arguments[name] = _convert(values[name], hint, f"{prefix}{name}", where)
        elif member.default is dataclasses.MISSING:
            raise ConfigError(
                f"{where}: {prefix}{name} is not set and has no default; add it to the file or pass {prefix}{name}=…"
            )
    return cls(**arguments)


def _convert(given: Any, hint: Any, name: str, where: str) -> Any:
    choices = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    if isinstance(given, _Argument):
        given = _list_without_brackets(given, choices)
    # Of a union of types, the first one that fits.
    for choice in choices:
        # A folder called 2024 is text on the command line, although TOML reads a number.
        if isinstance(given, _Argument) and (choice is str or typing.get_origin(choice) is Literal):
            value = given.value if isinstance(given.value, str) else given.text
        else:
            value = given.value if isinstance(given, _Argument) else given
        fits, converted = _fit(value, choice)
        if fits:
            return _from_home(converted)
    shown = given.text if isinstance(given, _Argument) else given
    literals = [str(option) for choice in choices for option in typing.get_args(choice) if isinstance(option, str)]
    # By its letters "gpu" is closest to "cpu".
    close = ["cuda"] if shown == "gpu" and "cuda" in literals else difflib.get_close_matches(str(shown), literals, n=1)
    hint_text = f"; did you mean {close[0]}?" if close else ""
    raise ConfigError(f"{_place(given, where)}: {name} is {shown!r}; expected {_type_name(hint, name)}{hint_text}")


def _list_without_brackets(given: _Argument, choices: Sequence[Any]) -> _Argument:
    """Reads `lfw,agedb_30`, and `[lfw]` whose quotes the shell has removed, as lists, if the setting is a list.

    A single word or number is a list of one, unless the setting may also be a single one.
    """
    is_list = any(typing.get_origin(choice) is tuple and typing.get_args(choice)[0] in _SCALARS for choice in choices)
    text = given.text.strip().removeprefix("[").removesuffix("]")
    if not is_list or isinstance(given.value, list) or not text or (len(choices) > 1 and "," not in text):
        return given
    items = []
    for part in text.split(","):
        try:
            items.append(tomllib.loads(f"item = {part.strip()}")["item"])
        except ValueError:
            items.append(part.strip())
    return _Argument(given.text, items)


def _place(given: Any, where: str) -> str:
    """Names the origin of a value: the command line if all of it came from there, otherwise the file."""
    values = given.values() if isinstance(given, dict) and given else [given]
    return "command line" if all(isinstance(value, _Argument) for value in values) else where


_SCALARS = (int, float, str)
_EXAMPLES = {
    "data.size": "[112, 96]",
    "backbone.freeze": '["conv1"]',
    "head.sample_rate": "[[0, 0.1], [8000, 1.0]]",
    "optimizer.step_epochs": "[8, 14]",
    "train.profile_ranks": "[0, 8]",
    "train.evaluate_sets": '["lfw", "agedb_30"]',
}
"""A value of each setting that is a list, for error messages."""
_OTHER_NAMES = {
    "train.global_batch": ("batch_size", "batch"),
    "train.nproc": ("gpus", "num_gpus", "ngpus", "devices", "np", "nproc_per_node"),
    "train.run_dir": ("out", "output", "output_dir", "save_dir", "out_dir"),
    "train.precision": ("amp", "fp16", "bf16"),
    "train.patience": ("early_stopping", "early_stop"),
    "data.path": ("data", "dataset", "data_dir", "root", "rec"),
    "data.size": ("image_size", "img_size", "resolution"),
    "data.workers": ("num_workers",),
    "backbone.name": ("model", "network", "arch", "backbone"),
    "backbone.embedding_dim": ("embedding_size", "dim"),
    "head.margin": ("loss", "head"),
    "optimizer.lr": ("learning_rate",),
    "optimizer.name": ("optimizer", "optim"),
    "optimizer.warmup_epochs": ("warmup",),
    "train.epochs": ("num_epochs", "num_epoch", "max_epochs"),
}
"""Names of these settings in other programs."""


def settings_named(key: str) -> list[str]:
    """Returns the settings of this name as section.key; by other programs' names or the closest names if there is none."""
    close = difflib.get_close_matches(key, _all_settings().values(), n=1, cutoff=0.7)
    return _settings_called(key) or [full for full, name in _all_settings().items() if name in close]


def _settings_called(key: str) -> list[str]:
    """Returns the settings that have exactly this name, or have it in other programs."""
    meant = [name for name, others in _OTHER_NAMES.items() if key in others]
    return meant or [full for full, name in _all_settings().items() if name == key]


def _all_settings() -> dict[str, str]:
    return {f"{section}.{name}": name for section, hint in _hints(Config).items() for name in _hints(hint)}


def _nearest(key: str, siblings: Sequence[str] | dict[str, Any], prefix: str) -> str:
    # The right key in the wrong section is the most frequent mistake.
    same = [f"{section}.{key}" for section, hint in _hints(Config).items() if key in _hints(hint)]
    close = difflib.get_close_matches(key, siblings, n=1, cutoff=0.5)
    if same or close:
        return f"did you mean {same[0] if same else prefix + close[0]}?"
    return f"known: {', '.join(prefix + name for name in siblings)}."


def _fit(value: Any, hint: Any) -> tuple[bool, Any]:
    if hint is float:
        # TOML can express infinity, but no setting has a meaning there.
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        is_number = is_number and abs(value) <= sys.float_info.max
        return is_number, float(value) if is_number else None
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool), value
    if typing.get_origin(hint) is Literal:
        return value in typing.get_args(hint), value
    if typing.get_origin(hint) is tuple:
        return _fit_tuple(value, typing.get_args(hint))
    return isinstance(value, hint), value


def _fit_tuple(value: Any, members: tuple[Any, ...]) -> tuple[bool, Any]:
    if not isinstance(value, list):
        return False, None
    hints = [members[0]] * len(value) if len(members) == 2 and members[1] is Ellipsis else list(members)
    if len(hints) != len(value):
        return False, None
    fitted = [_fit(item, hint) for item, hint in zip(value, hints, strict=True)]
    return all(fits for fits, _ in fitted), tuple(item for _, item in fitted)


def _type_name(hint: Any, name: str = "") -> str:
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "nothing"}
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join(_type_name(choice, name) for choice in typing.get_args(hint) if choice is not type(None))
    if typing.get_origin(hint) is Literal:
        return "one of " + ", ".join(str(option) for option in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        return f"a list like {_EXAMPLES[name]}"
    return names[hint]


def _toml_value(value: Any) -> str:
    if isinstance(value, tuple | list):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    if isinstance(value, float):
        text = repr(value)
        return text if any(c in text for c in ".en") else text + ".0"
    # JSON's strings, numbers and booleans are TOML's, except that TOML wants DEL escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


_FOLDER = Path(__file__).parents[1] / "recipes"


def recipe_path(given: Path) -> Path:
    """Returns the file that the user means: the given one if it is a file, otherwise a recipe of the package with that name."""
    if given.is_file() or len(given.parts) != 1:
        return given
    shipped = _FOLDER / f"{given.name.removesuffix('.toml')}.toml"
    return shipped if shipped.is_file() else given


def is_data(given: Path) -> bool:
    """Tells whether what stands in place of a recipe is a folder or a file of images, or a file of features."""
    return given.is_dir() or (given.is_file() and given.suffix in (".tar", ".rec", ".npy", ".safetensors"))


def recipe_names() -> list[str]:
    """Returns the names of the package's recipes, sorted."""
    return sorted(path.stem for path in _FOLDER.glob("*.toml"))


def recipe_summaries() -> Iterator[tuple[str, str]]:
    """Yields the name of each recipe of the package, and the first sentence of its opening comment."""
    for name in recipe_names():
        comment = []
        for line in (_FOLDER / f"{name}.toml").read_text(encoding="utf-8").splitlines():
            if not line.startswith("#") or line == "#":
                break
            comment.append(line.removeprefix("# "))
        yield name, " ".join(comment).split(". ")[0].rstrip(".") + "."


def own_class(setting: str, name: str, example: str) -> Callable[..., Any]:
    """Imports the class or function; raises a ConfigError that shows an example, such as `mynets:Net`."""
    module_name, _, attribute = name.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        # `python -m megaclass` also looks in the working folder; last, so nothing there hides an installed package.
        sys.path.append(here)
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        file, _, wanted = example.partition(":")
        raise ConfigError(
            f"{setting} is {name!r}, expected package.module:Class on the Python path: {error}; looked in {here} and on "
            f"the Python path. A file {file}.py in this folder with a class {wanted} is {example}."
        ) from error
    if not callable(found):
        raise ConfigError(f"{setting} is {name!r}, which is not a class or function.")
    made: Callable[..., Any] = found
    return made
