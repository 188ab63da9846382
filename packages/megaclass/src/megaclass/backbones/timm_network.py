"""Networks of timm as backbones: `backbone.name = "timm/vit_small_patch16_224"`.

The features of the network (num_classes=0) go through a linear layer and batch norm to the embedding, as in the house's
transformers. Pixels arrive in [-1, 1] like everywhere and are brought to the mean and standard deviation of the network here,
so evaluation, export and other tools need not know them.
"""

import difflib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megaclass.backbones.lora import wrapped_weights
from megaclass.errors import CheckpointError
from megaclass.image_size import ImageSize, compact_size, height_and_width, shown_size
from megaclass_launch.errors import ConfigError

TIMM_PREFIX = "timm/"


class TimmNetwork(nn.Module):
    """A network of timm with random weights."""

    gain_3: Tensor
    shift_3: Tensor

    def __init__(self, name: str, embedding_dim: int, image_size: ImageSize) -> None:
        super().__init__()
        self.name, self.image_size = name, image_size
        self.body = _create(name, image_size)
        facts = self.body.pretrained_cfg
        mean_3, std_3 = (torch.tensor(facts[key]) for key in ("mean", "std"))
        # ((x + 1) / 2 - mean) / std, in one step. Not saved: the name of the network gives the numbers.
        self.register_buffer("gain_3", 0.5 / std_3, persistent=False)
        self.register_buffer("shift_3", (0.5 - mean_3) / std_3, persistent=False)
        self.feature = nn.Sequential(
            nn.Linear(self.body.num_features, embedding_dim, bias=False), nn.BatchNorm1d(embedding_dim)
        )

    def forward(self, images_B: Tensor) -> Tensor:
        """(B, 3, H, W) in [-1, 1] -> (B, D)"""
        features_BF = self.body(images_B * self.gain_3[:, None, None] + self.shift_3[:, None, None])
        embeddings_BD: Tensor = self.feature(features_BF)
        return embeddings_BD

    @torch.no_grad()
    def load_pretrained_(self, source: str) -> None:
        """Copies pretrained weights into the body.

        source: "hub" downloads those of timm's name; otherwise a file in timm's format. Position embeddings are resampled.
        """
        if source != "hub" and not Path(source).is_file():
            raise CheckpointError(f'backbone.pretrained is {source!r}: expected "hub", or a .safetensors or .pth file.')
        overlay = {} if source == "hub" else {"pretrained_cfg_overlay": {"file": source}}
        bodies = []
        with torch.random.fork_rng():
            for options in ({}, {"pretrained": True, **overlay}):
                torch.manual_seed(0)
                try:
                    bodies.append(_create(self.name, self.image_size, **options))
                # timm, the Hub's library and its HTTP client raise many types.
                except Exception as error:
                    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
                    raise CheckpointError(
                        f"Cannot load pretrained weights of timm/{self.name} from {source}: {reason}"
                    ) from error
        # timm ignores missing names: what still has its random start was not in the file.
        state, start = bodies[1].state_dict(), bodies[0].state_dict()
        absent = [name for name, weight in state.items() if weight.ndim > 1 and torch.equal(weight, start[name])]
        if absent:
            raise CheckpointError(
                f"{source} does not hold the weights of timm/{self.name}: {len(absent)} tensors are missing, "
                f"the first is {absent[0]}."
            )
        self.body.load_state_dict(wrapped_weights(state, self.body.state_dict()))


def check_timm_name(name: str) -> None:
    """Raises a ConfigError if timm is not installed or has no such network."""
    timm = _timm()
    short = name.removeprefix(TIMM_PREFIX)
    if not timm.is_model(short):
        close = difflib.get_close_matches(short, timm.list_models(), n=3)
        hint = (
            f"did you mean {' or '.join(TIMM_PREFIX + one for one in close)}?" if close else "see timm.list_models()."
        )
        raise ConfigError(f"backbone.name is {name!r}, but timm {timm.__version__} has no such network; {hint}")


def timm_size(name: str) -> ImageSize:
    """Returns the size of images with which timm's weights of this name were trained."""
    check_timm_name(name)
    facts = _timm().get_pretrained_cfg(name.removeprefix(TIMM_PREFIX))
    _, height, width = facts.input_size if facts is not None else (3, 224, 224)
    return compact_size((height, width))


def origin_of_weights(name: str, source: str) -> str:
    """Returns which pretrained weights these are, and their licence, for the model card."""
    facts = _timm().get_pretrained_cfg(name.removeprefix(TIMM_PREFIX))
    licence = getattr(facts, "license", None) or "not stated by timm"
    if source == "hub":
        return f"the weights of {name} ({getattr(facts, 'hf_hub_id', None) or 'timm'}), licence {licence}"
    return f"the weights {Path(source).name} for {name}, licence not known (timm's own weights of that name: {licence})"


def _create(name: str, image_size: ImageSize, **options: Any) -> Any:
    size = height_and_width(image_size)
    timm = _timm()
    try:
        try:
            # Transformers are built for one size; convolutional networks do not know the argument.
            return timm.create_model(name, num_classes=0, img_size=size, **options)
        except TypeError:
            return timm.create_model(name, num_classes=0, **options)
    except (AssertionError, ValueError) as error:
        raise ConfigError(f"timm/{name} cannot take images of {shown_size(image_size)} pixels: {error}") from error


def _timm() -> Any:
    try:
        import timm
    except (ImportError, RuntimeError) as error:
        # A torchvision of another torch raises a RuntimeError.
        raise ConfigError(
            f"Networks of timm need timm and a torchvision that fits torch {torch.__version__} ({error}): "
            f"pip install 'megaclass[timm]'"
        ) from error
    return timm
