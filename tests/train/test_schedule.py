import pytest

from megaclass.config.schema import OptimizerConfig
from megaclass.train.schedule import learning_rate


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
