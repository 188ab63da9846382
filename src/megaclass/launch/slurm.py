"""A job for Slurm's srun, inside an allocation or asking for one. Standard library only."""

from collections.abc import Mapping, Sequence

from megaclass.errors import LaunchError
from megaclass.launch.hosts import Host
from megaclass.launch.options import RunOptions
from megaclass.world import tasks_on_slurm_nodes


def srun_command(options: RunOptions, hosts: Sequence[Host], env: Mapping[str, str]) -> list[str]:
    """env: of the batch script, if there is one; srun itself reads the rest of it."""
    num_processes = options.num_processes or sum(host.slots for host in hosts)
    granted = _granted(env)
    if granted is None and not num_processes:
        raise LaunchError("How many processes? Give -np N, or type this inside an allocation: salloc --ntasks=8")
    if granted is not None and num_processes > granted:
        raise LaunchError(
            f"-np {num_processes} asks for more than the {granted} tasks of Slurm job {env['SLURM_JOB_ID']}: "
            f"lower -np, or submit with sbatch --ntasks={num_processes}."
        )
    slots = {host.slots for host in hosts}
    if len(slots) > 1 and num_processes == sum(host.slots for host in hosts):
        raise LaunchError(
            "--launcher slurm takes the same number of slots on every host of -H: "
            "leave -H out, and Slurm chooses, or give equal slots."
        )
    return [
        "srun",
        f"--ntasks={num_processes or granted}",
        *((f"--nodelist={','.join(host.name for host in hosts)}", f"--nodes={len(hosts)}") if hosts else ()),
        *((f"--ntasks-per-node={slots.pop()}",) if len(slots) == 1 else ()),
        # One rank that fails must take the others with it, which would wait for it otherwise.
        "--kill-on-bad-exit=1",
        "--label",
        f"--chdir={options.workdir}",
        "--export=ALL",
        *options.command,
    ]


def _granted(env: Mapping[str, str]) -> int | None:
    """Tasks of the allocation we are in; None outside."""
    if "SLURM_JOB_ID" not in env:
        return None
    if env.get("SLURM_NTASKS", "").isdecimal():
        return int(env["SLURM_NTASKS"])
    return sum(tasks_on_slurm_nodes(env["SLURM_TASKS_PER_NODE"])) if "SLURM_TASKS_PER_NODE" in env else 1
