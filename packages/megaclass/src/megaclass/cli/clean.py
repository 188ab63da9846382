"""`megaclass data clean` and `data merge`: find wrong labels and doubled identities, confirm them by eye, write a new set."""

import argparse
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from megaclass.cli.arguments import writing
from megaclass.errors import DataError
from megaclass.progress import bar_on_demand

if TYPE_CHECKING:
    from megaclass.data.sources.source import ImageSource
    from megaclass.evaluation.suspects import LabelFinding

Result = tuple[int, dict[str, Any], str]
CLEAN_COMMANDS = """
clean: find mislabelled images, outliers and doubled identities with a trained model
  model     path RUN    run folder, or a model file
  --data    text        the data, as for data.path (default: the training data of the run)
  --tests   path+ SET   labelled images or .bin files: training classes of which they have images are found as well
  --out     path!       folder for findings.html and findings.tsv
  --apply   path NEW    write the new set there, by findings.tsv if --out has one
  @fit @device @json

merge: join sets: classes of the same name, or that look the same to a model, become one
  data      text+ DATA  two or more sets, each as for data.path
  --like    path RUN    join classes that look the same to this model, instead of by name
  --out     path!       folder for findings.html and findings.tsv
  --apply   path NEW    write the new set there, by findings.tsv if --out has one
  @fit @device @json
"""


def _clean(options: argparse.Namespace) -> Result:
    from megaclass.config.read import load_config
    from megaclass.data.sources.open_source import open_source
    from megaclass.inference import load
    from megaclass.inference.clean import review

    settings = options.model / "config.toml"
    if options.data is None and not settings.is_file():
        raise DataError(
            f"{options.model} is not a run folder, which names its training data: name it with --data PATH."
        )
    path = options.data or load_config(settings).data.path
    source = open_source(path)

    def find() -> "list[LabelFinding]":
        return review(load(options.model, device=options.device), source, options.tests, options.fit)

    return _reviewed(options, source, path, _names(path, source), find)


def _merge(options: argparse.Namespace) -> Result:
    from megaclass.data.sources.joined import JoinedSource
    from megaclass.data.sources.open_source import format_of, open_source
    from megaclass.inference import load
    from megaclass.inference.clean import review, same_names

    if len(options.data) < 2:
        raise DataError("megaclass data merge needs two sets or more.")
    if options.like is None and (unnamed := [path for path in options.data if format_of(path).class_names() is None]):
        raise DataError(
            f"The classes of {unnamed[0]} have numbers and no names: join by likeness, with --like RUN, a model that embeds "
            f"such images."
        )
    parts = [open_source(path) for path in options.data]
    source = JoinedSource(parts)
    names = [name for path, part in zip(options.data, parts, strict=True) for name in _names(path, part)]

    def find() -> "list[LabelFinding]":
        if options.like is None:
            return same_names(names)
        found = review(load(options.like, device=options.device), source, fit=options.fit)
        return [one for one in found if one.kind == "doubled"]

    return _reviewed(options, source, ",".join(options.data), names, find)


def _reviewed(
    options: argparse.Namespace,
    source: "ImageSource",
    data: str,
    names: Sequence[str],
    find: "Callable[[], list[LabelFinding]]",
) -> Result:
    """Writes list and page, unless an earlier list is to be applied; with --apply writes the new set."""
    from megaclass.inference.clean import LIST, PAGE, apply, counts_of, read_list, write_review

    listed = options.out / LIST
    with writing(options.out):
        if options.apply is None or not listed.exists():
            write_review(options.out, source, data, names, find())
        findings = read_list(listed, source)
    counts = counts_of(findings)
    text = ", ".join(f"{number:,} {kind}" for kind, number in counts.items() if number) or "nothing found"
    text = f"{options.out / PAGE}: {text}"
    result: dict[str, Any] = {"list": str(listed), "page": str(options.out / PAGE), **counts}
    if options.apply is None:
        text += f"\nChange what is wrong in {listed}, then write the new set with --apply FOLDER."
        return 0, result, text
    with bar_on_demand("writing the new set") as on_progress:
        packed = apply(source, findings, options.apply, names, on_progress)
    text += f"\n{options.apply}: {packed.num_images:,} of {source.num_images:,} images"
    return 0, {**result, "out": str(options.apply), "num_images": packed.num_images}, text


def _names(path: str, source: "ImageSource") -> list[str]:
    from megaclass.checkpoint.class_names import class_list

    # Not "replace": names that are not UTF-8 must stay different.
    return [name.decode(errors="backslashreplace") for name in class_list(path, source).names()]


CLEANING = (_clean, _merge)
