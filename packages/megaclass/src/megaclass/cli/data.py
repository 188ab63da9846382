"""`megaclass data …`: create, pack, inspect, verify and benchmark data sets."""

import argparse
import json
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megaclass.cli.arguments import add_commands
from megaclass.cli.clean import CLEAN_COMMANDS, CLEANING
from megaclass.errors import DataError
from megaclass.progress import bar_on_demand
from megaclass_launch.wire.checks import plain_lines

if TYPE_CHECKING:
    from megaclass.cli.hints import Commands

_logger = logging.getLogger("megaclass.cli")
_COMMANDS = """
synth: draw synthetic identities: train.rec, train.idx, property and verification.bin
  --identities           int!          number of identities
  --images-per-identity  int!          number of images per identity
  --size                 int=112       side length of the images in pixels
  --pairs                int=1000      number of verification pairs, of other identities
  --seed                 int=0         random seed
  --out                  path!         folder to write
  @json

pack: convert folders, label.txt or tar shards to .rec, .idx and property, or to tar shards
  @path
  --out           path!                folder to write
  --format        rec|tar=rec          output format
  --labels        auto|float|id2=auto  store labels as float32 (exact up to 2^24) or as 64 bits in id2; auto uses id2
                beyond 2^24 classes
  --no-shuffle    flag                 keep the images of each class together
  --seed          int=0                random seed of the order
  --size          size SIDE|HEIGHTxWIDTH    fit images to this size, such as 112 or 112x96, and encode them again; otherwise
                bytes are copied
  --fit           pad|crop|squash=squash    with --size: add black borders, cut off edges, or stretch
  --shard-images  int=10000            images per tar shard
  --threads       cores="one per core" N    number of threads that read and encode
  @json

inspect: print counts, sizes, the range of labels and images per class
  @path
  @json

verify: decode every image, check labels and index, list bad records
  path       text      the data, in any form that data.path accepts, or a .rec file without an index
  --repair   path OUT  write a copy of the readable images to this folder
  --threads  cores="one per core" N    number of threads that decode
  --show     int=20    number of bad images to print; --json prints all
  @json

split: hold out identities, or images of each identity: writes OUT/train and OUT/holdout, with pairs
  @path
  --out            path!        folder to write
  or --identities  float SHARE  share of the identities to hold out, such as 0.1
  or --images      float SHARE  share of the images of each identity to hold out
  --seed           int=0        random seed of the choice
  --pairs          int=6000     largest number of pairs in train/holdout.bin
  --threads        cores="one per core" N    number of threads that read
  @json

glyphs: draw about 105,000 Chinese characters and Korean syllables from free fonts
  --out        path          folder to write; without it, list the fonts and the missing ones
  --fonts      path+ FOLDER  folders with fonts or with unpacked packages (default: the installed fonts)
  --classes    int N         draw only the N characters that most designs have (default: all)
  --processes  cores="one per core" N    number of processes that draw
  @json

unpack: write any data as a folder of images, one subfolder per identity
  @path
  --out  path!  folder to write
  @json

pairs: write a .bin file of verification pairs, half of them of the same class
  @path
  --out      path! FILE.bin  file to write
  --pairs    int=6000        number of pairs
  --seed     int=0           random seed of the choice of pairs
  --holdout  float SHARE     use only the identities that `data split --identities SHARE` with the same seed holds out
  @json

align: align photos of faces by five landmarks, given or found by an ONNX detector of yours
  path           path            folder of photos, including subfolders, such as one per identity
  --out          path!           folder to write; run again to continue
  or --points    path FILE       text file with a line name x1 y1 … x5 y5 per photo
  or --detector  path FILE.onnx  face detector in the layout of SCRFD or RetinaFace
  --size         positive=112    side length of the crops in pixels
  --format       png|jpg=png     format of the crops
  --threads      cores="one per core" N    number of threads that read and align
  @json

stage: copy data into memory before a run, or remove such a copy
  path      text?         the data, in any form that data.path accepts
  --to      path! FOLDER  folder in memory, for example /dev/shm
  --remove  flag          remove all of your copies in this folder
  @json

bench: measure images per second by stage: read, decode, collate, loader, augment
  @path
  --threads  cores="one per core" N    number of threads that read
  --batch    positive=256     images per batch
  --seconds  float=2.0   seconds per stage
  --device   cpu|cuda=cpu    device of the augmentations
  @json
"""


def add_data_commands(commands: "Commands") -> None:
    """Adds `data` and its subcommands to the parser's commands."""
    data = commands.add_parser("data", help="create, pack, inspect, verify and benchmark data sets")
    functions = (
        _synth,
        _pack,
        _inspect,
        _verify,
        _split,
        _glyphs,
        _unpack,
        _pairs,
        _align,
        _stage,
        _bench,
        *CLEANING,
    )
    add_commands(
        data.add_subparsers(required=True, metavar="COMMAND"),
        f"{_COMMANDS}\n{CLEAN_COMMANDS}",
        {one.__name__.removeprefix("_"): partial(_run_and_print, one) for one in functions},
    )


def _run_and_print(
    run: Callable[[argparse.Namespace], tuple[int, dict[str, Any], str]], options: argparse.Namespace, given: list[str]
) -> int:
    command = run.__name__.removeprefix("_")
    if command not in ("stage", "inspect"):
        _refuse_features(command, str(getattr(options, "path", "")))
    code, result, text = run(options)
    # The text quotes names of files and folders, which may contain escape sequences; JSON escapes them itself.
    print(json.dumps(result, indent=1) if options.json else plain_lines(text))
    return code


def _refuse_features(command: str, path: str) -> None:
    from megaclass.data.sources.features import FeatureFormat

    if FeatureFormat.matches(path):
        raise DataError(f"megaclass data {command} is for images, but {path} is a file of features.")


def _synth(options: argparse.Namespace) -> tuple[int, dict[str, Any], str]:
    from megaclass.data.tools.synthesize import synthesize

    with bar_on_demand("drawing identities") as on_progress:
        is_new = synthesize(
            options.out,
            num_identities=options.identities,
            images_per_identity=options.images_per_identity,
            image_size=options.size,
            seed=options.seed,
            num_pairs=options.pairs,
            on_progress=on_progress,
        )
    text = f"{options.out}: {'drawn' if is_new else 'exists already, unchanged'}"
    return 0, {"out": str(options.out), "is_new": is_new}, text


def _glyphs(options: argparse.Namespace) -> tuple[int, dict[str, Any], str]:
    from megaclass.data.tools.glyph_fonts import FONT_FOLDERS, FontCollection, read_designs
    from megaclass.data.tools.glyphs import characters_for, describe_relations, split_glyphs, write_glyphs

    folders = options.fonts or [Path(folder) for folder in FONT_FOLDERS]
    if absent := next((folder for folder in options.fonts or () if not folder.is_dir()), None):
        raise DataError(f"Cannot look for fonts in {absent}: there is no such folder.")
    fonts = FontCollection.find(folders, read_designs(), options.processes)
    if options.out is None:
        return 0, fonts.to_json(), fonts.describe()
    if not any(fonts.faces):
        is_packed = any(next(folder.expanduser().rglob("*.deb"), None) for folder in folders)
        hint = "Packages (.deb) are there, which must be unpacked" if is_packed else "They are free"
        raise DataError(
            f"None of the fonts is in {', '.join(map(str, folders))}. {hint}: megaclass data glyphs, without --out, lists the "
            f"fonts and says how to get them."
        )
    if options.out.exists():
        raise DataError(f"Cannot write {options.out}: it exists already. Remove it or choose another folder.")
    wanted = None if options.classes is None else characters_for(fonts, options.classes)
    with bar_on_demand("drawing characters") as on_progress:
        glyphs = fonts.draw(wanted, options.processes, on_progress)
    split = split_glyphs(glyphs, fonts)
    facts = {**fonts.to_json(), **describe_relations(glyphs, fonts)}
    with bar_on_demand("writing the set") as on_progress:
        facts = write_glyphs(split, options.out, facts, num_threads=options.processes, on_progress=on_progress)
    lines = [
        f"{options.out / name}: {part['images']:,} images of {part['characters']:,} characters"
        for name, part in facts["parts"].items()
    ]
    lines += [
        f"{part}: {number:,} images removed because training has nearly the same ones"
        for part, number in facts["removed_as_nearly_equal"].items()
        if part != "train"
    ]
    return 0, facts, "\n".join(lines)


def _unpack(options: argparse.Namespace) -> tuple[int, dict[str, Any], str]:
    from megaclass.checkpoint.class_names import class_list
    from megaclass.data.tools.pack import unpack

    source = _open(options.path)
    classes = class_list(options.path, source)
    names = list(classes.names()) if classes.text else None
    with bar_on_demand("unpacking") as on_progress:
        num_bad = unpack(source, options.out, class_names=names, on_progress=on_progress)
    num_images = source.num_images - num_bad
    text = f"{options.out}: {num_images:,} images of {source.num_classes:,} classes"
    text += f"; {num_bad:,} that cannot be decoded were left out" if num_bad else ""
    return 0, {"out": str(options.out), "images": num_images, "classes": source.num_classes, "bad": num_bad}, text


def _pack(options: argparse.Namespace) -> tuple[int, dict[str, Any], str]:
    from megaclass.checkpoint.class_names import class_list
    from megaclass.data.tools.pack import PackOptions, pack
    from megaclass.image_size import compact_size, shown_size

    chosen = PackOptions(
        layout=options.format,
        labels=options.labels,
        shuffle_seed=None if options.no_shuffle else options.seed,
        image_size=options.size,
        fit=options.fit,
        images_per_shard=options.shard_images,
    )
    source = _open(options.path)
    names = class_list(options.path, source).text
    with bar_on_demand("packing images") as on_progress:
        packed = pack(
            source, options.out, chosen, class_names=names, num_threads=options.threads, on_progress=on_progress
        )
    text = f"{options.out}: {packed.num_images:,} images of {source.num_classes:,} classes"
    if packed.num_bad:
        text += f"; {packed.num_bad:,} that cannot be decoded were left out"
    if packed.labels_in_id2:
        text += "; labels are stored as 64-bit numbers in id2, as the second line of property states (labels=id2)"
    if packed.num_other_size:
        what = f"were fitted to it ({options.fit})" if options.size is not None else "are kept; --size fits them"
        size = options.size if options.size is not None else compact_size(source.image_size)
        text += f"; {packed.num_other_size:,} have another size than {shown_size(size)} and {what}"
    return 0, {"out": str(options.out), **packed.__dict__, "num_classes": source.num_classes}, text


def _inspect(options: argparse.Namespace) -> tuple[int, dict[str, Any], str]:
    from megaclass.data.tools.inspect import inspect_source, inspection_text

    source = _open(options.path)
    with bar_on_demand("inspecting images") as on_progress:
        found = inspect_source(source, on_progress)
    return 0, found, inspection_text(found)


def _verify(options: argparse.Namespace) -> tuple[int, dict[str, Any], str]:
    from megaclass.checkpoint.class_names import class_list
    from megaclass.data.tools.pack import PackOptions, pack
    from megaclass.data.tools.verify import verify

    with bar_on_demand("checking records") as on_progress:
        findings, sound = verify(options.path, num_threads=options.threads, on_progress=on_progress)
    lines = [
        f"{findings.what}: {findings.num_images:,} images, {len(findings.bad):,} bad, {len(findings.faults):,} faults"
    ]
    lines += [f"  {fault}" for fault in findings.faults[: options.show]]
    lines += [f"  {name}: {fault}" for name, fault in findings.bad[: options.show]]
    num_left = max(0, len(findings.bad) - options.show) + max(0, len(findings.faults) - options.show)
    lines += [f"  and {num_left:,} more (--json names all)"] if num_left else []
    lines += [f"  note: {note}" for note in findings.notes]
    result: dict[str, Any] = {**findings.__dict__, "bad": dict(findings.bad), "is_sound": findings.is_sound}
    if options.repair is not None:
        if sound is None:
            raise DataError(f"Nothing of {options.path} can be repaired: it has no readable image.")
        try:
            names = class_list(options.path, sound).text
        except DataError as error:
            names = b""
            lines.append(f"  class names are not copied: {error}")
        with bar_on_demand("writing the clean copy") as on_progress:
            chosen = PackOptions(shuffle_seed=None)
            packed = pack(sound, options.repair, chosen, class_names=names, on_progress=on_progress)
        result["repaired"] = {"out": str(options.repair), "num_images": packed.num_images}
        lines.append(f"{options.repair}: {packed.num_images:,} readable images of {sound.num_classes:,} classes")
    return 0 if findings.is_sound or options.repair is not None else 1, result, "\n".join(lines)


def _split(options: argparse.Namespace) -> tuple[int, dict[str, Any], str]:
    from megaclass.checkpoint.class_names import class_list
    from megaclass.data.tools.split import Split, split_data

    by = "identities" if options.identities is not None else "images"
    split = Split(by=by, share=getattr(options, by), seed=options.seed)
    source = _open(options.path)
    with bar_on_demand("writing both parts") as on_progress:
        made = split_data(
            source,
            split,
            options.out,
            class_names=class_list(options.path, source).text,
            num_pairs=options.pairs,
            num_threads=options.threads,
            on_progress=on_progress,
        )
    train = options.out / "train"
    lines = [
        f"{train}: {made.num_train_images:,} images of {made.num_train_classes:,} classes: use it as data.path",
        f"{options.out / 'holdout'}: {made.num_holdout_images:,} images of {made.num_holdout_classes:,} classes",
        f"{train / 'holdout.bin'}: {made.num_pairs:,} pairs of held-out {by}; training evaluates them automatically"
        if made.num_pairs
        else "No pairs: too few images were held out.",
    ]
    lines += [f"{made.num_bad:,} images that cannot be decoded were left out."] if made.num_bad else []
    return 0, {"out": str(options.out), "by": by, **made.__dict__}, "\n".join(lines)


def _pairs(options: argparse.Namespace) -> tuple[int, dict[str, Any], str]:
    from megaclass.data.pair_file import write_pairs
    from megaclass.data.tools.make_pairs import make_pairs
    from megaclass.data.tools.split import Split, held_out_part, mark_pairs

    source = whole = _open(options.path)
    split = None
    if options.holdout is not None:
        split = Split(by="identities", share=options.holdout, seed=options.seed)
        source = held_out_part(whole, split)
    with bar_on_demand("reading pairs") as on_progress:
        pair_set = make_pairs(source, options.pairs, options.seed, on_progress)
    write_pairs(options.out, pair_set)
    if split is not None:
        mark_pairs(options.out, split, split.id_for(whole))
    return 0, {"out": str(options.out), "num_pairs": pair_set.num_pairs}, f"{options.out}: {pair_set.num_pairs:,} pairs"


def _align(options: argparse.Namespace) -> tuple[int, dict[str, Any], str]:
    from megaclass.data.tools.align_photos import align_photos
    from megaclass.evaluation.images import find_images

    with bar_on_demand("aligning photos") as on_progress:
        made = align_photos(
            find_images(options.path),
            options.path,
            options.out,
            points=options.points,
            detector=options.detector,
            image_size=options.size,
            suffix=options.format,
            num_threads=options.threads,
            on_progress=on_progress,
        )
    text = f"{options.out}: {made.num_aligned:,} of {made.num_photos:,} photos aligned"
    text += f", {made.num_kept:,} were there already" if made.num_kept else ""
    text += f"; {made.num_left_out:,} left out, as not-aligned.txt there lists" if made.num_left_out else ""
    return 0, {"out": str(options.out), **made.__dict__}, text


def _stage(options: argparse.Namespace) -> tuple[int, dict[str, Any], str]:
    from megaclass.data.tools.stage import stage, unstage

    if options.remove:
        num_files = unstage(options.to)
        return 0, {"removed": num_files}, f"{options.to}: {num_files} files removed"
    if options.path is None:
        raise DataError("megaclass data stage needs the data to copy, or --remove.")
    with bar_on_demand("copying the data into memory, bytes") as on_progress:
        staged = stage(options.path, options.to, on_progress)
    return 0, {"path": staged}, f"{staged}: train with data.stage={options.to}"


def _bench(options: argparse.Namespace) -> tuple[int, dict[str, Any], str]:
    import torch

    from megaclass.data.tools.bench import bench_stages

    source = _open(options.path)
    with bar_on_demand("measuring") as on_progress:
        speeds = bench_stages(
            source,
            num_threads=options.threads,
            batch=options.batch,
            seconds=options.seconds,
            device=torch.device(options.device),
            on_progress=on_progress,
        )
    lines = [f"{'stage':36}{'images/s':>10}{'CPU s per 1000':>18}"]
    lines += [f"{speed.stage:36}{speed.images_per_second:>10,.0f}{speed.cpu_s_per_1000:>18.3f}" for speed in speeds]
    return 0, {speed.stage: speed.__dict__ for speed in speeds}, "\n".join(lines)


def _open(path: str) -> Any:
    """Opens the data and logs what it is."""
    from megaclass.data.sources.open_source import open_source

    source = open_source(path)
    _logger.info(source.describe())
    return source
