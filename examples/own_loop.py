"""Your own training loop with PartialFC. Run it alone, or with `torchrun --nproc-per-node 2 examples/own_loop.py`."""

import torch
from torch import nn

from megaclass import ArcFace, PartialFC, RowSGD
from megaclass_launch.ranks.process_group import process_group
from megaclass_launch.world import world_from_environment

world = world_from_environment()
with process_group(world) as device:
    torch.manual_seed(0)
    backbone = nn.parallel.DistributedDataParallel(nn.Linear(32, 64).to(device))
    optimizer = torch.optim.SGD(backbone.parameters(), lr=0.1, momentum=0.9)
    head = PartialFC(
        64, 10_000, margin=ArcFace(scale=32, margin=0.3), sample_rate=0.1, optimizer=RowSGD(), device=device
    )
    generator = torch.Generator().manual_seed(world.rank)
    prototypes = torch.randn(10_000, 32, generator=torch.Generator().manual_seed(1))
    for step in range(60):
        labels = torch.randint(200, (128,), generator=generator)
        inputs = prototypes[labels] + 0.2 * torch.randn(128, 32, generator=generator)
        loss = head(backbone(inputs.to(device)), labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        head.step(lr=0.1)
        if world.is_main and step % 10 == 9:
            print(f"step {step + 1}: loss {loss.item():.3f}")
