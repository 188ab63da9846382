"""Runs commands through `megaclass run`, for the functions of `horovod.runner`."""

import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def run_command(
    command: Sequence[str],
    *,
    num_proc: int,
    hosts: str | None = None,
    hostfile: str | None = None,
    min_num_proc: int | None = None,
    start_timeout: int | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    output_filename: str | None = None,
    nics: Iterable[str] | None = None,
    with_timestamp: bool | None = None,
    verbose: Any = None,
    env: Mapping[str, str] | None = None,
) -> None:
    """Runs the command on `num_proc` ranks with the shims on PYTHONPATH; raises RuntimeError if a rank fails.

    env: environment variables for all ranks, in addition to those of this process.
    """
    values = {
        "--num-proc": num_proc,
        "--hosts": hosts,
        "--hostfile": hostfile,
        "--min-np": min_num_proc,
        "--start-timeout": start_timeout,
        "--ssh-port": ssh_port,
        "--ssh-identity-file": ssh_identity_file,
        "--output-filename": output_filename,
        "--network-interfaces": ",".join(nics or ()),
    }
    switches = {"--prefix-output-with-timestamp": with_timestamp, "--verbose": verbose}
    options = [
        *(part for flag, value in values.items() if value for part in (flag, str(value))),
        *(flag for flag, is_on in switches.items() if is_on),
    ]
    launcher = [sys.executable, "-P", "-m", "megaclass", "run", "--horovod", *options, *command]
    done = subprocess.run(launcher, env={**os.environ, **(env or {})})
    if done.returncode:
        raise RuntimeError(
            f"Horovod detected that one or more processes exited with non-zero status, thus causing the job to be "
            f"terminated.\nExit code: {done.returncode}\n"
        )
