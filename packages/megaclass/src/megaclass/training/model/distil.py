"""Distillation: the embeddings of the backbone are pulled to those of a teacher, next to the loss of the classes.

    cosine      mean over the images of 1 - cosine(embedding, the teacher's embedding); both have the same size
    relations   mean of (cosine of two images here - their cosine at the teacher)^2, over the pairs in a rank's part of a step

The teacher sees the same augmented pixels, scaled to its input size. With distil.cache it embeds every image once, before the
first step, unaugmented and in both flips; the file teacher.npy in the run folder (N x D float16) is mapped by all ranks.
The loss in metrics and report is that of the classes alone.
"""

import json
import logging
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from numpy.typing import NDArray
from torch import Tensor

from megaclass.config.schema import Config, DistilConfig
from megaclass.data.loading.choose import available_cores
from megaclass.data.sources.source import ImageSource
from megaclass.data.tools.verify import SubsetSource
from megaclass.distributed.agreement import on_every_rank, on_every_rank_for_long, text_of_main_rank
from megaclass.evaluation.embed import embed_part, part_of_rank
from megaclass.evaluation.images import SourceImages
from megaclass.image_size import height_and_width
from megaclass.inference import LoadedModel, load, weights_fingerprint
from megaclass.progress import progress_bar
from megaclass.training.model.precision import Precision
from megaclass_launch.errors import ConfigError
from megaclass_launch.files import write_text
from megaclass_launch.rank_status import own_status
from megaclass_launch.ranks.collectives import gather_blocks
from megaclass_launch.world import World

_logger = logging.getLogger("megaclass.training")
CACHE_FILES = _CACHE_FILE, _STAMP_FILE = "teacher.npy", "teacher.json"
_CHUNK_IMAGES = 2**16


class Distiller:
    """The teacher, or its embeddings, and the loss that follows from them."""

    def __init__(self, settings: DistilConfig, teacher: LoadedModel, embedding_dim: int, precision: Precision) -> None:
        if settings.cosine and teacher.embedding_dim != embedding_dim:
            raise ConfigError(
                f"distil.teacher gives {teacher.embedding_dim} numbers per embedding, and backbone.embedding_dim is "
                f"{embedding_dim}: set it to {teacher.embedding_dim}, or use the relations alone: distil.cosine=0 "
                f"distil.relations=1."
            )
        self.settings, self.teacher, self._precision = settings, teacher, precision
        self._size = height_and_width(teacher.image_size)
        self._cached_ND: NDArray[np.float16] | None = None
        for parameter in teacher.network.parameters():
            parameter.requires_grad = False

    def loss(
        self, inputs: tuple[Tensor, ...], indices_B: NDArray[np.int64], embeddings_BD: Tensor, num_images: int
    ) -> Tensor:
        """Returns this part's share of the loss; num_images: of this rank in the whole step, over which the means are."""
        want_BD, have_BD = F.normalize(self._targets(inputs, indices_B)), F.normalize(embeddings_BD.float())
        loss = have_BD.new_zeros(())
        if self.settings.cosine:
            loss = self.settings.cosine * (1 - (want_BD * have_BD).sum(1)).sum()
        if self.settings.relations:
            difference_BB = have_BD @ have_BD.T - want_BD @ want_BD.T
            # The mean of a row, so the sum over the parts of a step is a mean over its images.
            loss = loss + self.settings.relations * difference_BB.square().mean(1).sum()
        return loss / max(1, num_images)

    @torch.no_grad()
    def _targets(self, inputs: tuple[Tensor, ...], indices_B: NDArray[np.int64]) -> Tensor:
        if self._cached_ND is not None:
            return torch.from_numpy(self._cached_ND[indices_B]).to(inputs[0].device).float()
        if inputs[0].ndim == 4 and inputs[0].shape[2:] != self._size:
            inputs = (F.interpolate(inputs[0], self._size, mode="bilinear", antialias=True),)
        with self._precision.autocast(inputs[0].device):
            rows_BD: Tensor = self.teacher.network(*inputs)
        return rows_BD.float()

    def fill_cache(self, folder: Path, source: ImageSource, fingerprint: str, config: Config, world: World) -> None:
        """Collective. Embeds every image with the teacher, unless the run folder holds that already, and maps the file.

        Traffic per 65,536 images: one all-gather of their embeddings, 65,536 x (D + 1) floats.
        """
        device, width = self.teacher.device, self.teacher.embedding_dim
        stamp = {"teacher": weights_fingerprint(self.teacher.network), "data": fingerprint, "images": source.num_images}
        text = json.dumps(stamp | {"fit": config.data.fit}) + "\n"

        def is_there() -> bool:
            has_both = (folder / _CACHE_FILE).is_file() and (folder / _STAMP_FILE).is_file()
            return has_both and (folder / _STAMP_FILE).read_text(encoding="utf-8") == text

        if not text_of_main_rank(lambda: "whole" if is_there() else "", device):
            new_bar = progress_bar("teacher embeddings", source.num_images, is_shown=world.is_main)
            with new_bar as bar, own_status().long_work("teacher embeddings"):
                out = None
                if world.is_main:
                    (folder / _STAMP_FILE).unlink(missing_ok=True)
                    shape = (source.num_images, width)
                    out = np.lib.format.open_memmap(folder / _CACHE_FILE, mode="w+", dtype=np.float16, shape=shape)
                for start in range(0, source.num_images, _CHUNK_IMAGES):
                    rows = np.arange(start, min(start + _CHUNK_IMAGES, source.num_images))
                    images = SourceImages(
                        source=SubsetSource(source, rows), image_size=self.teacher.image_size, fit=config.data.fit
                    )
                    part = part_of_rank(len(rows), world.rank, world.size)
                    own = on_every_rank(lambda images=images, part=part: self._embed(images, part, world), device)  # type: ignore[misc]
                    found_ND = F.normalize(gather_blocks(own, None).flatten(0, 1)[: len(rows), :-1])
                    if out is not None:
                        out[rows] = found_ND.half().cpu().numpy()
                    bar.advance_to(int(rows[-1]) + 1)
                if out is not None:
                    out.flush()
                    write_text(folder / _STAMP_FILE, text)
        # Waits for rank 0, so the file is whole wherever it is mapped.
        self._cached_ND = on_every_rank_for_long(lambda: np.load(folder / _CACHE_FILE, mmap_mode="r"), device)

    def _embed(self, images: SourceImages, part: list[int], world: World) -> Tensor:
        threads = max(1, available_cores() // world.local_size)
        # Training replaces images that cannot be read, and counts them: their rows are never used.
        return embed_part(
            self.teacher.network,
            images,
            part,
            device=self.teacher.device,
            num_threads=threads,
            on_bad=lambda index, error: None,
        )


def new_distiller(config: Config, device: torch.device, precision: Precision) -> Distiller | None:
    """Returns None without distil.teacher. Every rank opens the teacher."""
    if not config.distil.teacher:
        return None
    teacher = load(config.distil.teacher, device=device)
    teacher.network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return Distiller(config.distil, teacher, config.backbone.embedding_dim, precision)
