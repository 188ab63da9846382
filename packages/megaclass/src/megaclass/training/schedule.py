"""Learning rate and duties of each step, as pure functions of its number.

A resumed run therefore needs no saved state for them, and all ranks agree without communicating.
"""

import math
from dataclasses import dataclass

from megaclass.config.schema import Config, OptimizerConfig


@dataclass(frozen=True, slots=True)
class StepDuties:
    """The learning rate of one step, and what the ranks do after it together."""

    lr: float
    is_last: bool
    is_evaluated: bool
    is_committed: bool
    is_saved: bool
    is_reported: bool


@dataclass(frozen=True, slots=True)
class Schedule:
    """Number of steps of a run and the duties of each. commit_steps: of an elastic job, steps between two commits."""

    config: Config
    steps_per_epoch: int
    commit_steps: int | None = None

    @property
    def num_steps(self) -> int:
        return self._steps_in(self.config.train.epochs)

    def duties(self, step: int) -> StepDuties:
        """Returns the duties of a step from 0 to num_steps - 1."""
        train, done = self.config.train, step + 1
        is_last = done == self.num_steps
        is_saved = is_last or done % self._steps_in(train.checkpoint_epochs) == 0
        is_evaluated = train.evaluate_epochs > 0 and (is_last or done % self._steps_in(train.evaluate_epochs) == 0)
        is_committed = self.commit_steps is not None and (is_saved or done % self.commit_steps == 0)
        return StepDuties(
            lr=learning_rate(self.config.optimizer, step, self.num_steps, self.steps_per_epoch),
            is_last=is_last,
            is_evaluated=is_evaluated,
            is_committed=is_committed,
            is_saved=is_saved,
            # Also at every commit: if the ranks change there, the rows are still those of a run that was never disturbed.
            is_reported=is_saved or is_evaluated or is_committed or done % train.report_steps == 0,
        )

    def _steps_in(self, num_epochs: float) -> int:
        return max(1, round(num_epochs * self.steps_per_epoch))


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
