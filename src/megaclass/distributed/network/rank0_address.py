"""Where the ranks meet: the address of rank 0 as the starter knows it, checked before anybody waits for anybody."""

import ipaddress
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace

from megaclass.distributed.network.addresses import interface_holding, is_own, own_addresses, source_towards
from megaclass.distributed.network.job_secret import JOB_SECRET, new_secret
from megaclass.distributed.network.pmix import tell_all
from megaclass.errors import LaunchError
from megaclass.world import World, address_advice

# Variables that steer the ranks and that all of them must have, or none.
_STEERING = ("NCCL_", "GLOO_", "TORCH_", "MEGACLASS_", "HOROVOD_", "OMP_NUM_THREADS")
_INTERFACE_NAMES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def meeting_point(world: World, env: Mapping[str, str] = os.environ) -> World:
    """The world with an address at which this host reaches rank 0. Under mpirun on several hosts: collective.

    What cannot work is a LaunchError now instead of a silence of ten minutes: a name that does not resolve, an address
    that is not rank 0's, an interface that does not exist.
    """
    if world.size == 1:
        return world
    if world.starter == "Open MPI" and world.local_size < world.size:
        world = _told_by_mpirun(world, env)
    elif world.starter == "Slurm":
        world = replace(world, address=_slurm_address(world.address, env))
    for name in _INTERFACE_NAMES:
        _check_interfaces(env.get(name, ""), name)
    found = _resolved(world)
    if world.is_main and not any(is_own(address) for address in found):
        raise LaunchError(
            f"MASTER_ADDR={world.address} points to {', '.join(found)}, but rank 0 runs on {socket.gethostname()} "
            f"({', '.join(own_addresses()) or 'which has no address'}): {_mending(world)}"
        )
    return world


def is_one_machine(world: World, env: Mapping[str, str] = os.environ) -> bool:
    """Whether all ranks are on one machine.

    Where RANK and WORLD_SIZE were set by hand and nothing counts the ranks of a host, only the address can tell.
    """
    is_counted = "LOCAL_WORLD_SIZE" in env or "HOROVOD_LOCAL_SIZE" in env or world.starter in ("Open MPI", "Slurm")
    return world.local_size == world.size and (is_counted or world.address in ("127.0.0.1", "localhost", "::1"))


def interface_names(world: World, env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables that make gloo and NCCL use the interface by which this host reaches rank 0; those set already stay.

    Without them gloo takes the address of the host's own name, which many distributions set to 127.0.1.1.
    """
    if any(env.get(name) for name in _INTERFACE_NAMES):
        return {}
    if world.size > 1 and is_one_machine(world, env):
        # gloo listens, too, and on one machine nobody else needs to reach it. NCCL is left to choose, as by the agents.
        return {"GLOO_SOCKET_IFNAME": "lo"}
    if world.local_size == world.size:
        return {}
    # On rank 0 the way to itself says nothing; the daemons of mpirun and srun know an address that others can reach.
    known = (world.address, *_daemon_addresses(env), env.get("SLURM_LAUNCH_NODE_IPADDR", ""))
    for address in known:
        own = source_towards(address) if address else None
        if own is not None and not ipaddress.ip_address(own).is_loopback:
            name = interface_holding(own)
            return dict.fromkeys(_INTERFACE_NAMES, name) if name else {}
    return {}


def _told_by_mpirun(world: World, env: Mapping[str, str]) -> World:
    """Rank 0 says where it is and which variables it has; the others go there."""
    addresses = [env["MASTER_ADDR"]] if "MASTER_ADDR" in env else _daemon_addresses(env) or own_addresses()
    names = sorted(name for name in env if name.startswith(_STEERING))
    said = {
        "host": socket.gethostname(),
        "addresses": addresses,
        "port": world.port,
        "names": names,
        # mpirun's daemons know each other already: what they carry is as safe as mpirun itself.
        "secret": env.get(JOB_SECRET) or new_secret(),
    }
    heard = tell_all(json.dumps(said), world.is_main)
    if heard is None:
        return _at_mpirun(world, env)
    main = json.loads(heard)
    os.environ.setdefault(JOB_SECRET, main["secret"])
    missing = [name for name in main["names"] if name not in env]
    if missing and world.local_rank == 0:
        print(
            f"WARNING {world.name()}: rank 0 on {main['host']} has {', '.join(missing)}, this rank has not. mpirun hands "
            f"variables to other hosts only when told: add {' '.join(f'-x {name}' for name in missing)}.",
            file=sys.stderr,
            flush=True,
        )
    for name, value in (("MASTER_ADDR", main["addresses"][0]), ("MASTER_PORT", str(main["port"]))):
        if env.get(name, value) != value:
            raise LaunchError(
                f"{world.name()} has {name}={env[name]}, but rank 0 on {main['host']} waits at {value}: "
                f"leave {name} out, or give all ranks the same with -x {name}={value}."
            )
    return replace(world, address=_nearest(main["addresses"], main["host"], world), port=main["port"])


def _at_mpirun(world: World, env: Mapping[str, str]) -> World:
    """Without PMIx: rank 0 is most often on the host where mpirun runs, and it finds out itself if it is not."""
    address = env.get("MASTER_ADDR") or _uri_addresses(env.get("OMPI_MCA_orte_hnp_uri", ""))[:1]
    if isinstance(address, str):
        return world
    if not address or (world.is_main and not is_own(address[0])):
        raise LaunchError(
            f"{world.name()}: mpirun started ranks on several hosts, MASTER_ADDR is not set, and there is no PMIx library "
            f"(libpmix.so.2) through which they could learn where rank 0 is: "
            f"add -x MASTER_ADDR={socket.gethostname() if world.is_main else '<host of rank 0>'} -x MASTER_PORT={world.port}."
        )
    return replace(world, address=address[0])


def _slurm_address(node: str, env: Mapping[str, str]) -> str:
    """Slurm's name of a node need not be a host name; Slurm itself knows the address then."""
    try:
        socket.getaddrinfo(node, None)
    except OSError:
        scontrol = shutil.which("scontrol", path=env.get("PATH"))
        shown = (
            subprocess.run(
                [scontrol, "show", "node", node], capture_output=True, text=True, timeout=30, check=False
            ).stdout
            if scontrol
            else ""
        )
        match = re.search(r"NodeAddr=(\S+)", shown)
        return match[1] if match else node
    return node


def _resolved(world: World) -> list[str]:
    try:
        found = socket.getaddrinfo(world.address, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise LaunchError(
            f"{world.name()} cannot resolve {world.address!r}, where rank 0 should be ({error}): {_mending(world)}"
        ) from error
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def _mending(world: World) -> str:
    own = next(iter(own_addresses()), socket.gethostname()) if world.is_main else "<host of rank 0>"
    return address_advice(world, own)


def _check_interfaces(text: str, name: str) -> None:
    """NCCL's list may begin with = (exact) or ^ (all but); otherwise its names are prefixes, while gloo's are whole."""
    there = [interface for _, interface in socket.if_nameindex()]
    if text.startswith("^"):
        return
    for given in filter(None, text.removeprefix("=").split(",")):
        is_exact = name.startswith("GLOO") or text.startswith("=")
        if given not in there and (is_exact or not any(interface.startswith(given) for interface in there)):
            raise LaunchError(
                f"{name}={text} names {given!r}, but {socket.gethostname()} has no such network interface: "
                f"it has {', '.join(there)}. Type `ip -br address`, then export {name}=<one of them>, or unset it."
            )


def _daemon_addresses(env: Mapping[str, str]) -> list[str]:
    """Addresses of mpirun's daemon on this host: those over which mpirun itself reaches other hosts."""
    return _uri_addresses(env.get("OMPI_MCA_orte_local_daemon_uri", ""))


def _uri_addresses(uri: str) -> list[str]:
    """'47.0;tcp://10.0.0.1,10.1.0.1:4711;tcp6://[fd00::2]:4712' -> ['10.0.0.1', '10.1.0.1', 'fd00::2']."""
    found: list[str] = []
    for part in re.findall(r"tcp6?://([^;]+):[0-9]+", uri):
        found += [address.strip("[]") for address in part.split(",")]
    return found


def _nearest(addresses: list[str], host: str, world: World) -> str:
    """The address of rank 0 that lies closest to an own one: a network both hosts are on comes before any router."""

    def shared_bits(address: str) -> int:
        own = source_towards(address)
        if own is None:
            return -1
        pair = [int(ipaddress.ip_address(text)) for text in (own, address)]
        return 128 - (pair[0] ^ pair[1]).bit_length() if own != address else 128

    if len(addresses) == 1:
        return addresses[0]
    best = max(addresses, key=shared_bits)
    if shared_bits(best) < 0:
        raise LaunchError(
            f"{world.name()} has no route to rank 0 on {host} ({', '.join(addresses)}): "
            f"see `ip route get {addresses[0]}`, or add -x MASTER_ADDR=<an address of {host} that is reached from here>."
        )
    return best
