"""PartialFC inside a LightningModule. Alone, or with `torchrun --nproc-per-node 2 examples/lightning_head.py`.

Lightning wraps the whole module into DistributedDataParallel; the head's classes stay split over the ranks. The checkpoint
holds all classes (module_state="whole") and loads on any number of ranks.
"""

import os
import sys
from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from megaclass import ArcFace, PartialFC

NUM_CLASSES, WIDTH = 25, 16


class Recogniser(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Linear(WIDTH, WIDTH)
        self.head: PartialFC | None = None

    def configure_model(self) -> None:
        # Here and not in __init__: the process group exists now, and the head knows its rank.
        if self.head is None:
            self.head = PartialFC(
                WIDTH, NUM_CLASSES, margin=ArcFace(scale=16, margin=0.3), device=self.device, module_state="whole"
            )

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        inputs, labels = batch
        assert self.head is not None
        loss: Tensor = self.head(self.backbone(inputs), labels)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.backbone.parameters(), lr=0.05)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)  # forward and backward run in here
        assert self.head is not None
        self.head.step(lr=0.05)


def main(folder: str) -> None:
    lightning.seed_everything(0)
    prototypes = torch.randn(NUM_CLASSES, WIDTH, generator=torch.Generator().manual_seed(7))
    labels = torch.arange(40 * NUM_CLASSES) % NUM_CLASSES
    inputs = prototypes[labels] + 0.05 * torch.randn(len(labels), WIDTH)
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        max_epochs=5,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Recogniser()
    trainer.fit(model, DataLoader(TensorDataset(inputs, labels), batch_size=25, shuffle=True))
    trainer.save_checkpoint(f"{folder}/last.ckpt")

    assert model.head is not None
    centres = model.head.centres(torch.arange(NUM_CLASSES))
    with torch.no_grad():
        cosines = nn.functional.normalize(model.backbone(prototypes)) @ nn.functional.normalize(centres).T
    top_1 = (cosines.argmax(1) == torch.arange(NUM_CLASSES)).double().mean()
    if trainer.is_global_zero:
        print(f"top-1 of the centres {top_1:.2f}, {model.head.extra_repr()}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/lightning")
