"""The command `megaclass`: parse, call one function."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megaclass import __version__
from megaclass.distributed.agreement import AgreedError
from megaclass.errors import UserError


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0, or 2 for what the user can mend, which is printed without a traceback."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = _parser()
    options = parser.parse_args(given)
    try:
        code: int = options.run(options, given)
    except AgreedError:
        return 2  # the rank that found it prints it
    except UserError as error:
        print(f"megaclass: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megaclass", description="Training of classifiers with millions of classes, on one machine or many."
    )
    parser.add_argument("--version", action="version", version=f"megaclass {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    train = commands.add_parser(
        "train",
        help="train, evaluate and export what a recipe says",
        description="Trains what a recipe says: megaclass train recipes/demo.toml head.sample_rate=0.1 train.epochs=2",
    )
    train.add_argument("recipe", type=Path, help="TOML file with the settings")
    train.add_argument("settings", nargs="*", metavar="section.key=value", help="settings that win over the file")
    train.add_argument(
        "--resume",
        nargs="?",
        const="auto",
        metavar="auto|PATH",
        help="continue the run: newest whole checkpoint, or PATH",
    )
    train.add_argument("--overwrite", action="store_true", help="replace the run that the run folder holds")
    train.add_argument("--show-config", action="store_true", help="print the resolved settings as TOML and end")
    train.set_defaults(run=_train)

    data = commands.add_parser("data", help="make and inspect data sets")
    data_commands = data.add_subparsers(required=True, metavar="COMMAND")
    synth = data_commands.add_parser(
        "synth", help="draw identities by code, as train.rec, train.idx, property and a .bin"
    )
    synth.add_argument("--identities", type=int, required=True, help="how many")
    synth.add_argument("--images-per-identity", type=int, required=True, help="images of each")
    synth.add_argument("--size", type=int, default=112, help="side of an image in pixels (112)")
    synth.add_argument("--pairs", type=int, default=1000, help="verification pairs of other identities (1000)")
    synth.add_argument("--seed", type=int, default=0, help="fixes every pixel (0)")
    synth.add_argument("--out", type=Path, required=True, help="folder to write")
    synth.set_defaults(run=_synth)
    return parser


def _train(options: argparse.Namespace, given: list[str]) -> int:
    from megaclass.config import load_config, to_toml

    config = load_config(options.recipe, options.settings)
    if options.show_config:
        print(to_toml(config), end="")
        return 0
    from megaclass.train.start import start_training

    return start_training(config, given[1:], resume=options.resume, overwrite=options.overwrite)


def _synth(options: argparse.Namespace, given: list[str]) -> int:
    from megaclass.data.synthesize import synthesize
    from megaclass.train.progress import progress_bar

    total = options.identities * options.images_per_identity + 2 * options.pairs
    with progress_bar("drawing identities", total) as bar:
        is_new = synthesize(
            options.out,
            num_identities=options.identities,
            images_per_identity=options.images_per_identity,
            image_size=options.size,
            seed=options.seed,
            num_pairs=options.pairs,
            on_progress=lambda done, _: bar.advance_to(done),
        )
    print(f"{options.out}: {'drawn' if is_new else 'already there, left as it is'}")
    return 0
