"""Packages that a run comes to need are asked for before it begins, not after its last step."""

from importlib.util import find_spec

from megaclass.config.schema import Config
from megaclass.errors import ConfigError


def require_packages(config: Config) -> None:
    """Only rank 0 sends metrics and exports, so only its host needs them."""
    for is_asked, setting, off, extra, names in (
        (config.export.onnx, "export.onnx", "false", "onnx", ("onnx", "onnxscript", "onnxruntime")),
        (config.train.tensorboard, "train.tensorboard", "false", "tensorboard", ("tensorboard",)),
        (config.train.wandb_project, "train.wandb_project", "''", "wandb", ("wandb",)),
    ):
        missing = [name for name in names if not _is_installed(name)]
        if is_asked and missing:
            raise ConfigError(
                f"{setting} needs {', '.join(missing)}: pip install 'megaclass[{extra}]', or go without: {setting}={off}."
            )


def _is_installed(name: str) -> bool:
    spec = find_spec(name)
    # Without an origin it is a folder of that name, such as the one that wandb leaves where it ran.
    return spec is not None and spec.origin is not None
