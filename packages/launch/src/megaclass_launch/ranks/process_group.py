"""Joins the default process group and chooses the device. Other packages may have groups of their own."""

import contextlib
import ipaddress
import itertools
import json
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from megaclass_launch.errors import ConnectionLostError, LaunchError
from megaclass_launch.ranks.collectives import gather_blocks
from megaclass_launch.ranks.devices import gpu_of_rank, no_gpu, ranks_sharing_a_gpu, visible_gpus
from megaclass_launch.ranks.gloo_exit import end_gloo, end_gloo_at_exit
from megaclass_launch.ranks.store import make_store
from megaclass_launch.rendezvous.addresses import source_towards
from megaclass_launch.rendezvous.connection_watch import Address, ConnectionWatch, network_timeout
from megaclass_launch.rendezvous.rank0_address import forget_interfaces, meeting_point, name_interfaces
from megaclass_launch.world import World

_log = logging.getLogger("megaclass.distributed")

_HINT_S = 15.0
_FAILED_RANK_FIRST_S = 1.0
_groups_of_this_process = itertools.count()
_is_left_by_error = False
"""True if the default group is one that an error has ended."""
_WITHOUT_LOST_RANKS = {
    # torch's watchdog then only aborts the communicators (CleanUpOnly). By default it ends the process.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    # By default the watchdog sleeps for four times 15 s before that, for the sake of a dump of its flight recorder, and holds a
    # lock that the next collective and the end of the group wait for. Another thread sleeps for 480 s after the dump.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
}
"""Variables with which a process outlives its group. torch reads them whenever it creates a group of NCCL."""
_ECHOES = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")


@contextmanager
def process_group(
    world: World,
    *,
    device: str = "auto",
    timeout_s: float = 600.0,
    join_s: float | None = None,
    gpu: int | None = None,
    ends_process: bool = True,
) -> Iterator[torch.device]:
    """Joins the default process group for the duration of the block and yields this rank's device.

    The backend is nccl on a GPU and gloo otherwise. A world of one joins a group of one: the same code path everywhere.
    Every rank logs its device, and warns about GPUs that are present but unused.

    After an error the group stays until the process ends or joins another group: destroying it may wait for the other ranks,
    and the error is not printed yet. In an elastic job it is ended, without waiting for anyone, because the process goes on.

    Args:
        timeout_s: limit of each collective.
        join_s: how long to wait for rank 0 and, on rank 0, for all other ranks; by default as long as for a collective.
        gpu: number of this rank's GPU; by default the local rank. A rank that sees one GPU uses that one.
        ends_process: whether a rank whose connections are dead ends. In an elastic job it joins another group instead, and
            its errors are raised at once.
    """
    join_s = timeout_s if join_s is None else join_s
    world = meeting_point(world)
    chosen = choose_device(device, world if gpu is None else replace(world, local_rank=gpu))
    backend = "nccl" if chosen.type == "cuda" else "gloo"
    sender = {"sender": world.name()}
    _log.info("%s, %s", describe_device(chosen), backend, extra=sender)
    for warning in unused_gpus(chosen, world) + unused_tasks(world):
        _log.warning(warning, extra=sender)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
        if not ends_process:
            outlive_lost_ranks()
    _drop_group_left_by_error()
    with _interfaces_named(world), watched_connections(world, ends_process=ends_process) as watch:
        try:
            store = _store(world, join_s)
            if chosen.type == "cuda":
                _check_no_shared_gpu(store, chosen, world)
            dist.init_process_group(
                backend,
                store=store,
                rank=world.rank,
                world_size=world.size,
                timeout=timedelta(seconds=timeout_s),
                device_id=chosen if chosen.type == "cuda" else None,
            )
        except (RuntimeError, ValueError) as error:  # DistStoreError and friends are RuntimeErrors
            raise LaunchError(
                f"{world.name()} cannot join the others at {world.address}:{world.port} within {join_s:g} s: "
                f"{explained(error)}"
            ) from error
        try:
            if watch is not None:
                watch.joined(_addresses_of_all(world, chosen), ends_process=ends_process)
            yield chosen
        except RuntimeError as error:
            is_own = watch is not None and bool(watch.reason)
            if not is_own and is_echo(error) and ends_process:
                # Another rank has ended, and its error should be reported first: this one is only the consequence.
                time.sleep(_FAILED_RANK_FIRST_S)
            _leave_after_error(ends_process)
            raise
        except BaseException:
            _leave_after_error(ends_process)
            raise
        else:
            _end_group()


def outlive_lost_ranks(env: MutableMapping[str, str] = os.environ) -> None:
    """Makes this process outlive ranks that are lost: to be called in elastic jobs before a group of NCCL is created.

    Settings that the user has given stay.
    """
    for name, value in _WITHOUT_LOST_RANKS.items():
        env.setdefault(name, value)


def abort_nccl(group: "dist.ProcessGroup | None" = None) -> None:
    """Ends the operations of a group of NCCL, by default the default group, that wait for a rank that is gone.

    Their results are garbage, and no error tells so; later operations of the group raise RuntimeError. Any thread may call it:
    a thread that waits in an operation continues. The group stays registered, because without a default group the other
    threads would take this rank for a world of one.
    """
    if group is None:
        if not dist.is_initialized() or dist.get_backend() != dist.Backend.NCCL:
            return
        group = dist.group.WORLD
    assert group is not None
    with contextlib.suppress(RuntimeError):
        group._get_backend(torch.device("cuda")).abort()


def _leave_after_error(ends_process: bool) -> None:
    global _is_left_by_error
    if not ends_process:
        _abort_group()
        return
    _is_left_by_error = True
    # By then the error is printed. gloo's threads have to end before Python does; a group of NCCL is not touched.
    end_gloo_at_exit()


def _drop_group_left_by_error() -> None:
    global _is_left_by_error
    if _is_left_by_error:
        _abort_group()
    _is_left_by_error = False


def _abort_group() -> None:
    end_gloo()
    if dist.is_initialized():
        # NCCL's: destroying it would wait for operations, and thus for a rank that may be gone.
        dist.distributed_c10d._abort_process_group()


def _end_group() -> None:
    end_gloo()
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def _interfaces_named(world: World) -> Iterator[None]:
    name_interfaces(world)
    try:
        yield
    finally:
        forget_interfaces()


def is_echo(error: Exception) -> bool:
    """Tells whether gloo raised the error because another rank has ended."""
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _ECHOES)


@contextmanager
def watched_connections(world: World, *, ends_process: bool = True) -> Iterator[ConnectionWatch | None]:
    """Ends this rank within MEGACLASS_NETWORK_TIMEOUT when another host stops answering; the error names both ends.

    Yields None when all ranks are on one machine. ends_process: see process_group.
    """
    if world.local_size == world.size:
        yield None
        return

    def describe(address: Address) -> str:
        is_rank_0 = address[1] == world.port and not world.is_main
        return f" (rank 0, {world.address})" if is_rank_0 else ""

    watch = ConnectionWatch(world.name(), network_timeout(), describe=describe, ends_process=ends_process).start()
    try:
        yield watch
    except Exception as error:
        if watch.reason:
            raise ConnectionLostError(watch.reason) from error
        raise
    finally:
        watch.stop()


def explained(error: Exception) -> str:
    """Returns torch's message; if gloo could not connect to another rank, one that names both ends instead.

    gloo does not name its own end, and prints the port of the other one with its two bytes swapped.
    """
    match = re.search(r"SO_ERROR: ([^,]+), remote=\[([^\]]+)\]:(\d+)", str(error))
    if match is None:
        return str(error)
    reason, address, port = match[1], match[2], socket.ntohs(int(match[3]))
    source = source_towards(address) or "this host"
    return f"the connection from {source} to {address} port {port} failed: {reason}. Does a firewall reject it?"


def _addresses_of_all(world: World, device: torch.device) -> list[str]:
    """Returns the addresses from which the hosts reach rank 0. Collective: one all-gather of 16 bytes per rank."""
    own = ipaddress.ip_address(source_towards(world.address) or "127.0.0.1")
    packed = own.packed if own.version == 6 else ipaddress.ip_address(f"::ffff:{own}").packed
    block = torch.tensor(list(packed), dtype=torch.uint8, device=device)
    return sorted({str(ipaddress.ip_address(bytes(row))) for row in gather_blocks(block, None).tolist()})


def choose_device(device: str, world: World) -> torch.device:
    """Returns the device for this rank; `auto` is the GPU of this local rank if torch can use one, else the CPU."""
    if device not in ("auto", "cpu", "cuda"):
        raise LaunchError(f"Unknown device {device!r}: expected auto, cpu or cuda.")
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise LaunchError(f"{world.name()} was asked for device 'cuda', but {no_gpu()}; or choose the device cpu.")
    index = gpu_of_rank(world.local_rank, torch.cuda.device_count())
    if index is None:
        raise LaunchError(
            f"{world.name()} is local rank {world.local_rank}, but torch sees {torch.cuda.device_count()} GPU(s) here, and "
            f"NCCL refuses two ranks on one GPU: start at most one process per GPU, or choose the device cpu."
        )
    return torch.device("cuda", index)


def _check_no_shared_gpu(
    store: "dist.Store",  # type: ignore[name-defined]
    device: torch.device,
    world: World,
) -> None:
    """Collective. Raises LaunchError on every rank if two ranks use one GPU, about which NCCL's own error says little.

    Through rank 0: about two reads of the store per rank.
    """
    gpu = visible_gpus()[device.index]
    if not world.is_main:
        store.set(f"gpu/{world.rank}", gpu)
        gpus_W = json.loads(store.get("gpus"))
    else:
        gpus_W = [gpu, *(store.get(f"gpu/{rank}").decode() for rank in range(1, world.size))]
        store.set("gpus", json.dumps(gpus_W))
    if pair := ranks_sharing_a_gpu(gpus_W):
        raise LaunchError(
            f"{world.name()} does not start, because ranks {pair[0]} and {pair[1]} would share GPU {gpus_W[pair[0]]}, and "
            f"NCCL refuses two ranks on one GPU: start at most one process per GPU, or choose the device cpu. For tests, "
            f"NCCL_HOSTID with another value per rank allows it."
        )


def describe_device(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return f"cpu ({torch.get_num_threads()} thread{'s' if torch.get_num_threads() > 1 else ''})"


def unused_gpus(device: torch.device, world: World, driver: Path = Path("/proc/driver/nvidia/gpus")) -> list[str]:
    """Returns warnings about GPUs that stay idle: a run that does not use its GPUs costs days."""
    present = len(list(driver.iterdir())) if driver.is_dir() else 0
    if device.type == "cpu":
        if torch.cuda.is_available():
            return [f"training on the CPU although {torch.cuda.device_count()} GPU(s) are usable: choose device=auto."]
        if present:
            return [
                f"the driver shows {present} GPU(s) on {socket.gethostname()}, but torch {torch.__version__} cannot use "
                f"them: training on the CPU. Install a CUDA build of torch that fits the driver."
            ]
    elif world.local_rank == 0 and world.local_size < torch.cuda.device_count():
        return [
            f"{torch.cuda.device_count()} GPUs are visible but only {world.local_size} process(es) run here: "
            f"the others stay idle."
        ]
    return []


def unused_tasks(world: World, env: Mapping[str, str] = os.environ) -> list[str]:
    """Returns a warning if Slurm granted several tasks, which only srun uses, to a process that was started without srun."""
    asked = env.get("SLURM_NPROCS") or env.get("SLURM_NTASKS", "1")
    if world.is_main and world.starter == "none" and "SLURM_JOB_ID" in env and asked.isdecimal() and int(asked) > 1:
        return [
            f"Slurm granted {asked} tasks, but this is one process: type `srun` in front of the command to use all of them."
        ]
    return []


def _store(world: World, timeout_s: float) -> "dist.Store":  # type: ignore[name-defined]
    # torch retries silently until the timeout, and its error names neither host nor port.
    hint = threading.Timer(_HINT_S, lambda: _log.warning(_waiting_for_rank_0(world, timeout_s)))
    hint.daemon = True
    if not world.is_main and world.size > 1:
        hint.start()
    try:
        store = make_store(world, timeout_s, waits_for_all=True)
    finally:
        hint.cancel()
    if world.size == 1 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return store
    # torchrun's store outlives groups and restarts of the ranks: gloo would connect to the addresses of an earlier group.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"megaclass/{attempt}/{next(_groups_of_this_process)}", store)  # type: ignore[attr-defined]


def _waiting_for_rank_0(world: World, timeout_s: float) -> str:
    return (
        f"{world.name()} has not reached rank 0 at {world.address} port {world.port} for {_HINT_S:g} s and keeps "
        f"trying for up to {timeout_s:g} s. Is rank 0 running, and does a firewall block the port? "
        f"Run `megaclass-check -H …` to find out."
    )
