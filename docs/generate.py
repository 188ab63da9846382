"""Writes docs/configuration.md from the settings' own definitions. `make docs` runs it; a test keeps it fresh."""

from pathlib import Path

from megaclass.config.read import describe_settings


def configuration_page() -> str:
    lines = [
        "# Configuration",
        "",
        "Settings live in a TOML file and on the command line, where `section.key=value` wins:",
        "",
        "    megaclass train recipes/demo.toml head.sample_rate=0.1 train.epochs=2",
        "",
        "`megaclass train RECIPE --show-config` prints the resolved settings; the run folder keeps them as `config.toml`.",
        "This page is made from `src/megaclass/config/schema.py` by `make docs`.",
    ]
    section = ""
    for name, kind, default, meaning in describe_settings():
        if name.split(".")[0] != section:
            section = name.split(".")[0]
            lines += ["", f"## [{section}]", "", "| setting | type | default | meaning |", "|---|---|---|---|"]
        cells = [f"`{name}`", f"`{kind}`".replace("|", "\\|"), f"`{default}`", meaning]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    Path(__file__).with_name("configuration.md").write_text(configuration_page(), encoding="utf-8")
