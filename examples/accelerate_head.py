"""PartialFC inside a model that Accelerate prepares. Alone, or with `accelerate launch` or torchrun.

    torchrun --nproc-per-node 2 examples/accelerate_head.py

Accelerate wraps the whole model into DistributedDataParallel; the head's classes stay split over the ranks. The saved
state holds all classes (module_state="whole") and loads on any number of ranks.
"""

import sys

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from megaclass import ArcFace, PartialFC

NUM_CLASSES, WIDTH = 25, 16


class Recogniser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Linear(WIDTH, WIDTH)
        self.head = PartialFC(WIDTH, NUM_CLASSES, margin=ArcFace(scale=16, margin=0.3), module_state="whole")

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.head(self.backbone(inputs), labels)
        return loss


def main(folder: str) -> None:
    accelerator = Accelerator(cpu=True)  # before the model: the head must know its rank
    torch.manual_seed(0)
    prototypes = torch.randn(NUM_CLASSES, WIDTH, generator=torch.Generator().manual_seed(7))
    labels = torch.arange(40 * NUM_CLASSES) % NUM_CLASSES
    inputs = prototypes[labels] + 0.05 * torch.randn(len(labels), WIDTH)
    recogniser = Recogniser()
    model, optimizer, loader = accelerator.prepare(
        recogniser,
        torch.optim.SGD(recogniser.parameters(), lr=0.05),
        DataLoader(TensorDataset(inputs, labels), batch_size=25, shuffle=True),
    )
    for _ in range(5):
        for batch in loader:
            loss = model(*batch)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            recogniser.head.step(lr=0.05)
    accelerator.save_state(folder)

    centres = recogniser.head.centres(torch.arange(NUM_CLASSES))
    with torch.no_grad():
        cosines = nn.functional.normalize(recogniser.backbone(prototypes)) @ nn.functional.normalize(centres).T
    top_1 = (cosines.argmax(1) == torch.arange(NUM_CLASSES)).double().mean()
    if accelerator.is_main_process:
        print(f"top-1 of the centres {top_1:.2f}, {recogniser.head.extra_repr()}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/accelerate")
