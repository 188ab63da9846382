"""Labels titles: hashed words of any number, several labels per title, precision and propensity-scored precision.

    python examples/titles.py                         # 2,000 labels, about a minute on two cores
    python examples/titles.py --labels 200 --epochs 2
    megaclass run -np 2 python examples/titles.py     # on two ranks

The titles are drawn: a label has words of its own, a title has words of its one to four labels and common ones between them.
Few labels have most of the titles, as in the catalogues of shops. P@k is the share of the first k answers that are right.
PSP@k weighs a right answer the more, the rarer its label is (Jain, Prabhu and Varma, KDD 2016), and compares the sum with the
best possible one.
"""

import argparse
import itertools
import os
import zlib

import numpy as np
import torch
from torch import Tensor, nn

import megaclass
from megaclass.data.sources.open_source import FORMATS
from megaclass.data.sources.source import SourceFormat

NUM_BUCKETS, MOST_LABELS, WORDS_PER_LABEL, NUM_COMMON = 16384, 4, 5, 300
TITLES_PER_LABEL = 12


def hashed(title: str) -> Tensor:
    """Returns the buckets of the words and of the pairs of neighbours (T,); bucket 0 is left to the padding."""
    words = title.split()
    parts = [*words, *(f"{one} {other}" for one, other in itertools.pairwise(words))]
    return torch.tensor([1 + zlib.crc32(part.encode()) % (NUM_BUCKETS - 1) for part in parts])


def drawn_titles(num_labels: int, num_titles: int, seed: int) -> tuple[list[str], np.ndarray]:
    """Returns titles and their labels (N, 4), -1 after the last one. The first titles have every label once."""
    random = np.random.default_rng(seed)
    popularity = 1 / np.arange(1, num_labels + 1)
    labels = random.choice(num_labels, size=(num_titles, MOST_LABELS), p=popularity / popularity.sum())
    labels[:, 0] = np.where(np.arange(num_titles) < num_labels, np.arange(num_titles) % num_labels, labels[:, 0])
    counts = random.integers(1, MOST_LABELS + 1, size=num_titles)
    titles, kept = [], np.full_like(labels, -1)
    for row, (drawn, count) in enumerate(zip(labels, counts, strict=True)):
        own = list(dict.fromkeys(drawn[:count].tolist()))
        kept[row, : len(own)] = own
        words = [f"w{label}x{word}" for label in own for word in random.choice(WORDS_PER_LABEL, size=2, replace=False)]
        words += [f"c{word}" for word in random.integers(NUM_COMMON, size=random.integers(1, 6))]
        titles.append(" ".join(random.permutation(words)))
    return titles, kept


class Titles:
    """Titles as buckets of words, of different lengths: a TensorSource with several labels (docs/other-fields.md)."""

    # Any number of buckets, each one of 16,384.
    image_size = (0, NUM_BUCKETS)

    def __init__(self, num_labels: int, num_titles: int, seed: int) -> None:
        self.titles, self.labels = drawn_titles(num_labels, num_titles, seed)
        self.num_classes, self.num_images = num_labels, num_titles
        self.buckets = [hashed(title) for title in self.titles]

    def tensors(self, indices: np.ndarray) -> list[Tensor]:
        return [self.buckets[index] for index in indices.tolist()]

    def read(self, index: int) -> bytes:
        return self.titles[index].encode()

    def name_of(self, index: int) -> str:
        return f"title {index}"

    def describe(self) -> str:
        return f"{self.num_images:,} titles with {self.num_classes:,} labels, up to {MOST_LABELS} per title"


class TitlesFormat(SourceFormat):
    """`titles:LABELS:TITLES`: drawn titles."""

    notation = "titles:LABELS:TITLES"

    @classmethod
    def matches(cls, path: str) -> bool:
        return path.startswith("titles:")

    def open(self) -> Titles:
        num_labels, num_titles = map(int, self.path.split(":")[1:])
        return Titles(num_labels, num_titles, seed=0)


class BagOfWords(nn.Module):
    """The mean of the vectors of all buckets of a title, and two layers."""

    def __init__(self, embedding_dim: int, image_size: tuple[int, int]) -> None:
        super().__init__()
        self.vectors = nn.Embedding(image_size[1], embedding_dim, padding_idx=0)
        self.layers = nn.Sequential(
            nn.LayerNorm(embedding_dim), nn.Linear(embedding_dim, 2 * embedding_dim), nn.GELU(),
            nn.Linear(2 * embedding_dim, embedding_dim),
        )  # fmt: skip

    def forward(self, buckets_BT: Tensor, lengths_B: Tensor) -> Tensor:
        """Takes padded buckets and the number of buckets of each title; the vector of the padding is 0."""
        return self.layers(self.vectors(buckets_BT).sum(1) / lengths_B[:, None])


def precisions(answers_Nk: np.ndarray, labels_NK: np.ndarray, counts_C: np.ndarray, k: int) -> tuple[float, float]:
    """Returns P@k and PSP@k. counts_C: training titles of each label."""
    # The propensity of a label: the rarer it is, the likelier it was forgotten when the titles were labelled.
    constant = (np.log(counts_C.sum()) - 1) * 2.5**0.55
    weights_C = 1 + constant * (counts_C + 1.5) ** -0.55
    hits, weighted, best = 0, 0.0, 0.0
    for answers, labels in zip(answers_Nk[:, :k], labels_NK, strict=True):
        own = labels[labels >= 0]
        right = np.intersect1d(answers, own)
        hits += len(right)
        weighted += weights_C[right].sum()
        best += np.sort(weights_C[own])[::-1][:k].sum()
    return hits / (k * len(answers_Nk)), weighted / best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--labels", type=int, default=2000)
    parser.add_argument("--epochs", type=float, default=10)
    parser.add_argument("--run-dir", default="runs/titles")
    options = parser.parse_args()

    FORMATS.insert(0, TitlesFormat)
    run = megaclass.train(
        {
            "data": {"path": f"titles:{options.labels}:{TITLES_PER_LABEL * options.labels}"},
            "backbone": {"name": "__main__:BagOfWords", "embedding_dim": 128},
            "head": {"margin": "softmax", "scale": 20.0, "optimizer": "adamw"},
            "optimizer": {"name": "adamw", "lr": 0.003, "weight_decay": 0.0, "warmup_epochs": 0.5, "power": 1.0},
            "train": {"run_dir": options.run_dir, "epochs": options.epochs, "global_batch": 256},
            "export": {"onnx": False},
        },
        overwrite=True,
    )
    if os.environ.get("RANK", "0") != "0":
        return  # rank 0 reports
    model = megaclass.load(run.folder, backbone="__main__:BagOfWords")
    trained = Titles(options.labels, TITLES_PER_LABEL * options.labels, seed=0).labels
    counts_C = np.bincount(trained[trained >= 0], minlength=options.labels)
    new = Titles(options.labels, 2 * options.labels, seed=1)
    found = model.classify(new.buckets, top=5)
    answers_Nk = np.array([[int(guess.name) for guess in one.guesses] for one in found])
    for k in (1, 3, 5):
        precision, weighted = precisions(answers_Nk, new.labels, counts_C, k)
        print(f"P@{k} {precision:.1%}  PSP@{k} {weighted:.1%}")


if __name__ == "__main__":
    main()
