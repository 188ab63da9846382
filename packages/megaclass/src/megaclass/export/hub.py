"""Publishes a model on the Hugging Face Hub, with a model card that states its measured numbers."""

import tempfile
from pathlib import Path

from megaclass.errors import ExportError
from megaclass.export.run_export import export_model
from megaclass.inference.hub import HUB_PREFIX, hub_library

# The names and centres of the training classes may be those of real people: they are published on request only.
_CENTRES = "centres.safetensors"


def push(
    path: Path,
    repository: str,
    *,
    form: str = "safetensors",
    licence: str = "not stated",
    backbone: str | None = None,
    is_private: bool = False,
    with_centres: bool = False,
) -> str:
    """Exports the model, uploads model, config.json and model card in one commit, and returns the address for megaclass.load.

    repository: `user/name`; made if it does not exist. The token comes from `hf auth login` or the variable HF_TOKEN.
    """
    repository = repository.removeprefix(HUB_PREFIX)
    if repository.count("/") != 1 or not all(repository.split("/")):
        raise ExportError(f"Cannot push to {repository!r}: expected user/name.")
    hub = hub_library("Publishing on the Hugging Face Hub")
    with tempfile.TemporaryDirectory() as temporary:
        folder = export_model(path, form, Path(temporary) / form, licence=licence, backbone=backbone)
        try:
            api = hub.HfApi()
            api.create_repo(repository, private=is_private or None, exist_ok=True)
            api.upload_folder(
                repo_id=repository,
                folder_path=folder,
                ignore_patterns=None if with_centres else [_CENTRES],
                commit_message="Upload a model with megaclass push",
            )
        # The library and its HTTP client raise many types, without a common base class.
        except Exception as error:
            raise ExportError(
                f"Cannot push to {repository} on the Hugging Face Hub: {str(error).strip() or type(error).__name__}. "
                f"`hf auth login` or the variable HF_TOKEN gives the token."
            ) from error
    return f"{HUB_PREFIX}{repository}"
