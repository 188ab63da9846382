"""Translates the settings of InsightFace's configs about GPUs, optimizer, batch and evaluation to sections of a recipe.

Each function appends a remark about everything that the recipe does not do in the same way.
"""

import re

from megaclass.insightface.config.given import GivenSettings, Sections, Settings

MAX_GPUS = 1024
GPUS_PER_MACHINE = 8


def published_gpus(file_name: str, asked: int | None, given: GivenSettings, remarks: list[str]) -> int:
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


def optimizer_settings(given: GivenSettings, lr_power: int, remarks: list[str]) -> Sections:
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


def _epochs(given: GivenSettings, remarks: list[str]) -> float:
    if "num_epoch" in given:
        return given.number("num_epoch")
    remarks.append("num_epoch is not set, and InsightFace has no default: train.epochs is 20")
    return 20.0


def batch_settings(given: GivenSettings, num_gpus: int, remarks: list[str]) -> Sections:
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


def evaluation_settings(given: GivenSettings, num_gpus: int, remarks: list[str]) -> Sections:
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
    if not given.is_readable("num_image"):
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


def output_settings(given: GivenSettings, file_name: str) -> Sections:
    """Translates the run folder and the steps between reports. file_name: names the folder where the file does not."""
    train: Settings = {"run_dir": f"runs/{file_name}", "report_steps": given.integer("frequent", least=1)}
    if "output" in given and given.value("output") is not None:
        train["run_dir"] = given.text("output")
    return {"train": train}
