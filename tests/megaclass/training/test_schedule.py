import pytest

from megaclass.config.read import load_config_values
from megaclass.config.schema import OptimizerConfig
from megaclass.training.schedule import Schedule, learning_rate


def curve(config: OptimizerConfig, num_steps: int = 10, steps_per_epoch: int = 5) -> list[float]:
    return [learning_rate(config, step, num_steps, steps_per_epoch) for step in range(num_steps)]


def test_polynomial_falls_as_the_power_of_what_is_left():
    assert curve(OptimizerConfig(lr=1.0, power=2.0))[:3] == pytest.approx([1.0, 0.81, 0.64])


def test_the_warm_up_rises_linearly_to_the_highest_rate():
    rates = curve(OptimizerConfig(lr=1.0, warmup_epochs=0.8, power=1.0))
    assert rates[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert rates[4:] == pytest.approx([1.0, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6])


def test_cosine_is_half_way_down_in_the_middle():
    rates = curve(OptimizerConfig(lr=1.0, schedule="cosine"))
    assert rates[0] == 1.0
    assert rates[5] == pytest.approx(0.5)


def test_steps_divide_by_ten():
    rates = curve(OptimizerConfig(lr=1.0, schedule="step", step_epochs=(0.4, 1.2)))
    assert rates == pytest.approx([1.0] * 2 + [0.1] * 4 + [0.01] * 4)


def steps_with(duty: str, commit_steps: int | None = None, **train: float) -> list[int]:
    """Numbers of the steps that have the duty, counted from 1, of a run with five steps per epoch."""
    config = load_config_values(
        {"data": {"path": "x"}, "train": {"run_dir": "x", "report_steps": 1000, **train}}, where="test"
    )
    schedule = Schedule(config, steps_per_epoch=5, commit_steps=commit_steps)
    return [step + 1 for step in range(schedule.num_steps) if getattr(schedule.duties(step), duty)]


def test_a_run_is_saved_evaluated_and_committed_at_the_intervals_of_its_settings_and_at_the_end():
    train = {"epochs": 2.4, "checkpoint_epochs": 1.0, "evaluate_epochs": 0.8}
    assert steps_with("is_last", **train) == [12]
    assert steps_with("is_saved", **train) == [5, 10, 12]
    assert steps_with("is_evaluated", **train) == [4, 8, 12]
    assert steps_with("is_committed", **train) == []
    assert steps_with("is_committed", commit_steps=3, **train) == [3, 5, 6, 9, 10, 12]
    # The numbers of a checkpoint and of a commit are those of its own step.
    assert steps_with("is_reported", commit_steps=3, **train) == [3, 4, 5, 6, 8, 9, 10, 12]
    assert steps_with("is_reported", **{**train, "report_steps": 7}) == [4, 5, 7, 8, 10, 12]


def test_without_evaluation_during_training_no_step_is_evaluated_and_a_run_has_at_least_one_step():
    assert steps_with("is_evaluated", epochs=2.0, evaluate_epochs=0.0) == []
    assert steps_with("is_saved", epochs=0.01, checkpoint_epochs=0.01) == [1]
    assert steps_with("is_saved", epochs=1.0, checkpoint_epochs=0.01) == [1, 2, 3, 4, 5]
