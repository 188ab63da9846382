"""Finds the address at which this host reaches rank 0, and checks it before any rank waits for another.

Starters know it in different ways: an environment variable, Slurm's node list, mpirun's daemons (`pmix`). `addresses` supplies
the facts about this host.
"""

import ctypes
import ctypes.util
import ipaddress
import json
import logging
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import replace

from megaclass_launch.errors import LaunchError
from megaclass_launch.rendezvous.addresses import interface_holding, is_own, own_addresses, source_towards
from megaclass_launch.rendezvous.job_secret import JOB_SECRET, new_secret
from megaclass_launch.world import World, address_advice

_log = logging.getLogger("megaclass.distributed")

# Variables that influence the ranks: all ranks must have them, or none.
_STEERING = ("NCCL_", "GLOO_", "TORCH_", "MEGACLASS_", "HOROVOD_", "OMP_NUM_THREADS")
_INTERFACE_NAMES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def meeting_point(world: World, env: Mapping[str, str] = os.environ) -> World:
    """Returns the world with an address at which this host reaches rank 0. Collective under mpirun on several hosts.

    Raises LaunchError at once, instead of letting ranks wait for ten minutes, when a name does not resolve, an address is not
    rank 0's, or an interface does not exist.
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
            f"({', '.join(own_addresses()) or 'which has no address'}): {_advice(world)}"
        )
    return world


def is_one_machine(world: World, env: Mapping[str, str] = os.environ) -> bool:
    """Returns whether all ranks are on one machine.

    If RANK and WORLD_SIZE were set by hand, no variable counts the ranks per host, and only rank 0's address can tell.
    """
    is_counted = "LOCAL_WORLD_SIZE" in env or "HOROVOD_LOCAL_SIZE" in env or world.starter in ("Open MPI", "Slurm")
    return world.local_size == world.size and (is_counted or world.address in ("127.0.0.1", "localhost", "::1"))


_named: dict[str, str] = {}
"""Variables that this process has set by itself; see name_interfaces()."""


def name_interfaces(world: World) -> None:
    """Sets the variables of interface_names().

    Those of an earlier call do not count as the user's: another world may need others.
    """
    forget_interfaces()
    _named.update(interface_names(world))
    os.environ.update(_named)


def forget_interfaces() -> None:
    """Takes back what name_interfaces() has set: programs that this process starts later may belong to other worlds."""
    for name, value in _named.items():
        if os.environ.get(name) == value:
            del os.environ[name]
    _named.clear()


def interface_names(world: World, env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns variables that make gloo and NCCL use the interface towards rank 0; none if the user has set one of them.

    Without them gloo uses the address of the host's own name, which many distributions set to 127.0.1.1.
    """
    if any(env.get(name) for name in _INTERFACE_NAMES):
        return {}
    if world.size > 1 and is_one_machine(world, env):
        # gloo opens a listening port, which other machines need not reach. NCCL chooses its interface itself, as under agents.
        return {"GLOO_SOCKET_IFNAME": "lo"}
    if world.local_size == world.size:
        return {}
    # Rank 0's route to itself is loopback; the daemons of mpirun and srun know an address that other hosts can reach.
    known = (world.address, *_daemon_addresses(env), env.get("SLURM_LAUNCH_NODE_IPADDR", ""))
    for address in known:
        own = source_towards(address) if address else None
        if own is not None and not ipaddress.ip_address(own).is_loopback:
            name = interface_holding(own)
            return dict.fromkeys(_INTERFACE_NAMES, name) if name else {}
    return {}


def _told_by_mpirun(world: World, env: Mapping[str, str]) -> World:
    """Rank 0 sends its addresses and the names of its variables to all ranks; returns the world with the nearest address."""
    addresses = [env["MASTER_ADDR"]] if "MASTER_ADDR" in env else _daemon_addresses(env) or own_addresses()
    names = sorted(name for name in env if name.startswith(_STEERING))
    said = {
        "host": socket.gethostname(),
        "addresses": addresses,
        "port": world.port,
        "names": names,
        # The connections between mpirun's daemons carry it: it is as safe as mpirun itself.
        "secret": env.get(JOB_SECRET) or new_secret(),
    }
    received = tell_all(json.dumps(said), world.is_main)
    if received is None:
        return _at_mpirun(world, env)
    main = json.loads(received)
    # A secret that the user gave stays; it must then be the same everywhere, which the first signed entry shows.
    os.environ.setdefault(JOB_SECRET, main["secret"])
    missing = [name for name in main["names"] if name not in env]
    # One warning per host, not one per rank.
    if missing and world.local_rank == 0:
        _log.warning(
            f"rank 0 on {main['host']} has {', '.join(missing)}, this rank does not. mpirun passes "
            f"variables to other hosts only on request: add {' '.join(f'-x {name}' for name in missing)}.",
            extra={"sender": world.name()},
        )
    for name, value in (("MASTER_ADDR", main["addresses"][0]), ("MASTER_PORT", str(main["port"]))):
        if env.get(name, value) != value:
            raise LaunchError(
                f"{world.name()} has {name}={env[name]}, but rank 0 on {main['host']} waits at {value}: "
                f"leave {name} out, or give all ranks the same with -x {name}={value}."
            )
    return replace(world, address=_nearest(main["addresses"], main["host"], world), port=main["port"])


def _at_mpirun(world: World, env: Mapping[str, str]) -> World:
    """Guesses, without PMIx, that rank 0 runs on the host of mpirun; rank 0 raises LaunchError if it does not."""
    address = env.get("MASTER_ADDR") or _uri_addresses(env.get("OMPI_MCA_orte_hnp_uri", ""))[:1]
    if isinstance(address, str):
        return world
    if not address or (world.is_main and not is_own(address[0])):
        raise LaunchError(
            f"{world.name()}: mpirun started ranks on several hosts, MASTER_ADDR is not set, and there is no PMIx library "
            f"(libpmix.so.2) through which they could learn the address of rank 0: "
            f"add -x MASTER_ADDR={socket.gethostname() if world.is_main else '<host of rank 0>'} -x MASTER_PORT={world.port}."
        )
    return replace(world, address=address[0])


def _slurm_address(node: str, env: Mapping[str, str]) -> str:
    """Returns the node's name if it resolves, else the address that Slurm has for it: node names need not be host names."""
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
            f"{world.name()} cannot resolve {world.address!r}, where rank 0 should be ({error}): {_advice(world)}"
        ) from error
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def _advice(world: World) -> str:
    """Returns how to set the address of rank 0 under this starter."""
    own = next(iter(own_addresses()), socket.gethostname()) if world.is_main else "<host of rank 0>"
    return address_advice(world, own)


def _check_interfaces(text: str, name: str) -> None:
    """Checks that the named interfaces exist. NCCL's names are prefixes unless the list starts with =, gloo's are exact."""
    there = [interface for _, interface in socket.if_nameindex()]
    if text.startswith("^"):
        return
    for given in filter(None, text.removeprefix("=").split(",")):
        is_exact = name.startswith("GLOO") or text.startswith("=")
        # gloo itself would fail minutes later, with an error that names no interface.
        if given not in there and (is_exact or not any(interface.startswith(given) for interface in there)):
            raise LaunchError(
                f"{name}={text} names {given!r}, but {socket.gethostname()} has no such network interface: "
                f"it has {', '.join(there)}. Type `ip -br address`, then export {name}=<one of them>, or unset it."
            )


def _daemon_addresses(env: Mapping[str, str]) -> list[str]:
    """Returns the addresses of mpirun's daemon on this host, over which mpirun itself reaches other hosts."""
    return _uri_addresses(env.get("OMPI_MCA_orte_local_daemon_uri", ""))


def _uri_addresses(uri: str) -> list[str]:
    """Parses addresses: '47.0;tcp://10.0.0.1,10.1.0.1:4711;tcp6://[fd00::2]:4712' -> ['10.0.0.1', '10.1.0.1', 'fd00::2']."""
    found: list[str] = []
    for part in re.findall(r"tcp6?://([^;]+):[0-9]+", uri):
        found += [address.strip("[]") for address in part.split(",")]
    return found


def _nearest(addresses: list[str], host: str, world: World) -> str:
    """Returns the address of rank 0 that shares the longest prefix with this host: a common network beats a routed one."""

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


# ---- pmix ----
#
# Sends a text from rank 0 to all ranks of an mpirun through its PMIx library: without MPI, an address or a file.
#
# Used by `rank0_address` when ranks on several hosts must learn where rank 0 is. Each rank talks to mpirun's daemon on its own
# host, and the daemons are already connected. Takes about 20 ms.


# From pmix_common.h; the same in PMIx 2 to 5.
_SUCCESS = 0
_GLOBAL = 3
_STRING = 3
_KEY = b"megaclass.rendezvous"
_SIZE_0 = ctypes.c_size_t(0)


class _Process(ctypes.Structure):
    _fields_ = (("namespace", ctypes.c_char * 256), ("rank", ctypes.c_uint32))


class _Value(ctypes.Structure):
    # The union's largest member is smaller than this padding, which is never read.
    _fields_ = (("kind", ctypes.c_uint16), ("text", ctypes.c_void_p), ("rest", ctypes.c_char * 64))


# PMIx cannot be initialised twice in one process, so the text is kept for a second process group.
_heard: list[str | None] = []


def tell_all(text: str, is_main: bool) -> str | None:
    """Returns rank 0's text on every rank, or None without a PMIx library. Collective; exchanged once per process."""
    if not _heard:
        _heard.append(_exchange(text, is_main))
    return _heard[0]


def _exchange(text: str, is_main: bool) -> str | None:
    library = _library()
    if library is None:
        return None
    own = _Process()
    _call(library, "PMIx_Init", ctypes.byref(own), None, _SIZE_0)
    try:
        if is_main:
            # Kept in a variable until PMIx_Put has copied it: the structure holds a bare pointer.
            held = ctypes.create_string_buffer(text.encode("ascii"))
            value = _Value(kind=_STRING, text=ctypes.cast(held, ctypes.c_void_p))
            _call(library, "PMIx_Put", ctypes.c_uint8(_GLOBAL), _KEY, ctypes.byref(value))
            _call(library, "PMIx_Commit")
        _call(library, "PMIx_Fence", None, _SIZE_0, None, _SIZE_0)
        main = _Process(namespace=own.namespace, rank=0)
        found = ctypes.POINTER(_Value)()
        _call(library, "PMIx_Get", ctypes.byref(main), _KEY, None, _SIZE_0, ctypes.byref(found))
        told = ctypes.cast(found.contents.text, ctypes.c_char_p).value
        assert found.contents.kind == _STRING and told is not None
        # The text is fetched from rank 0's host on demand, so rank 0 must not leave before the last rank has it.
        _call(library, "PMIx_Fence", None, _SIZE_0, None, _SIZE_0)
        return told.decode("ascii")
    finally:
        library.PMIx_Finalize(None, _SIZE_0)


def _library() -> ctypes.CDLL | None:
    for name in ("libpmix.so.2", ctypes.util.find_library("pmix")):
        try:
            return ctypes.CDLL(name) if name else None
        except OSError:
            continue
    return None


def _call(library: ctypes.CDLL, name: str, *arguments: object) -> None:
    code = getattr(library, name)(*arguments)
    if code != _SUCCESS:
        raise LaunchError(
            f"mpirun's PMIx refused {name} with {code}, so the ranks cannot learn where rank 0 is: "
            f"add -x MASTER_ADDR=<host of rank 0> -x MASTER_PORT=<a free port there>."
        )
