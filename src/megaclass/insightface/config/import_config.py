"""Converts InsightFace's `configs/*.py` to recipes that train like its `train_v2.py`. The file is parsed, not executed."""

import re
from pathlib import Path
from typing import Any

from megaclass.config.read import load_config_values, to_toml
from megaclass.config.schema import Config
from megaclass.errors import ConfigError
from megaclass.insightface.config.known_settings import BASE, CARRIED, LOSSES, OLDER, WITHOUT_EFFECT
from megaclass.insightface.config.lines import ConfigLines, read_lines
from megaclass.insightface.config.values import Unreadable, printable
from megaclass.insightface.names import NETWORKS

_MAX_GPUS = 1024
_GPUS_PER_MACHINE = 8


def import_config(path: Path, num_gpus: int | None = None, lr_power: int = 1) -> tuple[Config, list[str]]:
    """Returns the equivalent Config, and a remark about every line that is not carried over unchanged.

    num_gpus: number of GPUs of the published run, because InsightFace's batch_size is per GPU; None takes it from the name
    of the file, or 8. lr_power: 1 for the current train_v2.py, 2 for its earlier scheduler.
    """
    if num_gpus is not None and not 1 <= num_gpus <= _MAX_GPUS:
        raise ConfigError(f"The number of GPUs is {num_gpus}; expected 1 to {_MAX_GPUS}.")
    translation = _Translation(read_lines(path), num_gpus, lr_power)
    return translation.config(), translation.remarks


def recipe_text(config: Config, remarks: list[str], path: Path) -> str:
    """Returns the recipe as TOML, with the remarks as comments."""
    lines = [f"# Imported from InsightFace's {printable(path.name)} by megaclass import-config."]
    lines += [f"# - {remark}" for remark in remarks]
    version = "as in the current train_v2.py; InsightFace's earlier scheduler used 2 (--lr-power 2)"
    if config.optimizer.power == 2:
        version = "as in InsightFace's earlier scheduler; the current train_v2.py uses 1"
    body = re.sub(r"(?m)^(?=power = )", f"# {version}\n", to_toml(config), count=1)
    return "\n".join([*lines, "", body])


class _Translation:
    """Translates the lines of a config to settings by section, and collects remarks."""

    def __init__(self, lines: ConfigLines, num_gpus: int | None, lr_power: int) -> None:
        self.remarks = [*lines.remarks]
        self._lines = lines
        self._lr_power = lr_power
        self._check_names()
        self._num_gpus = self._gpus(num_gpus)
        stem = lines.path.stem
        self._sections: dict[str, dict[str, Any]] = {
            "data": {},
            "backbone": {},
            "head": {"scale": 64.0, "gradient": "straight-through"},
            "optimizer": {"clip_norm": 5.0, "schedule": "polynomial", "power": float(lr_power)},
            "train": {"run_dir": f"runs/{stem}", "nproc": min(self._num_gpus, _GPUS_PER_MACHINE)},
        }

    def config(self) -> Config:
        self._data()
        self._network()
        self._margin()
        self._optimizer()
        self._batch()
        self._evaluation()
        self._rest()
        missing = [f"{name} = {value!r}" for name, value in BASE.items() if name not in self._lines.values]
        if missing:
            self.remarks.append(f"not in the file, therefore taken from InsightFace's base.py: {', '.join(missing)}")
        try:
            return load_config_values(self._sections, where=str(self._lines.path))
        except ConfigError as error:
            # Errors about values out of range name the setting, but not the file.
            place = str(self._lines.path)
            raise (error if str(error).startswith(place) else ConfigError(f"{place}: {error}")) from None

    def _check_names(self) -> None:
        """Refuses unknown settings; adds remarks about those that do not affect the result of training."""
        off: list[str] = []
        for name, line in self._lines.values.items():
            if name in WITHOUT_EFFECT and line.value in (False, None):
                off.append(name)
            elif name in WITHOUT_EFFECT:
                self.remarks.append(f"{name} was not carried over: {WITHOUT_EFFECT[name]}")
            elif name in OLDER:
                raise self._lines.error(
                    line,
                    f"the setting belongs to older InsightFace code. Delete the line from a copy of the file, and "
                    f"{OLDER[name]}.",
                )
            elif name not in CARRIED:
                raise self._lines.error(
                    line,
                    f"{printable(name)} is not a known setting of InsightFace's train_v2.py and could change the training. If "
                    f"it does not matter, delete the line from a copy of the file and import the copy.",
                )
            elif isinstance(line.value, Unreadable):
                raise self._lines.error(
                    line, f"{line.value.reason}, and the file is not executed: replace it by its value."
                )
        if off:
            self.remarks.append(f"not carried over, because switched off: {', '.join(off)}")

    def _gpus(self, given: int | None) -> int:
        """Returns the given number, or the one in the name of the file, which may also state the global batch (bs4k)."""
        stem = self._lines.path.stem.lower()
        match = re.search(r"(?:^|_)(\d{1,4})gpus?(?:_|$)", stem)
        named = int(match[1]) if match else 1 if re.search(r"(?:^|_)onegpu(?:_|$)", stem) else None
        whole = re.search(r"(?:^|_)bs(\d{1,4})k(?:_|$)", stem)
        batch = self._integer("batch_size", least=1)
        # bs4k is the global batch in units of 1024; with batch_size it gives the number of GPUs.
        if named is None and whole and int(whole[1]) * 1024 % batch == 0:
            named = int(whole[1]) * 1024 // batch
        if named is not None and not 1 <= named <= _MAX_GPUS:
            named = None
        if given is None and named is None:
            self.remarks.append(
                f"the name of the file does not say how many GPUs were used: {_GPUS_PER_MACHINE} were assumed, as in "
                f"most published runs; import again with --gpus if that is wrong"
            )
            num_gpus = _GPUS_PER_MACHINE
        else:
            num_gpus = given if given is not None else named or _GPUS_PER_MACHINE
            if given is None:
                self.remarks.append(
                    f"the name of the file says {num_gpus} GPUs; import again with --gpus if that is wrong"
                )
            elif named is not None and named != given:
                self.remarks.append(f"the name of the file says {named} GPUs, but --gpus is {given}")
        if whole and num_gpus * batch != int(whole[1]) * 1024:
            self.remarks.append(
                f"the name of the file says a batch of {int(whole[1]) * 1024}, but batch_size {batch} on {num_gpus} GPUs "
                f"is {num_gpus * batch}"
            )
        if num_gpus > _GPUS_PER_MACHINE:
            self.remarks.append(
                f"{num_gpus} GPUs are more than one machine has: train.nproc is {_GPUS_PER_MACHINE} per machine; use megaclass "
                f"run to start on several machines"
            )
        return num_gpus

    def _data(self) -> None:
        data = self._sections["data"]
        path = self._text("rec") if "rec" in self._lines.values else ""
        if path == "synthetic":
            num_classes = self._integer("num_classes", least=1) if self._has("num_classes") else 0
            if not num_classes:
                raise self._lines.error(self._lines.values["rec"], "synthetic data needs config.num_classes.")
            num_images = self._integer("num_image", least=1) if self._has("num_image") else None
            path = f"synthetic:{num_classes}" + (f"x{num_images}" if num_images else "")
        if not path:
            path = "SET-ME"
            self.remarks.append("rec is not set: set data.path to the folder of the data")
        data["path"] = path
        data["threads"] = max(1, self._integer("num_workers", least=0))
        if self._flag("dali_aug"):
            if "dali" in self._lines.values and not self._has("dali"):
                raise self._error("dali", "expected True or False, because dali_aug depends on it")
            if self._flag("dali"):
                # The four augmentations and probabilities of InsightFace's DALI pipeline.
                data["augment"] = "low_resolution:0.1,blur:0.2,colour:0.2,grey:0.1"
                self.remarks.append(
                    "dali_aug became data.augment: the same augmentations and probabilities, but Megaclass's own operations, "
                    "which differ from DALI's in detail"
                )
            else:
                self.remarks.append("dali_aug was not carried over: InsightFace reads it only if dali is True")

    def _network(self) -> None:
        name = self._text("network")
        if name not in NETWORKS:
            raise self._error("network", f"unknown network; known networks are {', '.join(NETWORKS)}")
        network = NETWORKS[name]
        backbone = self._sections["backbone"]
        backbone["name"] = network.name
        backbone["embedding_dim"] = self._integer("embedding_size", least=1)
        backbone["drop_path"], backbone["mask_patches"] = network.drop_path, network.mask_patches
        backbone["checkpoint_activations"] = network.checkpoint_activations
        if name.endswith("mask_005"):
            self.remarks.append(
                f"the name {name} suggests 5 % masked patches, but InsightFace's code masks 10 %: backbone.mask_patches is 0.1"
            )
        if network.checkpoint_activations:
            self.remarks.append(
                f"InsightFace trains {name} with activation checkpointing: backbone.checkpoint_activations is true; false is "
                f"faster if memory allows"
            )

    def _margin(self) -> None:
        """Reads margin_list like InsightFace's CombinedMarginLoss: m3 > 0 means CosFace, whatever m1 and m2 are."""
        key, given = "margin_list", self._given("margin_list")
        if "loss" in self._lines.values:
            loss = self._text("loss")
            if loss not in LOSSES:
                raise self._error("loss", f"expected {' or '.join(LOSSES)}")
            if "margin_list" not in self._lines.values:
                key, given = "loss", LOSSES[loss]
            elif not isinstance(given, (list, tuple)) or tuple(given) != LOSSES[loss]:
                raise self._error(
                    "loss", f"it contradicts margin_list = {given!r}, and the current train_v2.py ignores it"
                )
        is_three = isinstance(given, (list, tuple)) and len(given) == 3 and all(map(_is_number, given))
        if not is_three:
            raise self._error(key, "expected three numbers (m1, m2, m3)")
        multiplier, angle, cosine = map(float, given)
        head = self._sections["head"]
        if cosine > 0:
            head["margin"], head["margin_size"] = "cosface", cosine
            if (multiplier, angle) != (1, 0):
                self.remarks.append(
                    f"margin_list = {given!r}: InsightFace's loss ignores m1 and m2 if m3 is above 0, and so does the recipe; "
                    f"to use all three set head.margin = 'combined', head.m1, head.m2 and head.m3"
                )
        elif (multiplier, cosine) == (1, 0):
            head["margin"], head["margin_size"] = "arcface", angle
        else:
            raise self._error(
                key, "InsightFace's loss raises an error for these: expected m1 = 1 and m3 = 0, or m3 above 0"
            )
        threshold = self._number("interclass_filtering_threshold")
        if threshold > 0:
            head["filter_above"] = threshold
        head["sample_rate"] = self._number("sample_rate")

    def _optimizer(self) -> None:
        name = self._text("optimizer")
        if name not in ("sgd", "adamw"):
            raise self._error("optimizer", "expected sgd or adamw")
        # InsightFace has one optimizer for backbone and head.
        for section, key in (("optimizer", "name"), ("head", "optimizer")):
            self._sections[section][key] = name
            self._sections[section]["weight_decay"] = self._number("weight_decay")
            self._sections[section]["momentum"] = self._number("momentum")
        if self._number("momentum") != 0.9 and name == "sgd":
            self.remarks.append("momentum was carried over, but train_v2.py always uses 0.9")
        lr, epochs, warmup = self._number("lr"), self._epochs(), 0.0
        if "warmup_epoch" in self._lines.values:
            warmup = self._number("warmup_epoch")
        else:
            self.remarks.append("warmup_epoch is not set: optimizer.warmup_epochs is 0")
        if warmup < 0:
            if self._lr_power == 2:
                # The earlier scheduler starts counting at the negative step, so that the decay has already begun.
                lr *= (epochs / (epochs - warmup)) ** self._lr_power
                self.remarks.append(
                    f"warmup_epoch = {warmup:g}: the earlier scheduler starts as if {-warmup:g} epochs had passed, therefore "
                    f"optimizer.lr is {lr:g}"
                )
            else:
                self.remarks.append(
                    f"warmup_epoch = {warmup:g} means no warm-up in InsightFace: optimizer.warmup_epochs is 0"
                )
            warmup = 0.0
        self._sections["optimizer"] |= {"lr": lr, "warmup_epochs": warmup}
        self._sections["train"]["epochs"] = epochs
        if self._lr_power == 1:
            self.remarks.append(
                "the learning rate decays with power 1, as in the current train_v2.py; --lr-power 2 gives the curve of "
                "InsightFace's earlier scheduler, with which published results may have been obtained"
            )
        else:
            self.remarks.append(
                f"the learning rate decays with power {self._lr_power}, as in InsightFace's earlier scheduler; the current "
                f"train_v2.py uses power 1"
            )

    def _epochs(self) -> float:
        if "num_epoch" in self._lines.values:
            return self._number("num_epoch")
        self.remarks.append("num_epoch is not set, and InsightFace has no default: train.epochs is 20")
        return 20.0

    def _batch(self) -> None:
        parts = self._integer("gradient_acc", least=1)
        train = self._sections["train"]
        train["global_batch"] = self._integer("batch_size", least=1) * self._num_gpus * parts
        train["accumulate"] = parts
        if parts > 1:
            self.remarks.append(
                f"gradient_acc = {parts} became train.accumulate, with a train.global_batch {parts} times as large: the "
                f"gradient is the mean over it; versions of train_v2.py that sum it instead take steps {parts} times as "
                f"large with sgd"
            )
        train["seed"] = self._integer("seed", least=0)
        if self._flag("fp16"):
            self.remarks.append(
                "fp16 = True became train.precision = 'auto': bf16 on GPUs that support it; set 'fp16' to train exactly like "
                "InsightFace"
            )
        else:
            train["precision"] = "float32"

    def _evaluation(self) -> None:
        train = self._sections["train"]
        targets = self._given("val_targets") if "val_targets" in self._lines.values else None
        if targets is not None:
            if not isinstance(targets, (list, tuple)) or not all(isinstance(one, str) for one in targets):
                raise self._error("val_targets", "expected a list of names of .bin files")
            train["evaluate_sets"] = list(targets)
        if targets is not None and not targets:
            self.remarks.append(
                "val_targets is empty: there is no evaluation during training; every .bin is evaluated at the end"
            )
            return
        steps = self._integer("verbose", least=1)
        if not self._has("num_image"):
            self.remarks.append(
                f"verbose = {steps} was not carried over: without num_image the steps cannot be converted to "
                f"train.evaluate_epochs"
            )
            return
        batch = self._integer("batch_size", least=1) * self._num_gpus
        steps_per_epoch = max(1, self._integer("num_image", least=1) // batch)
        train["evaluate_epochs"] = round(steps / steps_per_epoch, 6)
        self.remarks.append(f"verbose = {steps} steps of {batch} images became train.evaluate_epochs")

    def _rest(self) -> None:
        train = self._sections["train"]
        train["report_steps"] = self._integer("frequent", least=1)
        if "output" in self._lines.values and self._given("output") is not None:
            train["run_dir"] = self._text("output")

    def _has(self, name: str) -> bool:
        return name in self._lines.values and not isinstance(self._lines.values[name].value, Unreadable)

    def _given(self, name: str) -> Any:
        return self._lines.values[name].value if name in self._lines.values else BASE[name]

    def _number(self, name: str) -> float:
        value = self._given(name)
        if not _is_number(value):
            raise self._error(name, "expected a number")
        return float(value)

    def _integer(self, name: str, least: int) -> int:
        value = self._given(name)
        if not _is_number(value) or value != int(value) or value < least:
            raise self._error(name, f"expected a whole number of at least {least}")
        return int(value)

    def _text(self, name: str) -> str:
        value = self._given(name)
        if not isinstance(value, str) or not value:
            raise self._error(name, "expected text")
        return value

    def _flag(self, name: str) -> bool:
        return bool(self._given(name)) if self._has(name) else bool(BASE.get(name, False))

    def _error(self, name: str, expected: str) -> ConfigError:
        line = self._lines.values.get(name)
        assert line is not None, f"the default of {name} must be allowed"
        shown = f" (which is {printable(repr(line.value))})" if "=" not in line.text else ""
        return self._lines.error(line, f"{expected}{shown}.")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
