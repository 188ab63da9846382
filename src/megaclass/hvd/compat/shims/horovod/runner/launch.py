"""horovodrun as functions: parses its arguments and runs a command or a function through `megaclass run`."""

import argparse
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megaclass.distributed.network.addresses import interfaces
from megaclass.hvd.compat.launching import run_command
from megaclass.hvd.compat.util import ccl_built, ddl_built, extension_available, gloo_built, mpi_built, nccl_built
from megaclass.hvd.run_function import run
from megaclass.launch.check.build_table import build_table
from megaclass.launch.horovod_options import TUNABLES, add_flags, read_config
from megaclass.launch.options import HOROVOD_VERSION

from .common.util import config_parser, hosts
from .js_run import is_jsrun_installed
from .util import lsf, network

_SSH_S = 10


def parse_args() -> argparse.Namespace:
    """Parses sys.argv and the file of --config-file; raises ValueError for numbers out of range."""
    parser = argparse.ArgumentParser(prog="horovodrun", description="See `megaclass run --help`.")
    parser.add_argument("-v", "--version", action="version", version=HOROVOD_VERSION)
    num_proc = parser.add_argument("-np", "--num-proc", type=int, required=not lsf.LSFUtils.using_lsf())
    parser.add_argument("-cb", "--check-build", action="store_true")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    for flag in ("--disable-cache", "--verbose"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("-prefix-timestamp", "--prefix-output-with-timestamp", action="store_true")
    for flag in ("--config-file", "--output-filename", "--mpi-args", "--binding-args"):
        parser.add_argument(flag)
    parser.add_argument("--start-timeout", type=int)
    parser.add_argument("--network-interfaces", "--network-interface", dest="nics", action=_Interfaces)
    parser.add_argument("-p", "--ssh-port", type=int)
    parser.add_argument("-i", "--ssh-identity-file")
    parser.add_argument("--min-np", "--min-num-proc", dest="min_num_proc", type=int)
    parser.add_argument("--max-np", "--max-num-proc", dest="max_num_proc", type=int)
    parser.add_argument("--slots-per-host", dest="slots", type=int)
    for flag in ("--elastic-timeout", "--reset-limit"):
        parser.add_argument(flag, type=int)
    parser.add_argument("--blacklist-cooldown-range", dest="cooldown_range", type=int, nargs=2)
    where = parser.add_mutually_exclusive_group()
    where.add_argument("-H", "--hosts")
    where.add_argument("-hostfile", "--hostfile")
    where.add_argument("--host-discovery-script")
    controller = parser.add_mutually_exclusive_group()
    for name in ("gloo", "mpi", "jsrun"):
        controller.add_argument(f"--{name}", dest=f"use_{name}", action="store_true")
    add_flags(parser)
    # --check-build starts no processes, so it needs no number of them.
    num_proc.required = num_proc.required and not {"-cb", "--check-build"} & set(sys.argv)
    args = parser.parse_args()
    if args.config_file:
        typed = {tunable.name for tunable in TUNABLES if getattr(args, tunable.name) is not None}
        config_parser.set_args_from_config(args, read_config(Path(args.config_file)), typed)
    config_parser.validate_config_args(args)
    args.run_func = args.executable = None
    if args.check_build:
        print(build_table())
        sys.exit(0)
    return args


class _Interfaces(argparse.Action):
    def __call__(self, parser, namespace, values, option_string=None) -> None:  # type: ignore[no-untyped-def]
        if option_string == "--network-interface" and "," in values:
            warnings.warn("Give several interfaces with --network-interfaces.", DeprecationWarning, stacklevel=2)
        namespace.nics = {*(namespace.nics or ()), *values.split(",")}


def run_commandline() -> None:
    """Runs `megaclass run` with the arguments of the command `horovodrun`."""
    from megaclass.cli.main import main

    sys.exit(main(["run", "--horovod", *sys.argv[1:]]))


def _check_all_hosts_ssh_successful(
    host_addresses: Sequence[str],
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    fn_cache: Any = None,
) -> bool | None:
    """Returns True if ssh logs in to all hosts without a password; else prints its errors and returns None."""
    is_good = True
    for host in host_addresses:
        port = ("-p", str(ssh_port)) if ssh_port else ()
        key = ("-i", ssh_identity_file) if ssh_identity_file else ()
        quiet = ("-o", "BatchMode=yes", "-o", f"ConnectTimeout={_SSH_S}")
        try:
            done = subprocess.run(["ssh", *quiet, *port, *key, "--", host, "true"], capture_output=True, text=True)
            problem = (done.stderr or f"exit code {done.returncode}\n") if done.returncode else ""
        except OSError as error:
            problem = f"{error}\n"
        if problem:
            is_good = False
            print(f"ssh not successful for host {host}:\n{problem}")
    return is_good or None


def run_controller(
    use_gloo: bool | None,
    gloo_run: Callable[[], Any],
    use_mpi: bool | None,
    mpi_run: Callable[[], Any],
    use_jsrun: bool | None,
    js_run: Callable[[], Any],
    verbosity: int | None,
) -> None:
    """Calls the requested controller, or the best one that was built; raises ValueError if it was not built."""
    has_gloo, has_mpi = gloo_built(), mpi_built()
    text = (
        "{0} support has not been built.  If this is not expected, ensure {1} is installed and reinstall Horovod with "
    )
    text += "HOROVOD_WITH_{2}=1 to debug the build error."
    if use_gloo and not has_gloo:
        raise ValueError(text.format("Gloo", "CMake", "GLOO"))
    if not use_gloo and (use_mpi or use_jsrun) and not has_mpi:
        raise ValueError(text.format("MPI", "MPI", "MPI"))
    if not (has_gloo or has_mpi):
        raise ValueError(
            "Neither MPI nor Gloo support has been built. Try reinstalling Horovod ensuring that either MPI is installed "
            "(MPI) or CMake is installed (Gloo)."
        )
    if use_gloo or not has_mpi:
        gloo_run()
    elif use_mpi:
        mpi_run()
    elif lsf.LSFUtils.using_lsf() and (use_jsrun or is_jsrun_installed()):
        js_run()
    elif use_jsrun:
        raise ValueError(
            "Horovod did not detect an LSF job.  The jsrun launcher can only be used in that environment. "
            "Please, pick a different launcher for other environments."
        )
    else:
        mpi_run()


def _run(args: Any) -> list[Any] | None:
    """Runs args.run_func and returns its results by rank, or runs args.command; raises RuntimeError if a process fails."""
    if getattr(args, "np", None) is not None:
        args.num_proc = args.np
    if args.verbose and args.hosts:
        _report_remote_hosts(args)
    results: list[Any] = []
    run_controller(
        args.use_gloo,
        lambda: results.append(_start(args)),
        args.use_mpi,
        _refuse,
        args.use_jsrun,
        _refuse,
        args.verbose,
    )
    return results[0] if results else None


def _refuse() -> None:
    raise NotImplementedError("megaclass does not include MPI.")


def _report_remote_hosts(args: Any) -> None:
    print("Filtering local host names.")
    remote = network.filter_local_addresses(hosts.parse_hosts_and_slots(args.hosts)[0])
    print(f"Remote host found: {' '.join(remote)}")
    if remote:
        print("Checking ssh on all remote hosts.")
        if not _check_all_hosts_ssh_successful(remote, args.ssh_port, args.ssh_identity_file):
            raise RuntimeError("could not connect to some hosts via ssh")
        print("SSH was successful into all the remote hosts.")
    else:
        print("All hosts are local, finding the interfaces with address 127.0.0.1")
        loopback = [name for name, addresses in interfaces().items() if "127.0.0.1" in addresses]
        print(f"Local interface found {' '.join(loopback)}")


def _start(args: Any) -> list[Any] | None:
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
            network_interfaces=args.nics,
            executable=args.executable,
        )
    run_command(
        args.command,
        num_proc=args.num_proc,
        hosts=args.hosts,
        hostfile=args.hostfile,
        min_num_proc=args.min_num_proc,
        start_timeout=args.start_timeout,
        ssh_port=args.ssh_port,
        ssh_identity_file=args.ssh_identity_file,
        output_filename=args.output_filename,
        nics=args.nics,
        with_timestamp=args.prefix_output_with_timestamp,
        # The launcher would repeat the messages of _report_remote_hosts().
        verbose=args.verbose and not args.hosts,
        env=config_parser.set_env_from_args({}, args),
    )
    return None


if __name__ == "__main__":
    run_commandline()
