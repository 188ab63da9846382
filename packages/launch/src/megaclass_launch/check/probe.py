"""The process that `check` runs on every host: it collects facts and tries to connect to other hosts.

It is started like an agent, over ssh or locally, answers questions that arrive as JSON lines on stdin, and exits when stdin
ends. torch is imported in a separate process, because a broken installation may end the process that imports it.
"""

import contextlib
import ctypes
import hashlib
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from megaclass_launch.operating_system import readable
from megaclass_launch.rendezvous.addresses import bound_socket, interface_towards, interfaces
from megaclass_launch.versions import NOT_INSTALLED, installed_versions, same_code_packages
from megaclass_launch.wire.protocol import encode, greeting

Facts = dict[str, Any]

_REACH_S = 4.0
_TORCH_S = 120.0
_MAX_CONNECTIONS = 64
_NVIDIA = "0x10de"

# Prints one JSON object. A matrix product on each GPU shows that it computes; the second one is timed, after the warm-up.
_TORCH_PROGRAM = """
import json, time, torch, torch.distributed as dist
facts = {
    "fault": "",
    "version": torch.__version__,
    "cuda": torch.version.cuda,
    "gloo": dist.is_available() and dist.is_gloo_available(),
    "nccl": ".".join(map(str, torch.cuda.nccl.version())) if dist.is_available() and dist.is_nccl_available() else None,
    "is_usable": torch.cuda.is_available(),
    "why_unusable": "",
    "gpus": [],
}
if facts["cuda"] and not facts["is_usable"]:
    try:
        torch.cuda.init()
    except Exception as error:
        facts["why_unusable"] = str(error).partition("\\n")[0]
for index in range(torch.cuda.device_count() if facts["is_usable"] else 0):
    gpu = {"name": f"GPU {index}", "fault": "", "microseconds": 0.0, "is_right": False, "free_bytes": 0, "total_bytes": 0}
    try:
        gpu["name"] = torch.cuda.get_device_name(index)
        left = torch.arange(64 * 64, dtype=torch.float32).reshape(64, 64) % 7
        on_gpu = left.to(f"cuda:{index}")
        product = on_gpu @ on_gpu
        torch.cuda.synchronize(index)
        begun = time.perf_counter()
        product = on_gpu @ on_gpu
        torch.cuda.synchronize(index)
        gpu["microseconds"] = (time.perf_counter() - begun) * 1e6
        gpu["is_right"] = product.is_cuda and bool((product.cpu() == left @ left).all())
        free, total = torch.cuda.mem_get_info(index)
        gpu |= {"free_bytes": free, "total_bytes": total}
    except Exception as error:
        gpu["fault"] = str(error).splitlines()[0] if str(error) else type(error).__name__
    facts["gpus"].append(gpu)
print("megaclass-facts " + json.dumps(facts))
"""

# Only the finding about torch reports that it does not work: gloo counts as present.
_NO_TORCH: Facts = {"cuda": None, "gloo": True, "nccl": None, "is_usable": False, "why_unusable": "", "gpus": []}


def host_facts(workdir: str, config: str | None) -> Facts:
    """Collects all facts about this host that need no other host."""
    return {
        "hostname": socket.gethostname(),
        "python": platform.python_version(),
        "versions": installed_versions(),
        "code": {name: code_digest(package.folder) for name, package in same_code_packages().items()},
        "config": _file_digest(Path(workdir, config)) if config else None,
        "torch": torch_facts(ends_with_stdin=True),
        "driver": _driver_version(),
        "driver_cuda": _driver_cuda(),
        "num_gpus_present": _num_gpus_present(),
        "visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "num_cpus": len(os.sched_getaffinity(0)),
        "interfaces": interfaces(),
        "workdir": workdir if Path(workdir).is_dir() else None,
        "free_disk_bytes": _free_bytes(workdir),
        "free_shared_bytes": _free_bytes("/dev/shm"),
    }


def code_digest(package: Path) -> str:
    """Returns a digest of the package's source: equal on two hosts exactly if every file is."""
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(f"{file.relative_to(package)}\0".encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def reach(address: str, port: int) -> str | None:
    """Tries to connect; returns None on success, else the reason."""
    try:
        socket.create_connection((address, port), timeout=_REACH_S).close()
    except OSError as error:
        return "no answer" if isinstance(error, TimeoutError) else (error.strerror or str(error))
    return None


def answer(question: Mapping[str, Any], listeners: list[socket.socket]) -> Facts:
    """Answers one question; sockets that listen for other hosts are added to `listeners`, which keeps them open."""
    match question["ask"]:
        case "facts":
            return host_facts(question["workdir"], question["config"])
        case "listen":
            return _listen(int(question["port"]), listeners)
        case "reach":
            names, addresses, ports = zip(*question["peers"], strict=True)
            # In parallel: behind a firewall each of them takes the whole timeout.
            with ThreadPoolExecutor(min(_MAX_CONNECTIONS, len(names))) as pool:
                faults = dict(zip(names, pool.map(reach, addresses, ports), strict=True))
            return {"towards": interface_towards(addresses[0]), "faults": faults}
        case unknown:
            raise AssertionError(unknown)


def main() -> int:
    """Reads the token, sends the greeting, then answers questions until stdin ends."""
    listeners: list[socket.socket] = []
    with contextlib.suppress(BrokenPipeError):
        for line in sys.stdin:
            message = json.loads(line)
            if "token" in message:
                sys.stdout.buffer.write(greeting(message["token"]))
                reply: Facts = {"ssh": os.environ.get("SSH_CONNECTION", "")}
            else:
                reply = answer(message, listeners)
            sys.stdout.buffer.write(encode(reply))
            sys.stdout.buffer.flush()
    return 0


def _listen(port: int, listeners: list[socket.socket]) -> Facts:
    """Listens at the port. The kernel completes connections without accept(), so no thread needs to serve them."""
    try:
        listener = bound_socket(port)
    except OSError as error:
        return {"port": port, "fault": error.strerror}
    listener.listen(128)
    listeners.append(listener)
    return {"port": listener.getsockname()[1], "fault": None}


def torch_facts(*, ends_with_stdin: bool = False) -> Facts:
    """Returns what torch reports about itself and the GPUs, or why it does not work ("fault").

    Args:
        ends_with_stdin: whether to give up when stdin ends, because the process that asked has ended then.
    """
    facts: Facts
    version = installed_versions()["torch"]
    if version == NOT_INSTALLED:
        return {**_NO_TORCH, "fault": NOT_INSTALLED, "version": version}
    command = [sys.executable, "-X", "utf8", "-P", "-c", _TORCH_PROGRAM]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        out, err = _communicate(process, ends_with_stdin)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    for line in out.splitlines():
        if line.startswith("megaclass-facts "):
            facts = json.loads(line.removeprefix("megaclass-facts "))
            return facts
    how = f"it did not end within {_TORCH_S:g} s" if process.returncode == -9 else f"it ended with {process.returncode}"
    last = next((line for line in reversed(err.splitlines()) if line.strip()), how)
    return {**_NO_TORCH, "fault": last.strip(), "version": version}


def _communicate(process: "subprocess.Popen[str]", ends_with_stdin: bool) -> tuple[str, str]:
    deadline = time.monotonic() + _TORCH_S
    while True:
        try:
            return process.communicate(timeout=0.2)
        except subprocess.TimeoutExpired:
            # There is one question at a time: stdin can only become readable before the answer because it has ended.
            has_ended = ends_with_stdin and readable([sys.stdin], 0)
            if has_ended or time.monotonic() > deadline:
                process.kill()
                return process.communicate()


def _driver_version() -> str | None:
    """Returns the version of the NVIDIA kernel module, or None."""
    for file in (Path("/sys/module/nvidia/version"), Path("/proc/driver/nvidia/version")):
        if file.exists():
            words = file.read_text().split()
            return next((word for word in words if word[0].isdigit() and "." in word), words[0])
    return None


def _driver_cuda() -> str | None:
    """Returns the newest CUDA version that the driver supports, or None without a driver."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    number = ctypes.c_int()
    if library.cuDriverGetVersion(ctypes.byref(number)) != 0:
        return None
    return f"{number.value // 1000}.{number.value % 1000 // 10}"


def _num_gpus_present() -> int:
    """Counts the NVIDIA GPUs that this host or container may open; if none, those known to the driver or on the PCI bus."""
    if devices := [*Path("/dev").glob("nvidia[0-9]*")]:
        return len(devices)
    driver = Path("/proc/driver/nvidia/gpus")
    if driver.is_dir():
        return len([*driver.iterdir()])
    found = 0
    for device in Path("/sys/bus/pci/devices").glob("*"):
        with contextlib.suppress(OSError):
            # Class 03 is a display controller.
            found += (device / "vendor").read_text().strip() == _NVIDIA and (device / "class").read_text()[:4] == "0x03"
    return found


def _file_digest(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def _free_bytes(path: str) -> int | None:
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return None


if __name__ == "__main__":
    sys.exit(main())
