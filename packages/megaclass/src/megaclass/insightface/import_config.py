"""Converts InsightFace's `configs/*.py` to recipes that train like its `train_v2.py`. The file is parsed, not executed.

Each function that translates a section appends a remark about everything that the recipe does not do in the same way.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from megaclass.config.read import load_config_values, to_toml
from megaclass.config.schema import Config
from megaclass.insightface.config_file import BASE, ConfigFile, is_number, printable, read_config_file
from megaclass.insightface.names import NETWORKS
from megaclass_launch.errors import ConfigError

Settings = dict[str, object]
"""Settings of one section of a recipe."""
Sections = dict[str, Settings]
"""Settings of a recipe, by section."""

MAX_GPUS = 1024
GPUS_PER_MACHINE = 8
# Settings that do not affect the result of training, and what replaces them.
WITHOUT_EFFECT = {
    "dali": "Megaclass always reads and decodes images itself",
    "save_all_states": "checkpoints always contain the complete state",
    "resume": "give --resume to megaclass train",
    "using_wandb": "set train.wandb_project",
    "wandb_project": "set train.wandb_project",
    "wandb_key": "log in with `wandb login`",
    "wandb_entity": "set WANDB_ENTITY",
    "wandb_log_all": "only rank 0 reports",
    "wandb_resume": "give --resume to megaclass train",
    "suffix_run_name": "train.run_dir names the run",
    "save_artifacts": "the run folder contains the model",
    "notes": "it is only a note",
    "warmup_step": "InsightFace computes it itself",
    "total_step": "InsightFace computes it itself",
    "num_classes": "it is read from the data",
    "num_image": "it is read from the data",
}
# Settings of older InsightFace code, which the current train_v2.py does not read.
OLDER = {
    "lr_func": "set optimizer.schedule = 'step' and optimizer.step_epochs in the recipe",
    "decay_epoch": "set optimizer.schedule = 'step' and optimizer.step_epochs in the recipe",
    "decay_step": "set optimizer.schedule = 'step' and optimizer.step_epochs in the recipe",
}
# Values of `loss` in InsightFace's configs of 2021, which had no margin_list.
LOSSES = {"arcface": (1.0, 0.5, 0.0), "cosface": (1.0, 0.0, 0.4)}
# Settings that a recipe has as well.
CARRIED = {
    *BASE, "loss", "rec", "dali_aug", "output", "num_epoch", "warmup_epoch", "val_targets",
}  # fmt: skip


def import_config(path: Path, num_gpus: int | None = None, lr_power: int = 1) -> tuple[Config, list[str]]:
    """Returns the equivalent Config, and a remark about every line that is not carried over unchanged.

    num_gpus: number of GPUs of the published run, because InsightFace's batch_size is per GPU; None takes it from the name
    of the file, or 8. lr_power: 1 for the current train_v2.py, 2 for its earlier scheduler.
    """
    if num_gpus is not None and not 1 <= num_gpus <= MAX_GPUS:
        raise ConfigError(f"The number of GPUs is {num_gpus}; expected 1 to {MAX_GPUS}.")
    given = read_config_file(path)
    remarks = [*given.remarks]
    _check_names(given, remarks)
    sections = _translated(given, num_gpus, lr_power, remarks)
    missing = [f"{name} = {value!r}" for name, value in BASE.items() if name not in given]
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


def _translated(given: ConfigFile, num_gpus: int | None, lr_power: int, remarks: list[str]) -> Sections:
    """Returns the settings of the recipe; the remarks come in the order of its sections."""
    file_name = given.path.stem
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


def _check_names(given: ConfigFile, remarks: list[str]) -> None:
    """Refuses unknown settings; adds remarks about those that do not affect the result of training."""
    off: list[str] = []
    for name, line in given.lines.items():
        if name in WITHOUT_EFFECT and line.value in (False, None):
            off.append(name)
        elif name in WITHOUT_EFFECT:
            remarks.append(f"{name} was not carried over: {WITHOUT_EFFECT[name]}")
        elif name in OLDER:
            raise given.error(
                name,
                f"the setting belongs to older InsightFace code. Delete the line from a copy of the file, and {OLDER[name]}",
            )
        elif name not in CARRIED:
            raise given.error(
                name,
                f"{printable(name)} is not a known setting of InsightFace's train_v2.py and could change the training. If "
                f"it does not matter, delete the line from a copy of the file and import the copy",
            )
    if off:
        remarks.append(f"not carried over, because switched off: {', '.join(off)}")


def data_settings(given: ConfigFile, remarks: list[str]) -> Sections:
    """Translates the path of the data, the readers and the augmentations."""
    path = given.text("rec") if "rec" in given else ""
    if path == "synthetic":
        num_classes = given.integer("num_classes", least=1) if "num_classes" in given else 0
        if not num_classes:
            raise given.error("rec", "synthetic data needs config.num_classes")
        num_images = given.integer("num_image", least=1) if "num_image" in given else None
        path = f"synthetic:{num_classes}" + (f"x{num_images}" if num_images else "")
    if not path:
        path = "SET-ME"
        remarks.append("rec is not set: set data.path to the folder of the data")
    data: Settings = {"path": path, "threads": max(1, given.integer("num_workers", least=0))}
    if given.flag("dali_aug"):
        if given.flag("dali"):
            # The four augmentations and probabilities of InsightFace's DALI pipeline.
            data["augment"] = "low_resolution:0.1,blur:0.2,colour:0.2,grey:0.1"
            remarks.append(
                "dali_aug became data.augment: the same augmentations and probabilities, but Megaclass's own operations, "
                "which differ from DALI's in detail"
            )
        else:
            remarks.append("dali_aug was not carried over: InsightFace reads it only if dali is True")
    return {"data": data}


def backbone_settings(given: ConfigFile, remarks: list[str]) -> Sections:
    """Translates the name of the network, which stands for several settings of a recipe."""
    name = given.text("network")
    if name not in NETWORKS:
        raise given.error("network", f"unknown network; known networks are {', '.join(NETWORKS)}")
    network = NETWORKS[name]
    backbone: Settings = {
        "name": network.name,
        "embedding_dim": given.integer("embedding_size", least=1),
        "drop_path": network.drop_path,
        "mask_patches": network.mask_patches,
        "checkpoint_activations": network.checkpoint_activations,
    }
    if name.endswith("mask_005"):
        remarks.append(
            f"the name {name} suggests 5 % masked patches, but InsightFace's code masks 10 %: backbone.mask_patches is 0.1"
        )
    if network.checkpoint_activations:
        remarks.append(
            f"InsightFace trains {name} with activation checkpointing: backbone.checkpoint_activations is true; false is "
            f"faster if memory allows"
        )
    return {"backbone": backbone}


def head_settings(given: ConfigFile, remarks: list[str]) -> Sections:
    """Translates margin, filter and sample rate."""
    head = _margin(given, remarks)
    threshold = given.number("interclass_filtering_threshold")
    if threshold > 0:
        head["filter_above"] = threshold
    head["sample_rate"] = given.number("sample_rate")
    return {"head": head}


def _margin(given: ConfigFile, remarks: list[str]) -> Settings:
    """Reads margin_list like InsightFace's CombinedMarginLoss: m3 > 0 means CosFace, whatever m1 and m2 are."""
    key, sizes = _margin_list(given)
    multiplier, angle, cosine = map(float, sizes)
    if cosine > 0:
        if (multiplier, angle) != (1, 0):
            remarks.append(
                f"margin_list = {sizes!r}: InsightFace's loss ignores m1 and m2 if m3 is above 0, and so does the recipe; "
                f"to use all three set head.margin = 'combined', head.m1, head.m2 and head.m3"
            )
        return {"margin": "cosface", "margin_size": cosine}
    if (multiplier, cosine) == (1, 0):
        return {"margin": "arcface", "margin_size": angle}
    raise given.error(key, "InsightFace's loss raises an error for these: expected m1 = 1 and m3 = 0, or m3 above 0")


def _margin_list(given: ConfigFile) -> tuple[str, Sequence[float]]:
    """Returns the setting that determines the margin, margin_list or the older loss, and m1, m2 and m3."""
    key, sizes = "margin_list", given.value("margin_list")
    if "loss" in given:
        loss = given.text("loss")
        if loss not in LOSSES:
            raise given.error("loss", f"expected {' or '.join(LOSSES)}")
        if "margin_list" not in given:
            key, sizes = "loss", LOSSES[loss]
        elif not isinstance(sizes, (list, tuple)) or tuple(sizes) != LOSSES[loss]:
            raise given.error("loss", f"it contradicts margin_list = {sizes!r}, and the current train_v2.py ignores it")
    if not (isinstance(sizes, (list, tuple)) and len(sizes) == 3 and all(map(is_number, sizes))):
        raise given.error(key, "expected three numbers (m1, m2, m3)")
    return key, sizes


def published_gpus(file_name: str, asked: int | None, given: ConfigFile, remarks: list[str]) -> int:
    """Returns the number of GPUs of the published run: as asked, or as the name of the file says.

    file_name: without its suffix; it may also state the global batch (bs4k).
    """
    stem = file_name.lower()
    match = re.search(r"(?:^|_)(\d{1,4})gpus?(?:_|$)", stem)
    named = int(match[1]) if match else 1 if re.search(r"(?:^|_)onegpu(?:_|$)", stem) else None
    whole = re.search(r"(?:^|_)bs(\d{1,4})k(?:_|$)", stem)
    batch = given.integer("batch_size", least=1)
    # bs4k is the global batch in units of 1024; with batch_size it gives the number of GPUs.
    if named is None and whole and int(whole[1]) * 1024 % batch == 0:
        named = int(whole[1]) * 1024 // batch
    if named is not None and not 1 <= named <= MAX_GPUS:
        named = None
    if asked is None and named is None:
        remarks.append(
            f"the name of the file does not say how many GPUs were used: {GPUS_PER_MACHINE} were assumed, as in "
            f"most published runs; import again with --gpus if that is wrong"
        )
        num_gpus = GPUS_PER_MACHINE
    else:
        num_gpus = asked if asked is not None else named or GPUS_PER_MACHINE
        if asked is None:
            remarks.append(f"the name of the file says {num_gpus} GPUs; import again with --gpus if that is wrong")
        elif named is not None and named != asked:
            remarks.append(f"the name of the file says {named} GPUs, but --gpus is {asked}")
    if whole and num_gpus * batch != int(whole[1]) * 1024:
        remarks.append(
            f"the name of the file says a batch of {int(whole[1]) * 1024}, but batch_size {batch} on {num_gpus} GPUs "
            f"is {num_gpus * batch}"
        )
    if num_gpus > GPUS_PER_MACHINE:
        remarks.append(
            f"{num_gpus} GPUs are more than one machine has: train.nproc is {GPUS_PER_MACHINE} per machine; use megaclass "
            f"run to start on several machines"
        )
    return num_gpus


def optimizer_settings(given: ConfigFile, lr_power: int, remarks: list[str]) -> Sections:
    """Translates the optimizer and the learning rate over the epochs. lr_power: of the scheduler, 1 or 2."""
    name = given.text("optimizer")
    if name not in ("sgd", "adamw"):
        raise given.error("optimizer", "expected sgd or adamw")
    # InsightFace has one optimizer for backbone and head.
    both: Settings = {"weight_decay": given.number("weight_decay"), "momentum": given.number("momentum")}
    if given.number("momentum") != 0.9 and name == "sgd":
        remarks.append("momentum was carried over, but train_v2.py always uses 0.9")
    lr, epochs, warmup = given.number("lr"), _epochs(given, remarks), 0.0
    if "warmup_epoch" in given:
        warmup = given.number("warmup_epoch")
    else:
        remarks.append("warmup_epoch is not set: optimizer.warmup_epochs is 0")
    if warmup < 0:
        if lr_power == 2:
            # The earlier scheduler starts counting at the negative step, so that the decay has already begun.
            lr *= (epochs / (epochs - warmup)) ** lr_power
            remarks.append(
                f"warmup_epoch = {warmup:g}: the earlier scheduler starts as if {-warmup:g} epochs had passed, therefore "
                f"optimizer.lr is {lr:g}"
            )
        else:
            remarks.append(f"warmup_epoch = {warmup:g} means no warm-up in InsightFace: optimizer.warmup_epochs is 0")
        warmup = 0.0
    if lr_power == 1:
        remarks.append(
            "the learning rate decays with power 1, as in the current train_v2.py; --lr-power 2 gives the curve of "
            "InsightFace's earlier scheduler, with which published results may have been obtained"
        )
    else:
        remarks.append(
            f"the learning rate decays with power {lr_power}, as in InsightFace's earlier scheduler; the current "
            f"train_v2.py uses power 1"
        )
    return {
        "optimizer": {
            **both,
            "name": name,
            "power": float(lr_power),
            "lr": lr,
            "warmup_epochs": warmup,
        },
        "head": {**both, "optimizer": name},
        "train": {"epochs": epochs},
    }


def _epochs(given: ConfigFile, remarks: list[str]) -> float:
    if "num_epoch" in given:
        return given.number("num_epoch")
    remarks.append("num_epoch is not set, and InsightFace has no default: train.epochs is 20")
    return 20.0


def batch_settings(given: ConfigFile, num_gpus: int, remarks: list[str]) -> Sections:
    """Translates the batch per GPU to a global batch, and the precision."""
    parts = given.integer("gradient_acc", least=1)
    train: Settings = {
        "global_batch": given.integer("batch_size", least=1) * num_gpus * parts,
        "accumulate": parts,
    }
    if parts > 1:
        remarks.append(
            f"gradient_acc = {parts} became train.accumulate, with a train.global_batch {parts} times as large: the "
            f"gradient is the mean over it; versions of train_v2.py that sum it instead take steps {parts} times as "
            f"large with sgd"
        )
    train["seed"] = given.integer("seed", least=0)
    if given.flag("fp16"):
        remarks.append(
            "fp16 = True became train.precision = 'auto': bf16 on GPUs that support it; set 'fp16' to train exactly like "
            "InsightFace"
        )
    else:
        train["precision"] = "float32"
    return {"train": train}


def evaluation_settings(given: ConfigFile, num_gpus: int, remarks: list[str]) -> Sections:
    """Translates the evaluated sets, and the steps between evaluations to epochs."""
    train: Settings = {}
    targets = given.value("val_targets") if "val_targets" in given else None
    if targets is not None:
        if not isinstance(targets, (list, tuple)) or not all(isinstance(one, str) for one in targets):
            raise given.error("val_targets", "expected a list of names of .bin files")
        train["evaluate_sets"] = list(targets)
    if targets is not None and not targets:
        remarks.append(
            "val_targets is empty: there is no evaluation during training; every .bin is evaluated at the end"
        )
        return {"train": train}
    steps = given.integer("verbose", least=1)
    if "num_image" not in given:
        remarks.append(
            f"verbose = {steps} was not carried over: without num_image the steps cannot be converted to "
            f"train.evaluate_epochs"
        )
        return {"train": train}
    batch = given.integer("batch_size", least=1) * num_gpus
    steps_per_epoch = max(1, given.integer("num_image", least=1) // batch)
    train["evaluate_epochs"] = round(steps / steps_per_epoch, 6)
    remarks.append(f"verbose = {steps} steps of {batch} images became train.evaluate_epochs")
    return {"train": train}


def output_settings(given: ConfigFile, file_name: str) -> Sections:
    """Translates the run folder and the steps between reports. file_name: names the folder where the file does not."""
    train: Settings = {"run_dir": f"runs/{file_name}", "report_steps": given.integer("frequent", least=1)}
    if "output" in given and given.value("output") is not None:
        train["run_dir"] = given.text("output")
    return {"train": train}
