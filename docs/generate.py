"""Writes docs/configuration.md from the definitions of the settings, and the list of margins in docs/reference/head.md.

Run by `make docs`; tests keep both fresh.
"""

import ast
import dataclasses
import inspect
import typing
from collections.abc import Iterator
from pathlib import Path

from megaclass.config.schema import Config
from megaclass.head.margins import MARGINS


def describe_settings() -> Iterator[tuple[str, str, str, str, str]]:
    """Yields (section.key, type, default, whether it may change on resume, description) of every setting.

    Descriptions are the strings under the fields, which only the source code holds, and the range of the numbers.
    """
    for section_name, section in typing.get_type_hints(Config).items():
        fields = {field.name: field for field in dataclasses.fields(section)}
        body = ast.parse(inspect.getsource(section)).body[0]
        assert isinstance(body, ast.ClassDef)
        for statement, following in zip(body.body, body.body[1:], strict=False):
            if isinstance(statement, ast.AnnAssign) and isinstance(following, ast.Expr):
                assert isinstance(statement.target, ast.Name) and isinstance(following.value, ast.Constant)
                field = fields[statement.target.id]
                default = "required" if field.default is dataclasses.MISSING else repr(field.default)
                resume = "yes" if field.metadata.get("may_change_on_resume") else "no"
                allowed = str(field.metadata.get("allowed", ""))
                limits = f" {allowed[0].upper()}{allowed[1:]}." if allowed else ""
                name, kind = f"{section_name}.{field.name}", ast.unparse(statement.annotation)
                yield name, kind, default, resume, f"{following.value.value}{limits}"


def configuration_page() -> str:
    """Returns the page as Markdown."""
    lines = [
        "# Configuration",
        "",
        "Settings live in a TOML file and on the command line, where `section.key=value` takes precedence:",
        "",
        "    megaclass train recipes/demo.toml head.sample_rate=0.1 train.epochs=2",
        "",
        "`megaclass train RECIPE --show-config` prints the resolved settings; the run folder keeps them as",
        "`config.toml`. The column *resume* says whether `--resume` accepts another value than the one the",
        "run was started with. This page is generated from",
        "`packages/megaclass/src/megaclass/config/schema.py` by `make docs`.",
    ]
    header = ["", "| setting | type | default | resume | description |", "|---|---|---|---|---|"]
    section = ""
    for name, kind, default, resume, description in describe_settings():
        if name.split(".")[0] != section:
            section = name.split(".")[0]
            lines += ["", f"## [{section}]", *header]
        cells = [f"`{name}`", f"`{kind}`".replace("|", "\\|"), f"`{default}`", resume, description]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def with_margins(page: str) -> str:
    """Returns the reference page of the head with the margins of the table in head/margins.py."""
    before, rest = page.split(".. autoclass:: megaclass.Targets\n   :members:\n")
    after = rest.partition("```\n")[2]
    margins = "".join(f".. autoclass:: megaclass.{margin.__name__}\n" for margin, _ in MARGINS.values())
    return f"{before}.. autoclass:: megaclass.Targets\n   :members:\n{margins}```\n{after}"


if __name__ == "__main__":
    reference = Path(__file__).with_name("reference") / "head.md"
    reference.write_text(with_margins(reference.read_text(encoding="utf-8")), encoding="utf-8")
    Path(__file__).with_name("configuration.md").write_text(configuration_page(), encoding="utf-8")
