"""All settings, as frozen dataclasses with a description under each field. `read.py` fills them from TOML and `key=value`.

Values that can be computed are not settings. Values outside their range are refused here, before any process starts.
The metadata MAY_CHANGE marks settings that a resumed run may change; any other change is refused (training/start/resume.py).
docs/configuration.md is generated from this file by `make docs`.
"""

import itertools
import math
import re
from dataclasses import dataclass, field, fields
from typing import Literal

from megaclass_launch.errors import ConfigError

CLASS_MEANS = "class_means"
"""Value of train.init_centres: start each class centre at the mean embedding of its images."""

MAY_CHANGE: dict[str, object] = {"may_change_on_resume": True}
"""Field metadata of settings that do not change what a run computes, only where, how long or how fast it runs."""

REMOVED = {"data.decode": ("auto", "cpu"), "head.cuda_graph": ("auto", "on", "off")}
"""Settings of earlier versions, with the values that mean what happens today: those are ignored, others refused.

Every run folder and every checkpoint lists all settings of its version, so without this none of them could be read again.
"""


def within(allowed: str) -> dict[str, object]:
    """Returns the field metadata of a setting whose numbers have a range, such as "at least 1" or "in [0, 1)"."""
    return {"allowed": allowed}


def is_within(value: float, allowed: str) -> bool:
    """Tells whether a number lies in a range that is written as "0 or more", "at least 1", "above 0" or "in [0, pi / 2]"."""
    if interval := re.search(r"in ([\[(])([^,]+), ([^])]+)([])])", allowed):
        low, high = (math.pi / 2 if end == "pi / 2" else float(end) for end in interval.group(2, 3))
        is_above = value >= low if interval[1] == "[" else value > low
        return is_above and (value <= high if interval[4] == "]" else value < high)
    bound = re.match(r"(at least |above )?(\d+)( or more)?", allowed)
    assert bound is not None and (bound[1] or bound[3]), allowed
    return value > float(bound[2]) if bound[1] == "above " else value >= float(bound[2])


@dataclass(frozen=True, kw_only=True, slots=True)
class _Section:
    """A section of the settings. Its fields state their ranges; `check` has what depends on several of them."""

    def __post_init__(self) -> None:
        for one in fields(self):
            allowed, value = str(one.metadata.get("allowed", "")), getattr(self, one.name)
            if allowed and value is not None:
                self.require(one.name, is_within(value, allowed), allowed)
        self.check()

    def check(self) -> None:
        """Raises a ConfigError if settings do not fit each other."""

    def require(self, name: str, is_allowed: bool, allowed: str, value: object = None) -> None:
        """Raises a ConfigError unless the setting is allowed. value: shown instead of all of it."""
        if not is_allowed:
            value = getattr(self, name) if value is None else value
            shown = "empty" if value == "" else list(value) if isinstance(value, tuple) else value
            section = type(self).__name__.removesuffix("Config").lower()
            raise ConfigError(f"{section}.{name} is {shown}; it must be {allowed}.")


@dataclass(frozen=True, kw_only=True, slots=True)
class SynthConfig(_Section):
    """Synthetic identities, drawn into `data.path` if it holds no data yet."""

    identities: int = field(default=0, metadata=within("0 or more"))
    """Number of training identities to draw; 0 draws none and expects existing data."""
    images_per_identity: int = field(default=20, metadata=within("at least 1"))
    """Number of images per identity."""
    size: int = field(default=112, metadata=within("in [16, 512]"))
    """Side length of the square images in pixels."""
    pairs: int = field(default=1000, metadata=within("at least 20: ten folds of two"))
    """Number of verification pairs, drawn from identities that are not in the training data."""
    seed: int = field(default=0, metadata=within("0 or more"))
    """Random seed; the same seed draws the same pixels."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig(_Section):
    """Training images."""

    path: str = field(metadata=MAY_CHANGE)
    """Folder with train.rec, label.txt, tar shards or folders of identities (several: A,B); synthetic:C[xN]; debug; X.npy."""
    size: int | tuple[int, int] = 0
    """Input size of the model in pixels: one number for squares, or [height, width]; 0 uses the size of the first image."""
    fit: Literal["pad", "crop", "squash"] = "squash"
    """How images of another size are fitted: pad adds black borders, crop cuts off edges, squash stretches."""
    mirror: bool = True
    """Mirror half of the training images at random; evaluation then adds the embedding of the mirrored image."""
    augment: str = ""
    """Augmentations with their probabilities, such as crop:0.2,affine,jpeg:0.1, or pick:2,crop,blur,jpeg; see docs/data.md."""
    order: Literal["images", "classes"] = "images"
    """images: every image once per epoch; classes: all classes equally often, independent of their number of images."""
    images_per_class: int = 1
    """Number of consecutive images of the same class in a batch; requires data.order=classes."""
    keep_last: bool = False
    """Also train on the images after the last full batch of an epoch: they are spread over its last two batches."""
    workers: int | Literal["auto"] = field(default="auto", metadata=MAY_CHANGE)
    """Number of loader processes per rank; 0: threads of the rank itself. auto: by CPU cores on a GPU, 0 on a CPU."""
    threads: int = field(default=1, metadata=MAY_CHANGE | within("in [1, 256]"))
    """Number of reader threads of the rank itself, if it has no loader processes."""
    on_gpu: bool = field(default=False, metadata=MAY_CHANGE)
    """Decode all images once, at the start, and keep their pixels in the memory of every GPU; for sets that fit."""
    max_bad_fraction: float = field(default=0.001, metadata=MAY_CHANGE | within("in [0, 1]"))
    """Largest fraction of unreadable images; they are replaced by others, and the run stops when there are more."""
    stage: str = field(default="", metadata=MAY_CHANGE)
    """Folder in memory, such as /dev/shm, in which each host keeps a copy of the data; empty for none."""

    def check(self) -> None:
        self.require("path", bool(self.path), "a folder, such as data.path=photos")
        sides = (self.size,) if isinstance(self.size, int) else self.size
        is_size = self.size == 0 or all(8 <= side <= 4096 for side in sides)
        self.require("size", is_size, "0, one number in [8, 4096], or two: [height, width]", self.size)
        self.require("workers", self.workers == "auto" or 0 <= self.workers <= 256, "auto, or a number in [0, 256]")
        is_group = self.images_per_class == 1 or (self.images_per_class > 1 and self.order == "classes")
        self.require("images_per_class", is_group, "1, or more with data.order=classes")
        self.require("keep_last", not self.keep_last or self.order == "images", "off with data.order=classes")


@dataclass(frozen=True, kw_only=True, slots=True)
class BackboneConfig(_Section):
    """The network that computes embeddings of images."""

    name: str = "iresnet50"
    """slim, iresnet18, -34, -50, -100, -200, -2060, mbf, mbf_large, vit_t to vit_h; none, linear, mlp; timm/NAME; own:Class."""
    embedding_dim: int = field(default=512, metadata=within("in [2, 65536]"))
    """Number of dimensions of an embedding."""
    pretrained: str = field(default="", metadata=MAY_CHANGE)
    """Start a network of timm with its weights from the Hugging Face Hub (hub) or from a file; empty: with random ones."""
    batch_norm: Literal["local", "sync"] = "local"
    """local: statistics of each rank's own images; sync: statistics of the global batch, independent of the number of ranks."""
    dropout: float = field(default=0.0, metadata=within("in [0, 1)"))
    """Dropout probability of the last feature map, for backbones that have such a layer."""
    drop_path: float = field(default=0.0, metadata=within("in [0, 1)"))
    """Stochastic depth of transformers: probability of dropping the last block, rising linearly from 0 in the first one."""
    mask_patches: float = field(default=0.0, metadata=within("in [0, 1)"))
    """Fraction of each image's patches that transformers leave out in training."""
    freeze: tuple[str, ...] = ()
    """Name prefixes of frozen parameters, such as ["conv1", "layer1"]; batch statistics are still updated."""
    lora: int = field(default=0, metadata=within("in [0, 1024]"))
    """Rank of LoRA: train two narrow matrices per linear layer of a transformer's blocks in place of the layer; 0: none."""
    checkpoint_activations: bool = False
    """Recompute activations in the backward pass instead of storing them: less memory, about a third more time."""

    def check(self) -> None:
        needed = "empty unless backbone.name is timm/NAME: train.init_backbone takes weights of other networks"
        self.require("pretrained", self.name.startswith("timm/") or not self.pretrained, needed)


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadConfig(_Section):
    """The classification layer, whose class centres are split over all ranks. The number of classes comes from the data."""

    margin: str = "arcface"
    """Margin: softmax, arcface, cosface, combined, adaface, magface, curricularface, elasticface, dynamic, intertopk, \
uniface, sphereface2, or package.module:Class."""
    scale: float = field(default=64.0, metadata=within("in (0, 300]"))
    """Factor by which cosines are multiplied before the softmax."""
    margin_size: float | None = None
    """Size of the margin; unset uses the published value."""
    m1: float | None = field(default=None, metadata=within("in [0.5, 8]"))
    """m1 in cos(m1 * angle + m2) - m3, for the margin combined; unset means 1."""
    m2: float | None = field(default=None, metadata=within("in [0, pi / 2]: an angle in radians"))
    """m2 in cos(m1 * angle + m2) - m3, in radians, for the margin combined; unset means 0."""
    m3: float | None = field(default=None, metadata=within("in [0, 2]"))
    """m3 in cos(m1 * angle + m2) - m3, for the margin combined; unset means 0."""
    margin_options: tuple[tuple[str, float], ...] = ()
    """Further numbers of the margin by name, for example [["exponent", 0.25], ["offset", 0.05]] for the margin dynamic."""
    margin_schedule: tuple[tuple[int, float], ...] = ()
    """Share of the margin by step, linear in between: [[0, 0.0], [2000, 1.0]] is a warm-up; empty: the whole margin."""
    gradient: Literal["exact", "straight-through"] = "exact"
    """Derivative of arcface and combined: exact, or straight-through (the constant head.scale), as in InsightFace."""
    sample_rate: float | tuple[tuple[int, float], ...] = 1.0
    """Fraction of the negative classes used per step, 1.0 for the full softmax; or a schedule [[first step, rate], ...]."""
    negatives: Literal["uniform", "frequencies", "in-batch"] = "uniform"
    """How negatives are drawn: uniform, in proportion to the images of a class, or uniform with the batch's classes counted \
as drawn; the last two correct the loss for it (logQ)."""
    sample_positives: bool = False
    """Count the positives in head.sample_rate, as InsightFace does: that fraction of all classes is used per step."""
    optimizer: Literal["auto", "sgd", "adamw", "adagrad"] = "auto"
    """Optimizer of the class centres; auto is adagrad if negatives are sampled (head.sample_rate below 1), else sgd."""
    momentum: float = field(default=0.9, metadata=within("in [0, 1)"))
    """Momentum of sgd for the class centres."""
    weight_decay: float = field(default=5e-4, metadata=within("0 or more"))
    """Weight decay of the class centres that are used in a step."""
    subcentres: int = field(default=1, metadata=within("in [1, 255]"))
    """Number of centres per class; more than one tolerates noisy labels."""
    filter_above: float | None = field(default=None, metadata=within("a cosine in (0, 1]"))
    """Treat negatives with a larger cosine as cosine 0, because they are probably mislabelled; unset disables the filter."""
    storage: Literal["float32", "bf16"] = "float32"
    """Data type in which class centres are stored."""
    stored_gib: float | None = field(default=None, metadata=MAY_CHANGE | within("0 or more"))
    """GiB per rank for exponentials kept for the backward pass, the rest is recomputed; unset: an eighth of the memory."""
    loss: Literal["softmax", "decoupled", "sigmoid"] | None = None
    """Loss; unset: sigmoid for the margins uniface and sphereface2, otherwise softmax."""
    max_labels: int = field(default=1, metadata=within("in [1, 4096]"))
    """Largest number of labels of an image."""
    label_smoothing: float = field(default=0.0, metadata=within("in [0, 1)"))
    """Share of an image's weight that is spread evenly over all classes that are used in the step."""
    similarity: Literal["cosine", "inner"] = "cosine"
    """Compares images with centres: by cosines, or by inner products, of which head.scale is the inverse of the temperature."""
    bias: bool = False
    """Learn a bias per class, for inner products."""
    kernel: Literal["auto", "triton_fused", "chunked"] = field(default="auto", metadata=MAY_CHANGE)
    """Implementation of the head; auto chooses the fastest one for the device."""

    @property
    def is_sampled(self) -> bool:
        rates = (
            [self.sample_rate] if isinstance(self.sample_rate, float | int) else [rate for _, rate in self.sample_rate]
        )
        return any(rate != 1.0 for rate in rates)

    def check(self) -> None:
        if self.optimizer == "auto":
            object.__setattr__(self, "optimizer", "adagrad" if self.is_sampled else "sgd")
        for name in ("m1", "m2", "m3"):
            needed = "unset unless head.margin is combined; the other margins take head.margin_size"
            self.require(name, getattr(self, name) is None or self.margin == "combined", needed)
        is_named_once = self.margin != "combined" or self.margin_size is None or self.m2 is None
        self.require("margin_size", is_named_once, "unset if head.m2 is set: both are the angle of the margin combined")
        is_inner, needed = self.similarity == "inner", "softmax, cosface or your own with head.similarity=inner"
        self.require("margin", not is_inner or self.margin in ("softmax", "cosface") or ":" in self.margin, needed)
        needed = "below 64 with head.similarity=inner: the inverse of the temperature, for example 1"
        self.require("scale", not is_inner or self.scale < 64, needed)
        self.require("bias", is_inner or not self.bias, "false unless head.similarity is inner")
        self.require("filter_above", not is_inner or self.filter_above is None, "unset with head.similarity=inner")
        has_choice = self.gradient == "exact" or self.margin in ("softmax", "arcface", "cosface", "combined")
        self.require("gradient", has_choice, f"exact for the margin {self.margin}, which has no other derivative")
        steps = [step for step, _ in self.margin_schedule]
        is_rising = steps[:1] in ([], [0]) and all(a < b for a, b in itertools.pairwise(steps))
        needed = "a list of increasing steps that starts at 0, each with a share of the margin"
        self.require("margin_schedule", is_rising, needed, list(map(list, self.margin_schedule)))
        schedule = self.sample_rate if isinstance(self.sample_rate, tuple) else ((0, self.sample_rate),)
        for _, rate in schedule:
            self.require("sample_rate", 0 <= rate <= 1, "in [0, 1]: 1.0 = all classes, 0 = positives only", rate)
        steps = [step for step, _ in schedule]
        is_rising = steps[:1] == [0] and all(a < b for a, b in itertools.pairwise(steps))
        shown = [list(one) for one in schedule]
        self.require("sample_rate", is_rising, "a list of increasing steps that starts at 0", shown)


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig(_Section):
    """Optimizer of the backbone, and the learning rate of backbone and head."""

    name: Literal["sgd", "adamw"] = "sgd"
    """Optimizer of the backbone."""
    lr: float = field(default=0.1, metadata=within("above 0"))
    """Peak learning rate, reached after the warm-up."""
    head_lr: float | None = field(default=None, metadata=within("above 0"))
    """Peak learning rate of the class centres; unset uses optimizer.lr, and 0.2 if head.optimizer is adagrad."""
    momentum: float = field(default=0.9, metadata=within("in [0, 1)"))
    """Momentum of sgd for the backbone."""
    weight_decay: float = field(default=5e-4, metadata=within("0 or more"))
    """Weight decay of the backbone."""
    decay_vectors: bool = True
    """Apply the weight decay also to biases, norms, position embeddings and tokens; transformers do better without."""
    layer_decay: float = field(default=1.0, metadata=within("in (0, 1]"))
    """Learning rate of each block of the backbone as a multiple of that of the next one; below 1 for fine-tuning."""
    clip_norm: float = field(default=5.0, metadata=within("0 or more"))
    """Clip the backbone's gradient to this norm; 0 disables clipping."""
    warmup_epochs: float = field(default=0.0, metadata=within("0 or more"))
    """Number of epochs over which the learning rate rises linearly from 0."""
    schedule: Literal["polynomial", "cosine", "step"] = "polynomial"
    """How the learning rate decreases after the warm-up."""
    power: float = field(default=2.0, metadata=within("0 or more"))
    """Exponent of the polynomial schedule: lr * (1 - progress) ** power."""
    step_epochs: tuple[float, ...] = ()
    """Epochs at which the step schedule divides the learning rate by ten."""

    def check(self) -> None:
        is_rising = all(a < b for a, b in itertools.pairwise((0.0, *self.step_epochs)))
        self.require("step_epochs", is_rising, "increasing epochs above 0")
        needed = "polynomial or cosine, or have the epochs at which the rate falls: optimizer.step_epochs=8,14"
        self.require("schedule", self.schedule != "step" or bool(self.step_epochs), needed)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig(_Section):
    """The training run."""

    run_dir: str = field(metadata=MAY_CHANGE)
    """Run folder: config, metrics, checkpoints, report and model."""
    epochs: float = field(default=20.0, metadata=MAY_CHANGE | within("above 0"))
    """Number of passes over the data; fractions such as 0.5 are allowed."""
    global_batch: int = field(default=512, metadata=within("at least 1"))
    """Number of images per step over all ranks together."""
    nproc: int = field(default=1, metadata=MAY_CHANGE | within("in [1, 1024]"))
    """Number of processes to start on this machine; ignored under a launcher such as megaclass run, torchrun or srun."""
    device: Literal["auto", "cpu", "cuda"] = field(default="auto", metadata=MAY_CHANGE)
    """auto uses one GPU per process if there are GPUs, otherwise the CPU."""
    seed: int = 0
    """Random seed of weights, centres, data order, sampling and augmentation, independent of the number of ranks."""
    precision: Literal["auto", "bf16", "fp16", "float32"] = "auto"
    """auto uses bf16 on GPUs that support it, otherwise float32; fp16 uses a dynamic loss scale."""
    accumulate: int = 1
    """Number of parts into which each rank's batch is split to save memory; the step is the same as with the whole batch."""
    ema: float = field(default=0.0, metadata=within("in [0, 1)"))
    """Decay of an exponential moving average of the backbone's weights, which is then evaluated and exported; 0 disables it."""
    on_nan: Literal["stop", "skip"] = field(default="stop", metadata=MAY_CHANGE)
    """Reaction to a loss or gradient that is not finite: stop the run, or skip the step."""
    compile: bool | Literal["auto"] = field(default="auto", metadata=MAY_CHANGE)
    """Compile the backbone with torch.compile; if that fails, training continues without it. auto: a ViT on a GPU only."""
    cuda_graph: Literal["auto", "on", "off"] = field(default="auto", metadata=MAY_CHANGE)
    """Replay the backbone's steps as CUDA graphs: auto with enough memory and, on several ranks, if it measures a gain."""
    shard_backbone: bool = field(default=False, metadata=MAY_CHANGE)
    """Split the backbone, its gradients and their optimizer over the ranks (FSDP2), for backbones too large for one GPU."""
    compression: Literal["none", "fp16", "bf16", "fp8", "int8"] = "none"
    """Number format in which ranks exchange the backbone's gradients; rounding errors are carried over to the next step."""
    tensorboard: bool = field(default=False, metadata=MAY_CHANGE)
    """Also write the metrics for TensorBoard into the run folder."""
    wandb_project: str = field(default="", metadata=MAY_CHANGE)
    """Also send the metrics to this Weights & Biases project; empty disables it."""
    hang_after_s: float | None = field(default=None, metadata=MAY_CHANGE)
    """Seconds without a finished step after which the job is ended as hung; 0 never; unset: 10 median steps, at least 30."""
    mlflow_experiment: str = field(default="", metadata=MAY_CHANGE)
    """Also send the metrics to this MLflow experiment, at MLFLOW_TRACKING_URI if that is set; empty disables it."""
    trackio_project: str = field(default="", metadata=MAY_CHANGE)
    """Also send the metrics to this trackio project; empty disables it."""
    metrics_port: int = field(default=0, metadata=MAY_CHANGE | within("in [0, 65535]"))
    """Port at which rank 0 offers the current metrics to Prometheus; 0 disables it."""
    metrics_address: str = field(default="127.0.0.1", metadata=MAY_CHANGE)
    """Address at which train.metrics_port listens; 0.0.0.0 for all networks of the host."""
    profile: str = field(default="", metadata=MAY_CHANGE)
    """Steps of which a Chrome trace and, on a GPU, a memory snapshot are written: first:stop, for example 100:110."""
    profile_ranks: tuple[int, ...] = field(default=(0,), metadata=MAY_CHANGE)
    """Ranks that train.profile records."""
    report_steps: int = field(default=20, metadata=MAY_CHANGE | within("at least 1"))
    """Number of steps per row of metrics.jsonl; evaluations and checkpoints always write a row."""
    evaluate_epochs: float = field(default=0.0, metadata=MAY_CHANGE | within("0 or more"))
    """Number of epochs between evaluations, by which the best checkpoint is chosen; 0 evaluates at the end only."""
    evaluate_sets: tuple[str, ...] = field(default=(), metadata=MAY_CHANGE)
    """Sets to evaluate: names of .bin files next to the data, or paths of images to classify; empty: all next to the data."""
    patience: int = field(default=0, metadata=MAY_CHANGE | within("0 or more"))
    """End the run after this many evaluations in a row without a better accuracy on the first evaluation set; 0 disables."""
    checkpoint_epochs: float = field(default=1.0, metadata=MAY_CHANGE | within("above 0"))
    """Number of epochs between checkpoints; one is always written at the end."""
    keep_checkpoints: int = field(default=2, metadata=MAY_CHANGE | within("at least 1"))
    """Number of most recent checkpoints to keep, in addition to the best one."""
    commit_steps: int = field(default=50, metadata=MAY_CHANGE | within("at least 1"))
    """Elastic jobs: number of steps between commits, copies of the state in the ranks' memory; new ranks join at a commit."""
    async_checkpoints: bool = field(default=True, metadata=MAY_CHANGE)
    """Write checkpoints in the background while training continues; needs host memory for a copy of the state."""
    init_backbone: str | None = field(default=None, metadata=MAY_CHANGE)
    """Initial backbone: a .safetensors file, a run folder or checkpoint, InsightFace's .pth or .pt, or MXNet's .params."""
    init_centres: str | None = field(default=None, metadata=MAY_CHANGE)
    """Initial centres: a checkpoint or run folder, a folder of checkpoint_gpu_N.pt or N_centers.param, or class_means."""

    mean_weight: float | None = field(default=None, metadata=MAY_CHANGE | within("in [0, 1000]"))
    """After the last step, turn centres to (centre + this / sqrt(sample rate) * mean); unset: 2 if sampled, else 0."""

    def check(self) -> None:
        self.require("run_dir", bool(self.run_dir), "a folder, such as train.run_dir=runs/first")
        self.require("seed", 0 <= self.seed < 2**63, "in [0, 2^63)")
        self.require("accumulate", 1 <= self.accumulate <= self.global_batch, "in [1, train.global_batch]")
        needed = "0 if train.evaluate_epochs is 0: it counts the evaluations during training"
        self.require("patience", not self.patience or self.evaluate_epochs > 0, needed)
        self.require("hang_after_s", not self.hang_after_s or self.hang_after_s >= 1, "0, or at least 1 second")
        self.require("metrics_address", bool(self.metrics_address), "an address of this host")
        for name, allowed in (
            ("compile", ("auto", False)),
            ("cuda_graph", ("auto", "off")),
            ("compression", ("none",)),
        ):
            is_allowed = not self.shard_backbone or getattr(self, name) in allowed
            self.require(
                name, is_allowed, f"{allowed[0]} with train.shard_backbone, whose layers are gathered one by one"
            )
        is_range = self.profile == "" or self.profiled_steps()[0] < self.profiled_steps()[1]
        self.require("profile", is_range, "first:stop with 0 <= first < stop, for example 100:110")
        has_ranks = bool(self.profile_ranks) and all(rank >= 0 for rank in self.profile_ranks)
        self.require("profile_ranks", has_ranks, "a list of ranks, for example [0, 8]")
        has_means = self.init_centres != CLASS_MEANS or self.init_backbone is not None
        needed = "a path if train.init_backbone is unset: class means are computed with the initial backbone"
        self.require("init_centres", has_means, needed)

    def profiled_steps(self) -> tuple[int, int]:
        """Returns the first profiled step and the one after the last, counted from 0; (0, 0) for none."""
        first, _, stop = self.profile.partition(":")
        return (int(first), int(stop)) if first.isdecimal() and stop.isdecimal() else (0, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class DistilConfig(_Section):
    """Training with a teacher: a trained model whose embeddings the backbone learns to give."""

    teacher: str = field(default="", metadata=MAY_CHANGE)
    """Any model that megaclass.load opens: a run folder, a model file, hf://user/name; empty: no teacher."""
    cosine: float = field(default=10.0, metadata=within("0 or more"))
    """Weight of 1 - cosine between the embedding and the teacher's, added to the loss; needs the same embedding size."""
    relations: float = field(default=0.0, metadata=within("0 or more"))
    """Weight of the squared difference to the teacher's cosines between the images of a rank; any embedding size."""
    cache: bool = field(default=False, metadata=MAY_CHANGE)
    """Embed every image with the teacher once, before the first step, into the run folder: 2 bytes per number."""

    def check(self) -> None:
        needed = "above 0 if distil.relations is 0: without both the teacher has no effect"
        has_effect = not self.teacher or self.cosine > 0 or self.relations > 0
        self.require("cosine", has_effect, needed)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportConfig(_Section):
    """Formats in which the trained backbone is exported."""

    onnx: bool = field(default=True, metadata=MAY_CHANGE)
    """Also export model.onnx (requires megaclass[onnx]); model.safetensors is always written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """All settings of a training run."""

    data: DataConfig
    train: TrainConfig
    synth: SynthConfig = field(default_factory=SynthConfig)
    backbone: BackboneConfig = field(default_factory=BackboneConfig)
    head: HeadConfig = field(default_factory=HeadConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    distil: DistilConfig = field(default_factory=DistilConfig)
    export: ExportConfig = field(default_factory=ExportConfig)

    def is_compiled(self, *, on_gpu: bool) -> bool:
        """Decides train.compile=auto: on an H200, vit_b trains 1.4 times as fast compiled, iresnet50 not faster."""
        if self.train.compile == "auto":
            return on_gpu and self.backbone.name.startswith("vit") and not self.train.shard_backbone
        return self.train.compile

    def may_replay_backbone(self) -> bool:
        """Returns True if the settings allow CUDA graphs of the backbone on a GPU.

        `auto` also limits their memory, and measures on several ranks whether they are faster. Several parts of a batch would
        share the memory of one. Random layers learn from the host which images come. A backbone of the user's own, which may
        do anything in its forward, must be switched on.
        """
        setting, layers = self.train.cuda_graph, self.backbone
        is_own = ":" in layers.name or layers.name.startswith("timm/")
        return (
            setting != "off"
            and not self.train.shard_backbone
            # Too small to gain anything, or without parameters.
            and layers.name not in ("none", "linear", "mlp")
            and (setting == "on" or not is_own)
            and self.train.accumulate == 1
            and layers.batch_norm == "local"
            and layers.dropout == layers.drop_path == layers.mask_patches == 0
            and not layers.checkpoint_activations
            and not self.is_compiled(on_gpu=True)
        )
