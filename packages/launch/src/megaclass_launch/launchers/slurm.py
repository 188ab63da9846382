"""`--launcher slurm`: hands the job to srun, inside an allocation or asking for one. Standard library only."""

import os
from collections.abc import Mapping, Sequence

from megaclass_launch.errors import LaunchError
from megaclass_launch.hosts import Host
from megaclass_launch.launchers.replace_process import replace_process, with_network_variables
from megaclass_launch.options import RunOptions
from megaclass_launch.placement import place_ranks
from megaclass_launch.world import tasks_on_slurm_nodes


def launch(options: RunOptions, hosts: Sequence[Host]) -> int:
    """Replaces this process by srun."""
    options = with_network_variables(options)
    return replace_process(_srun_command(options, hosts, os.environ), options, package="slurm-client")


def _srun_command(options: RunOptions, hosts: Sequence[Host], env: Mapping[str, str]) -> list[str]:
    """env: the batch script's environment, if there is one; srun itself reads the rest of it."""
    num_processes = options.num_processes or sum(host.slots for host in hosts)
    granted = _granted_tasks(env)
    if granted is None and not num_processes:
        raise LaunchError("How many processes? Give -np N, or run this inside an allocation: salloc --ntasks=8")
    if granted is not None and num_processes > granted:
        raise LaunchError(
            f"-np {num_processes} asks for more than the {granted} tasks of Slurm job {env['SLURM_JOB_ID']}: "
            f"lower -np, or submit with sbatch --ntasks={num_processes}."
        )
    return [
        "srun",
        f"--ntasks={num_processes or granted}",
        *(_layout(hosts, num_processes) if hosts else ("--export=ALL",)),
        # The end of one rank must end the others, which would wait for it otherwise.
        "--kill-on-bad-exit=1",
        "--label",
        f"--chdir={options.workdir}",
        *options.command,
    ]


def _layout(hosts: Sequence[Host], num_processes: int) -> tuple[str, ...]:
    """Returns options that give each host as many tasks as it has slots, filling one host after the other."""
    counts = {host.name: host.slots for host in place_ranks(hosts, num_processes)}
    nodes = f"--nodes={len(counts)}"
    if len(set(counts.values())) == 1:
        each = next(iter(counts.values()))
        return f"--nodelist={','.join(counts)}", nodes, f"--ntasks-per-node={each}", "--export=ALL"
    tasks = ",".join(name for name, count in counts.items() for _ in range(count))
    # Task 0 is on the first host of this list, while SLURM_STEP_NODELIST, which ranks read otherwise, is sorted by Slurm.
    first = next(iter(counts))
    return f"--nodelist={tasks}", nodes, "--distribution=arbitrary", f"--export=ALL,MASTER_ADDR={first}"


def _granted_tasks(env: Mapping[str, str]) -> int | None:
    """Returns the number of tasks of the current allocation, or None outside of one."""
    if "SLURM_JOB_ID" not in env:
        return None
    if env.get("SLURM_NTASKS", "").isdecimal():
        return int(env["SLURM_NTASKS"])
    return sum(tasks_on_slurm_nodes(env["SLURM_TASKS_PER_NODE"])) if "SLURM_TASKS_PER_NODE" in env else 1
