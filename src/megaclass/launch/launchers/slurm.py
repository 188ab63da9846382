"""A job for Slurm's srun, inside an allocation or asking for one. Standard library only."""

from collections.abc import Mapping, Sequence

from megaclass.errors import LaunchError
from megaclass.launch.hosts import Host
from megaclass.launch.options import RunOptions
from megaclass.launch.plan import place_ranks
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
    return [
        "srun",
        f"--ntasks={num_processes or granted}",
        *(_layout(hosts, num_processes) if hosts else ("--export=ALL",)),
        # One rank that fails must take the others with it, which would wait for it otherwise.
        "--kill-on-bad-exit=1",
        "--label",
        f"--chdir={options.workdir}",
        *options.command,
    ]


def _layout(hosts: Sequence[Host], num_processes: int) -> tuple[str, ...]:
    """As many tasks on each host as it has slots, one host filled after the other."""
    counts = {placed.host.name: len(placed.worlds) for placed in place_ranks(hosts, num_processes)}
    nodes = f"--nodes={len(counts)}"
    if len(set(counts.values())) == 1:
        each = next(iter(counts.values()))
        return f"--nodelist={','.join(counts)}", nodes, f"--ntasks-per-node={each}", "--export=ALL"
    tasks = ",".join(name for name, count in counts.items() for _ in range(count))
    # Task 0 is then on the first host of the list, which need not be the first of the step: Slurm sorts those.
    first = next(iter(counts))
    return f"--nodelist={tasks}", nodes, "--distribution=arbitrary", f"--export=ALL,MASTER_ADDR={first}"


def _granted(env: Mapping[str, str]) -> int | None:
    """Tasks of the allocation we are in; None outside."""
    if "SLURM_JOB_ID" not in env:
        return None
    if env.get("SLURM_NTASKS", "").isdecimal():
        return int(env["SLURM_NTASKS"])
    return sum(tasks_on_slurm_nodes(env["SLURM_TASKS_PER_NODE"])) if "SLURM_TASKS_PER_NODE" in env else 1
