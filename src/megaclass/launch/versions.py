"""Versions of the packages on this host, found without importing them. Standard library only."""

import importlib.util
import re
import sys
from pathlib import Path


def installed_versions() -> dict[str, str]:
    """Returns the versions that all ranks of a run must share."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return {"Python": python, "megaclass": megaclass_version(), "torch": _torch_version()}


def differences(versions_by_host: dict[str, dict[str, str]]) -> dict[str, str]:
    """Returns one sentence per package whose version differs between hosts, keyed by package."""
    found = {}
    for name in next(iter(versions_by_host.values())):
        hosts_by_version: dict[str, list[str]] = {}
        for host, versions in versions_by_host.items():
            hosts_by_version.setdefault(versions.get(name, "unknown"), []).append(host)
        if len(hosts_by_version) > 1:
            sides = (f"{version} on {', '.join(hosts)}" for version, hosts in hosts_by_version.items())
            found[name] = f"{name} is {'; '.join(sides)}"
    return found


def megaclass_version() -> str:
    return _written_in(Path(__file__).parents[1] / "__init__.py")


def _torch_version() -> str:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return "not installed"
    return _written_in(Path(spec.origin).with_name("version.py"))


def _written_in(file: Path) -> str:
    # torch takes seconds to import; its version is also in a file of a few lines.
    match = re.search(r"""^__version__ = ['"]([^'"]+)['"]""", file.read_text() if file.exists() else "", re.MULTILINE)
    return match[1] if match else "unknown"
