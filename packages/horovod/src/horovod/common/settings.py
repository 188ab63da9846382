"""Horovod's environment variables that have an effect here."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from megaclass_launch.errors import LaunchError
from megaclass_launch.rank_status import HANG_TIMEOUT


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The values of the variables, read by init()."""

    fusion_threshold: int = 128 * 1024 * 1024
    """HOROVOD_FUSION_THRESHOLD: largest number of bytes that are reduced as one; 0 disables fusion."""
    cycle_time_s: float = 0.001
    """HOROVOD_CYCLE_TIME (in ms there): operations that no thread waits for are held back for five times as long, and then
    travel together."""
    cache_capacity: int = 1024
    """HOROVOD_CACHE_CAPACITY: number of lists of operations that ranks may refer to by a hash; 0: none."""
    stall_warning_s: float = 60.0
    """HOROVOD_STALL_CHECK_TIME_SECONDS: time until the warning about a tensor that some ranks have not submitted."""
    stall_shutdown_s: float = 0.0
    """HOROVOD_STALL_SHUTDOWN_TIME_SECONDS: time until such a tensor ends the job with an error; 0: never."""
    gloo_timeout_s: float = 300.0
    """HOROVOD_GLOO_TIMEOUT_SECONDS: how long a rank may be silent during an operation."""
    start_timeout_s: float = 300.0
    """HOROVOD_START_TIMEOUT: how long init() waits for the other ranks."""
    timeline: str = ""
    """HOROVOD_TIMELINE: file of the Chrome trace, or DYNAMIC; empty: no trace."""
    mark_cycles: bool = False
    """HOROVOD_TIMELINE_MARK_CYCLES: whether the trace shows when cycles start."""
    fuse_groups: bool = True
    """HOROVOD_DISABLE_GROUP_FUSION unsets it: whether a group may be fused with tensors that do not belong to it."""
    hang_timeout_s: float = 0.0
    """MEGACLASS_HANG_TIMEOUT, from `megaclass run --hang-timeout`: how long a rank may wait for an operation; 0: any time."""
    dynamic_process_sets: bool = False
    """HOROVOD_DYNAMIC_PROCESS_SETS: whether process sets may be added and removed after init()."""


def settings_from_environment(env: Mapping[str, str] = os.environ) -> Settings:
    stall_warning_s = _number(env, "STALL_CHECK_TIME_SECONDS", 60.0)
    stall_shutdown_s = _number(env, "STALL_SHUTDOWN_TIME_SECONDS", 0.0)
    if _flag(env, "STALL_CHECK_DISABLE"):
        stall_warning_s = stall_shutdown_s = 0.0
    return Settings(
        fusion_threshold=int(_number(env, "FUSION_THRESHOLD", 128 * 1024 * 1024)),
        cycle_time_s=_number(env, "CYCLE_TIME", 1.0) / 1000,
        cache_capacity=int(_number(env, "CACHE_CAPACITY", 1024)),
        stall_warning_s=stall_warning_s,
        stall_shutdown_s=stall_shutdown_s,
        gloo_timeout_s=_number(env, "GLOO_TIMEOUT_SECONDS", 300.0) or 300.0,
        start_timeout_s=_number(env, "START_TIMEOUT", 300.0) or 300.0,
        timeline=env.get("HOROVOD_TIMELINE", ""),
        mark_cycles=_flag(env, "TIMELINE_MARK_CYCLES"),
        fuse_groups=not _flag(env, "DISABLE_GROUP_FUSION"),
        hang_timeout_s=_seconds(env, HANG_TIMEOUT),
        dynamic_process_sets=_flag(env, "DYNAMIC_PROCESS_SETS"),
    )


def _flag(env: Mapping[str, str], name: str) -> bool:
    return env.get(f"HOROVOD_{name}", "").strip().lower() not in ("", "0", "false", "no", "off")


def _seconds(env: Mapping[str, str], name: str) -> float:
    """Reads a variable that the launcher has set; anything else than a number means that it has not."""
    try:
        return max(0.0, float(env.get(name, "") or 0.0))
    except ValueError:
        return 0.0


def _number(env: Mapping[str, str], name: str, default: float) -> float:
    text = env.get(f"HOROVOD_{name}", "")
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise LaunchError(f"HOROVOD_{name}={text!r} in the environment: expected a number of 0 or more.")
    return value
