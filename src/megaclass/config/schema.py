"""Every setting: frozen dataclasses with the meaning under each field. TOML files and `key=value` fill them.

What can be computed is not a setting. A value out of its range is refused here, before any process starts.
"""

import itertools
import math
from dataclasses import dataclass, field
from typing import Literal

from megaclass.errors import ConfigError

CLASS_MEANS = "class_means"


@dataclass(frozen=True, kw_only=True, slots=True)
class SynthConfig:
    """Identities drawn by code, when `data.path` does not hold any data yet."""

    identities: int = 0
    """Training identities to draw; 0: none, the data must be there."""
    images_per_identity: int = 20
    """Images of each."""
    size: int = 112
    """Side of an image in pixels."""
    pairs: int = 1000
    """Verification pairs, of identities that do not occur in training."""
    seed: int = 0
    """Fixes every pixel."""

    def __post_init__(self) -> None:
        _require("synth.identities", self.identities, self.identities >= 0, "0 or more")
        _require("synth.images_per_identity", self.images_per_identity, self.images_per_identity >= 1, "at least 1")
        _require("synth.size", self.size, 16 <= self.size <= 512, "in [16, 512]")
        _require("synth.pairs", self.pairs, self.pairs >= 20, "at least 20: ten folds of two")
        _require("synth.seed", self.seed, self.seed >= 0, "0 or more")


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Where the images come from."""

    path: str
    """Folder with train.rec, label.txt, tar shards or folders of identities, several by commas; synthetic:C[xN]; debug."""
    size: int | tuple[int, int] = 0
    """Size of the model's input: one number for squares, or [height, width]; 0: the size of the first image."""
    fit: Literal["pad", "crop", "squash"] = "squash"
    """How images of another size are fitted: pad: scaled, black borders; crop: scaled, edges cut off; squash: stretched."""
    mirror: bool = True
    """Mirror half of the images, chosen by (seed, epoch, image); evaluation then adds the mirrored image's embedding."""
    augment: str = ""
    """Augmentations in order, with shares: crop:0.2,low_resolution,blur,colour,grey,occlusion,jpeg:0.1; empty: none."""
    order: Literal["images", "classes"] = "images"
    """images: each once an epoch; classes: all equally often, whatever their number of images."""
    images_per_class: int = 1
    """Images of one class side by side in a batch, with data.order=classes."""
    keep_last: bool = False
    """Show what is left after the last whole batch too: the last two batches of an epoch share it."""
    threads: int = 1
    """Threads a process that read and decode."""
    max_bad_fraction: float = 0.001
    """Share of the images that may be unreadable and are replaced; beyond it the run stops."""
    stage: str = ""
    """Folder in memory, such as /dev/shm/faces, that the data is copied to once a host and read from; empty: none."""

    def __post_init__(self) -> None:
        _require("data.path", self.path, bool(self.path), "a folder")
        sides = (self.size,) if isinstance(self.size, int) else self.size
        is_size = self.size == 0 or all(8 <= side <= 4096 for side in sides)
        _require("data.size", self.size, is_size, "0, one number in [8, 4096], or two: [height, width]")
        _require("data.threads", self.threads, 1 <= self.threads <= 256, "in [1, 256]")
        is_group = self.images_per_class == 1 or (self.images_per_class > 1 and self.order == "classes")
        _require("data.images_per_class", self.images_per_class, is_group, "1, or more with data.order=classes")
        is_fraction = 0 <= self.max_bad_fraction <= 1
        _require("data.max_bad_fraction", self.max_bad_fraction, is_fraction, "in [0, 1]")
        _require(
            "data.keep_last",
            self.keep_last,
            not self.keep_last or self.order == "images",
            "off with data.order=classes",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class BackboneConfig:
    """Images -> embeddings."""

    name: str = "iresnet50"
    """slim (for CPUs), iresnet18, -34, -50, -100, -200, -2060, mbf, mbf_large, vit_t, -s, -b, -l, -h, or your module:Class."""
    embedding_dim: int = 512
    """Numbers in an embedding."""
    batch_norm: Literal["local", "sync"] = "local"
    """local: statistics of each rank's own images; sync: of the global batch, the same on any number of ranks."""
    dropout: float = 0.0
    """Share of the last feature map dropped, chosen by (seed, step, image); backbones that have such a layer."""
    drop_path: float = 0.0
    """Transformers: share of the images whose branch the last block drops in training, rising linearly from 0 in the first."""
    mask_patches: float = 0.0
    """Transformers: share of each image's patches left out in training; chosen, like drop_path, by (seed, step, image)."""
    freeze: tuple[str, ...] = ()
    """Beginnings of the names of parameters that are not trained, such as ["conv1", "layer1"]; batch statistics go on."""
    checkpoint_activations: bool = False
    """Compute activations again in backward instead of keeping them: less memory, a third more time."""

    def __post_init__(self) -> None:
        _require("backbone.dropout", self.dropout, 0 <= self.dropout < 1, "in [0, 1)")
        _require("backbone.drop_path", self.drop_path, 0 <= self.drop_path < 1, "in [0, 1)")
        _require("backbone.mask_patches", self.mask_patches, 0 <= self.mask_patches < 1, "in [0, 1)")
        _require("backbone.embedding_dim", self.embedding_dim, 2 <= self.embedding_dim <= 65536, "in [2, 65536]")


# Setting, lowest and highest value, both in words: those of CombinedMargin's fields.
_COMBINED_RANGES = (
    ("m1", 0.5, 8.0, "in [0.5, 8]"),
    ("m2", 0.0, math.pi / 2, "in [0, pi / 2]: an angle in radians"),
    ("m3", 0.0, 2.0, "in [0, 2]"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadConfig:
    """Embeddings -> loss, the classes split over all ranks. Their number comes from the data."""

    margin: Literal[
        "softmax", "arcface", "cosface", "combined", "adaface", "magface", "curricularface", "elasticface"
    ] = "arcface"
    """What is done to the target's cosine."""
    scale: float = 64.0
    """Factor of the cosines."""
    margin_size: float | None = None
    """Size of the margin; unset: the margin's published one."""
    m1: float | None = None
    """Factor of the angle in cos(m1 * angle + m2) - m3, for the margin combined; unset: 1."""
    m2: float | None = None
    """Angle in radians added by the margin combined; unset: 0."""
    m3: float | None = None
    """Amount subtracted from the cosine by the margin combined; unset: 0."""
    gradient: Literal["exact", "straight-through"] = "exact"
    """Derivative of arcface and combined: exact, or straight-through (taken as head.scale), as InsightFace trains."""
    sample_rate: float | tuple[tuple[int, float], ...] = 1.0
    """Share of the negatives that take part in a step, 1.0 = full softmax; or [[first step, rate], ...]."""
    optimizer: Literal["sgd", "adamw", "adagrad"] = "sgd"
    """How the centres move."""
    momentum: float = 0.9
    """Momentum of sgd."""
    weight_decay: float = 5e-4
    """Decay of the rows that take part."""
    subcentres: int = 1
    """Centres a class; more than one absorbs noisy labels."""
    filter_above: float | None = None
    """Negatives with a larger cosine count as cosine 0; unset: none."""
    storage: Literal["float32", "bf16"] = "float32"
    """Dtype of the centres."""
    stored_gib: float = 4.0
    """Memory a rank may use to keep exponentials for backward; what does not fit is computed again."""
    kernel: Literal["auto", "triton_fused", "chunked", "reference"] = "auto"
    """auto: the fastest that runs on the device."""

    def __post_init__(self) -> None:
        _require("head.scale", self.scale, 0 < self.scale <= 300, "in (0, 300]")
        for name, low, high, allowed in _COMBINED_RANGES:
            value = getattr(self, name)
            _require(f"head.{name}", value, value is None or low <= value <= high, allowed)
            needed = "unset where head.margin is not combined; head.margin_size sizes a single margin"
            _require(f"head.{name}", value, value is None or self.margin == "combined", needed)
        is_named_once = self.margin != "combined" or self.margin_size is None or self.m2 is None
        needed = "unset where head.m2 is set: both are the angle of the margin combined"
        _require("head.margin_size", self.margin_size, is_named_once, needed)
        has_choice = self.gradient == "exact" or self.margin in ("softmax", "arcface", "cosface", "combined")
        _require("head.gradient", self.gradient, has_choice, f"exact for the margin {self.margin}, which has no other")
        schedule = self.sample_rate if isinstance(self.sample_rate, tuple) else ((0, self.sample_rate),)
        for _, rate in schedule:
            _require("head.sample_rate", rate, 0 <= rate <= 1, "in [0, 1]: 1.0 = all classes, 0 = positives only")
        steps = [step for step, _ in schedule]
        is_rising = steps[:1] == [0] and all(a < b for a, b in itertools.pairwise(steps))
        _require("head.sample_rate", list(map(list, schedule)), is_rising, "a list of steps that rise from 0")
        _require("head.stored_gib", self.stored_gib, self.stored_gib >= 0, "0 or more")
        _require("head.momentum", self.momentum, 0 <= self.momentum < 1, "in [0, 1)")
        _require("head.weight_decay", self.weight_decay, self.weight_decay >= 0, "0 or more")
        _require("head.subcentres", self.subcentres, 1 <= self.subcentres <= 255, "in [1, 255]")
        is_cosine = self.filter_above is None or 0 < self.filter_above <= 1
        _require("head.filter_above", self.filter_above, is_cosine, "a cosine in (0, 1]")


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """How the backbone moves, and the learning rate of both."""

    name: Literal["sgd", "adamw"] = "sgd"
    """How the backbone moves."""
    lr: float = 0.1
    """Highest learning rate, reached after the warm-up."""
    head_lr: float | None = None
    """The centres' own; unset: the same."""
    momentum: float = 0.9
    """Momentum of the backbone's SGD."""
    weight_decay: float = 5e-4
    """Decay of the backbone's weights."""
    clip_norm: float = 5.0
    """Longest gradient of the backbone, over all its parameters; 0: any."""
    warmup_epochs: float = 0.0
    """Epochs over which the learning rate rises from 0."""
    schedule: Literal["polynomial", "cosine", "step"] = "polynomial"
    """How it falls from then on."""
    power: float = 2.0
    """polynomial: as (1 - progress) ** power."""
    step_epochs: tuple[float, ...] = ()
    """step: epochs at which it is divided by ten."""

    def __post_init__(self) -> None:
        _require("optimizer.lr", self.lr, self.lr > 0, "above 0")
        _require("optimizer.head_lr", self.head_lr, self.head_lr is None or self.head_lr > 0, "above 0")
        _require("optimizer.momentum", self.momentum, 0 <= self.momentum < 1, "in [0, 1)")
        _require("optimizer.weight_decay", self.weight_decay, self.weight_decay >= 0, "0 or more")
        _require("optimizer.clip_norm", self.clip_norm, self.clip_norm >= 0, "0 or more")
        _require("optimizer.warmup_epochs", self.warmup_epochs, self.warmup_epochs >= 0, "0 or more")
        _require("optimizer.power", self.power, self.power >= 0, "0 or more")
        is_rising = all(a < b for a, b in itertools.pairwise((0.0, *self.step_epochs)))
        _require("optimizer.step_epochs", list(self.step_epochs), is_rising, "epochs above 0 that rise")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """The run."""

    run_dir: str
    """Folder of the run: config, metrics, checkpoints, report, model."""
    epochs: float = 20.0
    """Passes over the data; 0.5 is half of one."""
    global_batch: int = 512
    """Images in a step over all ranks, whatever their number."""
    nproc: int = 1
    """Processes to start on this machine when no other starter is in charge."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: one GPU a process when there are any."""
    seed: int = 0
    """Fixes centres, order, draws and mirroring, whatever the number of ranks."""
    precision: Literal["auto", "bf16", "fp16", "float32"] = "auto"
    """auto: bf16 on GPUs that have it, float32 elsewhere; fp16 uses a loss scale on which all ranks agree."""
    accumulate: int = 1
    """Parts a rank's batch is cut into, of two images at least; the step is that of the whole batch, at a part's memory."""
    ema: float = 0.0
    """Decay of a running mean of the backbone's weights, which is then evaluated and exported; 0: none."""
    on_nan: Literal["stop", "skip"] = "stop"
    """What a loss or gradient that is not finite does, on all ranks in the same step."""
    compile: bool = False
    """torch.compile the backbone: faster for ViT, not for iresnet; where that fails it says why and goes on without."""
    compression: Literal["none", "fp16", "bf16", "fp8", "int8"] = "none"
    """Width in which the backbone's gradients travel; what rounding loses is added in the next step."""
    tensorboard: bool = False
    """Also write the metrics for TensorBoard, into the run folder."""
    wandb_project: str = ""
    """Also send the metrics to this project of Weights & Biases."""
    report_steps: int = 20
    """Steps between two rows of metrics.jsonl; evaluations and checkpoints have a row in any case."""
    evaluate_epochs: float = 0.0
    """Epochs between two evaluations on all ranks; 0: at the end only. The most accurate checkpoint is then the best one."""
    evaluate_sets: tuple[str, ...] = ()
    """Names of the .bin files beside the data to evaluate on, such as ["lfw", "agedb_30"]; empty: all."""
    checkpoint_epochs: float = 1.0
    """Epochs between two checkpoints; one is always written at the end."""
    keep_checkpoints: int = 2
    """How many of the last ones are kept, beside the best."""
    async_checkpoints: bool = True
    """Write checkpoints while training goes on; the copy they are written from takes host memory."""
    init_backbone: str | None = None
    """Weights to begin with: a .safetensors file, a run folder or checkpoint, InsightFace's .pth or .pt, MXNet's .params."""
    init_centres: str | None = None
    """Centres to begin with: a checkpoint, a run folder, a folder of checkpoint_gpu_N.pt or N_centers.param; class_means."""

    def __post_init__(self) -> None:
        _require("train.run_dir", self.run_dir, bool(self.run_dir), "a folder")
        _require("train.epochs", self.epochs, self.epochs > 0, "above 0")
        _require("train.global_batch", self.global_batch, self.global_batch >= 1, "at least 1")
        _require("train.nproc", self.nproc, 1 <= self.nproc <= 1024, "in [1, 1024]")
        _require("train.seed", self.seed, 0 <= self.seed < 2**63, "in [0, 2^63)")
        _require(
            "train.accumulate", self.accumulate, 1 <= self.accumulate <= self.global_batch, "in [1, train.global_batch]"
        )
        _require("train.ema", self.ema, 0 <= self.ema < 1, "in [0, 1)")
        _require("train.report_steps", self.report_steps, self.report_steps >= 1, "at least 1")
        _require("train.evaluate_epochs", self.evaluate_epochs, self.evaluate_epochs >= 0, "0 or more")
        _require("train.checkpoint_epochs", self.checkpoint_epochs, self.checkpoint_epochs > 0, "above 0")
        _require("train.keep_checkpoints", self.keep_checkpoints, self.keep_checkpoints >= 1, "at least 1")
        has_means = self.init_centres != CLASS_MEANS or self.init_backbone is not None
        needed = "a path where train.init_backbone is unset: class means are those of the initial backbone's embeddings"
        _require("train.init_centres", self.init_centres, has_means, needed)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportConfig:
    """What the trained backbone is written as."""

    onnx: bool = True
    """Also model.onnx (needs megaclass[onnx]); model.safetensors is always written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """A training run, whole."""

    data: DataConfig
    train: TrainConfig
    synth: SynthConfig = field(default_factory=SynthConfig)
    backbone: BackboneConfig = field(default_factory=BackboneConfig)
    head: HeadConfig = field(default_factory=HeadConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    export: ExportConfig = field(default_factory=ExportConfig)


def _require(name: str, value: object, is_allowed: bool, allowed: str) -> None:
    if not is_allowed:
        raise ConfigError(f"{name} is {value}; it must be {allowed}.")
