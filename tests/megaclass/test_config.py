"""Settings: what is accepted, what is refused and in which words, and the way back to TOML."""

import dataclasses
import importlib.util
import re
from pathlib import Path

import pytest

import megaclass
from megaclass.cli.main import main
from megaclass.config.read import changes_refused_on_resume, load_config, to_toml
from megaclass.config.schema import Config, DataConfig, HeadConfig, OptimizerConfig, SynthConfig, TrainConfig, is_within
from megaclass.head.margins import MARGINS
from megaclass_launch.errors import ConfigError

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.toml"))
SECTIONS = {section.name: section.type for section in dataclasses.fields(Config)}
MINIMAL = '[data]\npath = "faces"\n[train]\nrun_dir = "run"\n'


@pytest.fixture
def recipe(tmp_path):
    def write(text=MINIMAL):
        path = tmp_path / "recipe.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def refusal(path, *overrides):
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


def settings():
    for section_name, section in SECTIONS.items():
        for field in dataclasses.fields(section):
            yield section_name, field.name


def test_what_is_not_given_has_its_default(recipe):
    assert load_config(recipe()) == Config(data=DataConfig(path="faces"), train=TrainConfig(run_dir="run"))


def test_arguments_win_over_the_file_and_the_last_one_wins(recipe):
    path = recipe(MINIMAL + "epochs = 7\n[head]\nsample_rate = 0.5\n")
    assert load_config(path).train.epochs == 7.0
    config = load_config(path, ["train.epochs=2", "head.sample_rate=0.1", "train.epochs=3e0", "export.onnx=false"])
    assert (config.train.epochs, config.head.sample_rate, config.export.onnx) == (3.0, 0.1, False)


def test_a_whole_number_is_a_number_but_not_the_reverse(recipe):
    assert load_config(recipe(), ["optimizer.lr=1"]).optimizer.lr == 1.0
    assert "a whole number" in refusal(recipe(), "train.global_batch=1.5")
    assert "a whole number" in refusal(recipe(), "train.global_batch=true")


@pytest.mark.parametrize(
    "text", ["2024", "007", "1e3", "true", "2024-01-01", "runs/a b", "a=b", "a#b", "[1]", "ü", "'"]
)
def test_text_stays_the_text_that_was_typed(recipe, text):
    assert load_config(recipe(), [f"train.run_dir={text}"]).train.run_dir == text


def test_a_path_in_the_home_folder_is_there_and_not_in_a_folder_called_tilde(recipe, monkeypatch):
    monkeypatch.setenv("HOME", "/home/anna")
    config = load_config(recipe(MINIMAL.replace("faces", "~/faces")), ["train.run_dir=~/runs/first", "data.stage=~"])
    assert (config.data.path, config.train.run_dir, config.data.stage) == (
        "/home/anna/faces",
        "/home/anna/runs/first",
        "~",
    )
    assert load_config(recipe(), ["train.evaluate_sets=~/a,b"]).train.evaluate_sets == ("/home/anna/a", "b")


def test_quotes_around_text_are_those_of_toml(recipe):
    assert load_config(recipe(), ['train.run_dir="a\\tb"']).train.run_dir == "a\tb"
    assert load_config(recipe(), ["train.run_dir='a\\tb'"]).train.run_dir == "a\\tb"


@pytest.mark.parametrize(
    ("overrides", "optimizer"),
    [
        ([], "sgd"),
        (["head.sample_rate=0.1"], "adagrad"),
        (["head.sample_rate=[[0, 0.1], [100, 1.0]]"], "adagrad"),
        (["head.sample_rate=0.1", "head.optimizer=sgd"], "sgd"),
    ],
)
def test_sampled_centres_are_moved_by_adagrad_unless_told_otherwise(recipe, overrides, optimizer):
    assert load_config(recipe(), overrides).head.optimizer == optimizer


def test_a_rate_may_be_a_schedule(recipe):
    config = load_config(recipe(), ["head.sample_rate=[[0, 0.1], [8000, 1]]"])
    assert config.head.sample_rate == ((0, 0.1), (8000, 1.0))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.epoch=2", "command line: unknown setting train.epoch; did you mean train.epochs?"),
        ("trian.epochs=2", "command line: unknown setting trian; did you mean train?"),
        ("train.sample_rate=0.1", "command line: unknown setting train.sample_rate; did you mean head.sample_rate?"),
        ("export.zzz=1", "command line: unknown setting export.zzz; known: export.onnx."),
        ("train.epochs=two", "command line: train.epochs is 'two'; expected a number"),
        ("train.epochs=", "command line: train.epochs is ''; expected a number"),
        ("train.epochs=2\n[head]", "command line: train.epochs is '2\\n[head]'; expected a number"),
        ("optimizer.step_epochs=3,x", "command line: optimizer.step_epochs is '3,x'; expected a list like [8, 14]"),
        ("backbone.freeze=", "command line: backbone.freeze is ''; expected a list like [\"conv1\"]"),
        ("data.mirror=1", "command line: data.mirror is '1'; expected true or false"),
        ("head.kernel=chunk", "command line: head.kernel is 'chunk'; expected one of auto, triton_fused, chunked; "
         "did you mean chunked?"),
        ("head.sample_rate=[[0, 0.1, 3]]", "command line: head.sample_rate is '[[0, 0.1, 3]]'; "
         "expected a number or a list like [[0, 0.1], [8000, 1.0]]"),
    ],
)  # fmt: skip
def test_an_unknown_name_or_a_wrong_type_is_one_line_with_the_nearest_name(recipe, override, message):
    assert refusal(recipe(), override) == message


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("epoch = 2", "unknown setting train.epoch; did you mean train.epochs?"),
        ("epochs = 'two'", "train.epochs is 'two'; expected a number"),
        ("[heads]\nscale = 1", "unknown setting heads; did you mean head?"),
    ],
)
def test_what_is_wrong_in_the_file_is_told_with_the_file(recipe, line, message):
    path = recipe(MINIMAL + line)
    assert refusal(path) == f"{path}: {message}"


def test_a_removed_setting_of_an_older_run_is_ignored_if_it_asks_for_nothing_else(recipe):
    # config.toml of every earlier run lists it.
    for line in ("data.decode=auto", "data.decode=cpu", "head.cuda_graph=on"):
        assert load_config(recipe(), [line]) == load_config(recipe())
    assert refusal(recipe(), "data.decode=gpu") == (
        "command line: data.decode = 'gpu', but this setting was removed, and only 'auto' or 'cpu' can still be read: "
        "leave data.decode out."
    )


def test_a_setting_at_the_top_of_the_file_is_shown_its_section(recipe):
    path = recipe("epochs = 2\n" + MINIMAL)
    assert refusal(path) == f"{path}: unknown setting epochs; did you mean train.epochs?"


def test_a_section_that_is_a_value_is_refused(recipe):
    path = recipe("head = 3\n" + MINIMAL)
    assert refusal(path) == f"{path}: head is 3; expected a section [head]."
    assert "not a section" in refusal(path, "head.scale=3")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("synth.identities=-1", "synth.identities is -1; it must be 0 or more."),
        ("synth.size=8", "synth.size is 8; it must be in [16, 512]."),
        ("synth.pairs=19", "synth.pairs is 19; it must be at least 20: ten folds of two."),
        ("data.path=", "data.path is empty; it must be a folder, such as data.path=photos."),
        ("data.threads=0", "data.threads is 0; it must be in [1, 256]."),
        ("backbone.embedding_dim=1", "backbone.embedding_dim is 1; it must be in [2, 65536]."),
        ("head.scale=0", "head.scale is 0.0; it must be in (0, 300]."),
        ("head.sample_rate=1.1", "head.sample_rate is 1.1; it must be in [0, 1]: 1.0 = all classes, 0 = positives only."),
        ("head.sample_rate=[[0, 0.1], [9, 2]]",
         "head.sample_rate is 2.0; it must be in [0, 1]: 1.0 = all classes, 0 = positives only."),
        ("head.sample_rate=[]", "head.sample_rate is []; it must be a list of increasing steps that starts at 0."),
        ("head.sample_rate=[[5, 0.1]]",
         "head.sample_rate is [[5, 0.1]]; it must be a list of increasing steps that starts at 0."),
        ("head.momentum=1", "head.momentum is 1.0; it must be in [0, 1)."),
        ("head.m2=0.3", "head.m2 is 0.3; it must be unset unless head.margin is combined; the other margins take "
         "head.margin_size."),
        ("head.m1=9", "head.m1 is 9.0; it must be in [0.5, 8]."),
        ("head.m2=2", "head.m2 is 2.0; it must be in [0, pi / 2]: an angle in radians."),
        ("head.m3=-1", "head.m3 is -1.0; it must be in [0, 2]."),
        ("head.filter_above=0", "head.filter_above is 0.0; it must be a cosine in (0, 1]."),
        ("optimizer.lr=0", "optimizer.lr is 0.0; it must be above 0."),
        ("optimizer.lr=-1", "optimizer.lr is -1.0; it must be above 0."),
        ("train.run_dir=", "train.run_dir is empty; it must be a folder, such as train.run_dir=runs/first."),
        ("optimizer.schedule=step", "optimizer.schedule is step; it must be polynomial or cosine, or have the epochs at "
         "which the rate falls: optimizer.step_epochs=8,14."),
        ("optimizer.clip_norm=-1", "optimizer.clip_norm is -1.0; it must be 0 or more."),
        ("train.epochs=-1", "train.epochs is -1.0; it must be above 0."),
        ("train.nproc=0", "train.nproc is 0; it must be in [1, 1024]."),
        ("train.seed=9223372036854775808", "train.seed is 9223372036854775808; it must be in [0, 2^63)."),
    ],
)  # fmt: skip
def test_a_value_out_of_its_range_is_refused_with_the_range(recipe, override, message):
    assert refusal(recipe(), override) == message


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("train.evaluate_sets=lfw,agedb_30", ("lfw", "agedb_30")),
        ("train.evaluate_sets=[lfw, agedb_30]", ("lfw", "agedb_30")),  # the shell has removed the quotes
        ('train.evaluate_sets=["lfw"]', ("lfw",)),
        ("train.evaluate_sets=lfw", ("lfw",)),
        ("train.evaluate_sets=[]", ()),
        ("train.profile_ranks=0,3", (0, 3)),
        ("optimizer.step_epochs=8,14.5", (8.0, 14.5)),
        ("optimizer.step_epochs=3", (3.0,)),
        ("data.size=112,96", (112, 96)),
        ("data.size=112", 112),
    ],
)
def test_lists_in_the_shell_need_neither_brackets_nor_quotes(recipe, override, value):
    section, _, key = override.partition("=")[0].partition(".")
    assert getattr(getattr(load_config(recipe(), [override]), section), key) == value


@pytest.mark.parametrize("number", ["inf", "-inf", "nan", "1" + 400 * "0"])
def test_numbers_that_are_not_finite_are_refused(recipe, number):
    assert "train.epochs is" in refusal(recipe(), f"train.epochs={number}")
    assert "optimizer.weight_decay is" in refusal(recipe(), f"optimizer.weight_decay={number}")


@pytest.mark.parametrize("argument", ["epochs=2", "train.epochs", "=2", ".epochs=2", "train.=2", "", "train"])
def test_an_argument_that_is_no_setting_is_shown_the_form(recipe, argument):
    meant = argument.strip(".") == "epochs=2"
    hint = "; did you mean train.epochs=2?" if meant else ", for example train.epochs=2."
    assert refusal(recipe(), argument) == f"Cannot read the argument {argument!r}: expected section.key=value{hint}"


def test_a_setting_without_default_must_be_given(recipe):
    path = recipe('[data]\npath = "faces"\n')
    assert (
        refusal(path)
        == f"{path}: train.run_dir is not set and has no default; add it to the file or pass train.run_dir=…"
    )
    assert load_config(path, ["train.run_dir=run"]).train.run_dir == "run"


def test_an_address_in_place_of_a_recipe_gets_the_way_to_give_it():
    with pytest.raises(ConfigError, match=r"not a recipe\. Data at an address .*data\.path=ADDRESS"):
        load_config(Path("s3://bucket/photos"))


def test_a_file_that_does_not_exist_is_named_with_its_neighbours(recipe, tmp_path):
    recipe()
    missing = tmp_path / "recipes.toml"
    meant = f"Did you mean {tmp_path / 'recipe.toml'}? That folder has: recipe.toml."
    assert refusal(missing) == f"There is no configuration file {missing}. {meant}"
    lost = tmp_path / "nowhere" / "recipe.toml"
    assert refusal(lost) == f"There is no configuration file {lost}."


def test_a_file_that_does_not_parse_is_told_by_line_and_column(recipe):
    path = recipe('[data]\npath = "faces"\n[train]\nepochs = = 2\n')
    assert refusal(path) == f"{path} is not valid TOML: Invalid value (at line 4, column 10)."


def test_a_folder_or_bytes_that_are_no_text_are_refused(tmp_path):
    assert refusal(tmp_path).startswith(
        f"{tmp_path} is a folder, and a recipe was expected. To train on the images in it: "
    )
    (tmp_path / "config.toml").touch()
    assert refusal(tmp_path).endswith(f"To continue that run: megaclass train {tmp_path}/config.toml --resume")
    path = tmp_path / "latin.toml"
    path.write_bytes(b'[data]\npath = "\xe4"\n')
    assert refusal(path).startswith(f"Cannot read the configuration file {path}: ")


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_every_recipe_is_read_and_comes_back_from_its_own_toml(path, recipe):
    config = load_config(path)
    assert load_config(recipe(to_toml(config))) == config


@pytest.mark.parametrize(
    "config",
    [
        Config(data=DataConfig(path="\"quotes\" and 'others'"), train=TrainConfig(run_dir="C:\\runs\\new")),
        Config(data=DataConfig(path="Gesichter/中/🙂/é"), train=TrainConfig(run_dir="a\tb\nc\r\x00\x7f\x1b")),
        Config(
            data=DataConfig(path="[x]", mirror=False, threads=3),
            train=TrainConfig(run_dir="#", epochs=1e-5, seed=2**63 - 1),
            head=HeadConfig(
                sample_rate=((0, 0.1), (10**7, 1.0)),
                margin="combined",
                m1=0.9,
                m2=0.4,
                m3=0.0,
                gradient="straight-through",
                filter_above=0.4,
            ),
            optimizer=OptimizerConfig(lr=1e22, head_lr=1 / 3, clip_norm=0.0, power=0.0),
            synth=SynthConfig(identities=10**12),
        ),
    ],
    ids=["quotes and backslashes", "unicode and control characters", "numbers and a schedule"],
)
def test_toml_brings_back_the_same_settings(config, recipe):
    assert load_config(recipe(to_toml(config))) == config


def test_no_setting_has_a_default_that_toml_cannot_replace_by_unset():
    """TOML has no null: a setting that may be unset must be unset by default, or it could not be written down."""
    for section in SECTIONS.values():
        for field in dataclasses.fields(section):
            may_be_unset = "None" in str(field.type)
            assert not may_be_unset or field.default is None, f"{section.__name__}.{field.name}"


def _generate():
    """The module docs/generate.py, which is not part of the package."""
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_setting_is_described_with_type_default_and_meaning():
    described = {name: rest for name, *rest in _generate().describe_settings()}
    assert list(described) == [f"{section}.{key}" for section, key in settings()]
    assert described["train.run_dir"] == [
        "str",
        "required",
        "yes",
        "Run folder: config, metrics, checkpoints, report and model.",
    ]
    assert all(meaning.endswith(".") for *_, meaning in described.values())
    assert described["head.margin"][-1] == f"Margin: {', '.join(MARGINS)}, or package.module:Class."


def test_the_page_about_settings_is_the_one_that_make_docs_writes():
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert page == _generate().configuration_page(), "run `make docs`"


def test_the_reference_lists_the_margins_of_the_table():
    page = (ROOT / "docs" / "reference" / "head.md").read_text()
    assert page == _generate().with_margins(page), "run `make docs`"
    assert {margin.__name__ for margin, _ in MARGINS.values()} < set(megaclass.__all__)


def test_a_resumed_run_may_change_where_and_how_fast_it_runs_but_not_what_it_computes(recipe):
    """Whatever is not marked counts: a new setting is refused on resume until somebody decides otherwise."""
    old = load_config(recipe())
    new = load_config(
        recipe(), ["train.nproc=2", "train.epochs=3", "data.path=x", "head.scale=30", "data.size=[96,80]"]
    )
    assert list(changes_refused_on_resume(old, new)) == [("data.size", 0, (96, 80)), ("head.scale", 64.0, 30.0)]


@pytest.mark.parametrize(("section", "key"), list(settings()), ids=map(".".join, settings()))
def test_every_setting_is_read_somewhere(section, key):
    package = Path(megaclass.__file__).parent
    sources = [path.read_text(encoding="utf-8") for path in package.rglob("*.py") if path.name != "config.py"]
    assert any(re.search(rf"\b(config|settings|{section})\.{key}\b", text) for text in sources)


def test_settings_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        HeadConfig().scale = 1.0  # type: ignore[misc]


def test_recipes_of_the_package_are_found_by_name_and_files_come_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_config(Path("demo")).data.path == "datasets/demo"
    assert load_config(Path("demo.toml")) == load_config(Path("demo"))
    Path("demo.toml").write_text('[data]\npath = "mine"\n[train]\nrun_dir = "runs/mine"\n')
    assert load_config(Path("demo.toml")).data.path == "mine"
    with pytest.raises(ConfigError, match=r"no configuration file demos\..* Recipes of the package: demo, "):
        load_config(Path("demos"))


def test_every_recipe_says_in_one_line_what_it_is(capsys):
    assert main(["recipes"]) == 0
    out = capsys.readouterr().out
    for path in RECIPES:
        assert re.search(rf"^{path.stem} +\S.{{20,}}\.$", out, re.MULTILINE), path.stem


def test_a_folder_in_the_working_directory_does_not_hide_the_recipe_of_that_name(tmp_path, monkeypatch):
    # `megaclass train demo data.path=demo` makes such a folder before the ranks read the recipe.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").mkdir()
    assert load_config(Path("demo")).backbone.name == "slim"


@pytest.mark.parametrize(
    ("allowed", "inside", "outside"),
    [
        ("0 or more", (0, 7), (-1,)),
        ("at least 20: ten folds of two", (20, 21), (19,)),
        ("above 0", (1e-9,), (0, -1)),
        ("in [0, 1)", (0, 0.5), (-0.1, 1)),
        ("a cosine in (0, 1]", (1e-9, 1), (0, 1.1)),
        ("in [0, pi / 2]: an angle in radians", (0, 1.57), (-1, 1.58)),
    ],
)
def test_the_words_of_a_range_are_its_check(allowed, inside, outside):
    assert all(is_within(value, allowed) for value in inside)
    assert not any(is_within(value, allowed) for value in outside)
