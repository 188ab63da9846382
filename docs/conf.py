"""Settings of the documentation site, which `make docs` builds with Sphinx, MyST and furo.

The source folder is the root of the repository, so pages link to README, SECURITY and the benchmark tables as on the web
view of the repository. Any broken link or reference fails the build.
"""

import importlib.util
import inspect
import os
from typing import Any

import megaclass

project = "Megaclass"
author = "The Megaclass developers"
copyright = "the Megaclass developers, Apache-2.0"
version = release = megaclass.__version__
root_doc = "docs/index"
include_patterns = ["docs/**.md", "*.md", "benchmarks/*.md"]
exclude_patterns = ["docs/_build/**", ".venv/**", "AGENTS.md"]
# TensorFlow is optional, and the reference imports what it documents.
os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "3", "TF_ENABLE_ONEDNN_OPTS": "0"}
if importlib.util.find_spec("tensorflow") is None:
    exclude_patterns.append("docs/reference/horovod-tensorflow.md")
extensions = ["myst_parser", "sphinx.ext.autodoc"]

# Anchors are made as GitHub makes them, so links between pages work on both.
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
# Tables and remarks in the style of this project use these freely.
suppress_warnings = ["myst.header"]
nitpicky = False

autoclass_content = "both"
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_format = "short"
# Docstrings are Markdown-like prose; `name` is code in them.
default_role = "code"

html_theme = "furo"
html_title = f"Megaclass {release}"
html_static_path = ["_static"]
html_css_files = ["narrow_screens.css"]
# Sends the front page of the site to docs/index.html.
html_extra_path = ["_extra"]
html_copy_source = False
html_show_sphinx = False


def as_field_lists(app: object, what: str, name: str, documented: object, options: object, lines: list[str]) -> None:
    """Turns the style of this project's docstrings into reStructuredText: `name: meaning` lines become fields."""
    try:
        parameters = set(inspect.signature(documented).parameters)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        parameters = set()
    is_in_field = False
    for number, line in enumerate(lines):
        word, colon, meaning = line.partition(": ")
        if colon and word in parameters:
            # A field list begins after an empty line.
            opening = "\n" if number and lines[number - 1].strip() and not is_in_field else ""
            line, is_in_field = f"{opening}:param {word}: {meaning}", True
        elif is_in_field and line.strip():
            line = f"    {line.strip()}"
        else:
            is_in_field = False
        lines[number] = line.replace("|", "\\|")
    lines[:] = "\n".join(lines).split("\n")


def leave_out_of_navigation(app: object, page: str, source: list[str]) -> None:
    """Keeps the tables of single benchmarks out of the sidebar; docs/benchmarks.md links to each."""
    if page.startswith("benchmarks/"):
        source[0] = f"---\norphan: true\n---\n{source[0]}"


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", as_field_lists)
    app.connect("source-read", leave_out_of_navigation)
