"""Torch's random number generators on this rank: layers of users' own may draw from them, so a checkpoint keeps them."""

import torch
from torch import Tensor


def generator_states(device: torch.device) -> dict[str, Tensor]:
    states = {"generator_cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["generator_cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_generators(states: dict[str, Tensor], device: torch.device) -> None:
    if "generator_cpu" in states:
        torch.set_rng_state(states["generator_cpu"])
    if "generator_cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["generator_cuda"], device)
