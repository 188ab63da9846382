"""Downloads models from the Hugging Face Hub: `megaclass.load("hf://user/name")`."""

from pathlib import Path
from typing import Any

from megaclass.errors import CheckpointError

HUB_PREFIX = "hf://"
# The model in any of its forms, and what describes it. Nothing else of a repository is fetched, and no code.
_FILES = ("config.json", "README.md", "model.safetensors", "model.onnx", "backbone.pth")


def hub_library(purpose: str) -> Any:
    """Returns the package huggingface_hub, or says how to install it."""
    try:
        import huggingface_hub
    except ImportError:
        raise CheckpointError(f"{purpose} needs huggingface-hub: pip install 'megaclass[hub]'") from None
    return huggingface_hub


def pull(address: str) -> Path:
    """Returns the folder in the Hub's cache that holds the model of `hf://user/name` or `hf://user/name@revision`."""
    repository, _, revision = address.removeprefix(HUB_PREFIX).partition("@")
    if repository.count("/") != 1 or not all(repository.split("/")):
        raise CheckpointError(f"Cannot read {address!r}: expected hf://user/name or hf://user/name@revision.")
    hub = hub_library(f"Opening {address}")
    try:
        folder = Path(hub.snapshot_download(repository, revision=revision or None, allow_patterns=list(_FILES)))
    # The library and its HTTP client raise many types, without a common base class.
    except Exception as error:
        raise CheckpointError(
            f"Cannot fetch {address} from the Hugging Face Hub: {str(error).strip() or type(error).__name__}"
        ) from error
    if not any((folder / name).is_file() for name in _FILES[2:]):
        raise CheckpointError(
            f"{address} holds no model of Megaclass: expected {', '.join(_FILES[2:])}. `megaclass push` publishes one."
        )
    return folder
