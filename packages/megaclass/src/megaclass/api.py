"""`megaclass.train` and `megaclass.evaluate`: what the commands of these names call, for scripts and notebooks.

One process trains where it is called. Several (nproc=2) are started and watched by this process, which waits for them: after
Ctrl-C, or an interrupted cell of a notebook, they save and end, and none is left. Under a launcher (megaclass run, torchrun,
srun) every process calls the function and is one rank of the job.
"""

import contextlib
import json
import logging
import os
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megaclass.backbones import OF_FEATURES, check_backbone
from megaclass.config.read import (
    is_data,
    load_config,
    load_config_values,
    overrides_of,
    recipe_path,
    to_toml,
    value_given,
)
from megaclass.config.schema import Config
from megaclass.data.augment import parse_augment
from megaclass.data.sources.features import write_features
from megaclass.data.sources.open_source import check_source, open_source
from megaclass.errors import DataError, TrainError
from megaclass.metrics_file import read_metrics, read_summary
from megaclass.progress import bar_on_demand, no_progress
from megaclass.training.choose_recipe import choose_recipe, run_name
from megaclass.training.model.build import build_margin
from megaclass.training.run.folder import RunFolder
from megaclass.training.run.run import Callback
from megaclass.training.start.restart import StartMode, check_start
from megaclass_launch.errors import ConfigError, LaunchError
from megaclass_launch.events_file import read_events
from megaclass_launch.exit_codes import EXIT_RESUME_ME
from megaclass_launch.messages import messages_on_stderr
from megaclass_launch.operating_system import is_linux
from megaclass_launch.world import NO_STARTER, World, starters_variables, world_from_environment

if TYPE_CHECKING:
    from megaclass.data.decode import Fit
    from megaclass.evaluation.protocol import EvaluationSet, SetResult
    from megaclass.inference import LoadedModel

_logger = logging.getLogger("megaclass.training")
_INTERRUPTED = (EXIT_RESUME_ME, 130)
_ROWS_POLL_S = 0.2


# ---- train ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainedRun:
    """A run that `train` has ended, or any run folder: its numbers, model and report."""

    folder: Path
    exit_code: int = 0
    """0; 75 or 130 if the run was interrupted: it has saved, and resume() continues it."""

    @property
    def is_finished(self) -> bool:
        """True after the last step, or after a step at which a callback or train.patience ended the run."""
        return self.exit_code == 0 and (self.folder / "summary.json").is_file()

    @property
    def numbers(self) -> dict[str, Any]:
        """The content of summary.json: loss, speed, sizes, and the accuracy on each set; empty for an unfinished run."""
        return read_summary(self.folder) if self.is_finished else {}

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl, one per report."""
        return read_metrics(self.folder / "metrics.jsonl")[0]

    @cached_property
    def model(self) -> "LoadedModel":
        """The trained model, as `megaclass.load` opens it."""
        from megaclass.inference import load

        return load(self.folder)

    @property
    def report(self) -> Path:
        """The HTML page about the run. It exists once the run is finished."""
        return self.folder / "report.html"

    def resume(self, *overrides: str, callbacks: Sequence[Callback] = (), **settings: Any) -> "TrainedRun":
        """Continues the run from its newest checkpoint, for example with epochs=20; see `train`."""
        # The folder may have been moved or copied since.
        run_dir = f"train.run_dir={self.folder}"
        return train(self.folder / "config.toml", run_dir, *overrides, resume=True, callbacks=callbacks, **settings)

    def __repr__(self) -> str:
        if not self.is_finished:
            steps = self.metrics[-1]["step"] if self.metrics else 0
            state = "interrupted after" if self.exit_code else "not finished, last row of"
            return f"TrainedRun({self.folder}: {state} step {steps:,}; resume() continues it)"
        numbers = self.numbers
        accuracy = numbers.get("verification_accuracy")
        shown = "" if accuracy is None else f", accuracy {accuracy:.1%}"
        return f"TrainedRun({self.folder}: {numbers['steps']:,} steps, loss {numbers['final_loss']:.3f}{shown})"


def train(
    recipe: str | Path | Config | Mapping[str, Any] | None = None,
    *overrides: str,
    data: str | Path | Mapping[str, Any] | None = None,
    resume: bool | str | Path = False,
    overwrite: bool = False,
    match_classes: bool = False,
    same_numbers: bool = False,
    callbacks: Sequence[Callback] = (),
    **settings: Any,
) -> TrainedRun:
    """Trains, evaluates and exports a model, as `megaclass train` does; returns the run.

    Under a launcher every rank calls it, and it returns on every rank once rank 0 has written the results.

    recipe: name of a recipe of the package, path of a TOML file, a Config, or a dict of sections. A folder of images, or None,
        chooses a recipe by the size of the data.
    overrides: settings as on the command line, "head.sample_rate=0.1".
    data: the training data, as data.path; or the settings of the section [data].
    settings: settings by their names, epochs=5, or by section, head={"margin": "cosface"}.
    resume: True continues the run in its run folder; "best" or a path does so from that checkpoint.
    overwrite: replace the run in the run folder.
    match_classes: if the list of classes has changed, keep the centres of classes with the same name, or number.
    same_numbers: accept classes without names as the same people if their numbers are equal.
    callbacks: each is called on rank 0 with every row of metrics (a dict); the run ends there, with all its results, after
        a callback that returns True.
    """
    if data is not None:
        settings = {"data": data if isinstance(data, Mapping) else {"path": str(data)}, **settings}
    given = [*overrides, *(one for name, value in settings.items() for one in overrides_of(name, value))]
    mode = StartMode(
        resume="auto" if resume is True else str(resume) if resume else None,
        overwrite=overwrite,
        matches_classes=match_classes,
        trusts_numbers=same_numbers,
    )
    with _messages(), ExitStack() as held:
        if isinstance(recipe, Mapping):
            recipe = load_config_values(dict(recipe), where="the settings")
        if isinstance(recipe, Config):
            folder = held.enter_context(tempfile.TemporaryDirectory(prefix="megaclass-"))
            (Path(folder) / "config.toml").write_text(to_toml(recipe), encoding="utf-8")
            recipe = Path(folder) / "config.toml"
        run = start_training(recipe, given, mode, callbacks, waits_for_results=True)
    if run.exit_code not in (0, *_INTERRUPTED):
        raise TrainError(
            f"The run in {run.folder} has failed with exit code {run.exit_code}: its error is printed above."
        )
    return run


def fit(
    features: Any,
    labels: Any = None,
    *overrides: str,
    run_dir: str | Path = "runs/fit",
    backbone: str = "linear",
    overwrite: bool = False,
    **settings: Any,
) -> "LoadedModel":
    """Trains a classifier of features with the recipe `features`, and returns the model, which classifies and searches.

    Everything else of the run, such as its report, is in `run_dir`.

    features: path of a .npy or .safetensors file with labels, which is mapped into memory (docs/other-fields.md); or a matrix
        (N, W), which is first written into the folder RUN_DIR-data: a matrix of more than half the memory is given as a file.
    labels: integers or names (N,), or integers (N, K) for several labels per row with -1 after the last one; None for a file.
    overrides: as for `train`, and so are overwrite and settings.
    backbone: "linear", "mlp", or "none", with which the features themselves are compared with the class centres.
    """
    is_file = isinstance(features, str | Path)
    if is_file != (labels is None):
        raise DataError(
            "fit() was given a file of features and labels: its labels are in the file, or in X.labels.npy next to X.npy."
            if is_file
            else "fit() was given features without labels: one per row is needed."
        )
    if not is_file:
        if world_from_environment().size > 1:
            raise DataError("fit() on several ranks takes the path of a file, which every rank opens, not a matrix.")
        if not overwrite and not settings.get("resume"):
            RunFolder(Path(run_dir)).check_free()
        features = write_features(features, labels, Path(f"{run_dir}-data"))
    given = [f"train.run_dir={run_dir}", f"backbone.name={backbone}"]
    if backbone == "none":
        given.append(f"backbone.embedding_dim={open_source(features).image_size[1]}")
    chosen = choose_recipe(str(features))
    return train(chosen.path, *chosen.overrides, *given, *overrides, overwrite=overwrite, **settings).model


def start_training(
    recipe: str | Path | None,
    overrides: Sequence[str],
    mode: StartMode,
    callbacks: Sequence[Callback] = (),
    *,
    output: str = "normal",
    waits_for_results: bool = False,
) -> TrainedRun:
    """Trains in this process, or starts local ranks and waits for them. `megaclass train` and `train` both call this.

    output: amount of messages of the ranks that are started.
    waits_for_results: under a launcher every rank waits until rank 0 has written the results.
    """
    world = world_from_environment()
    recipe, overrides = resolve_recipe(recipe, overrides, mode)
    config = load_config(recipe, overrides)
    if mode.resume is not None and (saved := _saved_optimizer(recipe, overrides, config)):
        overrides = [*overrides, f"head.optimizer={saved}"]
        config = load_config(recipe, overrides)
    _check_settings(config)
    options = [f"--resume={mode.resume}"] if mode.resume is not None else []
    options += ["--overwrite"] * mode.overwrite + ["--match-classes"] * mode.matches_classes
    options += ["--same-numbers"] * mode.trusts_numbers
    command = ["megaclass", "train", str(recipe), *overrides, *options]
    # The command line shows what was typed.
    mode = replace(mode, command=mode.command or tuple(command))
    run_dir = Path(config.train.run_dir)
    if world.starter != NO_STARTER:
        if world.size == 1 and config.train.nproc > 1:
            _logger.warning(_unused_nproc(config, world), extra={"sender": world.name()})
        return TrainedRun(run_dir, _train_here(config, world, mode, callbacks, waits_for_results))
    check_start(config, mode, mode.command)
    if config.train.nproc == 1:
        return TrainedRun(run_dir, _train_here(config, world, mode, callbacks, False))
    if not is_linux():
        raise LaunchError(
            f"train.nproc is {config.train.nproc}, but several processes are started and watched on Linux only: set "
            f"train.nproc=1 on {sys.platform}."
        )
    if output != "normal":
        command.append(f"--{output}")
    with _rows_of_ranks(run_dir, callbacks):
        return TrainedRun(run_dir, _on_local_ranks(command[1:], config.train.nproc))


def _saved_optimizer(recipe: Path, overrides: Sequence[str], config: Config) -> str:
    """Returns head.optimizer of the run that is continued, if the recipe leaves it open: its default was sgd until 0.2.0."""
    earlier = Path(config.train.run_dir) / "config.toml"
    given = value_given(overrides, "head", "optimizer") or _in_toml(recipe_path(recipe), "head", "optimizer")
    return _in_toml(earlier, "head", "optimizer") if given in ("", "auto") else ""


def _in_toml(path: Path, section: str, key: str) -> str:
    try:
        return str(tomllib.loads(path.read_text(encoding="utf-8")).get(section, {}).get(key, ""))
    except (OSError, ValueError, AttributeError):
        # Resuming says what is wrong with the file.
        return ""


def resolve_recipe(recipe: str | Path | None, overrides: Sequence[str], mode: StartMode) -> tuple[Path, list[str]]:
    """Returns a recipe and settings: for a run folder its own, for a folder of images or None those that fit the data."""
    overrides = list(overrides)
    is_setting = recipe is not None and "=" in str(recipe) and not Path(recipe).exists()
    if is_setting:
        recipe, overrides = None, [str(recipe), *overrides]
    if recipe is not None and not is_data(Path(recipe)):
        return Path(recipe), overrides
    if recipe is not None and (Path(recipe) / "config.toml").is_file():
        if mode.resume is None:
            raise ConfigError(f"{recipe} holds a run. To continue it: megaclass train {recipe} --resume")
        # Not the place where it began: the folder may have been moved or copied since.
        return Path(recipe) / "config.toml", [f"train.run_dir={recipe}", *overrides]
    folder = str(recipe) if recipe is not None else value_given(overrides, "data", "path")
    if not folder:
        raise ConfigError(
            "There is neither a recipe nor data: give the name of a recipe (megaclass recipes lists them), or a folder of "
            "images with one subfolder per identity: megaclass train photos/"
        )
    run_dir = value_given(overrides, "train", "run_dir")
    earlier = Path(run_dir or f"runs/{run_name(folder)}")
    if mode.resume is not None and (earlier / "config.toml").is_file():
        # The settings with which it began, also if images have been added since, or the data has been moved.
        return earlier / "config.toml", [f"data.path={folder}", f"train.run_dir={earlier}", *overrides]
    chosen = choose_recipe(folder, run_dir or "")
    if world_from_environment().is_main:
        _logger.info(chosen.reason)
    return chosen.path, [*chosen.overrides, *overrides]


def _train_here(
    config: Config, world: World, mode: StartMode, callbacks: Sequence[Callback], waits_for_results: bool
) -> int:
    # Not at module level: a process that only starts ranks need not load what trains and evaluates.
    from megaclass.training.rank_main import train_as_rank

    return train_as_rank(config, world, mode, callbacks, waits_for_results=waits_for_results)


def _check_settings(config: Config) -> None:
    """Builds what needs no data, for its errors: a typing mistake should not cost the start of the ranks."""
    name, size = config.backbone.name, config.data.size or (config.synth.size if config.synth.identities else None)
    # Whether the data fits a backbone for features is known when it is open.
    check_backbone(name, None if name in OF_FEATURES else size)
    build_margin(config.head)
    parse_augment(config.data.augment)


def _unused_nproc(config: Config, world: World) -> str:
    """Explains a world of one rank: in a shell under a launcher (srun --pty bash), every command looks like one."""
    return (
        f"train.nproc={config.train.nproc} is ignored, because {world.starter} is in charge and started one process. "
        f"Start more with it, or, in a shell that it opened, first run `unset {' '.join(starters_variables())}`."
    )


@contextmanager
def _rows_of_ranks(run_dir: Path, callbacks: Sequence[Callback]) -> Iterator[None]:
    """Calls the callbacks of this process with the rows that the ranks of the block write into metrics.jsonl."""
    if not callbacks:
        yield
        return
    begun, is_over, errors = time.time(), threading.Event(), list[BaseException]()

    def follow() -> None:
        last, place, is_last = None, 0, False
        try:
            while not is_last:
                # Once more after the end, for the last rows.
                is_last = is_over.wait(_ROWS_POLL_S)
                if last is None:
                    # The rows of an earlier run in this folder, or of an earlier start, do not count.
                    events = [event for event in read_events(run_dir)[0] if event["time"] >= begun]
                    last = next((int(event["step"]) for event in events if event["event"] in ("start", "resume")), None)
                rows, place = _rows_from(run_dir / "metrics.jsonl", place) if last is not None else ([], place)
                for row in rows:
                    if last is not None and row["step"] > last:
                        last = row["step"]
                        asked = [callback(dict(row)) is True for callback in callbacks]
                        if any(asked):
                            RunFolder(run_dir).request_end()
        except BaseException as error:
            errors.append(error)
            with contextlib.suppress(OSError):
                RunFolder(run_dir).request_end()

    thread = threading.Thread(target=follow, name="megaclass-callbacks", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
    if errors:
        raise errors[0]


def _rows_from(path: Path, place: int) -> tuple[list[dict[str, Any]], int]:
    """Returns the rows from a place in the file on, and the place behind the last whole line. Training only appends to it."""
    if not path.is_file():
        return [], place
    with path.open("rb") as file:
        file.seek(place)
        lines = file.read().split(b"\n")[:-1]
    return [json.loads(line) for line in lines], place + sum(len(line) + 1 for line in lines)


def _on_local_ranks(arguments: Sequence[str], nproc: int) -> int:
    """Starts ranks with the arguments of `megaclass`, and returns the exit code of the job."""
    if threading.current_thread() is not threading.main_thread():
        raise LaunchError(
            f"{nproc} processes can be started from the main thread only, which receives the signals: call this from there, "
            f"or set nproc=1."
        )
    # Not at module level, because it needs modules that exist on Linux only.
    from megaclass_launch.launchers.local import run_local

    return run_local([sys.executable, "-P", "-m", "megaclass", *arguments], nproc, os.environ)


def _messages() -> AbstractContextManager[None]:
    """Prints the messages of the package, as the command does, unless the caller has set up logging for them."""
    return nullcontext() if logging.getLogger("megaclass").handlers else messages_on_stderr()


# ---- evaluate -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Evaluation:
    """The results of a model on evaluation sets."""

    results: "list[SetResult]"

    @property
    def numbers(self) -> dict[str, dict[str, Any]]:
        """The numbers of each set by its name, or its `error`."""
        return {result.name: result.to_json() for result in self.results}

    def __repr__(self) -> str:
        from megaclass.evaluation.results import headline

        return f"Evaluation({'; '.join(f'{result.name}: {headline(result)}' for result in self.results)})"


def evaluate(
    model: "str | Path | LoadedModel | TrainedRun",
    on: str | Path | Sequence[str | Path] = (),
    *,
    classify: str | Path | Sequence[str | Path] = (),
    gallery: str | Path | None = None,
    probes: str | Path | None = None,
    queries: str | Path | None = None,
    distractors: str | Path | None = None,
    training_data: str | None = None,
    out: str | Path | None = None,
    fit: "Fit | None" = None,
    resize: bool = False,
    mirror: bool | None = None,
    published_tpir: bool = False,
    batch_size: int = 64,
    threads: int = 2,
    device: str = "auto",
    backbone: str | None = None,
    nproc: int = 1,
    on_result: "Callable[[SetResult], None] | None" = None,
) -> Evaluation:
    """Evaluates a model on classification, verification, template and identification sets, as `megaclass evaluate` does.

    Under a launcher every rank calls this, and each embeds a part of the images. The numbers are also written to
    evaluation.json in `out`, or in the run folder if `model` is one; its report shows them.

    model: run folder, model file, or what `megaclass.load` or `megaclass.train` returned.
    on: .bin files, lists of pairs, IJB folders, or folders of .bin files.
    classify: labelled images to classify, as for data.path: a folder per class, .rec or tar files.
    gallery: known people, a folder of identities or embeddings .npy.
    probes: people to search for, likewise.
    queries: images to retrieve the gallery's entries of the same identity for, likewise.
    distractors: distractors of MegaFace, to search among.
    training_data: counts the images of each set that are in this data, and gives the accuracy of `classify` by the number
        of training images.
    out: folder for the numbers.
    fit: how images of another size are fitted; None as in training.
    resize: stretch images of another size if the model does not state how to fit them.
    mirror: add the embedding of the mirrored image; None as in training.
    published_tpir: IJB: TPIR with the threshold of InsightFace's ijb_evals.py, which lets one probe fewer pass.
    backbone: `package.module:Class` of your own, if the model is not a built-in one.
    nproc: number of processes to start on this machine, for a model that is a run folder or a file.
    on_result: called on rank 0 with each result as soon as it is there; with nproc, when all are.
    """
    from megaclass.distributed.agreement import on_every_rank
    from megaclass.evaluation.protocol import Evaluator
    from megaclass.evaluation.sets import evaluate_sets, sets_of_main_rank
    from megaclass.evaluation.training_overlap import compared_with_training_data
    from megaclass.inference import LoadedModel, load
    from megaclass_launch.ranks.process_group import process_group

    world, given = world_from_environment(), model.folder if isinstance(model, TrainedRun) else model
    paths, labelled = (
        [Path(one) for one in ([given_sets] if isinstance(given_sets, str | Path) else given_sets)]
        for given_sets in (on, classify)
    )
    others = [None if one is None else Path(one) for one in (gallery, probes, distractors, queries)]
    if out is None and not isinstance(given, LoadedModel) and Path(given).is_dir():
        out = given
    if nproc > 1 and world.starter == NO_STARTER and not isinstance(given, LoadedModel):
        options = {
            "on": paths,
            "classify": labelled,
            "gallery": gallery,
            "probes": probes,
            "queries": queries,
            "distractors": distractors,
            "training-data": training_data,
            "fit": fit,
            "batch-size": batch_size,
            "threads": threads,
            "device": device,
            "backbone": backbone,
        }
        flags = ["--resize"] * resize + ["--mirror"] * (mirror is True) + ["--published-tpir"] * published_tpir
        evaluation = _evaluate_on_ranks(given, options, [*flags, *(["--no-mirror"] * (mirror is False))], nproc, out)
        if on_result is not None:
            for result in evaluation.results:
                on_result(result)
        return evaluation
    results: list[SetResult] = []
    with _messages(), process_group(world, device=device) as found:
        if isinstance(given, LoadedModel):
            loaded = given
        else:
            loaded = on_every_rank(lambda: load(given, device=found, backbone=backbone), found)
        fit, mirror = loaded.treatment.chosen(fit, mirror, resize=resize)
        evaluator = Evaluator(
            network=loaded.network,
            image_size=loaded.image_size,
            embedding_dim=loaded.embedding_dim,
            device=loaded.device,
            batch_size=batch_size,
            num_threads=threads,
            fit=fit,
            mirror=mirror,
            published_tpir=published_tpir,
            centres=lambda: loaded.class_shard(training_data),
        )
        for one in sets_of_main_rank(
            lambda: _sets(paths, labelled, *others, training_data=training_data), loaded.device
        ):
            with bar_on_demand(f"evaluating {one.name}") if world.is_main else nullcontext(no_progress) as on_progress:
                [result] = evaluate_sets(replace(evaluator, on_progress=on_progress), [one])
            if world.is_main and training_data is not None:
                [result] = compared_with_training_data([result], open_source(training_data), training_data)
            results.append(result)
            if world.is_main and on_result is not None:
                on_result(result)
        if world.is_main and out is not None:
            _write(out, {"name": loaded.name, "weights": loaded.fingerprint()}, results)
    return Evaluation(results)


def _evaluate_on_ranks(
    model: str | Path, options: Mapping[str, Any], flags: Sequence[str], nproc: int, out: str | Path | None
) -> Evaluation:
    """Starts ranks that evaluate as the command does, and reads what they have written."""
    from megaclass.evaluation.results import NUMBERS_FILE, read_results

    words = [str(model), *flags]
    for name, value in options.items():
        if value:
            words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    with _messages(), tempfile.TemporaryDirectory(prefix="megaclass-") as folder:
        code = _on_local_ranks(["evaluate", *words, "--out", folder], nproc)
        file = Path(folder) / NUMBERS_FILE
        if not file.is_file():
            raise TrainError(f"The evaluation of {model} has failed with exit code {code}: its error is printed above.")
        results = read_results(Path(folder))
        if out is not None:
            _write(out, json.loads(file.read_text(encoding="utf-8"))["model"], results)
    return Evaluation(results)


def _write(out: str | Path, model: Mapping[str, Any], results: "Sequence[SetResult]") -> None:
    from megaclass.evaluation.results import write_results

    try:
        file = write_results(Path(out), model, results)
    except OSError as error:
        raise DataError(
            f"Cannot write {out}: {error.strerror or error}. Choose another place for the numbers."
        ) from error
    _logger.info(f"numbers in {file}")


def _sets(
    paths: Sequence[Path],
    labelled: Sequence[Path],
    gallery: Path | None,
    probes: Path | None,
    distractors: Path | None,
    queries: Path | None,
    *,
    training_data: str | None,
) -> "list[EvaluationSet]":
    from megaclass.evaluation.protocol import EvaluationSet
    from megaclass.evaluation.sets import find_sets

    if training_data is not None:
        check_source(training_data)
    sets = find_sets(paths, labelled)
    if (gallery or distractors) and not (probes or (queries and not distractors)):
        raise ConfigError(
            "--gallery and --distractors need --probes, the images to search for; --gallery or --queries."
        )
    if queries and not gallery:
        raise ConfigError("--queries need --gallery, the images to search in; it may be the same path.")
    for one, kind, between, searched in (
        (gallery, "identification", "in", probes),
        (gallery, "retrieval", "from", queries),
        (distractors, "distractors", "among", probes),
    ):
        if one is not None and searched is not None:
            name = f"{searched.stem} {between} {one.stem}"
            sets.append(EvaluationSet(name=name, kind=kind, path=one, probes=searched))
    if not sets:
        raise ConfigError(
            "Nothing to evaluate on: give --on SET …, --classify DATA …, --probes with --gallery or --distractors, or "
            "--queries with --gallery."
        )
    return sets
