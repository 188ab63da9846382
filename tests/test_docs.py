"""Documentation tells the truth about the tree: links lead somewhere, named functions exist, packages are listed."""

import ast
import inspect
import io
import re
import tokenize
import tomllib
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

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


def test_the_tree_on_the_architecture_page_lists_every_room():
    page = (ROOT / "docs" / "architecture.md").read_text()
    for folder in SOURCES.values():
        (package,) = (path for path in folder.iterdir() if path.is_dir() and (path / "__init__.py").exists())
        tree = re.findall(rf"^{package.name}/\n((?:  .*\n)+)", page, re.MULTILINE)[0]
        rooms = {path.name for path in package.iterdir() if path.is_dir() and any(path.glob("*.*"))}
        assert set(re.findall(r"^  (\w+)/", tree, re.MULTILINE)) == rooms - {"__pycache__"}


def test_lines_of_prose_have_at_most_100_columns():
    """Paragraphs and lists. Tables, code and words that cannot be broken may be longer; Chinese has no spaces to break at."""
    pages = [page for page in PAGES if page.parent != ROOT / "benchmarks" and ".zh-CN" not in page.name]
    parser = MarkdownIt("commonmark").enable("table")
    found = []
    for page in pages:
        lines = page.read_text().splitlines()
        paragraphs = [token.map for token in parser.parse("\n".join(lines)) if token.type == "paragraph_open"]
        numbers = [number for start, end in paragraphs for number in range(start, end)]
        # A code span is not broken, so it counts as one word.
        found += [
            f"{page.relative_to(ROOT)}:{number + 1}"
            for number in numbers
            if len(lines[number]) > 100 and " " in re.sub(r"`[^`]*`", "", lines[number]).strip()
        ]
    assert found == []


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
    assert len(named) > 60, "the walks name a function for each step"
    places = {str(path.relative_to(folder)): path for folder in SOURCES.values() for path in folder.rglob("*.py")}
    missing = [f"{file}:{name}" for file, name in named if file not in places or name not in names_in(places[file])]
    assert not missing


def test_every_file_that_the_page_on_extending_names_exists():
    page = (ROOT / "docs" / "contributing.md").read_text()
    named = re.findall(r"`((?:\w+/)+[\w.]*)`", page)
    assert len(named) > 40
    roots = [ROOT, *SOURCES.values()]
    assert [name for name in named if not any((root / name).exists() for root in roots)] == []


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


def links_of(page: Path) -> set[Path]:
    """Files that a page links to with Markdown's syntax."""
    targets = re.findall(r"\]\(([^)\s:]+)\)", page.read_text())
    return {(page.parent / target.partition("#")[0]).resolve() for target in targets}


def test_the_start_page_leads_to_every_tutorial_and_so_does_the_readme():
    tutorials = {*(ROOT / "docs" / "tutorials").glob("*.md"), ROOT / "docs" / "own-loop.md"}
    assert tutorials - links_of(ROOT / "docs" / "index.md") == set()
    english = {page for page in tutorials if ".zh-CN" not in page.name}
    assert english - links_of(ROOT / "README.md") == set()


def test_the_page_of_benchmarks_links_to_every_table():
    tables = set((ROOT / "benchmarks").glob("*.md"))
    assert tables - links_of(ROOT / "docs" / "benchmarks.md") == set()


def test_readme_and_start_page_show_the_same_results():
    tables = [
        re.findall(r"^\| measured \|.*?\n\n", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
        for page in ("README.md", "docs/index.md")
    ]
    assert tables[0] == tables[1] != []


def test_the_readme_fits_on_a_few_screens():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_messages_that_the_troubleshooting_page_quotes_are_printed_somewhere():
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    quoted = re.findall(r'^\| "([^"]+)"', page, re.MULTILINE)
    assert len(quoted) > 6
    source = "\n".join(path.read_text() for path in MODULES)
    # Messages are joined from f-strings of several lines.
    joined = re.sub(r'"\s*\n\s*f?"', "", source)
    assert [one for one in quoted if one not in joined] == []
