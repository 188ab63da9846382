"""Converts InsightFace's `configs/*.py` to recipes that train like its `train_v2.py`. The file is parsed, not executed.

Published configs have lines of two kinds, `config = edict()` and `config.x = value`, where the value is a literal or
arithmetic over literals and earlier values of `config`. Any other line could change the training and is an error that names
the line. The one exception is the function lr_step_func of older configs, which becomes a remark.

Each function below the reader translates some lines to settings by their full names, such as `head.margin`, and adds a remark
about everything that the recipe does not do in the same way.
"""

import ast
import math
import operator
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from megaclass.config.read import load_config_values, to_toml
from megaclass.config.schema import Config
from megaclass.insightface.names import NETWORKS
from megaclass_launch.errors import ConfigError

# Defaults from InsightFace's configs/base.py, which every config overrides.
BASE: dict[str, object] = {
    "margin_list": (1.0, 0.5, 0.0),
    "network": "r50",
    "embedding_size": 512,
    "sample_rate": 1.0,
    "interclass_filtering_threshold": 0,
    "fp16": False,
    "batch_size": 128,
    "optimizer": "sgd",
    "lr": 0.1,
    "momentum": 0.9,
    "weight_decay": 5e-4,
    "verbose": 2000,
    "frequent": 10,
    "gradient_acc": 1,
    "seed": 2048,
    "num_workers": 2,
}
# Further settings that a recipe has as well.
CARRIED = ("rec", "dali_aug", "output", "num_epoch", "warmup_epoch", "val_targets", "using_wandb", "wandb_project")
# Settings that do not affect the result of training, and what replaces them.
WITHOUT_EFFECT = {
    "dali": "Megaclass always reads and decodes images itself",
    "save_all_states": "checkpoints always contain the complete state",
    "resume": "give --resume to megaclass train",
    "wandb_key": "log in with `wandb login`",
    "wandb_log_all": "only rank 0 reports",
    "wandb_resume": "give --resume to megaclass train",
    "wandb_entity": "set the variable WANDB_ENTITY when you start the run",
    "notes": "set the variable WANDB_NOTES when you start the run",
    "suffix_run_name": "train.run_dir names the run",
    "save_artifacts": "the run folder contains the model",
    "warmup_step": "InsightFace computes it itself",
    "total_step": "InsightFace computes it itself",
    "num_classes": "it is read from the data",
    "num_image": "it is read from the data",
}
# Settings of older InsightFace code, which the current train_v2.py does not read, and what to do instead.
_STEPS = "set optimizer.schedule = 'step' and optimizer.step_epochs in the recipe"
OLDER = {
    "lr_func": _STEPS,
    "decay_epoch": _STEPS,
    "decay_step": _STEPS,
    "loss": "give config.margin_list: (1.0, 0.5, 0.0) for arcface, (1.0, 0.0, 0.4) for cosface",
}
MAX_GPUS = 1024
GPUS_PER_MACHINE = 8

Settings = dict[str, object]
"""Settings of a recipe by their full names."""


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
        **_data_settings(given),
        **_backbone_settings(given),
        **_head_settings(given),
        **_optimizer_settings(given, lr_power),
        **_run_settings(given, num_gpus),
    }
    missing = [f"{name} = {value!r}" for name, value in BASE.items() if name not in given.lines]
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
    lines = [f"# Imported from InsightFace's {_printable(path.name)} by megaclass import-config."]
    return "\n".join([*lines, *(f"# - {remark}" for remark in remarks), "", to_toml(config)])


# ---- the file -----------------------------------------------------------------------------------------------------------

_MAX_NUMBER = 1e18
"""Beyond it no setting makes sense."""
_ARITHMETIC: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


class _CannotReadError(Exception):
    """Raised for a statement or value that is not one of the two kinds; the text is the reason."""


@dataclass(frozen=True)
class Line:
    """The last assignment to `config.<name>`."""

    value: Any
    number: int
    text: str
    """The line in the file, shortened and printable."""


@dataclass
class ConfigFile:
    """The settings of a file, checked for their types. A setting that the file does not contain has the value of base.py."""

    path: Path
    lines: dict[str, Line] = field(default_factory=dict)
    """By name."""
    remarks: list[str] = field(default_factory=list)
    """Everything that the recipe does not do in the same way."""

    def remark(self, text: str) -> None:
        self.remarks.append(text)

    def value(self, name: str) -> Any:
        return self.lines[name].value if name in self.lines else BASE.get(name)

    def number(self, name: str) -> float:
        if not _is_number(value := self.value(name)):
            raise self.error(name, "expected a number")
        return float(value)

    def integer(self, name: str, least: int = 1) -> int:
        value = self.value(name)
        if not _is_number(value) or value != int(value) or value < least:
            raise self.error(name, f"expected a whole number of at least {least}")
        return int(value)

    def text(self, name: str) -> str:
        value = self.value(name)
        if not isinstance(value, str) or not value:
            raise self.error(name, "expected text")
        return value

    def error(self, name: str, reason: str) -> ConfigError:
        """Returns an error about the line that sets it."""
        line = self.lines[name]
        return ConfigError(f"{self.path}, line {line.number}: {line.text!r}: {reason}.")


def read_config_file(path: Path) -> ConfigFile:
    """Parses the file; refuses every statement that is neither `config = edict()` nor `config.x = value`."""
    found = ConfigFile(path)
    try:
        source = path.read_text(encoding="utf-8-sig")
        with warnings.catch_warnings():
            # "\d" in a string causes a SyntaxWarning, which is irrelevant here.
            warnings.simplefilter("ignore")
            statements = ast.parse(source).body
        for statement in statements:
            text = _printable(source.split("\n")[statement.lineno - 1])
            try:
                _follow(statement, text, found)
            except _CannotReadError as reason:
                raise ConfigError(f"{path}, line {statement.lineno}: {text!r}: {reason}.") from None
    except OSError as error:
        raise ConfigError(f"Cannot read {path}: {error.strerror}.") from error
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        place = f", line {error.lineno or 1}" if isinstance(error, SyntaxError) else ""
        why = error.msg if isinstance(error, SyntaxError) else str(error) or type(error).__name__
        raise ConfigError(f"{path}{place}: not Python in UTF-8, or nested too deeply: {_printable(why)}.") from error
    if not found.lines:
        raise ConfigError(f"{path} holds no lines like config.network = 'r50': is it one of InsightFace's configs?")
    return found


def _printable(text: str, limit: int = 120) -> str:
    """Returns the text as one shortened line without control characters."""
    joined = " ".join(text.split())
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in joined)
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _follow(statement: ast.stmt, text: str, found: ConfigFile) -> None:
    match statement:
        case ast.Expr(ast.Constant(str())):  # a docstring
            pass
        case ast.ImportFrom("easydict", [ast.alias("EasyDict", "edict" | None)]):
            pass
        case ast.Assign([ast.Name("config")], ast.Call(ast.Name("edict" | "EasyDict" | "dict"), [], [])):
            found.lines.clear()
        case ast.FunctionDef("lr_step_func", decorator_list=[], args=ast.arguments(defaults=[], kw_defaults=[])):
            found.remark(
                f"lr_step_func in line {statement.lineno} was not carried over: the recipe has the polynomial schedule of "
                f"the current train_v2.py; for steps {_STEPS}"
            )
        case ast.Assign([ast.Attribute(ast.Name("config"), "lr_func")], ast.Name("lr_step_func")):
            pass  # the remark is that of the function
        case ast.Assign([ast.Attribute(ast.Name("config"), name)], value):
            found.lines[name] = Line(_value(value, found), statement.lineno, text)
        case _:
            raise _CannotReadError(
                "expected config = edict() or config.<name> = <literal or arithmetic>; the file is not executed"
            )


def _value(node: ast.expr, found: ConfigFile) -> Any:
    """Computes literals, arithmetic and earlier values of `config`."""
    value: Any
    match node:
        case ast.Constant(None | str()):
            return node.value
        case ast.Constant(int() | float()):
            value = node.value
        case ast.Tuple(parts) | ast.List(parts):
            return tuple(_value(part, found) for part in parts)
        case ast.UnaryOp(operation, operand) if type(operation) in _ARITHMETIC:
            value = _computed(operation, _value(operand, found))
        case ast.BinOp(left, operation, right) if type(operation) in _ARITHMETIC:
            value = _computed(operation, _value(left, found), _value(right, found))
        case ast.Attribute(ast.Name("config"), name):
            if name not in found.lines:
                raise _CannotReadError(f"config.{_printable(name)} is not set above this line")
            return found.lines[name].value
        case _:
            raise _CannotReadError("the value is neither a literal nor arithmetic, and the file is not executed")
    # The size comes first, because isfinite cannot convert huge integers.
    if abs(value) > _MAX_NUMBER or not math.isfinite(value):
        raise _CannotReadError("the number is too large")
    return value


def _computed(operation: ast.operator | ast.unaryop, *values: Any) -> Any:
    if not all(map(_is_number, values)):
        raise _CannotReadError("arithmetic is supported for numbers only")
    try:
        return _ARITHMETIC[type(operation)](*values)
    except ArithmeticError as error:
        raise _CannotReadError(f"the value cannot be computed: {_printable(str(error))}") from None


# ---- its settings as those of a recipe ------------------------------------------------------------------------------------


def _check_names(given: ConfigFile) -> None:
    """Refuses unknown settings; adds remarks about those that do not affect the result of training."""
    off: list[str] = []
    for name, line in given.lines.items():
        if name in WITHOUT_EFFECT and line.value in (False, None, ""):
            off.append(name)
        elif name in WITHOUT_EFFECT:
            given.remark(f"{name} was not carried over: {WITHOUT_EFFECT[name]}")
        elif name in OLDER:
            reason = "the setting belongs to older InsightFace code. Delete the line from a copy of the file, and"
            raise given.error(name, f"{reason} {OLDER[name]}")
        elif name not in BASE and name not in CARRIED:
            raise given.error(
                name,
                f"{_printable(name)} is not a known setting of InsightFace's train_v2.py and could change the training. If "
                f"it does not matter, delete the line from a copy of the file and import the copy",
            )
    if off:
        given.remark(f"not carried over, because switched off: {', '.join(off)}")


def published_gpus(asked: int | None, given: ConfigFile) -> int:
    """Returns the number of GPUs of the published run: as asked, or as the name of the file says.

    The name may also state the global batch in units of 1024 (bs4k), which with batch_size gives the number of GPUs.
    """
    stem, batch = given.path.stem.lower(), given.integer("batch_size")
    gpus = re.search(r"(?:^|_)(\d{1,4}|one)gpus?(?:_|$)", stem)
    whole = re.search(r"(?:^|_)bs(\d{1,4})k(?:_|$)", stem)
    named = 0
    if gpus:
        named = 1 if gpus[1] == "one" else int(gpus[1])
    elif whole and int(whole[1]) * 1024 % batch == 0:
        named = int(whole[1]) * 1024 // batch
    named = named if named <= MAX_GPUS else 0
    num_gpus = asked or named or GPUS_PER_MACHINE
    if named and named != asked:
        wrong = "import again with --gpus if that is wrong" if asked is None else f"but --gpus is {asked}"
        given.remark(f"the name of the file says {named} GPUs: {wrong}")
    elif not asked:
        given.remark(
            f"the name of the file does not say how many GPUs were used: {GPUS_PER_MACHINE} were assumed, as in "
            f"most published runs; import again with --gpus if that is wrong"
        )
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


def _data_settings(given: ConfigFile) -> Settings:
    """Translates the path of the data, the readers and the augmentations."""
    path = given.text("rec") if "rec" in given.lines else "SET-ME"
    if path == "SET-ME":
        given.remark("rec is not set: set data.path to the folder of the data")
    if path == "synthetic":
        if not given.value("num_classes"):
            raise given.error("rec", "synthetic data needs config.num_classes")
        path += f":{given.integer('num_classes')}"
        path += f"x{given.integer('num_image')}" if "num_image" in given.lines else ""
    settings: Settings = {"data.path": path, "data.threads": max(1, given.integer("num_workers", least=0))}
    if given.value("dali_aug") and given.value("dali"):
        # The four augmentations and probabilities of InsightFace's DALI pipeline.
        settings["data.augment"] = "low_resolution:0.1,blur:0.2,colour:0.2,grey:0.1"
        given.remark("dali_aug became data.augment, whose operations differ from DALI's in detail")
    elif given.value("dali_aug"):
        given.remark("dali_aug was not carried over: InsightFace reads it only if dali is True")
    return settings


def _backbone_settings(given: ConfigFile) -> Settings:
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
    settings: Settings = {f"backbone.{key}": value for key, value in vars(network).items()}
    return settings | {"backbone.embedding_dim": given.integer("embedding_size")}


def _head_settings(given: ConfigFile) -> Settings:
    """Translates margin, filter and sample rate. The margin is read like InsightFace's CombinedMarginLoss."""
    sizes = given.value("margin_list")
    if not (isinstance(sizes, tuple) and len(sizes) == 3 and all(map(_is_number, sizes))):
        raise given.error("margin_list", "expected three numbers (m1, m2, m3)")
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
        reason = "InsightFace's loss raises an error for these: expected m1 = 1 and m3 = 0, or m3 above 0"
        raise given.error("margin_list", reason)
    if (threshold := given.number("interclass_filtering_threshold")) > 0:
        settings["head.filter_above"] = threshold
    return settings


def _optimizer_settings(given: ConfigFile, lr_power: int) -> Settings:
    """Translates the optimizer and the learning rate over the epochs. lr_power: of the scheduler, 1 or 2."""
    name = given.text("optimizer")
    if name not in ("sgd", "adamw"):
        raise given.error("optimizer", "expected sgd or adamw")
    if given.number("momentum") != 0.9 and name == "sgd":
        given.remark("momentum was carried over, but train_v2.py always uses 0.9")
    epochs, warmup = (
        given.number(key) if key in given.lines else default
        for key, default in (("num_epoch", 20), ("warmup_epoch", 0))
    )
    if "num_epoch" not in given.lines:
        given.remark("num_epoch is not set, and InsightFace has no default: train.epochs is 20")
    if "warmup_epoch" not in given.lines:
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
    both: Settings = {"weight_decay": given.number("weight_decay"), "momentum": given.number("momentum")}
    return {
        "optimizer.name": name,
        "head.optimizer": name,
        **{f"{part}.{key}": value for part in ("optimizer", "head") for key, value in both.items()},
        "optimizer.clip_norm": 5.0,
        "optimizer.schedule": "polynomial",
        "optimizer.power": float(lr_power),
        "optimizer.lr": lr,
        "optimizer.warmup_epochs": max(0.0, warmup),
        "train.epochs": epochs,
    }


def _run_settings(given: ConfigFile, num_gpus: int) -> Settings:
    """Translates batch, precision, run folder, tracker, and the steps between reports and evaluations."""
    parts, batch = given.integer("gradient_acc"), given.integer("batch_size") * num_gpus
    settings: Settings = {
        "train.nproc": min(num_gpus, GPUS_PER_MACHINE),
        "train.global_batch": batch * parts,
        "train.accumulate": parts,
        "train.seed": given.integer("seed", least=0),
        "train.precision": "auto" if given.value("fp16") else "float32",
        "train.run_dir": f"runs/{given.path.stem}" if given.value("output") is None else given.text("output"),
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
    if given.value("using_wandb"):
        settings["train.wandb_project"] = given.value("wandb_project") or "project"
        given.remark(f"using_wandb became train.wandb_project = {settings['train.wandb_project']!r}")
    elif given.value("wandb_project"):
        given.remark("using_wandb is not True: Weights & Biases is switched off; train.wandb_project switches it on")
    targets, steps = given.value("val_targets"), given.integer("verbose")
    if targets is not None:
        if not isinstance(targets, tuple) or not all(isinstance(one, str) for one in targets):
            raise given.error("val_targets", "expected a list of names of .bin files")
        settings["train.evaluate_sets"] = list(targets)
    if targets == ():
        given.remark("val_targets is empty: there is no evaluation during training; every .bin is evaluated at the end")
    elif "num_image" not in given.lines:
        given.remark(f"verbose = {steps} was not carried over: without num_image the steps are not a number of epochs")
    else:
        settings["train.evaluate_epochs"] = round(steps / max(1, given.integer("num_image") // batch), 6)
        given.remark(f"verbose = {steps} steps of {batch} images became train.evaluate_epochs")
    return settings
