"""Class centres from the mean embeddings of their images: for the start of a fine-tuning, and after the last step.

One pass over the data without augmentation: in each step every rank embeds its part of the next images. The embeddings of
all ranks are gathered, and each rank adds up those of its own classes, in the order of the data independent of the number
of ranks.

Why centres are placed at the end: the centre of a class with few images is pulled to them a few times per epoch only, and
with sampled negatives it is pushed from similar classes only in the steps that draw it. The embeddings are hardly worse for
it, the trained centres are (benchmarks/glyphs.md).
"""

import logging
import math

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from megaclass.config.schema import Config
from megaclass.data.augment import normalise
from megaclass.data.sources.source import ImageSource
from megaclass.distributed.agreement import on_every_rank
from megaclass.distributed.data_parallel import average_buffers_
from megaclass.errors import DataError
from megaclass.evaluation.embed import evaluating
from megaclass.head.gather_batch import gather_batch
from megaclass.progress import progress_bar
from megaclass.training.model.build import Model
from megaclass.training.observer import DataErrors
from megaclass.training.run.run import Run
from megaclass_launch.errors import ConfigError, UserError
from megaclass_launch.rank_status import own_status
from megaclass_launch.ranks.collectives import gather_blocks

_logger = logging.getLogger("megaclass.training")
_DEFAULT_WEIGHT = 2.0
_LOWEST_RATE = 1e-4


def start_at_class_means(run: Run, model: Model) -> None:
    """Collective. Passes over the data once; classes without a readable image keep random centres.

    With sub-centres, the first one of each class starts at the mean and the others at random: equal ones would stay equal.
    Traffic: one all-gather per step, as in the head's forward: W * (16 + max_batch * (8 + D * 4)) bytes.
    """
    if run.config.head.similarity == "inner":
        raise ConfigError(
            "train.init_centres is class_means, but head.similarity is inner: the mean of a class's embeddings is not a centre "
            "for inner products. Leave train.init_centres unset, or name a run."
        )
    sums_KD = _finite_sums(
        run, model, f"by {run.config.train.init_backbone}", "train.init_backbone is a trained backbone"
    )
    num_started = gather_blocks(model.head.store.start_at_(sums_KD), None).sum()
    if run.world.is_main:
        _logger.info(f"{int(num_started):,} of {run.source.num_classes:,} centres start at the mean of their images.")


def mean_weight(config: Config, source: ImageSource) -> float:
    """Returns the weight of the class means in the centres after the last step.

    The setting or its default, divided by the square root of the last sample rate: centres that are drawn rarely say less
    than means do (docs/decisions/head.md).
    """
    if source.labels.ndim > 1 or config.head.similarity == "inner":
        # A sample of several classes is not an example of each, and the length of inner products' centres counts.
        return 0.0
    weight = config.train.mean_weight
    if weight is None:
        weight = _DEFAULT_WEIGHT if config.head.is_sampled and config.head.subcentres == 1 else 0.0
    rate = config.head.sample_rate
    last_rate = rate if isinstance(rate, float | int) else rate[-1][1]
    return weight / math.sqrt(max(last_rate, _LOWEST_RATE))


def place_centres(run: Run, model: Model) -> bool:
    """Collective, after the last step. Turns each centre towards the mean of its images' embeddings; returns whether it did.

    The new direction is that of (unit centre + mean_weight() * unit mean); lengths stay. An error leaves the centres as they
    are: it must not cost the training. Traffic as above. Memory: as many float32 numbers as there are centres on this rank.
    """
    weight = mean_weight(run.config, run.source)
    if not weight:
        return False
    # With local batch norm each rank has statistics of its own; the exported model has their average.
    average_buffers_(model.backbone)
    try:
        on_every_rank(lambda: _check_room(model), run.device)
        sums_KD = _finite_sums(run, model, "", "the training has converged")
    except (UserError, OSError) as error:
        if run.world.is_main:
            _logger.warning(f"the centres stay as they were trained, because their class means failed: {error}")
        return False
    model.head.store.turn_to_(sums_KD, weight)
    if run.world.is_main:
        _logger.info(
            f"the centres were moved towards the means of their classes, which count {weight:.3g} times as much as the "
            f"trained directions (train.mean_weight)."
        )
    return True


def _check_room(model: Model) -> None:
    device, needed = model.head.device, len(model.head.classes) * model.head.embedding_dim * 4
    if device.type != "cuda":
        return
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if 2 * needed > free:
        raise DataError(f"the class means need {2 * needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free.")


def _finite_sums(run: Run, model: Model, by: str, check_that: str) -> Tensor:
    """Returns (K, D) sums of the unit embeddings of this rank's classes; raises on all ranks if one of them cannot."""
    data_errors = DataErrors()
    with model.for_evaluation() as network:
        sums_KD = _sum_by_class(run, model, network, data_errors)
    is_finite_K = sums_KD.isfinite().all(1)

    def check() -> None:
        data_errors.check()
        if not is_finite_K.all():
            first = model.head.classes.start + int((~is_finite_K).nonzero()[0])
            raise DataError(
                f"The embeddings of class {first} {by}{' ' if by else ''}are not finite: "
                f"check that {check_that} and that train.precision is wide enough for it."
            )

    # All ranks leave together, with the error of the rank that has one.
    on_every_rank(check, run.device)
    return sums_KD


def _sum_by_class(run: Run, model: Model, network: nn.Module, data_errors: DataErrors) -> Tensor:
    """Returns (K, D) float32 sums of the unit embeddings of this rank's classes; partial sums if the data of a rank failed.

    A rank whose data failed sends empty batches, and 1 instead of 0 in the field for the step's number: all ranks read
    that one step later and leave together.
    """
    config, source, world, device = run.config, run.source, run.world, run.device
    own, width = model.head.classes, model.head.embedding_dim
    # Blocks of the all-gather have the same size on all ranks: that of the largest part.
    largest = -(-config.train.global_batch // world.size)
    # The last row collects images of classes on other ranks; it is dropped.
    sums = torch.zeros((len(own) + 1, width), device=device)
    starts = range(0, source.num_images, config.train.global_batch)
    nothing = run.loader.blank(1, 0).only(torch.zeros(1, dtype=torch.bool))
    batches = data_errors.keep_error(run.loader.once(config.train.global_batch), nothing)
    is_failed = torch.zeros((), dtype=torch.bool)
    with evaluating(network), progress_bar("class means", source.num_images, is_shown=world.is_main) as bar:
        for start, loaded in zip(starts, batches, strict=False):
            # Without mirroring and augmentation.
            inputs = (
                loaded.inputs(device)
                if loaded.treatment is None
                else (normalise(loaded.images.to(device)).to(memory_format=torch.channels_last),)
            )
            with model.precision.autocast(device):
                some = len(loaded.labels) > 0
                embeddings_BD = network(*inputs) if some else torch.zeros((0, width), device=device)
            unit_BD = F.normalize(embeddings_BD.float())
            # No collective of its own: the flag travels in the block that is gathered anyway.
            failed = int(data_errors.is_any)
            batch = gather_batch(unit_BD, loaded.labels.to(device), step=failed, max_batch=largest, group=None)
            local_G = batch.labels_G - own.start
            rows_G = torch.where((local_G >= 0) & (local_G < len(own)), local_G, len(own))
            _add_rows_(sums, rows_G, batch.embeddings_GD)
            done = min(start + config.train.global_batch, source.num_images)
            # Shows the agent that the pass advances.
            own_status().progress(
                allowed_s=0.0, phase="class means", detail=f"{done:,} of {source.num_images:,} images"
            )
            bar.advance_to(done)
            if is_failed:
                # Read one step late, so the host does not wait for the GPU in every step.
                break
            is_failed = batch.steps_W.any()
    return sums[:-1]


def _add_rows_(sums: Tensor, rows_G: Tensor, values_GD: Tensor) -> None:
    """Adds rows in the same order in every run: index_add_ does not on a GPU, index_put_ does not on a CPU."""
    if sums.is_cuda:
        sums.index_put_((rows_G,), values_GD, accumulate=True)
    else:
        sums.index_add_(0, rows_G, values_GD)
