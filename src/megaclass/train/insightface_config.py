"""InsightFace's `configs/*.py` -> a recipe, without executing them: they are read as text."""

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megaclass.config import Config, load_config_values
from megaclass.errors import ConfigError

_BACKBONES = {f"r{depth}": f"iresnet{depth}" for depth in (18, 34, 50, 100, 200)}
# Decided elsewhere: by these settings, whose defaults suit.
_ELSEWHERE = {
    "frequent": "train.report_steps",
    "verbose": "train.evaluate_epochs",
    "val_targets": "the *.bin files beside the data, all of which are evaluated on",
    "fp16": "train.precision",
    "num_workers": "data.threads",
    "using_wandb": "train.wandb_project",
    "wandb_project": "train.wandb_project",
    "resume": "--resume",
}
# Say nothing about the training itself.
_WITHOUT_MEANING = {
    "dali", "dali_aug", "num_image", "save_all_states", "wandb_key", "suffix_run_name", "wandb_entity", "wandb_log_all",
    "save_artifacts", "wandb_resume", "notes", "warmup_step", "total_step", "synthetic",
}  # fmt: skip


def import_config(path: Path, num_gpus: int) -> tuple[Config, list[str]]:
    """The same training as a Config, and a remark about every line that has no counterpart.

    num_gpus: how many the published run used; InsightFace's batch_size is that of one.
    """
    values = read_assignments(path)
    remarks = [f"{name} has no counterpart and was left out" for name in sorted(values.keys() & _WITHOUT_MEANING)]
    remarks += [f"{name} was left out: see {_ELSEWHERE[name]}" for name in sorted(values.keys() & _ELSEWHERE.keys())]
    sections: dict[str, dict[str, Any]] = {"train": {"run_dir": f"runs/{path.stem}", "nproc": num_gpus}}
    for name, value in values.items():
        if name in _WITHOUT_MEANING or name in _ELSEWHERE:
            continue
        if name not in _TRANSLATIONS:
            remarks.append(f"{name} = {value!r} is not known and was left out")
            continue
        for setting, translated in _TRANSLATIONS[name](value, num_gpus).items():
            section, key = setting.split(".")
            sections.setdefault(section, {})[key] = translated
    if (parts := _num_parts(values)) > 1:
        # InsightFace adds the gradients of the parts up; here a step is the mean over its whole batch.
        train = sections["train"]
        train["accumulate"], train["global_batch"] = parts, int(values.get("batch_size", 128)) * num_gpus * parts
        remarks.append(
            f"gradient_acc = {parts} became train.accumulate, with a train.global_batch {parts} times as large; the mean "
            f"over it takes the place of a sum of {parts} means, so that optimizer.lr may be up to {parts} times as large"
        )
    sections.setdefault("data", {}).setdefault("path", "SET-ME")
    if sections["data"]["path"] == "SET-ME":
        remarks.append("rec is not set: put the folder of the data into data.path")
    return load_config_values(sections, where=str(path)), remarks


def read_assignments(path: Path) -> dict[str, Any]:
    """Literal values of `config.name = …`; expressions that are not literals are refused by name and line."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    except OSError as error:
        raise ConfigError(f"Cannot read {path}: {error.strerror}.") from error
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{path} is not Python: {error}") from error
    values: dict[str, Any] = {}
    for statement in tree.body:
        if not isinstance(statement, ast.Assign) or not isinstance(statement.targets[0], ast.Attribute):
            continue
        name = statement.targets[0].attr
        try:
            values[name] = ast.literal_eval(statement.value)
        except ValueError:
            if name not in _WITHOUT_MEANING:
                text = ast.unparse(statement.value)
                raise ConfigError(
                    f"{path}, line {statement.lineno}: {name} = {text} is computed, and the file is not executed: "
                    f"write the value there."
                ) from None
    if not values:
        raise ConfigError(f"{path} holds no lines like config.network = 'r50': is it one of InsightFace's configs?")
    return values


def _num_parts(values: dict[str, Any]) -> int:
    parts = values.get("gradient_acc", 1)
    if not isinstance(parts, int) or parts < 1:
        raise ConfigError(f"gradient_acc is {parts!r}; expected a whole number of 1 or more.")
    return parts


def _margin(value: Any, num_gpus: int) -> dict[str, Any]:
    try:
        multiplier, angle, cosine = (float(part) for part in value)
    except (TypeError, ValueError):
        raise ConfigError(f"margin_list is {value!r}; expected three numbers (m1, m2, m3).") from None
    if (multiplier, cosine) == (1, 0):
        return {"head.margin": "arcface", "head.margin_size": angle}
    if (multiplier, angle) == (1, 0):
        return {"head.margin": "cosface", "head.margin_size": cosine}
    raise ConfigError(
        f"margin_list {value!r} combines margins, which a recipe cannot say: use CombinedMargin in your own loop."
    )


def _backbone(value: Any, num_gpus: int) -> dict[str, Any]:
    return {"backbone.name": _BACKBONES.get(value, value)}


def _optimizer(value: Any, num_gpus: int) -> dict[str, Any]:
    if value not in ("sgd", "adamw"):
        raise ConfigError(f"optimizer is {value!r}; expected sgd or adamw.")
    # One optimizer moves both there.
    return {"optimizer.name": value, "head.optimizer": value}


def _filter(value: Any, num_gpus: int) -> dict[str, Any]:
    return {"head.filter_above": float(value)} if value else {}


def _same(setting: str, kind: Callable[[Any], Any]) -> Callable[[Any, int], dict[str, Any]]:
    return lambda value, num_gpus: {setting: kind(value)}


_TRANSLATIONS: dict[str, Callable[[Any, int], dict[str, Any]]] = {
    "network": _backbone,
    "margin_list": _margin,
    "optimizer": _optimizer,
    "interclass_filtering_threshold": _filter,
    "batch_size": lambda value, num_gpus: {"train.global_batch": int(value) * num_gpus},
    "weight_decay": lambda value, num_gpus: {"optimizer.weight_decay": float(value), "head.weight_decay": float(value)},
    "momentum": lambda value, num_gpus: {"optimizer.momentum": float(value), "head.momentum": float(value)},
    "rec": _same("data.path", str),
    "output": lambda value, num_gpus: {"train.run_dir": value} if value else {},
    "embedding_size": _same("backbone.embedding_dim", int),
    "sample_rate": _same("head.sample_rate", float),
    "lr": _same("optimizer.lr", float),
    "num_epoch": _same("train.epochs", float),
    "warmup_epoch": _same("optimizer.warmup_epochs", float),
    "seed": _same("train.seed", int),
    # The data says how many classes there are.
    "num_classes": lambda value, num_gpus: {},
    # Changes the batch, whatever the order of the lines: see above.
    "gradient_acc": lambda value, num_gpus: {},
}
