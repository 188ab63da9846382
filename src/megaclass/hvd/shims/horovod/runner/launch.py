"""`horovodrun` as functions."""

import subprocess
import sys
from typing import Any

from megaclass.hvd.horovod_util import ccl_built, ddl_built, extension_available, gloo_built, mpi_built, nccl_built
from megaclass.hvd.running import run

__all__ = [
    "_run",
    "ccl_built",
    "ddl_built",
    "extension_available",
    "gloo_built",
    "mpi_built",
    "nccl_built",
    "run",
    "run_commandline",
]


def run_commandline() -> None:
    """What the command `horovodrun` does: its arguments, given to `megaclass run`."""
    from megaclass.cli import main

    sys.exit(main(["run", "--horovod", *sys.argv[1:]]))


def _run(args: Any) -> list[Any] | None:
    """Runs args.run_func, for its results by rank, or args.command; RuntimeError if a process fails."""
    if args.np is not None:
        args.num_proc = args.np
    if args.run_func is not None:
        return run(
            args.run_func,
            num_proc=args.num_proc,
            min_num_proc=args.min_num_proc,
            hosts=args.hosts,
            hostfile=args.hostfile,
            host_discovery_script=args.host_discovery_script,
            start_timeout=args.start_timeout,
            ssh_port=args.ssh_port,
            ssh_identity_file=args.ssh_identity_file,
            output_filename=args.output_filename,
            verbose=args.verbose,
            use_gloo=args.use_gloo,
            use_mpi=args.use_mpi,
            network_interfaces=args.nics,
            executable=args.executable,
        )
    options = [
        *("--num-proc", str(args.num_proc)),
        *(("--hosts", args.hosts) if args.hosts else ()),
        *(("--hostfile", args.hostfile) if args.hostfile else ()),
        *(("--ssh-port", str(args.ssh_port)) if args.ssh_port else ()),
        *(("--ssh-identity-file", args.ssh_identity_file) if args.ssh_identity_file else ()),
        *(("--output-filename", args.output_filename) if args.output_filename else ()),
        *(("--verbose",) if args.verbose else ()),
    ]
    done = subprocess.run([sys.executable, "-P", "-m", "megaclass", "run", "--horovod", *options, *args.command])
    if done.returncode:
        raise RuntimeError(
            f"Horovod detected that one or more processes exited with non-zero status, thus causing the job to be "
            f"terminated.\nExit code: {done.returncode}\n"
        )
    return None
