"""Versions of the packages on this host, found without importing them. Standard library only."""

import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

NOT_INSTALLED = "not installed"
_SHOWN_HOSTS = 8


def installed_versions() -> dict[str, str]:
    """Returns the versions that all ranks of a run must share."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    packages = {name: package.version for name, package in same_code_packages().items()}
    return {"Python": python, **packages, "torch": _torch_version()}


@dataclass(frozen=True, slots=True)
class SameCodePackage:
    """An installed package whose code must be the same on all hosts of a job."""

    version: str
    folder: Path


def same_code_packages() -> dict[str, SameCodePackage]:
    """Returns this package and those that are built on it, keyed by the name that pip knows.

    A package names itself by an entry point of the group `megaclass_launch.same_code`; none of them is imported.
    """
    found = {"megaclass-launch": SameCodePackage(megaclass_version(), Path(__file__).parent)}
    for entry in sorted(importlib.metadata.entry_points(group="megaclass_launch.same_code"), key=lambda one: one.name):
        spec = importlib.util.find_spec(entry.value)
        if spec is not None and spec.origin is not None and entry.dist is not None:
            found[entry.dist.name] = SameCodePackage(entry.dist.version, Path(spec.origin).parent)
    return found


def differences(versions_by_host: dict[str, dict[str, str]]) -> dict[str, str]:
    """Returns one sentence per package whose version differs between hosts, keyed by package."""
    found = {}
    for name in dict.fromkeys(name for versions in versions_by_host.values() for name in versions):
        found_by_host = {host: versions.get(name, NOT_INSTALLED) for host, versions in versions_by_host.items()}
        groups = hosts_by_value(found_by_host)
        if len(groups) > 1:
            sides = (f"{version} on {short_list(hosts)}" for version, hosts in groups.items())
            found[name] = f"{name} is {'; '.join(sides)}"
    return found


def hosts_by_value(values: Mapping[str, str]) -> dict[str, list[str]]:
    """Groups hosts that have the same value."""
    groups: dict[str, list[str]] = {}
    for host, value in values.items():
        groups.setdefault(value, []).append(host)
    return groups


def short_list(hosts: Sequence[str]) -> str:
    """Returns the names of hosts for a message: of many only the first, and their number."""
    shown = ", ".join(hosts[:_SHOWN_HOSTS])
    return shown if len(hosts) <= _SHOWN_HOSTS else f"{shown} and {len(hosts) - _SHOWN_HOSTS} more"


def megaclass_version() -> str:
    return _written_in(Path(__file__).with_name("__init__.py"))


# TensorFlow 2.16 is the first with Keras 3.
OLDEST_TENSORFLOW = (2, 16)
OLDEST_KERAS = (3,)
_TENSORFLOW_PACKAGES = (
    "tensorflow",
    "tensorflow-cpu",
    "tensorflow-intel",
    "tensorflow-rocm",
    "tf-nightly",
    "tf-nightly-cpu",
)


def tensorflow_version() -> str | None:
    """Returns the version of TensorFlow, whichever of its packages is installed; None if there is none."""
    return _version_of("tensorflow", _TENSORFLOW_PACKAGES)


def keras_version() -> str | None:
    """Returns the version of Keras; None if it is not installed."""
    return _version_of("keras", ("keras", "keras-nightly"))


def _version_of(module: str, packages: tuple[str, ...]) -> str | None:
    for package in packages:
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        # A package whose files were deleted by hand still has a version.
        return version if importlib.util.find_spec(module) is not None else None
    return None


def is_at_least(version: str | None, oldest: tuple[int, ...]) -> bool:
    """Returns whether the version, which may be absent, is not older."""
    return version is not None and tuple(map(int, re.findall(r"\d+", version)[: len(oldest)])) >= oldest


def _torch_version() -> str:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return NOT_INSTALLED
    return _written_in(Path(spec.origin).with_name("version.py"))


def _written_in(file: Path) -> str:
    # torch takes seconds to import; its version is also in a file of a few lines.
    match = re.search(r"""^__version__ = ['"]([^'"]+)['"]""", file.read_text() if file.exists() else "", re.MULTILINE)
    return match[1] if match else "unknown"
