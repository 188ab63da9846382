"""horovodrun's options for the training program: flag, environment variable of the ranks, place in its YAML file.

Standard library only, except for the YAML file.
"""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaclass_launch.errors import LaunchError, clipped

LOG_LEVELS = ("TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL")


@dataclass(frozen=True, slots=True)
class Tunable:
    name: str
    """Name in Horovod's parsed arguments; the flag has dashes."""
    kind: type
    suffix: str
    """The variable is HOROVOD_ and this suffix."""
    place: str = ""
    """Section and key in the file."""
    no_effect: str = ""
    """Why the option is accepted but does nothing; empty if it has an effect."""

    @property
    def variable(self) -> str:
        return "NCCL_IB_DISABLE" if self.name == "tcp_flag" else f"HOROVOD_{self.suffix}"

    @property
    def flag(self) -> str:
        return self.on_flags[0]

    @property
    def on_flags(self) -> tuple[str, ...]:
        return _ON_FLAGS.get(self.name, (f"--{self.name.replace('_', '-')}",))

    @property
    def off_flags(self) -> tuple[str, ...]:
        """Returns the flags that turn a switch off."""
        return _OFF_FLAGS.get(self.name, (f"--no-{self.flag[2:]}",))


_ON_FLAGS = {"tcp_flag": ("--tcp",), "log_with_timestamp": ("--log-with-timestamp", "--no-log-hide-timestamp")}
_OFF_FLAGS = {
    "tcp_flag": (),
    "no_stall_check": ("--stall-check",),
    "log_with_timestamp": ("--log-without-timestamp", "--log-hide-timestamp"),
}
_LARGEST = 1 << 53
_CHOSEN = "NCCL and gloo choose by themselves"
_TUNED = "nothing is left to tune"
# fmt: off
TUNABLES = (
    Tunable("fusion_threshold_mb", int, "FUSION_THRESHOLD", "params.fusion_threshold_mb"),
    Tunable("cycle_time_ms", float, "CYCLE_TIME", "params.cycle_time_ms"),
    Tunable("cache_capacity", int, "CACHE_CAPACITY", "params.cache_capacity"),
    Tunable("hierarchical_allreduce", bool, "HIERARCHICAL_ALLREDUCE", "params.hierarchical_allreduce", _CHOSEN),
    Tunable("hierarchical_allgather", bool, "HIERARCHICAL_ALLGATHER", "params.hierarchical_allgather", _CHOSEN),
    Tunable("torus_allreduce", bool, "TORUS_ALLREDUCE", "params.torus_allreduce", _CHOSEN),
    Tunable("autotune", bool, "AUTOTUNE", "autotune.enabled", _TUNED),
    Tunable("autotune_log_file", str, "AUTOTUNE_LOG", "autotune.log_file", _TUNED),
    Tunable("autotune_warmup_samples", int, "AUTOTUNE_WARMUP_SAMPLES", "autotune.warmup_samples", _TUNED),
    Tunable("autotune_steps_per_sample", int, "AUTOTUNE_STEPS_PER_SAMPLE", "autotune.steps_per_sample", _TUNED),
    Tunable("autotune_bayes_opt_max_samples", int, "AUTOTUNE_BAYES_OPT_MAX_SAMPLES", "autotune.bayes_opt_max_samples", _TUNED),
    Tunable("autotune_gaussian_process_noise", float, "AUTOTUNE_GAUSSIAN_PROCESS_NOISE",
            "autotune.gaussian_process_noise", _TUNED),
    Tunable("timeline_filename", str, "TIMELINE", "timeline.filename"),
    Tunable("timeline_mark_cycles", bool, "TIMELINE_MARK_CYCLES", "timeline.mark_cycles"),
    Tunable("no_stall_check", bool, "STALL_CHECK_DISABLE", "stall_check.enabled"),
    Tunable("stall_check_warning_time_seconds", int, "STALL_CHECK_TIME_SECONDS", "stall_check.warning_time_seconds"),
    Tunable("stall_check_shutdown_time_seconds", int, "STALL_SHUTDOWN_TIME_SECONDS", "stall_check.shutdown_time_seconds"),
    Tunable("mpi_threads_disable", bool, "MPI_THREADS_DISABLE", "library_options.mpi_threads_disable", "no MPI is needed"),
    Tunable("num_nccl_streams", int, "NUM_NCCL_STREAMS", "library_options.num_nccl_streams", "torch decides"),
    Tunable("thread_affinity", int, "THREAD_AFFINITY", "library_options.thread_affinity", "there is no thread to pin"),
    Tunable("gloo_timeout_seconds", int, "GLOO_TIMEOUT_SECONDS", "library_options.gloo_timeout_seconds"),
    Tunable("tcp_flag", bool, ""),
    Tunable("log_level", str, "LOG_LEVEL", "logging.level"),
    Tunable("log_with_timestamp", bool, "LOG_HIDE_TIME", "logging.with_timestamp"),
)
# fmt: on


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags, hidden from --help; an option that is not given is None."""
    for tunable in TUNABLES:
        if tunable.kind is not bool:
            choices = LOG_LEVELS if tunable.name == "log_level" else None
            parser.add_argument(tunable.flag, type=tunable.kind, choices=choices, help=argparse.SUPPRESS)
            continue
        switch = parser.add_mutually_exclusive_group()
        for flags, value in ((tunable.on_flags, True), (tunable.off_flags, False)):
            if flags:
                switch.add_argument(
                    *flags, dest=tunable.name, action="store_const", const=value, help=argparse.SUPPRESS
                )


def read_config(path: Path) -> dict[str, Any]:
    """Parses the YAML file of --config-file. Raises LaunchError if that fails."""
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError as error:
        raise LaunchError(f"--config-file {path} needs PyYAML: pip install 'megaclass-launch[yaml]'.") from error
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise LaunchError(f"Cannot read --config-file {path}: {error.strerror}.") from error
    # ValueError: not UTF-8, or a date or a number that looks right and is none, such as 2026-02-30.
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise LaunchError(f"Cannot read --config-file {path}: {' '.join(str(error).split())}") from error
    if not isinstance(config, dict):
        raise LaunchError(f"--config-file {path} has no sections: expected for example `params:`, `timeline:`.")
    for section in dict.fromkeys(tunable.place.partition(".")[0] for tunable in TUNABLES if tunable.place):
        if not isinstance(config.get(section) or {}, dict):
            raise LaunchError(
                f"--config-file {path}: section {section!r} is {clipped(config[section])}, not a list of `key: value`."
            )
    return config


def from_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of the options that the file has, keyed by name."""
    found = {}
    for tunable in TUNABLES:
        section, _, key = tunable.place.partition(".")
        value = (config.get(section) or {}).get(key)
        if value is not None:
            found[tunable.name] = not value if tunable.name == "no_stall_check" else value
    return found


def what_is_wrong(values: Mapping[str, Any]) -> str:
    """Returns an error message, or an empty text if all values have the right kind and all numbers are in their ranges."""
    for tunable in TUNABLES:
        value = values.get(tunable.name)
        if value is None:
            continue
        if tunable.kind is str:
            if not isinstance(value, str) or "\0" in value:
                return f"{tunable.name}={clipped(value)} must be a text; quote it"
            continue
        if tunable.kind is bool:
            if not isinstance(value, int) or value not in (0, 1):
                return f"{tunable.name}={clipped(value)} must be true or false"
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _LARGEST
        if not is_number or (tunable.kind is int and value != int(value)):
            return f"{tunable.name}={clipped(value)} must be a {'whole ' if tunable.kind is int else ''}number"
        if value < 0:
            return f"{tunable.name}={value} must be >= 0"
    noise = values.get("autotune_gaussian_process_noise")
    if noise is not None and noise > 1:
        return f"autotune_gaussian_process_noise={noise} must be in [0, 1]"
    return ""


def environment_for(values: Mapping[str, Any]) -> dict[str, str]:
    """Returns the environment variables for the given options."""
    env = {}
    for tunable in TUNABLES:
        value = values.get(tunable.name)
        is_idle = (tunable.name.startswith("autotune") and not values.get("autotune")) or (
            tunable.name.startswith("timeline") and not values.get("timeline_filename")
        )
        if value is None or is_idle or (tunable.name == "tcp_flag" and not value):
            continue
        if tunable.name == "fusion_threshold_mb":
            value = int(value) << 20
        elif tunable.kind is bool:
            # LOG_HIDE_TIME is the opposite of its option.
            value = int(bool(value) != (tunable.name == "log_with_timestamp"))
        env[tunable.variable] = str(value)
    return env
