"""How a job that was restarted starts: the table at the top of training/start/restart.py, case by case."""

import pytest

from megaclass.config.read import load_config_values, to_toml
from megaclass.training.run.folder import RunFolder
from megaclass.training.start import restart
from megaclass.training.start.restart import StartMode
from megaclass_launch.errors import ConfigError

NEW, OVERWRITE, RESUME = StartMode(), StartMode(overwrite=True), StartMode(resume="auto")


def config_of(run_dir, **changes):
    return load_config_values({"data": {"path": "x"}, "train": {"run_dir": str(run_dir), **changes}}, where="test")


@pytest.fixture
def decided(tmp_path, monkeypatch):
    """decided(mode, is_taken, own_steps, has_same_settings): the mode of a restart in a folder that holds a run."""

    def decide(mode, *, is_taken, own_steps=(), has_same_settings=True):
        folder, config = RunFolder(tmp_path), config_of(tmp_path)
        folder.write_config(to_toml(config if has_same_settings else config_of(tmp_path, seed=1)))
        folder.set_taken(is_taken)
        monkeypatch.setattr(restart, "published", lambda _: [tmp_path / f"step-{step:09d}" for step in own_steps])
        return restart._mode_after_restart(config, folder, mode)

    return decide


def test_an_empty_folder_is_started_as_told(tmp_path):
    for mode in (NEW, OVERWRITE, RESUME):
        assert restart._mode_after_restart(config_of(tmp_path), RunFolder(tmp_path), mode) == mode


def test_before_the_folder_is_taken_a_restart_starts_as_told(decided):
    """It still holds the previous run, which --overwrite replaces and --resume continues."""
    for mode in (OVERWRITE, RESUME):
        assert decided(mode, is_taken=False, own_steps=[5]) == mode


def test_once_the_folder_is_taken_a_restart_resumes_from_the_newest_checkpoint_of_the_job(decided):
    for mode in (NEW, OVERWRITE, RESUME):
        assert decided(mode, is_taken=True, own_steps=[5, 10]) == StartMode(resume="auto")
    # A folder that had to be free can only hold the run of this job.
    assert decided(NEW, is_taken=False, own_steps=[5]) == StartMode(resume="auto")


def test_without_a_checkpoint_a_restart_replaces_its_own_run_and_no_other(decided):
    assert decided(NEW, is_taken=True) == OVERWRITE
    assert decided(OVERWRITE, is_taken=True) == OVERWRITE
    assert decided(RESUME, is_taken=True) == RESUME
    assert decided(NEW, is_taken=True, has_same_settings=False) == NEW


def test_checkpoints_up_to_the_one_that_was_started_from_are_not_of_the_job(decided, monkeypatch):
    monkeypatch.setattr(restart, "_first_step", lambda mode: 5)
    mode = StartMode(resume="elsewhere/step-000000005")
    assert decided(mode, is_taken=True, own_steps=[5]) == mode
    assert decided(mode, is_taken=True, own_steps=[5, 6]) == StartMode(resume="auto")


def test_resuming_and_replacing_exclude_each_other():
    with pytest.raises(ConfigError, match="exclude each other"):
        StartMode(resume="auto", overwrite=True)
