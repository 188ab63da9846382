"""LoRA for transformers, by peft: `backbone.lora = 8`.

The weight W of every linear layer of the blocks stays as it is, and W + B A takes its place, where A (rank, inputs) starts at
random and B (outputs, rank) at 0. They are trained, and so is what is behind the last block. The scale is 1, so a checkpoint
needs no setting to be understood. Checkpoints hold W, A and B; what is evaluated and exported has W + B A under the name of W.
"""

import copy
import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from megaclass_launch.errors import ConfigError

# Names that peft gives to the layer that it wraps, and to A and B.
_BASE, _ADAPTER = ".base_layer.", ".lora_"


def add_lora(backbone: nn.Module, rank: int, behind: Iterable[str]) -> None:
    """Wraps the linear layers of the blocks, and freezes all other parameters but those of `behind`."""
    try:
        import peft
    except (ImportError, RuntimeError) as error:
        raise ConfigError(f"backbone.lora needs peft ({error}): pip install 'megaclass[lora]'") from error
    layers: list[str] = [
        name
        for name, module in backbone.named_modules()
        if isinstance(module, nn.Linear) and re.search(r"(^|\.)blocks\.\d+\.", name)
    ]
    if not layers:
        raise ConfigError(
            f"backbone.lora is {rank}, but {type(backbone).__name__} has no linear layers in `blocks`: LoRA is for "
            f"transformers, such as vit_s and timm/vit_small_patch16_224."
        )
    settings = peft.LoraConfig(r=rank, lora_alpha=rank, target_modules=layers)
    peft.inject_adapter_in_model(settings, backbone)
    # peft has frozen everything else.
    for name in behind:
        backbone.get_parameter(name).requires_grad = True


def evaluated_weights(shared: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the weights that training evaluated and exported, from a checkpoint's: of its moving average if it has one."""
    weights: dict[str, Tensor] = {}
    for prefix in ("backbone.", "ema."):
        weights |= {name.removeprefix(prefix): tensor for name, tensor in shared.items() if name.startswith(prefix)}
    return merged_weights(weights)


def merged_weights(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the weights of the plain network: W + B A. Without LoRA they are those that were given."""
    merged = {}
    for name, tensor in state.items():
        stem, is_wrapped, _ = name.partition(f"{_BASE}weight")
        if is_wrapped:
            tensor = tensor + state[f"{stem}{_ADAPTER}B.default.weight"] @ state[f"{stem}{_ADAPTER}A.default.weight"]
        if _ADAPTER not in name:
            merged[name.replace(_BASE, ".")] = tensor
    return merged


def wrapped_weights(plain: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns plain weights under the names of `own`, a network's state with LoRA or without; adapters stay as they are."""
    names = {name.replace(_BASE, "."): name for name in own if _ADAPTER not in name}
    adapters = {name: tensor for name, tensor in own.items() if _ADAPTER in name}
    return {names.get(name, name): tensor for name, tensor in plain.items()} | adapters


def without_lora(backbone: nn.Module) -> nn.Module:
    """Returns the backbone itself, or a copy with plain layers in place of those with LoRA."""
    if not any(_ADAPTER in name for name, _ in backbone.named_parameters()):
        return backbone
    plain = copy.deepcopy(backbone)
    weights = merged_weights(plain.state_dict())
    layers: dict[str, Any] = {name: module for name, module in plain.named_modules() if hasattr(module, "base_layer")}
    for name, layer in layers.items():
        parent, _, own = name.rpartition(".")
        setattr(plain.get_submodule(parent), own, layer.base_layer)
    plain.load_state_dict(weights)
    return plain
