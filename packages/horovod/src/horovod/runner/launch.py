"""`horovod.runner.launch._run`: runs a command or a function through `megaclass run`."""

import os
import subprocess
import sys
from typing import Any

from horovod.common.util import ccl_built, ddl_built, gloo_built, mpi_built, nccl_built
from horovod.runner.run_function import options_of, run
from megaclass_launch.horovod_options import TUNABLES, environment_for, what_is_wrong


def _run(args: Any) -> list[Any] | None:
    """Runs args.run_func and returns its results by rank, or runs args.command; raises RuntimeError if a process fails.

    args: a `_HorovodArgs`, in which options that were not given are None.
    """
    if args.use_mpi or args.use_jsrun:
        raise ValueError("MPI support has not been built: megaclass has none. Leave use_mpi and use_jsrun out.")
    num_proc = args.np or args.num_proc
    if args.run_func is not None:
        same = (
            *("min_num_proc", "max_num_proc", "slots", "reset_limit", "cooldown_range", "hosts", "hostfile"),
            *("host_discovery_script", "start_timeout", "ssh_port", "ssh_identity_file", "output_filename"),
            *("verbose", "executable"),
        )
        given = {name: getattr(args, name) for name in same}
        return run(args.run_func, num_proc=num_proc, network_interfaces=args.nics, **given)
    tuned = {tunable.name: getattr(args, tunable.name) for tunable in TUNABLES}
    if wrong := what_is_wrong(tuned):
        raise ValueError(wrong)
    options = {
        "--num-proc": num_proc,
        "--hosts": args.hosts,
        "--hostfile": args.hostfile,
        "--min-np": args.min_num_proc,
        "--start-timeout": args.start_timeout,
        "--ssh-port": args.ssh_port,
        "--ssh-identity-file": args.ssh_identity_file,
        "--output-filename": args.output_filename,
        "--network-interfaces": ",".join(args.nics or ()),
        "--prefix-output-with-timestamp": bool(args.prefix_output_with_timestamp),
        "--verbose": bool(args.verbose),
    }
    launcher = [sys.executable, "-P", "-m", "megaclass_launch", "run", "--horovod", *options_of(options), *args.command]
    done = subprocess.run(launcher, env={**os.environ, **environment_for(tuned)})
    if done.returncode:
        raise RuntimeError(
            f"Horovod detected that one or more processes exited with non-zero status, thus causing the job to be "
            f"terminated.\nExit code: {done.returncode}\n"
        )
    return None
