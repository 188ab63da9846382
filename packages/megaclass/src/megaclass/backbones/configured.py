"""Builds a backbone as the section [backbone] of the settings describes it: layers, frozen parameters, recomputation."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megaclass.backbones import build_backbone
from megaclass.backbones.lora import add_lora
from megaclass.backbones.vit import VisionTransformer
from megaclass.config.schema import BackboneConfig
from megaclass.image_size import ImageSize
from megaclass_launch.errors import ConfigError
from megaclass_launch.ranks.sync_batch_norm import SyncBatchNorm


def backbone_on_paper(settings: BackboneConfig, image_size: ImageSize) -> nn.Module:
    """Builds the backbone on torch's default device for `megaclass plan`: its memory, not its values, are those of a run."""
    backbone = configured_layers(settings, image_size)
    freeze(backbone, settings)
    if settings.checkpoint_activations:
        checkpoint_activations(backbone, settings)
    backbone.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return backbone


def configured_layers(settings: BackboneConfig, image_size: ImageSize) -> nn.Module:
    """Builds the layers with their dropout; nothing is frozen yet."""
    backbone = build_backbone(settings.name, embedding_dim=settings.embedding_dim, image_size=image_size)
    if settings.dropout:
        if not isinstance(getattr(backbone, "dropout", None), nn.Dropout):
            raise ConfigError(f"backbone.dropout is {settings.dropout}, but {settings.name} has no layer `dropout`.")
        backbone.dropout = nn.Dropout(settings.dropout)
    if settings.drop_path or settings.mask_patches:
        if not isinstance(backbone, VisionTransformer):
            raise ConfigError(
                f"backbone.drop_path is {settings.drop_path} and backbone.mask_patches {settings.mask_patches}, but "
                f"only the transformers (vit_t to vit_h) have them, not {settings.name}: set both to 0."
            )
        backbone.regularise(settings.drop_path, settings.mask_patches)
    return backbone


def freeze(backbone: nn.Module, config: BackboneConfig) -> None:
    """Excludes parameters that backbone.freeze names from training, and with LoRA all but a few."""
    if config.lora:
        depths = layer_depths(backbone)
        add_lora(backbone, config.lora, (name for name, depth in depths.items() if depth == max(depths.values())))
    for prefix in config.freeze:
        frozen = [p for name, p in backbone.named_parameters() if name.startswith(prefix)]
        if not frozen:
            raise ConfigError(
                f"backbone.freeze names {prefix!r}, but no parameter of {config.name} starts with that prefix."
            )
        for parameter in frozen:
            parameter.requires_grad = False
    if config.freeze and not any(parameter.requires_grad for parameter in backbone.parameters()):
        raise ConfigError(
            f"backbone.freeze = {list(config.freeze)} leaves nothing of {config.name} to train: "
            f"leave at least its last layer out of the list."
        )


def layer_depths(backbone: nn.Module) -> dict[str, int]:
    """Returns the depth of every parameter: 0 before the first block, one more per block or stage, the largest behind the last.

    Blocks are the items of `blocks`, `stages` and `layers`; stages are also layer1, layer2, …, as in residual networks.
    """
    depths, depth = {}, 0

    def walk(module: nn.Module, prefix: str) -> None:
        nonlocal depth
        is_behind = False
        for name, child in module.named_children():
            if name == "body":
                walk(child, "body.")
                is_behind = True
                continue
            units = (
                [(f"{name}.{number}", block) for number, block in child.named_children()]
                if name in ("blocks", "stages", "layers")
                else [(name, child)]
            )
            is_unit = name in ("blocks", "stages", "layers") or re.fullmatch(r"layer\d+", name) is not None
            # The first layer after the blocks, such as a norm, begins what is behind them.
            depth += not is_unit and not is_behind and depth > 0
            is_behind |= not is_unit and depth > 0
            for unit, block in units:
                depth += is_unit
                for inner, _ in block.named_parameters():
                    depths[f"{prefix}{unit}.{inner}"] = depth

    walk(backbone, "")
    if not depth:
        raise ConfigError(
            f"optimizer.layer_decay below 1 and backbone.lora need the order of the layers, but {type(backbone).__name__} has "
            f"neither blocks, stages nor layer1, layer2, …"
        )
    return depths | {name: 0 for name, _ in backbone.named_parameters() if name not in depths}


def blocks_of(backbone: nn.Module) -> list[nn.Module]:
    """Returns the items of `blocks`, `stages`, `layers` and layer1, layer2, …, each before the one that contains it."""
    names = re.compile(r"(.*\.)?(blocks|stages|layers|layer\d+)\.\d+")
    return [module for name, module in backbone.named_modules() if names.fullmatch(name)][::-1]


def checkpoint_activations(backbone: nn.Module, config: BackboneConfig) -> None:
    """Makes every block recompute its activations in the backward pass."""
    blocks = [module for module in backbone.modules() if getattr(module, "is_recomputable", False)]
    if not blocks:
        raise ConfigError(
            f"backbone.checkpoint_activations is on, but only the iresnets and the transformers support it, not "
            f"{config.name}."
        )
    for block in blocks:
        block.forward = partial(_forward_with_recomputation, block, block.forward)


def _forward_with_recomputation(block: nn.Module, forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    if torch.compiler.is_compiling():
        # A compiled block repeats its arithmetic only, and does not touch the running statistics again.
        result: Tensor = checkpoint(forward, x, use_reentrant=False)
    else:
        result = checkpoint(
            forward, x, use_reentrant=False, context_fn=lambda: (nullcontext(), _statistics_stay(block))
        )
    return result


@contextmanager
def _statistics_stay(block: nn.Module) -> Iterator[None]:
    """Freezes running statistics while backward repeats the forward: each batch must count once."""
    norms = [module for module in block.modules() if isinstance(module, (nn.BatchNorm2d, SyncBatchNorm))]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 0.0
    try:
        yield
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum


_SHARE_FOR_GRAPHS, _MOST_FOR_GRAPHS = 4, 32 << 30


def largest_replayed_bytes(device_bytes: int) -> int:
    """Returns how much the forward of a backbone may keep for backward if its steps become CUDA graphs by default.

    A quarter of the GPU's memory, because it stays allocated between the steps, and at most 32 GiB. iresnet50 fills that in
    about 130 ms of an H200. The host needs 42 to 58 ms to start the launches of a step and is not the limit of larger ones,
    even if something else takes its time.
    """
    return min(device_bytes // _SHARE_FOR_GRAPHS, _MOST_FOR_GRAPHS)
