"""Horovod's environment variables: defaults, units, flags, and values that cannot be meant."""

import dataclasses

import pytest

from horovod.common.settings import Settings, settings_from_environment
from megaclass_launch.errors import LaunchError
from megaclass_launch.rank_status import HANG_TIMEOUT


def test_an_empty_environment_gives_the_documented_defaults():
    assert settings_from_environment({}) == Settings()
    # Launchers may export variables without a value.
    names = ["FUSION_THRESHOLD", "CYCLE_TIME", "CACHE_CAPACITY", "TIMELINE", "STALL_CHECK_DISABLE"]
    assert settings_from_environment({f"HOROVOD_{name}": "" for name in names}) == Settings()


@pytest.mark.parametrize(
    ("variable", "text", "field", "value"),
    [
        ("FUSION_THRESHOLD", "0", "fusion_threshold", 0),
        ("FUSION_THRESHOLD", "33554432", "fusion_threshold", 32 << 20),
        ("FUSION_THRESHOLD", "1e6", "fusion_threshold", 1_000_000),
        # In milliseconds.
        ("CYCLE_TIME", "3.5", "cycle_time_s", 0.0035),
        ("CYCLE_TIME", "0", "cycle_time_s", 0.0),
        ("CACHE_CAPACITY", "0", "cache_capacity", 0),
        ("STALL_CHECK_TIME_SECONDS", "7", "stall_warning_s", 7.0),
        ("STALL_SHUTDOWN_TIME_SECONDS", "9", "stall_shutdown_s", 9.0),
        ("GLOO_TIMEOUT_SECONDS", "12", "gloo_timeout_s", 12.0),
        # A time-out of 0 would end every job at once: it means the default.
        ("GLOO_TIMEOUT_SECONDS", "0", "gloo_timeout_s", 300.0),
        ("START_TIMEOUT", "0", "start_timeout_s", 300.0),
        ("START_TIMEOUT", "45", "start_timeout_s", 45.0),
        ("TIMELINE", "/tmp/trace.json", "timeline", "/tmp/trace.json"),
        ("TIMELINE_MARK_CYCLES", "1", "mark_cycles", True),
        ("DISABLE_GROUP_FUSION", "1", "fuse_groups", False),
        ("DISABLE_GROUP_FUSION", "0", "fuse_groups", True),
        ("DYNAMIC_PROCESS_SETS", "1", "dynamic_process_sets", True),
    ],
)
def test_each_variable_sets_its_field_and_no_other(variable, text, field, value):
    found = settings_from_environment({f"HOROVOD_{variable}": text})
    assert found == dataclasses.replace(Settings(), **{field: value})


@pytest.mark.parametrize("text", ["0", "false", "No", "OFF", " ", " 0 "])
def test_a_flag_is_off_in_every_spelling_of_no(text):
    assert not settings_from_environment({"HOROVOD_TIMELINE_MARK_CYCLES": text}).mark_cycles


@pytest.mark.parametrize("text", ["1", "true", "Yes", "on", "2"])
def test_a_flag_is_on_for_all_else(text):
    assert settings_from_environment({"HOROVOD_TIMELINE_MARK_CYCLES": text}).mark_cycles


def test_disabled_stall_checks_neither_warn_nor_shut_down():
    env = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "5", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "6"}
    found = settings_from_environment(env)
    assert (found.stall_warning_s, found.stall_shutdown_s) == (5.0, 6.0)
    found = settings_from_environment({**env, "HOROVOD_STALL_CHECK_DISABLE": "1"})
    assert (found.stall_warning_s, found.stall_shutdown_s) == (0.0, 0.0)


@pytest.mark.parametrize("text", ["-1", "many", "nan", "inf", "1,5", "64MB"])
@pytest.mark.parametrize("variable", ["FUSION_THRESHOLD", "CYCLE_TIME", "START_TIMEOUT", "STALL_CHECK_TIME_SECONDS"])
def test_what_is_no_number_of_0_or_more_is_refused_by_name(variable, text):
    with pytest.raises(LaunchError) as caught:
        settings_from_environment({f"HOROVOD_{variable}": text})
    assert str(caught.value) == f"HOROVOD_{variable}={text!r} in the environment: expected a number of 0 or more."


@pytest.mark.parametrize(("text", "seconds"), [("30", 30.0), ("0.5", 0.5), ("-3", 0.0), ("never", 0.0), ("", 0.0)])
def test_the_launchers_own_variable_is_never_an_error(text, seconds):
    assert settings_from_environment({HANG_TIMEOUT: text}).hang_timeout_s == seconds
