"""`megaclass data …`: create, pack, inspect, verify and benchmark data sets."""

import argparse
import json
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megaclass.errors import DataError
from megaclass_launch.operating_system import num_cores
from megaclass_launch.wire.plain_text import plain_lines

if TYPE_CHECKING:
    from megaclass.cli.hints import Commands
    from megaclass.image_size import ImageSize

_DATA = "the data, in any form that data.path accepts"
_logger = logging.getLogger("megaclass.cli")


def add_data_commands(commands: "Commands") -> None:
    """Adds `data` and its subcommands to the parser's commands."""
    data = commands.add_parser("data", help="create, pack, inspect, verify and benchmark data sets")
    below = data.add_subparsers(required=True, metavar="COMMAND")
    _add_synth(below)
    _add_pack(below)

    look = _command(below, "inspect", _inspect, "print counts, sizes, the range of labels and images per class")
    look.add_argument("path", help=_DATA)
    look.add_argument("--png", type=Path, metavar="FOLDER", help="write first-images.png there")

    check = _command(below, "verify", _verify, "decode every image, check labels and index, list bad records")
    check.add_argument("path", help="the data, in any form that data.path accepts, or a .rec file without an index")
    check.add_argument("--repair", type=Path, metavar="OUT", help="write a copy of the readable images to this folder")
    _add_threads(check, "decode")
    check.add_argument(
        "--show", type=int, default=20, help="number of bad images to print (default: 20); --json prints all"
    )

    shuffle = _command(below, "shuffle", _shuffle, "write a .rec file with the records in random order")
    shuffle.add_argument("path", help=_DATA)
    shuffle.add_argument("--out", type=Path, required=True, help="folder to write")
    shuffle.add_argument("--seed", type=int, default=0, help="random seed of the order (default: 0)")

    _add_split(below)
    _add_glyphs(below)

    unpack = _command(below, "unpack", _unpack, "write any data as a folder of images, one subfolder per identity")
    unpack.add_argument("path", help=_DATA)
    unpack.add_argument("--out", type=Path, required=True, help="folder to write")

    pairs = _command(below, "pairs", _pairs, "write a .bin file of verification pairs, half of them of the same class")
    pairs.add_argument("path", help=_DATA)
    pairs.add_argument("--out", type=Path, required=True, metavar="FILE.bin", help="file to write")
    pairs.add_argument("--pairs", type=int, default=6000, help="number of pairs (default: 6000)")
    pairs.add_argument("--seed", type=int, default=0, help="random seed of the choice of pairs (default: 0)")
    pairs.add_argument(
        "--holdout",
        type=float,
        metavar="SHARE",
        help="use only the identities that `data split --identities SHARE` with the same seed holds out",
    )

    _add_align(below)

    stage = _command(below, "stage", _stage, "copy data into memory before a run, or remove such a copy")
    stage.add_argument("path", nargs="?", help=_DATA)
    stage.add_argument(
        "--to", type=Path, required=True, metavar="FOLDER", help="folder in memory, for example /dev/shm"
    )
    stage.add_argument("--remove", action="store_true", help="remove all of your copies in this folder")

    bench = _command(
        below, "bench", _bench, "measure images per second by stage: read, decode, collate, loader, augment"
    )
    bench.add_argument("path", help=_DATA)
    _add_threads(bench, "read")
    bench.add_argument("--batch", type=int, default=256, help="images per batch (default: 256)")
    bench.add_argument("--seconds", type=float, default=2.0, help="seconds per stage (default: 2)")
    bench.add_argument("--device", default="cpu", help="device of the augmentations: cpu or cuda (default: cpu)")


def _add_split(below: "Commands") -> None:
    meaning = "hold out identities, or images of each identity: writes OUT/train and OUT/holdout, with pairs"
    split = _command(below, "split", _split, meaning)
    split.add_argument("path", help=_DATA)
    split.add_argument("--out", type=Path, required=True, help="folder to write")
    share = split.add_mutually_exclusive_group(required=True)
    share.add_argument(
        "--identities", type=float, metavar="SHARE", help="share of the identities to hold out, such as 0.1"
    )
    share.add_argument("--images", type=float, metavar="SHARE", help="share of the images of each identity to hold out")
    split.add_argument("--seed", type=int, default=0, help="random seed of the choice (default: 0)")
    split.add_argument(
        "--pairs", type=int, default=6000, help="largest number of pairs in train/holdout.bin (default: 6000)"
    )
    _add_threads(split, "read")


def _add_align(below: "Commands") -> None:
    meaning = "align photos of faces by five landmarks, given or found by an ONNX detector of yours"
    align = _command(below, "align", _align, meaning)
    align.add_argument("path", type=Path, help="folder of photos, including subfolders, such as one per identity")
    align.add_argument("--out", type=Path, required=True, help="folder to write; run again to continue")
    landmarks = align.add_mutually_exclusive_group(required=True)
    landmarks.add_argument(
        "--points", type=Path, metavar="FILE", help="text file with a line name x1 y1 … x5 y5 per photo"
    )
    landmarks.add_argument(
        "--detector", type=Path, metavar="FILE.onnx", help="face detector in the layout of SCRFD or RetinaFace"
    )
    align.add_argument("--size", type=int, default=112, help="side length of the crops in pixels (default: 112)")
    align.add_argument("--format", choices=("png", "jpg"), default="png", help="format of the crops (default: png)")
    _add_threads(align, "read and align")


def _add_glyphs(below: "Commands") -> None:
    glyphs = _command(
        below, "glyphs", _glyphs, "draw about 105,000 Chinese characters and Korean syllables from free fonts"
    )
    glyphs.add_argument("--out", type=Path, help="folder to write; without it, list the fonts and the missing ones")
    glyphs.add_argument(
        "--fonts",
        type=Path,
        action="append",
        metavar="FOLDER",
        help="folder with fonts or with unpacked packages, may be repeated (default: the installed fonts)",
    )
    glyphs.add_argument(
        "--classes", type=int, metavar="N", help="draw only the N characters that most designs have (default: all)"
    )
    glyphs.add_argument(
        "--processes", type=int, default=num_cores(), help="number of processes that draw (default: one per core)"
    )


def _add_synth(below: "Commands") -> None:
    synth = _command(
        below, "synth", _synth, "draw synthetic identities: train.rec, train.idx, property and verification.bin"
    )
    synth.add_argument("--identities", type=int, required=True, help="number of identities")
    synth.add_argument("--images-per-identity", type=int, required=True, help="number of images per identity")
    synth.add_argument("--size", type=int, default=112, help="side length of the images in pixels (default: 112)")
    synth.add_argument(
        "--pairs", type=int, default=1000, help="number of verification pairs, of other identities (default: 1000)"
    )
    synth.add_argument("--seed", type=int, default=0, help="random seed (default: 0)")
    synth.add_argument("--out", type=Path, required=True, help="folder to write")


def _add_pack(below: "Commands") -> None:
    pack = _command(
        below, "pack", _pack, "convert folders, label.txt or tar shards to .rec, .idx and property, or to tar shards"
    )
    pack.add_argument("path", help=_DATA)
    pack.add_argument("--out", type=Path, required=True, help="folder to write")
    pack.add_argument("--format", choices=["rec", "tar"], default="rec", help="output format (default: rec)")
    pack.add_argument(
        "--labels",
        choices=["auto", "float", "id2"],
        default="auto",
        help="store labels as float32 (exact up to 2^24) or as 64 bits in id2; auto uses id2 beyond 2^24 classes",
    )
    pack.add_argument("--no-shuffle", action="store_true", help="keep the images of each class together")
    pack.add_argument("--seed", type=int, default=0, help="random seed of the order (default: 0)")
    pack.add_argument(
        "--size",
        type=_size,
        metavar="SIDE|HEIGHTxWIDTH",
        help="fit images to this size, such as 112 or 112x96, and encode them again; otherwise bytes are copied",
    )
    pack.add_argument(
        "--fit",
        choices=("pad", "crop", "squash"),
        default="squash",
        help="with --size: add black borders, cut off edges, or stretch (default: squash)",
    )
    pack.add_argument("--shard-images", type=int, default=10_000, help="images per tar shard (default: 10000)")
    _add_threads(pack, "read and encode")


def _add_threads(parser: argparse.ArgumentParser, do: str) -> None:
    meaning = f"number of threads that {do} (default: one per core)"
    parser.add_argument("--threads", type=int, default=num_cores(), help=meaning)


def _command(
    below: "Commands", name: str, run: Callable[[argparse.Namespace], tuple[int, dict[str, Any], str]], meaning: str
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = below.add_parser(
        name, help=meaning, description=f"{meaning[0].upper()}{meaning[1:]}."
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")

    def run_and_print(options: argparse.Namespace, given: list[str]) -> int:
        code, result, text = run(options)
        # The text quotes names of files and folders, which may contain escape sequences; JSON escapes them itself.
        print(json.dumps(result, indent=1) if options.json else plain_lines(text))
        return code

    parser.set_defaults(run=run_and_print)
    return parser


def _synth(options: argparse.Namespace) -> tuple[int, dict[str, Any], str]:
    from megaclass.data.tools.synthesize import synthesize

    with _progress("drawing identities") as on_progress:
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
    fonts = FontCollection.find(folders, read_designs(), options.processes)
    if options.out is None:
        return 0, fonts.to_json(), fonts.describe()
    if options.out.exists():
        raise DataError(f"Cannot write {options.out}: it exists already. Remove it or choose another folder.")
    wanted = None if options.classes is None else characters_for(fonts, options.classes)
    with _progress("drawing characters") as on_progress:
        glyphs = fonts.draw(wanted, options.processes, on_progress)
    split = split_glyphs(glyphs, fonts)
    facts = {**fonts.to_json(), **describe_relations(glyphs, fonts)}
    with _progress("writing the set") as on_progress:
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
    from megaclass.data.sources.open_source import format_of, open_source
    from megaclass.data.tools.unpack import unpack

    source = open_source(options.path)
    with _progress("unpacking") as on_progress:
        names = format_of(options.path).class_names()
        num_bad = unpack(source, options.out, class_names=names, on_progress=on_progress)
    num_images = source.num_images - num_bad
    text = f"{options.out}: {num_images:,} images of {source.num_classes:,} classes"
    text += f"; {num_bad:,} that cannot be decoded were left out" if num_bad else ""
    return 0, {"out": str(options.out), "images": num_images, "classes": source.num_classes, "bad": num_bad}, text


def _pack(options: argparse.Namespace) -> tuple[int, dict[str, Any], str]:
    from megaclass.data.tools.pack import PackOptions

    chosen = PackOptions(
        layout=options.format,
        labels=options.labels,
        shuffle_seed=None if options.no_shuffle else options.seed,
        image_size=options.size,
        fit=options.fit,
        images_per_shard=options.shard_images,
    )
    return _pack_with(options.path, options.out, chosen, options.threads)


def _shuffle(options: argparse.Namespace) -> tuple[int, dict[str, Any], str]:
    from megaclass.data.tools.pack import PackOptions

    return _pack_with(options.path, options.out, PackOptions(shuffle_seed=options.seed), 1)


def _pack_with(path: str, out: Path, options: Any, num_threads: int) -> tuple[int, dict[str, Any], str]:
    from megaclass.checkpoint.class_names import class_list
    from megaclass.data.tools.pack import pack
    from megaclass.image_size import compact_size, shown_size

    source = _open(path)
    names = class_list(path, source).text
    with _progress("packing images") as on_progress:
        packed = pack(source, out, options, class_names=names, num_threads=num_threads, on_progress=on_progress)
    text = f"{out}: {packed.num_images:,} images of {source.num_classes:,} classes"
    if packed.num_bad:
        text += f"; {packed.num_bad:,} that cannot be decoded were left out"
    if packed.labels_in_id2:
        text += "; labels are stored as 64-bit numbers in id2, as the second line of property states (labels=id2)"
    if packed.num_other_size:
        what = f"were fitted to it ({options.fit})" if options.image_size is not None else "are kept; --size fits them"
        size = options.image_size if options.image_size is not None else compact_size(source.image_size)
        text += f"; {packed.num_other_size:,} have another size than {shown_size(size)} and {what}"
    return 0, {"out": str(out), **packed.__dict__, "num_classes": source.num_classes}, text


def _inspect(options: argparse.Namespace) -> tuple[int, dict[str, Any], str]:
    from megaclass.data.tools.inspect import inspect_source, write_first_images

    source = _open(options.path)
    with _progress("inspecting images") as on_progress:
        found = inspect_source(source, on_progress)
    text = found.to_text()
    if options.png is not None:
        try:
            options.png.mkdir(parents=True, exist_ok=True)
            write_first_images(options.png / "first-images.png", source)
        except OSError as error:
            raise DataError(f"Cannot write pictures to {options.png}: {error.strerror or error}.") from error
        text += f"\n\n{options.png / 'first-images.png'}"
    return 0, found.to_json(), text


def _verify(options: argparse.Namespace) -> tuple[int, dict[str, Any], str]:
    from megaclass.checkpoint.class_names import class_list
    from megaclass.data.tools.pack import PackOptions, pack
    from megaclass.data.tools.verify import verify

    with _progress("checking records") as on_progress:
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
        with _progress("writing the clean copy") as on_progress:
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
    with _progress("writing both parts") as on_progress:
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
    with _progress("reading pairs") as on_progress:
        pair_set = make_pairs(source, options.pairs, options.seed, on_progress)
    write_pairs(options.out, pair_set)
    if split is not None:
        mark_pairs(options.out, split, split.id_for(whole))
    return 0, {"out": str(options.out), "num_pairs": pair_set.num_pairs}, f"{options.out}: {pair_set.num_pairs:,} pairs"


def _align(options: argparse.Namespace) -> tuple[int, dict[str, Any], str]:
    from megaclass.data.tools.align_photos import align_photos
    from megaclass.evaluation.images import find_images

    with _progress("aligning photos") as on_progress:
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
    with _progress("copying the data into memory, bytes") as on_progress:
        staged = stage(options.path, options.to, on_progress)
    return 0, {"path": staged}, f"{staged}: use it as data.path, or {options.to} as data.stage"


def _bench(options: argparse.Namespace) -> tuple[int, dict[str, Any], str]:
    import torch

    from megaclass.data.tools.bench import bench_stages

    source = _open(options.path)
    with _progress("measuring") as on_progress:
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


def _progress(title: str) -> AbstractContextManager[Callable[[int, int], None]]:
    """Returns a progress bar that appears with the first call, which passes the total."""
    from megaclass.progress import bar_on_demand

    return bar_on_demand(title)


def _size(text: str) -> "ImageSize":
    from megaclass.image_size import size_from_text

    try:
        return size_from_text(text.replace("x", ","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size; expected 112, or height and width as 112x96"
        ) from None
