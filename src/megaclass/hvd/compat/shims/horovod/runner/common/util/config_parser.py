"""Turns horovodrun's options, by the names of Horovod's parsed arguments, into the ranks' environment variables."""

from collections.abc import Collection, Mapping, MutableMapping
from typing import Any

from megaclass.launch.horovod_options import LOG_LEVELS as _LOG_LEVELS
from megaclass.launch.horovod_options import TUNABLES, environment_for, from_config, what_is_wrong

LOG_LEVELS = list(_LOG_LEVELS)
# As in Horovod, the module has a constant per variable: HOROVOD_FUSION_THRESHOLD = "HOROVOD_FUSION_THRESHOLD", and so on.
globals().update({tunable.variable: tunable.variable for tunable in TUNABLES})


def set_args_from_config(args: Any, config: Mapping[str, Any], override_args: Collection[str]) -> None:
    """Sets options from the configuration file, except those in `override_args`, which were given on the command line."""
    controller = config.get("controller")
    if controller and not args.use_gloo and not args.use_mpi:
        if controller.lower() not in ("gloo", "mpi"):
            raise ValueError(f"No such controller supported: {controller}")
        setattr(args, f"use_{controller.lower()}", True)
    for name, value in from_config(config).items():
        if name not in override_args:
            setattr(args, name, value)


def validate_config_args(args: Any) -> None:
    if wrong := what_is_wrong(_values(args)):
        raise ValueError(wrong)


def set_env_from_args(env: MutableMapping[str, str], args: Any) -> MutableMapping[str, str]:
    env.update(environment_for(_values(args)))
    return env


def _values(args: Any) -> dict[str, Any]:
    return {tunable.name: getattr(args, tunable.name, None) for tunable in TUNABLES}
