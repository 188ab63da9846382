"""Settings -> the parts of a run."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from megaclass.backbones import build_backbone
from megaclass.config import Config, HeadConfig
from megaclass.data.source import RecordSource
from megaclass.distributed.data_parallel import data_parallel
from megaclass.errors import ConfigError
from megaclass.head.margins import (
    AdaFace,
    ArcFace,
    CombinedMargin,
    CosFace,
    CurricularFace,
    ElasticFace,
    MagFace,
    Margin,
    NormalisedSoftmax,
)
from megaclass.head.partial_fc import PartialFC
from megaclass.head.row_optimizers import RowAdagrad, RowAdamW, RowOptimizer, RowSGD
from megaclass.world import World

# Margin, and the field that head.margin_size sets.
_MARGINS: dict[str, tuple[Any, str | None]] = {
    "softmax": (NormalisedSoftmax, None),
    "arcface": (ArcFace, "margin"),
    "cosface": (CosFace, "margin"),
    "combined": (CombinedMargin, "angle"),
    "adaface": (AdaFace, "margin"),
    "magface": (MagFace, None),
    "curricularface": (CurricularFace, "margin"),
    "elasticface": (ElasticFace, "margin"),
}


@dataclass
class Model:
    """What is trained: everything a checkpoint must hold."""

    backbone: nn.Module
    parallel: DistributedDataParallel
    head: PartialFC
    optimizer: torch.optim.SGD

    def shared_state(self) -> dict[str, Tensor]:
        """Tensors that are the same on all ranks, by name."""
        state = {f"backbone.{name}": tensor for name, tensor in self.backbone.state_dict().items()}
        for name, parameter in self.backbone.named_parameters():
            for key, value in self.optimizer.state[parameter].items():
                if isinstance(value, Tensor):
                    state[f"optimizer.{name}.{key}"] = value
        return state | {f"head.{name}": buffer for name, buffer in self.head.named_buffers(recurse=False)}

    def load_shared_state(self, state: dict[str, Tensor]) -> None:
        self.backbone.load_state_dict(_part(state, "backbone."))
        for name, parameter in self.backbone.named_parameters():
            for key, value in _part(state, f"optimizer.{name}.").items():
                self.optimizer.state[parameter][key] = value.to(parameter.device)
        for name, value in _part(state, "head.").items():
            self.head.get_buffer(name).copy_(value)


def build_model(config: Config, source: RecordSource, world: World, device: torch.device) -> Model:
    """Collective: DDP gives all ranks the weights of rank 0, the head compares its settings."""
    torch.manual_seed(config.train.seed)
    backbone = build_backbone(
        config.backbone.name, embedding_dim=config.backbone.embedding_dim, image_size=source.image_size[0]
    ).to(device)
    backbone.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    head = PartialFC(
        config.backbone.embedding_dim,
        source.num_classes,
        margin=build_margin(config.head),
        sample_rate=config.head.sample_rate,
        optimizer=build_row_optimizer(config.head),
        seed=config.train.seed,
        max_batch=-(-config.train.global_batch // world.size),
        kernel=config.head.kernel,
        storage=config.head.storage,
        num_subcentres=config.head.subcentres,
        filter_above=config.head.filter_above,
        device=device,
    )
    optimizer = torch.optim.SGD(
        [parameter for parameter in backbone.parameters() if parameter.requires_grad],
        lr=config.optimizer.lr,
        momentum=config.optimizer.momentum,
        weight_decay=config.optimizer.weight_decay,
    )
    return Model(backbone, data_parallel(backbone), head, optimizer)


def build_margin(config: HeadConfig) -> Margin:
    margin, size_field = _MARGINS[config.margin]
    if config.margin_size is None:
        built: Margin = margin(scale=config.scale)
        return built
    if size_field is None:
        raise ConfigError(
            f"head.margin_size is {config.margin_size}, but the margin {config.margin} has no single size."
        )
    sized: Margin = margin(scale=config.scale, **{size_field: config.margin_size})
    return sized


def build_row_optimizer(config: HeadConfig) -> RowOptimizer:
    builders: dict[str, Any] = {
        "sgd": partial(RowSGD, momentum=config.momentum),
        "adamw": RowAdamW,
        "adagrad": RowAdagrad,
    }
    optimizer: RowOptimizer = builders[config.optimizer](weight_decay=config.weight_decay)
    return optimizer


def _part(state: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
