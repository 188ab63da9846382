"""Reviews labelled data with a trained model: a page of pictures to look at, a list to edit, and a new set by that list.

`findings.tsv` holds one line per finding. A person may change its first column (move, remove, merge or keep), or delete lines.
`findings.html` shows the pictures. The list names the data by its hash, so it is never applied to other data.
"""

import csv
import io
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megaclass.checkpoint.class_names import class_list
from megaclass.data.decode import Fit
from megaclass.data.fingerprint import source_hash
from megaclass.data.pair_file import read_pairs
from megaclass.data.sources.open_source import open_source
from megaclass.data.sources.source import ImageSource, TensorSource, require_one_label
from megaclass.data.tools.pack import PackOptions, PackResult, distinct_names, pack
from megaclass.data.tools.split import SplitPart
from megaclass.errors import DataError
from megaclass.evaluation.embed import distinct_images, log_bad_images
from megaclass.evaluation.examples import images_of, thumbnails
from megaclass.evaluation.images import Images, PairImages, SourceImages
from megaclass.evaluation.report.templates import picture, render
from megaclass.evaluation.suspects import LabelFinding, find_in_training, find_suspects, merged_classes
from megaclass.inference.loaded_model import LoadedModel
from megaclass.progress import OnProgress, no_progress
from megaclass_launch.files import write_text

LIST, PAGE = "findings.tsv", "findings.html"
_ACTIONS = {
    "mislabelled": ("move", "remove", "keep"),
    "outlier": ("remove", "keep"),
    "doubled": ("merge", "keep"),
    "in-test": ("remove", "keep"),
}
_COLUMNS = ("action", "kind", "image", "class", "other_class", "cosine", "other_cosine", "names")
_MARK = "# findings about the data "
_SHOWN_PER_KIND, _PICTURES_PER_CLASS = 100, 4


def review(
    model: LoadedModel, source: ImageSource, tests: Sequence[Path] = (), fit: Fit | None = None
) -> list[LabelFinding]:
    """Embeds all images and returns the findings. tests: labelled images or .bin files whose identities must not be in it."""
    if isinstance(source, TensorSource):
        raise DataError(f"Only images are looked at, not {source.describe()}.")
    require_one_label(source, "A review of labels")
    fit = fit or model.treatment.fit
    # Opened before anything is embedded: a wrong path shows at once.
    opened = [_test_images(model, path, fit) for path in tests]
    rows_ND = _embedded(model, SourceImages(source=source, image_size=model.image_size, fit=fit))
    labels_N = np.asarray(source.labels)
    suspects = find_suspects(rows_ND, labels_N, source.num_classes, model.device)
    findings = list(suspects.findings)
    for images, test_labels_N, names in opened:
        test_ND = _embedded(model, images)
        by_class = {one[1]: one for one in find_in_training(test_ND, test_labels_N, rows_ND, labels_N, suspects)}
        findings += [
            LabelFinding(
                kind="in-test", action="remove", label=label, cosine=own, other_cosine=cosine, text=names[identity]
            )
            for identity, label, cosine, own in map(by_class.__getitem__, sorted(by_class))
        ]
    return findings


def _test_images(model: LoadedModel, path: Path, fit: Fit | None) -> tuple[Images, NDArray[np.int64], list[str]]:
    """Returns images, the identity of each and the names of identities; in a .bin each distinct image is one."""
    images: Images
    if path.suffix == ".bin":
        images = PairImages(pair_set=read_pairs(path), set_name=str(path), image_size=model.image_size, fit=fit)
        firsts, labels_N = distinct_images(images)
        names = [images.name(index) for index in firsts]
    else:
        source = open_source(path)
        images = SourceImages(source=source, image_size=model.image_size, fit=fit)
        labels_N = np.asarray(source.labels)
        classes = class_list(str(path), source).names()
        names = [f"class {name.decode(errors='replace')} of {path}" for name in classes]
    return images, labels_N, names


def _embedded(model: LoadedModel, images: Images) -> NDArray[np.float32]:
    """Returns unit embeddings; images that cannot be read are named and have NaN."""
    return model.embed_source(images, mirror=model.treatment.mirror, on_bad=log_bad_images())


def same_names(names: Sequence[str]) -> list[LabelFinding]:
    """Returns a finding for each class that has the name of an earlier one."""
    first = {name: number for number, name in reversed(list(enumerate(names)))}
    return [
        LabelFinding(kind="doubled", action="merge", label=number, other=first[name])
        for number, name in enumerate(names)
        if first[name] < number
    ]


def counts_of(findings: Sequence[LabelFinding]) -> dict[str, int]:
    """Returns how many findings there are of each kind."""
    counts = Counter(one.kind for one in findings)
    return {kind: counts[kind] for kind in _ACTIONS}


# ---- the list and the page ------------------------------------------------------------------------------------------


def write_review(
    folder: Path, source: ImageSource, data: str, names: Sequence[str], findings: Sequence[LabelFinding]
) -> None:
    text = io.StringIO(f"{_MARK}{source_hash(source)} {data}\n")
    text.seek(0, io.SEEK_END)
    table = csv.writer(text, delimiter="\t", lineterminator="\n")
    table.writerow(_COLUMNS)
    for one in findings:
        numbers = ["" if number < 0 else number for number in (one.image, one.label, one.other)]
        told = [source.name_of(one.image) if one.image >= 0 else one.text]
        told += [names[label] for label in (one.label, one.other) if label >= 0]
        cosines = (f"{one.cosine:.3f}", f"{one.other_cosine:.3f}")
        table.writerow([one.action, one.kind, *numbers, *cosines, " | ".join(filter(None, told))])
    folder.mkdir(parents=True, exist_ok=True)
    # List and page may show faces.
    write_text(folder / LIST, text.getvalue(), is_private=True)
    shown = {kind: [one for one in findings if one.kind == kind] for kind in _ACTIONS}
    wanted = {label for ones in shown.values() for one in ones[:_SHOWN_PER_KIND] for label in (one.label, one.other)}
    of_class = images_of(np.asarray(source.labels), wanted, _PICTURES_PER_CLASS)
    sections = [
        (kind, len(ones), [_card(source, one, names, of_class) for one in ones[:_SHOWN_PER_KIND]])
        for kind, ones in shown.items()
        if ones
    ]
    page = render("inference/clean.html.j2", data=data, sections=sections, list=LIST, source=source.describe())
    write_text(folder / PAGE, page, is_private=True)


def _card(
    source: ImageSource, one: LabelFinding, names: Sequence[str], of_class: dict[int, list[int]]
) -> dict[str, object]:
    def pictures(indices: Sequence[int]) -> list[object]:
        return [picture(jpeg) for jpeg in thumbnails(source, indices)]

    return {
        "finding": one,
        "pictures": pictures([one.image] if one.image >= 0 else []),
        "text": source.name_of(one.image) if one.image >= 0 else one.text,
        "classes": [
            (names[label], pictures([index for index in of_class.get(label, []) if index != one.image]))
            for label in (one.label, one.other)
            if label >= 0
        ],
    }


def read_list(path: Path, source: ImageSource) -> list[LabelFinding]:
    """Reads the list, which a person may have edited; each mistake is named with its line."""
    try:
        # Spreadsheets begin a file with a byte order mark. Names may hold the line breaks of other alphabets.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"Cannot read the list {path}: {error}.") from error
    mark = f"{_MARK}{source_hash(source)}"
    if not lines or not lines[0].startswith(f"{mark} "):
        raise DataError(
            f"{path} is not about {source.describe()}: its first line must start with {mark!r}. Images or labels may have "
            f"changed since: write the list again."
        )
    found = []
    for number, row in enumerate(csv.reader(lines[2:], delimiter="\t"), start=3):
        where = f"Line {number} of {path}"
        if not "".join(row).strip():
            continue
        if len(row) < 5:
            raise DataError(f"{where} has {len(row)} columns: expected {', '.join(_COLUMNS)}, separated by tabs.")
        action, kind, *cells = (cell.strip() for cell in row[:5])
        if action not in _ACTIONS.get(kind, ()):
            expected = ", ".join(_ACTIONS.get(kind, (f"one of the kinds {', '.join(_ACTIONS)}",)))
            raise DataError(f"{where} says {action!r} for {kind!r}: expected {expected}.")
        numbers = []
        limits = (source.num_images, source.num_classes, source.num_classes)
        needed = (kind in ("mislabelled", "outlier"), True, action in ("move", "merge"))
        for cell, limit, is_needed in zip(cells, limits, needed, strict=True):
            if (cell or is_needed) and not (cell.isdigit() and int(cell) < limit):
                raise DataError(
                    f"{where} has {cell!r} in the columns image to other_class: expected a number below {limit:,}."
                )
            numbers.append(int(cell) if cell else -1)
        found.append(LabelFinding(kind=kind, action=action, image=numbers[0], label=numbers[1], other=numbers[2]))
    return found


# ---- the new set ----------------------------------------------------------------------------------------------------


class _Relabelled(SplitPart):
    """The images that stay, with other labels; the classes that have images are numbered 0, 1, … in their order."""

    def __init__(self, source: ImageSource, rows: NDArray[np.int64], labels_N: NDArray[np.int64]) -> None:
        super().__init__(source, rows, renumbers=False)
        self.classes, labels = np.unique(labels_N[rows], return_inverse=True)
        self.labels, self.num_classes = labels.astype(np.int64), len(self.classes)


def apply(
    source: ImageSource,
    findings: Sequence[LabelFinding],
    out: Path,
    names: Sequence[str],
    on_progress: OnProgress = no_progress,
) -> PackResult:
    """Writes the data as the findings say into a new folder: moved and removed images, merged and removed classes."""
    labels_N = np.array(source.labels, dtype=np.int64)
    for one in findings:
        if one.action == "move":
            labels_N[one.image] = one.other
    merged_C = merged_classes(findings, source.num_classes)
    removed = [one for one in findings if one.action == "remove"]
    # Images that are moved to a removed class go with it, and so does a class that is merged with it: it is the same identity.
    is_kept_N = ~np.isin(merged_C[labels_N], [merged_C[one.label] for one in removed if one.image < 0])
    is_kept_N[[one.image for one in removed if one.image >= 0]] = False
    if not is_kept_N.any():
        raise DataError(f"Nothing is left of {source.describe()}: the list removes every image.")
    made = _Relabelled(source, np.flatnonzero(is_kept_N), merged_C[labels_N])
    # Two sets may call different identities the same.
    text = "".join(f"{name}\n" for name in distinct_names([names[number] for number in made.classes.tolist()])).encode()
    return pack(made, out, PackOptions(), class_names=text, on_progress=on_progress)
