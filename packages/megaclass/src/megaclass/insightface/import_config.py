"""Converts InsightFace's `configs/*.py` to recipes that train like its `train_v2.py`. The file is parsed, not executed.

Each function translates some lines to settings by their full names, such as `head.margin`, and adds a remark about
everything that the recipe does not do in the same way.
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
"""Settings of a recipe by their full names."""

MAX_GPUS = 1024
GPUS_PER_MACHINE = 8
# Settings that do not affect the result of training, and what replaces them.
WITHOUT_EFFECT = {
    "dali": "Megaclass always reads and decodes images itself",
    "save_all_states": "checkpoints always contain the complete state",
    "resume": "give --resume to megaclass train",
    "wandb_key": "log in with `wandb login`",
    "wandb_log_all": "only rank 0 reports",
    "wandb_resume": "give --resume to megaclass train",
    "suffix_run_name": "train.run_dir names the run",
    "save_artifacts": "the run folder contains the model",
    "warmup_step": "InsightFace computes it itself",
    "total_step": "InsightFace computes it itself",
    "num_classes": "it is read from the data",
    "num_image": "it is read from the data",
}
# Settings of older InsightFace code, which the current train_v2.py does not read.
OLDER = ("lr_func", "decay_epoch", "decay_step")
# Values of `loss` in InsightFace's configs of 2021, which had no margin_list.
LOSSES = {"arcface": (1.0, 0.5, 0.0), "cosface": (1.0, 0.0, 0.4)}
# Settings that a recipe has as well.
CARRIED = {
    *BASE, "loss", "rec", "dali_aug", "output", "num_epoch", "warmup_epoch", "val_targets",
    "using_wandb", "wandb_project", "wandb_entity", "notes",
}  # fmt: skip


def import_config(path: Path, num_gpus: int | None = None, lr_power: int = 1) -> tuple[Config, list[str]]:
    """Returns the equivalent Config, and a remark about every line that is not carried over unchanged.

    num_gpus: number of GPUs of the published run, because InsightFace's batch_size is per GPU; None takes it from the name
    of the file, or 8. lr_power: 1 for the current train_v2.py, 2 for its earlier scheduler.
    """
    if num_gpus is not None and not 1 <= num_gpus <= MAX_GPUS:
        raise ConfigError(f"The number of GPUs is {num_gpus}; expected 1 to {MAX_GPUS}.")
    given = read_config_file(path)
    _check_names(given)
    num_gpus = published_gpus(num_gpus, given)
    settings = {
        **data_settings(given),
        **backbone_settings(given),
        **head_settings(given),
        **optimizer_settings(given, lr_power),
        **run_settings(given, num_gpus),
        **tracker_settings(given),
    }
    missing = [f"{name} = {value!r}" for name, value in BASE.items() if name not in given]
    if missing:
        given.remark(f"not in the file, therefore taken from InsightFace's base.py: {', '.join(missing)}")
    sections: dict[str, Settings] = {}
    for name, value in settings.items():
        section, key = name.split(".")
        sections.setdefault(section, {})[key] = value
    try:
        return load_config_values(sections, where=str(path)), given.remarks
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


def _check_names(given: ConfigFile) -> None:
    """Refuses unknown settings; adds remarks about those that do not affect the result of training."""
    off: list[str] = []
    for name, line in given.lines.items():
        if name in WITHOUT_EFFECT and line.value in (False, None):
            off.append(name)
        elif name in WITHOUT_EFFECT:
            given.remark(f"{name} was not carried over: {WITHOUT_EFFECT[name]}")
        elif name in OLDER:
            raise given.error(
                name,
                "the setting belongs to older InsightFace code. Delete the line from a copy of the file, and set "
                "optimizer.schedule = 'step' and optimizer.step_epochs in the recipe",
            )
        elif name not in CARRIED:
            raise given.error(
                name,
                f"{printable(name)} is not a known setting of InsightFace's train_v2.py and could change the training. If "
                f"it does not matter, delete the line from a copy of the file and import the copy",
            )
    if off:
        given.remark(f"not carried over, because switched off: {', '.join(off)}")


def published_gpus(asked: int | None, given: ConfigFile) -> int:
    """Returns the number of GPUs of the published run: as asked, or as the name of the file says.

    The name may also state the global batch in units of 1024 (bs4k), which with batch_size gives the number of GPUs.
    """
    stem = given.path.stem.lower()
    batch = given.integer("batch_size")
    match = re.search(r"(?:^|_)(\d{1,4}|one)gpus?(?:_|$)", stem)
    named = 0 if match is None else 1 if match[1] == "one" else int(match[1])
    whole = re.search(r"(?:^|_)bs(\d{1,4})k(?:_|$)", stem)
    if match is None and whole and int(whole[1]) * 1024 % batch == 0:
        named = int(whole[1]) * 1024 // batch
    if not 1 <= named <= MAX_GPUS:
        named = 0
    num_gpus = asked or named or GPUS_PER_MACHINE
    if not asked and not named:
        given.remark(
            f"the name of the file does not say how many GPUs were used: {GPUS_PER_MACHINE} were assumed, as in "
            f"most published runs; import again with --gpus if that is wrong"
        )
    elif not asked:
        given.remark(f"the name of the file says {named} GPUs; import again with --gpus if that is wrong")
    elif named and named != asked:
        given.remark(f"the name of the file says {named} GPUs, but --gpus is {asked}")
    if whole and num_gpus * batch != int(whole[1]) * 1024:
        given.remark(
            f"the name of the file says a batch of {int(whole[1]) * 1024}, but batch_size {batch} on {num_gpus} GPUs "
            f"is {num_gpus * batch}"
        )
    if num_gpus > GPUS_PER_MACHINE:
        given.remark(
            f"{num_gpus} GPUs are more than one machine has: train.nproc is {GPUS_PER_MACHINE} per machine; use megaclass "
            f"run to start on several machines"
        )
    return num_gpus


def data_settings(given: ConfigFile) -> Settings:
    """Translates the path of the data, the readers and the augmentations."""
    path = given.text("rec") if "rec" in given else "SET-ME"
    if "rec" not in given:
        given.remark("rec is not set: set data.path to the folder of the data")
    if path == "synthetic":
        if not given.value("num_classes"):
            raise given.error("rec", "synthetic data needs config.num_classes")
        path += f":{given.integer('num_classes')}"
        path += f"x{given.integer('num_image')}" if "num_image" in given else ""
    settings: Settings = {"data.path": path, "data.threads": max(1, given.integer("num_workers", least=0))}
    if given.value("dali_aug") and given.value("dali"):
        # The four augmentations and probabilities of InsightFace's DALI pipeline.
        settings["data.augment"] = "low_resolution:0.1,blur:0.2,colour:0.2,grey:0.1"
        given.remark(
            "dali_aug became data.augment: the same augmentations and probabilities, but Megaclass's own operations, "
            "which differ from DALI's in detail"
        )
    elif given.value("dali_aug"):
        given.remark("dali_aug was not carried over: InsightFace reads it only if dali is True")
    return settings


def backbone_settings(given: ConfigFile) -> Settings:
    """Translates the name of the network, which stands for several settings of a recipe."""
    name = given.text("network")
    if name not in NETWORKS:
        raise given.error("network", f"unknown network; known networks are {', '.join(NETWORKS)}")
    network = NETWORKS[name]
    if name.endswith("mask_005"):
        given.remark(
            f"the name {name} suggests 5 % masked patches, but InsightFace's code masks 10 %: backbone.mask_patches is 0.1"
        )
    if network.checkpoint_activations:
        given.remark(
            f"InsightFace trains {name} with activation checkpointing: backbone.checkpoint_activations is true; false is "
            f"faster if memory allows"
        )
    return {
        "backbone.name": network.name,
        "backbone.embedding_dim": given.integer("embedding_size"),
        "backbone.drop_path": network.drop_path,
        "backbone.mask_patches": network.mask_patches,
        "backbone.checkpoint_activations": network.checkpoint_activations,
    }


def head_settings(given: ConfigFile) -> Settings:
    """Translates margin, filter and sample rate. The margin is read like InsightFace's CombinedMarginLoss."""
    key, sizes = _margin_list(given)
    multiplier, angle, cosine = map(float, sizes)
    # Scale, derivative and the meaning of the sample rate are built into InsightFace's code.
    settings: Settings = {
        "head.scale": 64.0,
        "head.gradient": "straight-through",
        "head.sample_rate": given.number("sample_rate"),
        "head.sample_positives": True,
        "head.margin": "cosface" if cosine > 0 else "arcface",
        "head.margin_size": cosine if cosine > 0 else angle,
    }
    if cosine > 0 and (multiplier, angle) != (1, 0):
        given.remark(
            f"margin_list = {sizes!r}: InsightFace's loss ignores m1 and m2 if m3 is above 0, and so does the recipe; "
            f"to use all three set head.margin = 'combined', head.m1, head.m2 and head.m3"
        )
    elif cosine <= 0 and (multiplier, cosine) != (1, 0):
        raise given.error(
            key, "InsightFace's loss raises an error for these: expected m1 = 1 and m3 = 0, or m3 above 0"
        )
    if (threshold := given.number("interclass_filtering_threshold")) > 0:
        settings["head.filter_above"] = threshold
    return settings


def _margin_list(given: ConfigFile) -> tuple[str, Sequence[float]]:
    """Returns the setting that determines the margin, margin_list or the older loss, and m1, m2 and m3."""
    key, sizes = "margin_list", given.value("margin_list")
    if "loss" in given:
        loss = given.text("loss")
        if loss not in LOSSES:
            raise given.error("loss", f"expected {' or '.join(LOSSES)}")
        if "margin_list" not in given:
            key, sizes = "loss", LOSSES[loss]
        elif not isinstance(sizes, list | tuple) or tuple(sizes) != LOSSES[loss]:
            raise given.error("loss", f"it contradicts margin_list = {sizes!r}, and the current train_v2.py ignores it")
    if not (isinstance(sizes, list | tuple) and len(sizes) == 3 and all(map(is_number, sizes))):
        raise given.error(key, "expected three numbers (m1, m2, m3)")
    return key, sizes


def optimizer_settings(given: ConfigFile, lr_power: int) -> Settings:
    """Translates the optimizer and the learning rate over the epochs. lr_power: of the scheduler, 1 or 2."""
    name = given.text("optimizer")
    if name not in ("sgd", "adamw"):
        raise given.error("optimizer", "expected sgd or adamw")
    if given.number("momentum") != 0.9 and name == "sgd":
        given.remark("momentum was carried over, but train_v2.py always uses 0.9")
    epochs, warmup = 20.0, 0.0
    if "num_epoch" in given:
        epochs = given.number("num_epoch")
    else:
        given.remark("num_epoch is not set, and InsightFace has no default: train.epochs is 20")
    if "warmup_epoch" in given:
        warmup = given.number("warmup_epoch")
    else:
        given.remark("warmup_epoch is not set: optimizer.warmup_epochs is 0")
    lr = given.number("lr")
    if warmup < 0 and lr_power == 2:
        # The earlier scheduler starts counting at the negative step, so the decay has already begun.
        lr *= (epochs / (epochs - warmup)) ** lr_power
        given.remark(
            f"warmup_epoch = {warmup:g}: the earlier scheduler starts as if {-warmup:g} epochs had passed, therefore "
            f"optimizer.lr is {lr:g}"
        )
    elif warmup < 0:
        given.remark(f"warmup_epoch = {warmup:g} means no warm-up in InsightFace: optimizer.warmup_epochs is 0")
    given.remark(
        "the learning rate decays with power 1, as in the current train_v2.py; --lr-power 2 gives the curve of "
        "InsightFace's earlier scheduler, with which published results may have been obtained"
        if lr_power == 1
        else f"the learning rate decays with power {lr_power}, as in InsightFace's earlier scheduler; the current "
        f"train_v2.py uses power 1"
    )
    # InsightFace has one optimizer for backbone and head.
    return {
        "optimizer.name": name,
        "head.optimizer": name,
        **{
            f"{part}.{key}": given.number(key) for part in ("optimizer", "head") for key in ("weight_decay", "momentum")
        },
        "optimizer.clip_norm": 5.0,
        "optimizer.schedule": "polynomial",
        "optimizer.power": float(lr_power),
        "optimizer.lr": lr,
        "optimizer.warmup_epochs": max(0.0, warmup),
        "train.epochs": epochs,
    }


def run_settings(given: ConfigFile, num_gpus: int) -> Settings:
    """Translates batch, precision, run folder, and the steps between reports and evaluations."""
    parts, batch = given.integer("gradient_acc"), given.integer("batch_size") * num_gpus
    is_named = given.value("output") is not None
    settings: Settings = {
        "train.nproc": min(num_gpus, GPUS_PER_MACHINE),
        "train.global_batch": batch * parts,
        "train.accumulate": parts,
        "train.seed": given.integer("seed", least=0),
        "train.precision": "auto" if given.value("fp16") else "float32",
        "train.run_dir": given.text("output") if is_named else f"runs/{given.path.stem}",
        "train.report_steps": given.integer("frequent"),
    }
    if parts > 1:
        given.remark(
            f"gradient_acc = {parts} became train.accumulate, with a train.global_batch {parts} times as large: the "
            f"gradient is the mean over it; versions of train_v2.py that sum it instead take steps {parts} times as "
            f"large with sgd"
        )
    if given.value("fp16"):
        given.remark(
            "fp16 = True became train.precision = 'auto': bf16 on GPUs that support it; set 'fp16' to train exactly like "
            "InsightFace"
        )
    targets, steps = given.value("val_targets"), given.integer("verbose")
    if targets is not None:
        if not isinstance(targets, list | tuple) or not all(isinstance(one, str) for one in targets):
            raise given.error("val_targets", "expected a list of names of .bin files")
        settings["train.evaluate_sets"] = list(targets)
    if targets is not None and not targets:
        given.remark("val_targets is empty: there is no evaluation during training; every .bin is evaluated at the end")
    elif "num_image" not in given:
        given.remark(
            f"verbose = {steps} was not carried over: without num_image the steps cannot be converted to "
            f"train.evaluate_epochs"
        )
    else:
        settings["train.evaluate_epochs"] = round(steps / max(1, given.integer("num_image") // batch), 6)
        given.remark(f"verbose = {steps} steps of {batch} images became train.evaluate_epochs")
    return settings


def tracker_settings(given: ConfigFile) -> Settings:
    """Translates the project in Weights & Biases. What wandb itself reads from its environment becomes a remark."""
    named = [name for name in ("wandb_project", "wandb_entity", "notes") if given.value(name)]
    if not given.value("using_wandb"):
        if named or "using_wandb" in given:
            shown = ", ".join(["using_wandb", *named])
            given.remark(f"{shown}: Weights & Biases is switched off; train.wandb_project switches it on")
        return {}
    for name, variable in (("wandb_entity", "WANDB_ENTITY"), ("notes", "WANDB_NOTES")):
        if name in named:
            given.remark(f"{name} = {given.text(name)!r}: set the variable {variable} when you start the run")
    if "wandb_project" not in named:
        given.remark("wandb_project is not set: train.wandb_project is 'project', as in InsightFace's base.py")
    return {"train.wandb_project": given.text("wandb_project") if "wandb_project" in named else "project"}
