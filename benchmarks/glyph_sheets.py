"""Pictures to judge by eye how many images of a test of the glyphs show another character than their label says.

    python benchmarks/glyph_sheets.py runs/glyphs-small --data datasets/glyphs --out sheets

Each image of the test stands next to the same character in test A (TW-Kai), and next to the image of A that the model finds
closest among the other characters. `random-*.png` show random images: the share of wrong ones there is an estimate of what no
classifier can get right. `worst.png` shows those that look least like their own character and most like another to the model.
"""

import argparse
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

import megaclass
from megaclass.data.decode import decode_batch
from megaclass.data.sources.open_source import format_of, open_source
from megaclass.inference import LoadedModel

SIDE, PER_ROW, PER_SHEET, BLOCK = 48, 6, 102, 2000


def read(folder: Path, model: LoadedModel) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns grey images, their labels and their unit embeddings."""
    source = open_source(folder)
    images = np.empty((source.num_images, SIDE, SIDE), dtype=np.uint8)
    for index in range(source.num_images):
        images[index] = decode_batch([source.read(index)], (SIDE, SIDE), [source.name_of(index)], "squash")[0][..., 0]
    blocks = np.split(images, range(BLOCK, len(images), BLOCK))
    rows = [model.embed(np.repeat(block[..., None], 3, axis=3)) for block in blocks]
    return images, np.asarray(source.labels), np.concatenate(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--data", type=Path, required=True, help="folder that `megaclass data glyphs` wrote")
    parser.add_argument("--test", default="test-b")
    parser.add_argument("--sheets", type=int, default=2, help="sheets of random images (2)")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    model = megaclass.load(options.model)
    names = [name.decode() for name in format_of(options.data / options.test).class_names() or []]
    images, labels, rows = read(options.data / options.test, model)
    others, other_labels, other_rows = read(options.data / "test-a", model)
    places = {label: place for place, label in enumerate(other_labels.tolist())}
    known = np.array([index for index, label in enumerate(labels.tolist()) if label in places])
    same = np.array([places[label] for label in labels[known].tolist()])
    own = (rows[known] * other_rows[same]).sum(axis=1)
    best, closest = np.empty(len(known)), np.empty(len(known), dtype=np.int64)
    for start in range(0, len(known), BLOCK):
        here = slice(start, start + BLOCK)
        cosines = rows[known[here]] @ other_rows.T
        cosines[np.arange(len(cosines)), same[here]] = -2
        best[here], closest[here] = cosines.max(axis=1), cosines.argmax(axis=1)
    order = np.random.default_rng(0).permutation(len(known))
    sheets = {f"random-{n}": order[n * PER_SHEET : (n + 1) * PER_SHEET] for n in range(options.sheets)}
    sheets["worst"] = np.argsort(own - best)[:PER_SHEET]
    options.out.mkdir(parents=True, exist_ok=True)
    for name, chosen in sheets.items():
        width, height = 3 * SIDE + 16, SIDE + 14
        sheet = Image.new("L", (PER_ROW * width, -(-len(chosen) // PER_ROW) * height), 255)
        draw = ImageDraw.Draw(sheet)
        for number, place in enumerate(chosen.tolist()):
            left, top = number % PER_ROW * width, number // PER_ROW * height
            draw.text((left + 2, top), f"{number}: {own[place]:.2f} {best[place]:.2f}", fill=0)
            for column, picture in enumerate((images[known[place]], others[same[place]], others[closest[place]])):
                sheet.paste(Image.fromarray(255 - picture), (left + 2 + column * (SIDE + 2), top + 12))
        sheet.resize((2 * sheet.width, 2 * sheet.height)).save(options.out / f"{name}.png")
        pairs = [names[labels[known[place]]] + names[other_labels[closest[place]]] for place in chosen.tolist()]
        print(f"{options.out / name}.png: {' '.join(pairs)}")


if __name__ == "__main__":
    main()
