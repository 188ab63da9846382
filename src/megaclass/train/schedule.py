"""The learning rate as a pure function of the step, so that a resumed run needs no saved state."""

import math

from megaclass.config.schema import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int, num_steps: int, steps_per_epoch: int) -> float:
    """Returns the rate of a step from 0 to num_steps - 1: rises linearly in the warm-up, then follows the schedule."""
    warmup_steps = min(round(config.warmup_epochs * steps_per_epoch), num_steps)
    if step < warmup_steps:
        return config.lr * (step + 1) / warmup_steps
    if config.schedule == "step":
        return config.lr * 0.1 ** sum(step >= round(epoch * steps_per_epoch) for epoch in config.step_epochs)
    progress = (step - warmup_steps) / max(1, num_steps - warmup_steps)
    if config.schedule == "cosine":
        return config.lr * (1 + math.cos(math.pi * progress)) / 2
    factor: float = (1 - progress) ** config.power
    return config.lr * factor
