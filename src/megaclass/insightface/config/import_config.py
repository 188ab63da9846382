"""Converts InsightFace's `configs/*.py` to recipes that train like its `train_v2.py`. The file is parsed, not executed."""

import re
from pathlib import Path

from megaclass.config.read import load_config_values, to_toml
from megaclass.config.schema import Config
from megaclass.errors import ConfigError
from megaclass.insightface.config.given import GivenSettings, Sections
from megaclass.insightface.config.known_settings import BASE, CARRIED, OLDER, WITHOUT_EFFECT
from megaclass.insightface.config.lines import ConfigLines, read_lines
from megaclass.insightface.config.model_sections import backbone_settings, data_settings, head_settings
from megaclass.insightface.config.training_sections import (
    GPUS_PER_MACHINE,
    MAX_GPUS,
    batch_settings,
    evaluation_settings,
    optimizer_settings,
    output_settings,
    published_gpus,
)
from megaclass.insightface.config.values import Unreadable, printable


def import_config(path: Path, num_gpus: int | None = None, lr_power: int = 1) -> tuple[Config, list[str]]:
    """Returns the equivalent Config, and a remark about every line that is not carried over unchanged.

    num_gpus: number of GPUs of the published run, because InsightFace's batch_size is per GPU; None takes it from the name
    of the file, or 8. lr_power: 1 for the current train_v2.py, 2 for its earlier scheduler.
    """
    if num_gpus is not None and not 1 <= num_gpus <= MAX_GPUS:
        raise ConfigError(f"The number of GPUs is {num_gpus}; expected 1 to {MAX_GPUS}.")
    lines = read_lines(path)
    remarks = [*lines.remarks]
    _check_names(lines, remarks)
    sections = _translated(GivenSettings(lines), lines.path, num_gpus, lr_power, remarks)
    missing = [f"{name} = {value!r}" for name, value in BASE.items() if name not in lines.values]
    if missing:
        remarks.append(f"not in the file, therefore taken from InsightFace's base.py: {', '.join(missing)}")
    try:
        return load_config_values(sections, where=str(path)), remarks
    except ConfigError as error:
        # Errors about values out of range name the setting, but not the file.
        raise (error if str(error).startswith(str(path)) else ConfigError(f"{path}: {error}")) from None


def recipe_text(config: Config, remarks: list[str], path: Path) -> str:
    """Returns the recipe as TOML, with the remarks as comments."""
    lines = [f"# Imported from InsightFace's {printable(path.name)} by megaclass import-config."]
    lines += [f"# - {remark}" for remark in remarks]
    version = "as in the current train_v2.py; InsightFace's earlier scheduler used 2 (--lr-power 2)"
    if config.optimizer.power == 2:
        version = "as in InsightFace's earlier scheduler; the current train_v2.py uses 1"
    body = re.sub(r"(?m)^(?=power = )", f"# {version}\n", to_toml(config), count=1)
    return "\n".join([*lines, "", body])


def _translated(given: GivenSettings, path: Path, num_gpus: int | None, lr_power: int, remarks: list[str]) -> Sections:
    """Returns the settings of the recipe; the remarks come in the order of its sections."""
    file_name = path.stem
    used_gpus = published_gpus(file_name, num_gpus, given, remarks)
    # Values that InsightFace's code has built in.
    sections: Sections = {
        "data": {},
        "backbone": {},
        "head": {"scale": 64.0, "gradient": "straight-through"},
        "optimizer": {"clip_norm": 5.0, "schedule": "polynomial"},
        "train": {"nproc": min(used_gpus, GPUS_PER_MACHINE)},
    }
    for part in (
        data_settings(given, remarks),
        backbone_settings(given, remarks),
        head_settings(given, remarks),
        optimizer_settings(given, lr_power, remarks),
        batch_settings(given, used_gpus, remarks),
        evaluation_settings(given, used_gpus, remarks),
        output_settings(given, file_name),
    ):
        for section, settings in part.items():
            sections[section] |= settings
    return sections


def _check_names(lines: ConfigLines, remarks: list[str]) -> None:
    """Refuses unknown settings; adds remarks about those that do not affect the result of training."""
    off: list[str] = []
    for name, line in lines.values.items():
        if name in WITHOUT_EFFECT and line.value in (False, None):
            off.append(name)
        elif name in WITHOUT_EFFECT:
            remarks.append(f"{name} was not carried over: {WITHOUT_EFFECT[name]}")
        elif name in OLDER:
            raise lines.error(
                line,
                f"the setting belongs to older InsightFace code. Delete the line from a copy of the file, and "
                f"{OLDER[name]}.",
            )
        elif name not in CARRIED:
            raise lines.error(
                line,
                f"{printable(name)} is not a known setting of InsightFace's train_v2.py and could change the training. If "
                f"it does not matter, delete the line from a copy of the file and import the copy.",
            )
        elif isinstance(line.value, Unreadable):
            raise lines.error(line, f"{line.value.reason}, and the file is not executed: replace it by its value.")
    if off:
        remarks.append(f"not carried over, because switched off: {', '.join(off)}")
