"""The recipes that come with the package, found by name: `megaclass train ms1mv3-r50-arcface`."""

from collections.abc import Iterator
from pathlib import Path

_FOLDER = Path(__file__).parents[1] / "recipes"


def recipe_path(given: Path) -> Path:
    """Returns the file that the user means: the given one if it is a file, otherwise a recipe of the package with that name."""
    if given.is_file() or len(given.parts) != 1:
        return given
    shipped = _FOLDER / f"{given.name.removesuffix('.toml')}.toml"
    return shipped if shipped.is_file() else given


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
