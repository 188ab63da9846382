"""Refuses to start if the ranks disagree on the recipe, the package's version, the data or the seed, and shows the difference.

Each host has its own copy of the recipe, the package and perhaps the data. Ranks with different settings would hang in
collectives of different sizes, or worse, train something that no user asked for.
"""

import hashlib
import json
import socket

import torch

from megaclass import __version__
from megaclass.config.read import flat_values
from megaclass.config.schema import Config
from megaclass_launch.errors import LaunchError
from megaclass_launch.ranks.collectives import gather_blocks
from megaclass_launch.world import World

# Where a host keeps its data and how many threads read it is the host's own business: the data's fingerprint is compared.
OF_EACH_HOST = ("data.path", "data.stage", "data.threads")
_SHOWN = 8


def check_same_start(config: Config, device: torch.device) -> tuple[str, ...]:
    """Collective. Returns the host names of all ranks; raises LaunchError on every rank if their settings or versions differ.

    One all-gather of 32 bytes per rank, and of the host names; if the ranks differ, one of all settings.
    """
    hosts = tuple(gather_texts(socket.gethostname(), device))
    facts = {"megaclass": __version__}
    facts |= {name: value for name, value in flat_values(config).items() if name not in OF_EACH_HOST}
    raise_if_different({name: str(value) for name, value in facts.items()}, hosts, device)
    return hosts


def check_same_data(fingerprint: str, num_images: int, num_classes: int, hosts: tuple[str, ...], world: World,
                    device: torch.device) -> None:  # fmt: skip
    """Collective. Raises LaunchError on every rank if the hosts have different data.

    fingerprint: of the first rank per host; the others of the host see the same files and pass an empty text.
    """
    facts = {"number of images": f"{num_images:,}", "number of classes": f"{num_classes:,}"}
    raise_if_different(facts, hosts, device)
    own = fingerprint if world.local_rank == 0 else ""
    found = gather_texts(own, device)
    table = {"data fingerprint": {rank: text for rank, text in enumerate(found) if text}}
    if len(set(table["data fingerprint"].values())) > 1:
        raise LaunchError(_described(table, hosts))


def raise_if_different(facts: dict[str, str], hosts: tuple[str, ...], device: torch.device) -> None:
    """Collective. Compares digests; only if they differ are the facts themselves exchanged."""
    text = json.dumps(facts, sort_keys=True)
    digest = torch.tensor(list(hashlib.sha256(text.encode()).digest()), dtype=torch.uint8, device=device)
    digests_W = gather_blocks(digest, None)
    if bool((digests_W == digests_W[0]).all()):
        return
    facts_W = [json.loads(theirs) for theirs in gather_texts(text, device)]
    names = dict.fromkeys(name for theirs in facts_W for name in theirs)
    table = {name: {rank: theirs.get(name, "(not there)") for rank, theirs in enumerate(facts_W)} for name in names}
    different = {name: values for name, values in table.items() if len(set(values.values())) > 1}
    raise LaunchError(_described(different, hosts))


def gather_texts(text: str, device: torch.device) -> list[str]:
    """Collective. Returns the texts of all ranks: one all-gather of lengths, one of the texts, padded to the longest."""
    encoded = text.encode(errors="replace")
    lengths_W = gather_blocks(torch.tensor([len(encoded)], device=device), None).flatten().tolist()
    block = torch.zeros(max(1, *lengths_W), dtype=torch.uint8)
    block[: len(encoded)] = torch.tensor(list(encoded), dtype=torch.uint8)
    rows = gather_blocks(block.to(device), None).cpu().tolist()
    return [bytes(row[:length]).decode(errors="replace") for row, length in zip(rows, lengths_W, strict=True)]


def _described(table: dict[str, dict[int, str]], hosts: tuple[str, ...]) -> str:
    lines = []
    for name, values in list(table.items())[:_SHOWN]:
        by_value: dict[str, list[int]] = {}
        for rank, value in values.items():
            by_value.setdefault(value, []).append(rank)
        sides = []
        for value, ranks in by_value.items():
            more = f" and {len(ranks) - 1} more" if len(ranks) > 1 else ""
            sides.append(f"{value} on rank {ranks[0]} ({hosts[ranks[0]]}){more}")
        lines.append(f"  {name}: {'; '.join(sides)}")
    if len(table) > _SHOWN:
        lines.append(f"  and {len(table) - _SHOWN} more")
    listed = "\n".join(lines)
    return (
        f"The ranks would not train the same thing, so none of them starts. They differ in\n{listed}\n"
        f"Use the same recipe, package version and data on all hosts."
    )
