"""Documentation tells the truth about the tree: links lead somewhere, named functions exist, packages are listed."""

import ast
import inspect
import io
import re
import tokenize
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = {name: ROOT / "packages" / name / "src" for name in ("launch", "horovod", "megaclass")}
MODULES = sorted(path for folder in SOURCES.values() for path in folder.rglob("*.py"))
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")])


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_within_the_repository_leads_to_a_file_and_a_heading(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), f"{page.name} links to {target}, which does not exist"
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), f"{page.name} links to {target}, but {file.name} has no such heading"


def names_in(path: Path) -> set[str]:
    """Functions, classes and methods (as Class.method) that a module defines."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
    return found


def test_every_function_that_the_architecture_page_names_exists():
    """The page names them as `path/in/package.py:function`."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    named = re.findall(r"`([\w/.]+\.py):([\w.]+)`", text)
    assert len(named) > 60, "the three walks name a function for each step"
    places = {str(path.relative_to(folder)): path for folder in SOURCES.values() for path in folder.rglob("*.py")}
    missing = [f"{file}:{name}" for file, name in named if file not in places or name not in names_in(places[file])]
    assert not missing


def code_lines(path: Path) -> int:
    """Lines of a module without comments, docstrings and blank lines."""
    source = path.read_text()
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        # Docstrings, and the strings that describe a field.
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


@pytest.mark.parametrize("name", SOURCES)
def test_a_package_has_no_more_lines_of_code_than_its_project_file_allows(name):
    project = tomllib.loads((ROOT / "packages" / name / "pyproject.toml").read_text())
    allowed = project["tool"]["megaclass"]["max-code-lines"]
    found = sum(map(code_lines, SOURCES[name].rglob("*.py")))
    assert found <= allowed, (
        f"packages/{name} has {found} lines of code, and max-code-lines in its pyproject.toml is {allowed}: "
        f"raise it only with a reason in the commit."
    )


def test_one_class_name_stands_for_one_thing():
    """Except the names of Horovod, which its API repeats for each framework. Names with an underscore stay in their file."""
    horovod = {"Compression", "Settings", "SyncBatchNorm"}
    places: dict[str, list[str]] = {}
    for path in MODULES:
        for name in re.findall(r"^class ([A-Za-z]\w*)", path.read_text(), re.MULTILINE):
            places.setdefault(name, []).append(str(path.relative_to(ROOT)))
    shared = {name: files for name, files in places.items() if len(files) > 1}
    assert {name for name in shared if not name.endswith("Compressor")} <= horovod, shared


def test_the_api_reference_names_exactly_what_the_package_exports():
    import horovod.torch
    import megaclass

    pages = "\n".join(page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md"))
    documented = set(re.findall(r"^\.\. auto(?:class|function):: megaclass\.(\w+)$", pages, re.MULTILINE))
    assert documented | {"__version__"} == set(megaclass.__all__)
    # The page of hvd documents everything exported; Sphinx leaves out what has no docstring, so constants are listed by hand.
    assert ".. automodule:: horovod.torch\n   :members:\n   :imported-members:" in pages
    by_hand = set(re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "reference" / "horovod.md").read_text(), re.MULTILINE))
    exported = {name: getattr(horovod.torch, name) for name in horovod.torch.__all__}
    by_docstring = {name for name, value in exported.items() if callable(value) and getattr(value, "__doc__", None)}
    assert set(exported) - by_docstring - by_hand == set(), "exported, but not documented"
    assert by_hand - set(exported) == set(), "documented, but not exported"
    public = {name for name, value in vars(horovod.torch.elastic).items() if inspect.isclass(value)}
    found = set(re.findall(r"^\.\. auto(?:class|function):: horovod\.torch\.elastic\.(\w+)$", pages, re.MULTILINE))
    # The exceptions are hvd's, and HostUpdateResult is a constant of Horovod's internals.
    assert found == (public - set(exported) - {"HostsUpdatedInterrupt", "HostUpdateResult"}) | {"run"}


def test_the_api_reference_has_every_name_for_tensorflow_and_keras():
    """TensorFlow may not be installed: the names are those of Horovod, which a test of ranks compares with the modules."""
    page = (ROOT / "docs" / "reference" / "horovod-tensorflow.md").read_text()
    assert ".. automodule:: horovod.tensorflow\n   :members:\n   :imported-members:" in page
    listed = re.findall(r"automodule:: horovod\.tensorflow\.keras\n   :members: (.*)", page)[0].split(", ")
    callbacks = re.findall(r"autoclass:: horovod\.keras\.callbacks\.(\w+)", page)
    documented = {"tensorflow.keras": listed, "keras": listed}
    documented |= {"tensorflow.keras.callbacks": callbacks, "keras.callbacks": callbacks}
    lines = (ROOT / "tests" / "horovod" / "tensorflow" / "signatures.txt").read_text().splitlines()
    names = [line.split()[:2] for line in lines if not line.startswith("#")]
    assert [name for module, name in names if module in documented and name not in documented[module]] == []


def _public_functions() -> dict[str, object]:
    import horovod.torch
    import megaclass
    from megaclass.inference import LoadedModel

    named = {
        f"{module.__name__}.{name}": getattr(module, name)
        for module in (megaclass, horovod.torch)
        for name in module.__all__
    }
    classes = {name: value for name, value in named.items() if inspect.isclass(value)} | {"LoadedModel": LoadedModel}
    methods = {
        f"{name}.{part}": value
        for name, one in classes.items()
        for part, value in vars(one).items()
        if inspect.isfunction(value) and not part.startswith("_")
    }
    return methods | {name: value for name, value in named.items() if inspect.isfunction(value)}


def test_docstrings_explain_each_parameter_on_a_line_of_its_own():
    """The reference makes a field of a line `name: meaning`; a second name on it would be lost in the first one's text."""
    found = []
    for name, value in _public_functions().items():
        parameters = "|".join(inspect.signature(value).parameters)
        found += [
            f"{name}: {line}"
            for line in (inspect.getdoc(value) or "").splitlines()
            if re.search(rf".\b({parameters}): ", line)
        ]
    assert found == []


def test_the_start_page_leads_to_the_seven_tutorials_in_order():
    page = (ROOT / "docs" / "index.md").read_text()
    table = re.findall(r"\[tutorial (\d)\]\(([\w/.-]+)\.md\)", page)
    sidebar = re.findall(r"^(\d)\. .+ <([\w/.-]+)>$", page, re.MULTILINE)
    assert table == sidebar
    assert [number for number, _ in table] == list("1234567")


def test_messages_that_the_troubleshooting_page_quotes_are_printed_somewhere():
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    quoted = re.findall(r'^\| "([^"]+)"', page, re.MULTILINE)
    assert len(quoted) > 6
    source = "\n".join(path.read_text() for path in MODULES)
    # Messages are joined from f-strings of several lines.
    joined = re.sub(r'"\s*\n\s*f?"', "", source)
    assert [one for one in quoted if one not in joined] == []
