"""FSDP2 beside the sharded head, over NCCL. Run with `make test-gpu`."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.many_gpus.conftest import DEVICE
from tests.megaclass.training.test_sharded import PARTS, SHARED
from tests.megaclass.training.test_step import TinySource, my_batch, settings

from megaclass.training.model.build import build_model
from megaclass.training.step import training_step
from megaclass_launch.world import World


def trained(is_sharded: bool, backbone: str, precision: str) -> tuple[list[float], dict[str, Any], torch.Tensor]:
    changes = SHARED | {"backbone__name": backbone, "backbone__freeze": [], "optimizer__name": "adamw"}
    config = settings(**changes, train__shard_backbone=is_sharded, train__precision=precision, train__cuda_graph="auto")
    rank, size = dist.get_rank(), dist.get_world_size()
    device = torch.device(DEVICE, torch.cuda.current_device()) if DEVICE == "cuda" else torch.device("cpu")
    model = build_model(config, TinySource(), World(rank=rank, size=size, local_rank=0, local_size=1), device)
    model.parallel.train()
    losses = [
        training_step(model, my_batch(step, PARTS[size]), config, lr=0.01, step=step, device=device).loss
        for step in range(5)
    ]
    images = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(9)).to(device)
    with model.for_evaluation() as network, torch.no_grad():
        embeddings = network.eval()(images).float().cpu()
    state = {name: tensor.detach().cpu().clone() for name, tensor in model.shared_state().items()}
    return [float(loss) for loss in losses], state, embeddings


@pytest.mark.gpu
@pytest.mark.parametrize(("size", "backbone"), [(2, "slim"), (4, "slim"), (2, "vit_t"), (2, "iresnet18")])
def test_losses_state_and_embeddings_are_those_of_the_whole_backbone(run_gpu_ranks, size, backbone):
    whole = run_gpu_ranks(size, trained, False, backbone, "float32")
    split = run_gpu_ranks(size, trained, True, backbone, "float32")
    for (losses, _, embeddings), (expected, _, wanted) in zip(split, whole, strict=True):
        assert losses == pytest.approx(expected, rel=1e-2)
        assert torch.nn.functional.cosine_similarity(embeddings, wanted).min() > 0.98
    assert {name: tensor.shape for name, tensor in split[0][1].items()} == {
        name: tensor.shape for name, tensor in whole[0][1].items()
    }


@pytest.mark.gpu
def test_mixed_precision_trains_a_split_backbone(run_gpu_ranks):
    if DEVICE == "cpu":
        pytest.skip("mixed precision is for GPUs")
    (whole, *_), (split, *_) = (run_gpu_ranks(2, trained, is_split, "vit_t", "bf16") for is_split in (False, True))
    assert split[0] == pytest.approx(whole[0], rel=0.05)
