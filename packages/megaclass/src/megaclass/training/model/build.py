"""Builds the model from the settings: backbone, head, optimizer, precision."""

import difflib
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from megaclass.backbones import own_size
from megaclass.backbones.configured import blocks_of, checkpoint_activations, configured_layers, freeze, layer_depths
from megaclass.backbones.lora import without_lora
from megaclass.checkpoint.tensor_file import tensors_with_prefix
from megaclass.config.read import own_class
from megaclass.config.schema import Config, HeadConfig, OptimizerConfig
from megaclass.data.sources.source import ImageSource, TensorSource
from megaclass.distributed.data_parallel import NothingToAverage, data_parallel, exact_average
from megaclass.distributed.sharded import ShardedBackbone
from megaclass.head.margins import MARGINS, Margin
from megaclass.head.partial_fc import PartialFC
from megaclass.head.row_optimizers import ROW_OPTIMIZERS, RowOptimizer
from megaclass.image_size import ImageSize, compact_size, has_rows, height_and_width, input_shape
from megaclass.training.model.distil import Distiller, new_distiller
from megaclass.training.model.graphed_backbone import GraphedBackbone, can_capture
from megaclass.training.model.keyed_dropout import KeyedDropout, key_dropout
from megaclass.training.model.precision import Ema, LossScale, Precision, RunningStatistics, choose_precision
from megaclass_launch.errors import ConfigError
from megaclass_launch.ranks.collectives import group_rank
from megaclass_launch.ranks.sync_batch_norm import synchronise_batch_norm
from megaclass_launch.ranks.wire_formats import compression_hook
from megaclass_launch.world import World

_logger = logging.getLogger("megaclass.training")


@dataclass
class Model:
    """Backbone, head and their optimizers: everything that a checkpoint must hold."""

    backbone: nn.Module
    parallel: DistributedDataParallel | NothingToAverage | ShardedBackbone
    """The backbone in DDP, which averages its gradients over the ranks; compiled, or replayed as CUDA graphs, by settings."""
    parameters: dict[str, nn.Parameter]
    """Parameters of the backbone, or this rank's rows of them, on which optimizer and moving average work."""
    head: PartialFC
    optimizer: torch.optim.Optimizer
    precision: Precision
    loss_scale: LossScale
    dropouts: list[KeyedDropout]
    ema: Ema | None
    statistics: RunningStatistics
    distiller: Distiller | None = None

    @property
    def sharded(self) -> ShardedBackbone | None:
        """The backbone, if train.shard_backbone has split it over the ranks."""
        return self.parallel if isinstance(self.parallel, ShardedBackbone) else None

    @contextmanager
    def for_evaluation(self) -> Iterator[nn.Module]:
        """Collective. Yields a plain network to evaluate and export: with the moving average if train.ema is set."""
        with (
            self.ema.in_place() if self.ema is not None else nullcontext(),
            self.sharded.whole_on_device() if self.sharded is not None else nullcontext(self.backbone) as network,
        ):
            yield without_lora(network)

    @contextmanager
    def loaded(self) -> Iterator[nn.Module]:
        """Yields a network of whole weights to load others into; the model then has them."""
        yield self.backbone if self.sharded is None else self.sharded.whole
        if self.sharded is not None:
            self.sharded.take_from_whole()
        if self.ema is not None:
            # The moving average starts at the loaded weights, not at the random ones.
            self.ema.load({name: parameter.detach() for name, parameter in self.parameters.items()})

    def zero_grad(self) -> None:
        if self.sharded is not None:
            self.sharded.take_gradients()
        self.optimizer.zero_grad()

    def shared_state(self) -> dict[str, Tensor]:
        """Returns the tensors that are the same on all ranks, by name.

        Collective with train.shard_backbone: an all-gather per tensor of backbone, optimizer and moving average. Rank 0 alone
        then has them, in host memory, and never more than one of them on its GPU.
        """
        state, whole = {}, self._whole
        for name, tensor in self.backbone.state_dict().items():
            state[f"backbone.{name}"] = whole(name, self.parameters[name]) if name in self.parameters else tensor
        for name, parameter in self.parameters.items():
            for key, value in self.optimizer.state[parameter].items():
                if isinstance(value, Tensor):
                    is_split = value.shape == parameter.shape
                    state[f"optimizer.{name}.{key}"] = whole(name, value) if is_split else value
        # Class centres are not here: every rank saves its own rows.
        state |= {f"head.margin_{name}": value for name, value in self.head.margin_state.items()}
        state |= {f"loss_scale.{name}": value for name, value in self.loss_scale.state().items()}
        means = self.ema.means if self.ema is not None else {}
        return state | {f"ema.{name}": whole(name, mean) for name, mean in means.items()}

    def _whole(self, name: str, tensor: Tensor) -> Tensor:
        if self.sharded is None:
            return tensor.detach()
        gathered = self.sharded.gathered(name, tensor)
        return gathered.cpu() if group_rank(None) == 0 else gathered.new_empty(0)

    def load_shared_state(self, state: dict[str, Tensor]) -> None:
        with self.loaded() as network:
            # Names of an older checkpoint must stay readable: they are part of the file format.
            network.load_state_dict(tensors_with_prefix(state, "backbone."))
        for name, parameter in self.parameters.items():
            for key, value in tensors_with_prefix(state, f"optimizer.{name}.").items():
                if self.sharded is not None and value.ndim:
                    value = self.sharded.rows_of(value)
                if value.shape == parameter.shape:
                    # In the memory layout of the weights: a fused optimizer walks through both by address.
                    value = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
                elif self.optimizer.defaults.get("fused"):
                    # Adam counts its steps on the CPU unless it is fused.
                    value = value.to(parameter.device)
                self.optimizer.state[parameter][key] = value
        for name, value in tensors_with_prefix(state, "head.margin_").items():
            self.head.margin_state[name].copy_(value)
        self.loss_scale.load(tensors_with_prefix(state, "loss_scale."))
        if self.ema is not None:
            means = tensors_with_prefix(state, "ema.")
            self.ema.load(means if self.sharded is None else {n: self.sharded.rows_of(m) for n, m in means.items()})


def input_size(config: Config, source: ImageSource) -> tuple[int, int]:
    """Returns (height, width) of the backbone's input: data.size, the size of a network of timm, or that of the first image."""
    size = config.data.size or own_size(config.backbone.name)
    return height_and_width(size) if size else source.image_size


def build_model(config: Config, source: ImageSource, world: World, device: torch.device) -> Model:
    """Collective. DDP copies the weights of rank 0 to all ranks, and the head compares its settings between ranks."""
    precision = choose_precision(config.train, device)
    image_size = compact_size(input_size(config, source))
    backbone, dropouts = _build_backbone(config, image_size, device)
    margin, has_several = build_margin(config.head), isinstance(source, TensorSource) and source.labels.ndim > 1
    head = PartialFC(
        config.backbone.embedding_dim,
        source.num_classes,
        margin=margin,
        sample_rate=config.head.sample_rate,
        sample_positives=config.head.sample_positives,
        negatives=config.head.negatives,
        class_counts=_class_counts(config, margin, source),
        margin_schedule=config.head.margin_schedule,
        loss=config.head.loss,
        max_labels=max(config.head.max_labels, *source.labels.shape[1:]) if has_several else config.head.max_labels,
        label_smoothing=config.head.label_smoothing,
        similarity=config.head.similarity,
        bias=config.head.bias,
        optimizer=build_row_optimizer(config.head),
        seed=config.train.seed,
        max_batch=-(-config.train.global_batch // world.size),
        kernel=config.head.kernel,
        storage=config.head.storage,
        num_subcentres=config.head.subcentres,
        filter_above=config.head.filter_above,
        stored_bytes=None if config.head.stored_gib is None else round(config.head.stored_gib * 2**30),
        device=device,
    )
    # Before the parameters are split.
    names_by_group = _parameter_groups(config.optimizer, backbone)
    parallel: DistributedDataParallel | NothingToAverage | ShardedBackbone
    if config.train.shard_backbone and names_by_group:
        parallel = ShardedBackbone(backbone, blocks_of(backbone), device)
        parameters = parallel.own
    else:
        parallel = _in_parallel(config, backbone, image_size, world, device)
        parameters = dict(backbone.named_parameters())
    return Model(
        backbone=backbone,
        parallel=parallel,
        parameters=parameters,
        head=head,
        optimizer=_build_optimizer(config.optimizer, names_by_group, parameters),
        precision=precision,
        loss_scale=LossScale(precision, device),
        dropouts=dropouts,
        ema=Ema(parameters, config.train.ema) if config.train.ema else None,
        statistics=RunningStatistics(backbone),
        distiller=new_distiller(config, device, precision),
    )


def _in_parallel(
    config: Config, backbone: nn.Module, image_size: ImageSize, world: World, device: torch.device
) -> DistributedDataParallel | NothingToAverage:
    called = backbone
    if config.is_compiled(on_gpu=device.type == "cuda"):
        called = _compiled(backbone, image_size)
    elif config.may_replay_backbone() and can_capture(device, backbone):
        called = GraphedBackbone(backbone, config.train.cuda_graph, world.size)
    parallel = data_parallel(called)
    # A hook replaces the all-reduce of DDP: by a compressed one, or on CPUs by one with an exact average.
    if config.train.compression != "none":
        parallel.register_comm_hook(*compression_hook(config.train.compression))
    elif device.type == "cpu":
        parallel.register_comm_hook(None, exact_average)
    return parallel


def _class_counts(config: Config, margin: Margin, source: ImageSource) -> Tensor | None:
    """Returns the number of images of every class, if the settings of the head need them."""
    if not margin.needs_class_counts and config.head.negatives == "uniform":
        return None
    labels = source.labels[source.labels >= 0]
    return torch.from_numpy(np.bincount(labels, minlength=source.num_classes))


def build_margin(config: HeadConfig) -> Margin:
    margin, size_field = _margin_class(config.margin)
    given = {"multiplier": config.m1, "angle": config.m2, "cosine": config.m3}
    if config.margin_size is not None:
        if size_field is None:
            raise ConfigError(
                f"head.margin_size is {config.margin_size}, but the margin {config.margin} has no single size."
            )
        given[size_field] = config.margin_size
    chosen: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if hasattr(margin, "gradient"):
        chosen["gradient"] = config.gradient
    known = [field.name for field in fields(margin) if field.name not in ("scale", "gradient")]  # type: ignore[arg-type]
    for name, value in config.margin_options:
        if name not in known or name in chosen:
            raise ConfigError(
                f"head.margin_options names {name!r}, but the margin {config.margin} takes {', '.join(known) or 'no numbers'}, "
                f"each once; head.margin_size is {size_field!r}."
            )
        # Counts, such as the k of intertopk, are whole numbers.
        chosen[name] = int(value) if value == int(value) and isinstance(getattr(margin, name, 0.0), int) else value
    build: Callable[..., Margin] = margin
    return build(scale=config.scale, **chosen)


def _margin_class(name: str) -> tuple[type[Margin], str | None]:
    """Returns the class, and the field that `head.margin_size` sets; for a class of the user, the field `margin`."""
    if ":" in name:
        margin = own_class("head.margin", name, "mymargins:SquaredMargin")
        names = {field.name for field in fields(margin)} if is_dataclass(margin) else set()
        if not (isinstance(margin, type) and issubclass(margin, Margin) and "scale" in names):
            raise ConfigError(
                f"head.margin is {name!r}, which is not a dataclass derived from megaclass.Margin with a field scale."
            )
        return margin, "margin" if "margin" in names else None
    if name not in MARGINS:
        close = difflib.get_close_matches(name, MARGINS, n=1)
        hint = f"; did you mean {close[0]}?" if close else "."
        raise ConfigError(
            f"head.margin is {name!r}; expected one of {', '.join(MARGINS)}, or package.module:Class of your own{hint}"
        )
    return MARGINS[name]


def build_row_optimizer(config: HeadConfig) -> RowOptimizer:
    chosen: dict[str, Any] = {"momentum": config.momentum} if config.optimizer == "sgd" else {}
    return ROW_OPTIMIZERS[config.optimizer](weight_decay=config.weight_decay, **chosen)


def _build_backbone(
    config: Config, image_size: ImageSize, device: torch.device
) -> tuple[nn.Module, list[KeyedDropout]]:
    # The initial weights depend on the seed alone: every rank draws the same ones, whatever ran before.
    torch.manual_seed(config.train.seed)
    backbone = configured_layers(config.backbone, image_size)
    # After all layers are in place, and before anything wraps them.
    dropouts = key_dropout(backbone, config.train.seed)
    if config.backbone.batch_norm == "sync":
        synchronise_batch_norm(backbone)
    freeze(backbone, config.backbone)
    if config.backbone.checkpoint_activations:
        checkpoint_activations(backbone, config.backbone)
    if not config.train.shard_backbone:
        backbone.to(device)
    backbone.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return backbone, dropouts


def _compiled(backbone: nn.Module, image_size: ImageSize) -> nn.Module:
    """Returns the compiled backbone, or the backbone itself if compiling fails; tries two images, because compiling is lazy."""
    device = next(itertools.chain(backbone.parameters(), backbone.buffers())).device
    images = torch.zeros((2, *input_shape(image_size)), device=device)
    images = images if has_rows(image_size) else images.to(memory_format=torch.channels_last)
    # Static shapes: otherwise a second batch size would make the dimension dynamic, and the kernels slower.
    compiled = torch.compile(backbone, dynamic=False)
    was_training = backbone.training
    try:
        backbone.eval()
        with torch.no_grad():
            compiled(images)
    except Exception as error:  # a compiler may fail in any way, which must not end the run
        reason = str(error).strip().split("\n")[0]
        _logger.warning(f"torch.compile failed, continuing without it: {reason}")
        return backbone
    finally:
        backbone.train(was_training)
    return compiled  # type: ignore[return-value]


def _build_optimizer(
    config: OptimizerConfig,
    names_by_group: Mapping[tuple[float, float], list[str]],
    trained: Mapping[str, nn.Parameter],
) -> torch.optim.Optimizer:
    # lr_scale is the group's share of the learning rate.
    groups: list[dict[str, Any]] = [
        {"params": [trained[name] for name in names], "lr_scale": lr_scale, "weight_decay": decay}
        for (lr_scale, decay), names in names_by_group.items()
    ]
    # As a group, because torch refuses a list of no parameters: features need not pass a layer.
    groups = groups or [{"params": [], "lr_scale": 1.0}]
    parameters = [parameter for group in groups for parameter in group["params"]]
    # Fused optimizers read `found_inf` on the device, so a bad step is skipped without waiting for the host.
    fused = bool(parameters) and parameters[0].device.type == "cuda"
    if config.name == "adamw":
        return torch.optim.AdamW(groups, lr=config.lr, weight_decay=config.weight_decay, fused=fused)
    sgd = torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay, fused=fused)
    if config.momentum:
        # The fused optimizer would create its buffers uninitialised in the first step, and keep them if that is skipped.
        for parameter in parameters:
            sgd.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return sgd


def _parameter_groups(config: OptimizerConfig, backbone: nn.Module) -> dict[tuple[float, float], list[str]]:
    """Returns the names of the trained parameters by their share of the learning rate and their weight decay."""
    depths = layer_depths(backbone) if config.layer_decay < 1 else {}
    last = max(depths.values(), default=0)
    groups: dict[tuple[float, float], list[str]] = {}
    for name, parameter in backbone.named_parameters():
        if parameter.requires_grad:
            lr_scale = config.layer_decay ** (last - depths.get(name, last))
            is_vector = parameter.ndim <= 1 or name.endswith(("pos_embed", "_token"))
            decay = 0.0 if is_vector and not config.decay_vectors else config.weight_decay
            groups.setdefault((lr_scale, decay), []).append(name)
    return groups


def generator_states(device: torch.device) -> dict[str, Tensor]:
    """Returns the state of torch's random number generators on this rank: layers of users' own may draw from them."""
    states = {"generator_cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["generator_cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_generators(states: dict[str, Tensor], device: torch.device) -> None:
    """Sets torch's random number generators to saved states, as far as this device has them."""
    if "generator_cpu" in states:
        torch.set_rng_state(states["generator_cpu"])
    if "generator_cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["generator_cuda"], device)
