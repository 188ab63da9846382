"""The settings of InsightFace's `configs/*.py`: defaults, and those that have no counterpart in a recipe."""

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
