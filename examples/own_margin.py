"""Margins of your own: a small class each, trained on random data in one process.

    python examples/own_margin.py

A margin that only changes the logit of an image's own class runs in every kernel. One that also changes the others says
so with `touches_only_target = False`; it costs one more all-reduce of one number per image, and runs in the plain kernels only.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from megaclass import Margin, PartialFC, RowSGD, Targets


@dataclass(frozen=True, kw_only=True)
class GrowingMargin(Margin):
    """scale * (cos - margin * (1 + cos) / 2): nothing to overcome for the hardest image, all of it for the easiest."""

    scale: float = 32.0
    margin: float = 0.4

    def target_logits(self, targets: Targets) -> Tensor:
        return self.scale * (targets.cosines_G - self.margin * (1 + targets.cosines_G) / 2)


@dataclass(frozen=True, kw_only=True)
class HardNegatives(Margin):
    """Classes closer to an image than its own weigh more: (1 + boost) * cos + boost (MV-Softmax, arXiv:1912.00833)."""

    scale: float = 32.0
    boost: float = 0.2
    touches_only_target: ClassVar[bool] = False

    def negative_logits(self, cosines_GS: Tensor, targets: Targets) -> Tensor:
        is_hard_GS = cosines_GS > targets.cosines_G.to(cosines_GS.dtype)[:, None]
        return self.scale * torch.where(is_hard_GS, (1 + self.boost) * cosines_GS + self.boost, cosines_GS)

    def logit_bound(self) -> float:
        return (1 + 2 * self.boost) * self.scale


def train(margin: Margin, num_steps: int = 60) -> None:
    torch.manual_seed(0)
    num_classes, width = 200, 32
    identities_CD = torch.randn(num_classes, 64)
    backbone = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, width))
    optimizer = torch.optim.SGD(backbone.parameters(), lr=0.01, momentum=0.9)
    head = PartialFC(width, num_classes, margin=margin, sample_rate=0.5, optimizer=RowSGD(momentum=0.9))
    print(head.margin)
    for step in range(num_steps):
        labels_B = torch.randint(num_classes, (64,))
        images = identities_CD[labels_B] + 0.3 * torch.randn(64, 64)
        loss = head(backbone(images), labels_B)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        head.step(lr=0.002)
        if step % 10 == 0 or step == num_steps - 1:
            print(f"step {step:3d}  loss {loss.item():.3f}")


if __name__ == "__main__":
    train(GrowingMargin())
    train(HardNegatives())
