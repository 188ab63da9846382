"""Turns facts about hosts into findings with advice. Pure functions: no input, no output. Standard library only."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import PurePath
from typing import Any

from megaclass_launch.versions import NOT_INSTALLED, differences, hosts_by_value
from megaclass_launch.wire.checks import plain_text

# ---- report ----
#
# The report of `check`: findings with advice, as a table or JSON.


class FindingState(StrEnum):
    """Consequence of a finding for the start of training."""

    GOOD = "good"
    ABSENT = "absent"
    """Not available, and not needed for training."""
    DOUBTFUL = "doubtful"
    """Training would start, but may be slow or confusing."""
    BAD = "bad"
    """Training would not start, or would leave GPUs unused."""


_MARKS = {FindingState.GOOD: "[X]", FindingState.ABSENT: "[ ]", FindingState.DOUBTFUL: "[?]", FindingState.BAD: "[!]"}
_ADVICE_COLUMN = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One line of the report."""

    what: str
    state: FindingState
    found: str
    advice: str = ""
    """Advice with the command to type; set for every finding that is bad or doubtful."""

    def __post_init__(self) -> None:
        assert (self.state in (FindingState.BAD, FindingState.DOUBTFUL)) == bool(self.advice), self


def _finding(state: FindingState, what: str, found: str, advice: str = "") -> Finding:
    return Finding(what=what, state=state, found=found, advice=advice)


good, absent, doubtful, bad = (partial(_finding, state) for state in FindingState)


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """All findings, with the facts that they are based on."""

    findings: Mapping[str, Sequence[Finding]]
    """Keyed by subject: a host name, or `together`."""
    titles: Mapping[str, str] = field(default_factory=dict)
    """Headings in the table, keyed by subject; the subject itself by default."""
    facts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Facts about each host; empty for a host that did not answer."""
    all_reduce: Sequence[Mapping[str, Any]] = ()
    """Rows of `bench allreduce`."""

    @property
    def would_start(self) -> bool:
        """True if no finding is bad."""
        return not any(finding.state is FindingState.BAD for finding in self._all())

    def as_json(self) -> dict[str, object]:
        """Returns everything in the table, and the facts and measurements behind it."""
        return {
            "would_start": self.would_start,
            "findings": [
                {"where": where, **asdict(finding)} for where, findings in self.findings.items() for finding in findings
            ],
            "facts": dict(self.facts),
            "all_reduce": list(self.all_reduce),
        }

    def table(self) -> str:
        """Returns the report as text; advice stands below each finding that has any."""
        width = max((len(finding.what) for finding in self._all()), default=0)
        lines: list[str] = []
        for where, findings in self.findings.items():
            lines += ["", self.titles.get(where, where)]
            for finding in findings:
                found = plain_text(finding.found)
                lines.append(f"    {_MARKS[finding.state]} {finding.what:<{width}}  {found}".rstrip())
                if finding.advice:
                    lines.append(f"{'':{_ADVICE_COLUMN}}{plain_text(finding.advice)}")
        return "\n".join([*lines, "", self._verdict()])

    def _verdict(self) -> str:
        num_bad = sum(finding.state is FindingState.BAD for finding in self._all())
        if num_bad:
            return f"Training would not start: {num_bad} problem{'s' if num_bad > 1 else ''}, marked [!]."
        num_doubtful = sum(finding.state is FindingState.DOUBTFUL for finding in self._all())
        return "Training would start." + (f" Warnings: {num_doubtful}, marked [?]." if num_doubtful else "")

    def _all(self) -> Iterator[Finding]:
        for findings in self.findings.values():
            yield from findings


Facts = Mapping[str, Any]

_OLDEST_PYTHON = (3, 11)
_OLDEST_TORCH = (2, 11)
_GIB = 1 << 30
_MIB = 1 << 20
_LEAST_DISK = 100 * _MIB
_COMFORTABLE_DISK = 10 * _GIB
# NCCL's buffers take tens of MiB per GPU; Docker's default for the whole of /dev/shm is 64 MiB.
_LEAST_SHARED = 64 * _MIB
_COMFORTABLE_SHARED = 1 * _GIB
_MISSING = "not there"


def host_findings(facts: Facts, slots: int) -> list[Finding]:
    """Returns the findings about one host. slots: number of processes that will run on it."""
    return [
        _python(facts),
        _torch(facts),
        _megaclass(facts),
        _cuda(facts),
        _driver(facts),
        *_gpus(facts),
        _nccl(facts),
        _gloo(facts),
        _slots(facts, slots),
        _disk(facts),
        _shared_memory(facts),
    ]


def default_slots(facts: Facts) -> int:
    """Returns the number of slots if the user gave none: one per GPU that torch can use, else two."""
    return len(facts["torch"]["gpus"]) or 2


def difference_findings(
    facts_by_host: Mapping[str, Facts], config: str | None, workdir: str, python: str
) -> list[Finding]:
    """Returns findings about what must be the same on all hosts. python: the interpreter on the hosts, for advice."""
    findings: list[Finding] = []
    if len(facts_by_host) > 1:
        findings += [*_version_findings(facts_by_host, python), *_code(facts_by_host)]
    if config is not None:
        findings.append(_config(facts_by_host, config, workdir))
    return findings


def _version_findings(facts_by_host: Mapping[str, Facts], python: str) -> list[Finding]:
    """Compares versions; if hosts differ, the first host that has the package is the reference."""
    versions = {host: facts["versions"] for host, facts in facts_by_host.items()}
    first = next(iter(versions.values()))
    findings = []
    for name, sentence in differences(versions).items():
        theirs = {host: one.get(name, NOT_INSTALLED) for host, one in versions.items()}
        right = next((version for version in theirs.values() if version[0].isdigit()), NOT_INSTALLED)
        others = ", ".join(host for host, version in theirs.items() if version != right)
        # A label such as +cu126 names a build and is unknown to package indexes; pip accepts the rest.
        line = f"Type on {others}: {python} -m pip install {name}=={right.partition('+')[0]}"
        if name == "Python":
            line = f"Install Python {right} with torch and megaclass on {others}, and set --python to it."
        findings.append(bad("same versions", sentence, line))
    return findings or [good("same versions", ", ".join(f"{name} {version}" for name, version in first.items()))]


def _code(facts_by_host: Mapping[str, Facts]) -> list[Finding]:
    """Compares the digests of the packages' files. A package that only some hosts have is a finding of its version."""
    names = dict.fromkeys(name for facts in facts_by_host.values() for name in facts["code"])
    findings = []
    for name in names:
        groups = hosts_by_value(
            {host: facts["code"][name][:12] for host, facts in facts_by_host.items() if name in facts["code"]}
        )
        if len(groups) > 1:
            advice = "Install the same wheel or checkout on every host with pip install --force-reinstall."
            findings.append(bad("same code", f"{name} is {_sides(groups)}", advice))
    first = next(iter(facts_by_host.values()))["code"]
    return findings or [good("same code", ", ".join(f"{name} {digest[:12]}" for name, digest in first.items()))]


def _python(facts: Facts) -> Finding:
    version = _numbers(facts["python"])
    if version < _OLDEST_PYTHON:
        return bad("Python", facts["python"], "Megaclass needs Python 3.11 or later: set --python to one.")
    return good("Python", facts["python"])


def _torch(facts: Facts) -> Finding:
    torch = facts["torch"]
    if torch["version"] == NOT_INSTALLED:
        return bad("torch", NOT_INSTALLED, "Type: pip install torch")
    if torch["fault"]:
        return bad("torch", torch["fault"], "It cannot be imported: pip install --force-reinstall torch")
    if _numbers(torch["version"]) < _OLDEST_TORCH:
        return bad("torch", torch["version"], 'Megaclass needs torch 2.11 or later: pip install "torch>=2.11"')
    return good("torch", torch["version"])


def _megaclass(facts: Facts) -> Finding:
    found = (f"{name} {digest[:12]}" for name, digest in facts["code"].items())
    return good("megaclass", f"{facts['versions']['megaclass-launch']}, code of {', '.join(found)}")


def _cuda(facts: Facts) -> Finding:
    torch = facts["torch"]
    if torch["cuda"] is None:
        return absent("CUDA", "torch is a CPU build")
    if not torch["is_usable"] and not facts["num_gpus_present"]:
        return absent("CUDA", f"torch is built for {torch['cuda']}; there is no GPU")
    return good("CUDA", f"torch is built for {torch['cuda']}")


def _driver(facts: Facts) -> Finding:
    """Judges the driver: within a major version of CUDA any driver runs any build; otherwise it must not be older."""
    torch, driver, newest = facts["torch"], facts["driver"], facts["driver_cuda"]
    present = facts["num_gpus_present"]
    if not driver and not torch["is_usable"]:
        if present:
            return bad(
                "driver", f"none, but {present} NVIDIA GPU(s) on the bus",
                "Install it and reboot: sudo apt install nvidia-driver, then check with nvidia-smi",
            )  # fmt: skip
        return absent("driver", "no NVIDIA GPU")
    runs = f", which runs CUDA up to {newest}" if newest else ""
    found = f"{driver or 'unknown version'}{runs}"
    # A driver that is too old by its number but works has NVIDIA's compatibility package installed.
    is_needed = torch["cuda"] and not torch["is_usable"]
    if is_needed and newest and _numbers(newest)[0] < _numbers(torch["cuda"])[0]:
        return bad(
            "driver", f"{found}; torch is built for {torch['cuda']}",
            f"Upgrade the driver (sudo apt install nvidia-driver), or install the torch build for CUDA {_numbers(newest)[0]}.",
        )  # fmt: skip
    return good("driver", found)


def _gpus(facts: Facts) -> list[Finding]:
    torch, present = facts["torch"], facts["num_gpus_present"]
    hidden = facts["visible_devices"]
    if not torch["gpus"]:
        if not present:
            return [absent("GPUs", "none: training runs on the CPU")]
        why = f": {torch['why_unusable']}" if torch["why_unusable"] else ""
        if torch["fault"]:
            advice = "Fix torch first."
        elif torch["cuda"] is None:
            advice = (
                f"torch {torch['version']} is a CPU build, so the GPUs stay idle. Install a CUDA build: "
                f"pip install --force-reinstall torch"
            )
        elif hidden is not None:
            advice = f"CUDA_VISIBLE_DEVICES={hidden!r} hides them: unset CUDA_VISIBLE_DEVICES"
        else:
            advice = "torch cannot use them: compare nvidia-smi with python -c 'import torch; torch.cuda.init()'"
        return [bad("GPUs", f"{present} present, none usable{why}", advice)]
    findings = []
    for index, gpu in enumerate(torch["gpus"]):
        what = f"GPU {index}"
        if gpu["fault"]:
            findings.append(bad(what, f"{gpu['name']}: {gpu['fault']}", _advice_about_gpu(gpu["fault"])))
        elif not gpu["is_right"]:
            advice = "A matrix product on it is wrong: do not use this GPU, and look for Xid errors in dmesg."
            findings.append(bad(what, f"{gpu['name']} computes wrongly", advice))
        else:
            memory = f"{gpu['free_bytes'] / _GIB:.1f} of {gpu['total_bytes'] / _GIB:.1f} GiB free"
            findings.append(good(what, f"{gpu['name']}, matrix product in {gpu['microseconds']:.0f} µs, {memory}"))
    if present > len(torch["gpus"]):
        advice = f"CUDA_VISIBLE_DEVICES={hidden} hides the others." if hidden is not None else "See nvidia-smi -L."
        findings.append(doubtful("GPUs", f"{present} present, {len(torch['gpus'])} usable", advice))
    return findings


def _advice_about_gpu(fault: str) -> str:
    if "no kernel image" in fault:
        lists = "python -c 'import torch; print(torch.cuda.get_arch_list())'"
        return f"This torch build does not support the GPU: install another one. Architectures of this build: {lists}"
    if "out of memory" in fault:
        return "Another process uses its memory: nvidia-smi shows which."
    return "A matrix product on it failed: see nvidia-smi and dmesg (Xid errors). Reset it: sudo nvidia-smi --gpu-reset"


def _nccl(facts: Facts) -> Finding:
    version = facts["torch"]["nccl"]
    if version is None and facts["torch"]["gpus"]:
        return bad("NCCL", "not in this torch", "GPUs communicate through it: install a torch build for CUDA on Linux.")
    return good("NCCL", version) if version else absent("NCCL", "not in this torch; CPUs do not need it")


def _gloo(facts: Facts) -> Finding:
    if facts["torch"]["gloo"]:
        return good("gloo", "in torch")
    return bad("gloo", "not in this torch", "CPUs communicate through it: pip install --force-reinstall torch")


def _slots(facts: Facts, slots: int) -> Finding:
    num_gpus = len(facts["torch"]["gpus"])
    if not num_gpus:
        if slots > facts["num_cpus"]:
            found = f"{slots} for {facts['num_cpus']} CPU cores"
            return doubtful("slots", found, f"They will share cores: use at most {facts['num_cpus']} slots in -H.")
        return good("slots", f"{slots}, on {facts['num_cpus']} CPU cores")
    if slots > num_gpus:
        found = f"{slots} for {num_gpus} GPU(s)"
        return bad("slots", found, f"NCCL refuses two ranks on one GPU: use at most {num_gpus} slots in -H.")
    if slots < num_gpus:
        found = f"{slots} for {num_gpus} GPUs"
        return doubtful("slots", found, f"{num_gpus - slots} of them will stay idle: use {num_gpus} slots in -H.")
    return good("slots", f"{slots}, one per GPU")


def _disk(facts: Facts) -> Finding:
    if facts["workdir"] is None:
        return bad("free disk", "the working folder does not exist", "Create it on that host, or set --workdir.")
    free = facts["free_disk_bytes"]
    if free is None:
        return doubtful("free disk", f"unknown at {facts['workdir']}", "Type on that host: df -h")
    found = f"{free / _GIB:.1f} GiB at {facts['workdir']}"
    if free < _LEAST_DISK:
        return bad("free disk", found, f"A checkpoint would not fit: du -xsh {facts['workdir']}/* | sort -h")
    if free < _COMFORTABLE_DISK:
        return doubtful("free disk", found, "Enough to start, but checkpoints of a large model take tens of GiB.")
    return good("free disk", found)


def _shared_memory(facts: Facts) -> Finding:
    free = facts["free_shared_bytes"]
    if free is None:
        return doubtful(
            "shared memory", "there is no /dev/shm", "NCCL uses it inside a host: mount -t tmpfs shm /dev/shm"
        )
    found = f"{free / _GIB:.2f} GiB free in /dev/shm"
    advice = "docker run --shm-size=8g …, or: sudo mount -o remount,size=8G /dev/shm"
    if free < _LEAST_SHARED and facts["torch"]["gpus"]:
        return bad("shared memory", found, f"NCCL would fail: {advice}")
    if free < _COMFORTABLE_SHARED:
        return doubtful("shared memory", found, f"Little space for NCCL: {advice}")
    return good("shared memory", found)


def _config(facts_by_host: Mapping[str, Facts], config: str, workdir: str) -> Finding:
    digests = {host: (facts["config"] or _MISSING)[:12] for host, facts in facts_by_host.items()}
    groups = hosts_by_value(digests)
    file = PurePath(workdir, config)
    if [*groups] == [_MISSING]:
        return bad("same config", f"{config} is not on {', '.join(digests)}", f"Check the path: looked for {file}")
    if len(groups) == 1:
        return good("same config", f"{config} {next(iter(groups))}")
    # The first host that has the file is the reference.
    source = next(host for host, digest in digests.items() if digest != _MISSING)
    others = [host for host, digest in digests.items() if digest != digests[source]]
    lines = " && ".join(f"scp {file} {host}:{file}" for host in others)
    missing = groups.get(_MISSING)
    found = f"{config} is not on {', '.join(missing)}" if missing else f"{config} is {_sides(groups)}"
    return bad("same config", found, f"Type on {source}: {lines}")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"[0-9]+", version.partition("+")[0])[:2])


def _sides(groups: Mapping[str, Sequence[str]]) -> str:
    return "; ".join(f"{value} on {', '.join(hosts)}" for value, hosts in groups.items())
