"""Next-item recommendation over a large catalogue: PartialFC as a sampled softmax over inner products, with item biases.

    python examples/recommend.py                          # 10,000 items, on a CPU in a few minutes
    python examples/recommend.py --items 5000000 --steps 4000 --batch 256 --users 20000      # on a GPU
    torchrun --nproc-per-node 2 examples/recommend.py

The catalogue is drawn: items have genres, their popularity follows Zipf's law, and a user stays in a genre for a while. A GRU
reads the last items of a user and predicts the next one at every place of the sequence. Sequences have different lengths: the
places behind the end of a sequence are padding, which is left out before the head. The items are trained by the head, and the
GRU reads them from a table of its own.

Printed is recall@10 on held-out users: the share whose next item is among the ten best of the whole catalogue.
"""

import argparse
import time

import torch
from torch import Tensor, nn

from megaclass import PartialFC, RowAdagrad
from megaclass_launch.ranks.process_group import process_group
from megaclass_launch.world import world_from_environment

LONGEST = 12
PADDING = -1


class Catalogue:
    """Items with a genre and a popularity; draws users. Item i is the (i // genres)-th most popular of genre i % genres."""

    def __init__(self, num_items: int, exponent: float = 1.0) -> None:
        self.num_items, self.num_genres = num_items, max(8, round(num_items**0.5 / 2))
        self.popularity = (torch.arange(num_items) // self.num_genres + 1).double() ** -exponent

    def draw_users(self, count: int, generator: torch.Generator) -> Tensor:
        """Returns (count, LONGEST + 1) items; behind the end of a shorter sequence PADDING."""
        weights = self.popularity[:: self.num_genres][: self.num_items // self.num_genres]
        places = torch.multinomial(weights, count * (LONGEST + 1), replacement=True, generator=generator)
        genre = torch.randint(self.num_genres, (count,), generator=generator)
        columns = []
        for place in places.view(count, LONGEST + 1).unbind(1):
            # Every tenth step a user goes on to the next genre.
            genre = (genre + (torch.rand(count, generator=generator) < 0.1).long()) % self.num_genres
            columns.append(place * self.num_genres + genre)
        items = torch.stack(columns, 1)
        lengths = torch.randint(3, LONGEST + 2, (count, 1), generator=generator)
        return items.masked_fill(torch.arange(LONGEST + 1) >= lengths, PADDING)


class Reader(nn.Module):
    """Reads a sequence of items; returns a vector for every place."""

    def __init__(self, num_items: int, width: int) -> None:
        super().__init__()
        # Sparse: a step touches only the rows of the items that it reads.
        self.items = nn.Embedding(num_items, width, sparse=True)
        self.gru = nn.GRU(width, width, batch_first=True)

    def forward(self, items: Tensor) -> Tensor:
        states: Tensor = self.gru(self.items(items.clamp_min(0)))[0]
        return states


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=10_000)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=64, help="users per step, over all processes")
    parser.add_argument("--rate", type=float, nargs="+", default=[1.0, 0.01], help="shares of the items per step")
    parser.add_argument("--negatives", choices=("uniform", "frequencies", "in-batch"), default="in-batch")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--users", type=int, default=2000, help="held-out users")
    arguments = parser.parse_args()
    world = world_from_environment()
    with process_group(world) as device:
        for rate in arguments.rate:
            recall, seconds = train(arguments, rate, world.rank, world.size, device)
            if world.is_main:
                print(f"rate {rate:g}: recall@10 {recall:.4f}, {1e3 * seconds:.1f} ms per step", flush=True)


def train(
    arguments: argparse.Namespace, rate: float, rank: int, world_size: int, device: torch.device
) -> tuple[float, float]:
    """Returns recall@10 on held-out users and the seconds of a step."""
    torch.manual_seed(0)
    catalogue = Catalogue(arguments.items)
    reader = Reader(arguments.items, arguments.width).to(device)
    head = PartialFC(
        arguments.width,
        arguments.items,
        similarity="inner",
        bias=True,
        sample_rate=rate,
        correct_sampling=arguments.negatives == "uniform" and rate > 0,
        negatives=arguments.negatives,
        class_counts=catalogue.popularity,
        optimizer=RowAdagrad(),
        # Gradients are summed over the processes below.
        gradient_scale="sum",
        device=device,
    )
    dense = torch.optim.Adam(reader.gru.parameters(), lr=3e-3)
    sparse = torch.optim.SparseAdam(reader.items.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    start = time.perf_counter()
    for step in range(arguments.steps):
        # Every process draws all users and trains on its own part.
        users = catalogue.draw_users(arguments.batch, generator)[rank::world_size].to(device)
        is_place = users[:, 1:] != PADDING
        vectors = reader(users[:, :-1])[is_place]
        # On a GPU the products with the items run in half precision.
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = head(vectors, users[:, 1:][is_place])
        reader.zero_grad()
        loss.backward()
        if world_size > 1:
            for parameter in reader.parameters():
                # gloo and NCCL add up dense gradients; a large catalogue would send its rows only.
                parameter.grad = None if parameter.grad is None else parameter.grad.to_dense()
                torch.distributed.all_reduce(parameter.grad)
            reader.items.weight.grad = reader.items.weight.grad.to_sparse(1)
        dense.step()
        sparse.step()
        head.step(lr=arguments.lr)
        if rank == 0 and step % 100 == 99:
            print(f"  step {step + 1}: loss {loss.item():.3f}", flush=True)
    seconds = (time.perf_counter() - start) / arguments.steps
    held_out = catalogue.draw_users(arguments.users, torch.Generator().manual_seed(2)).to(device)
    hits = []
    with torch.no_grad():
        for users in held_out.split(2048):
            last = (users != PADDING).sum(1) - 1
            vectors = reader(users[:, :-1])[torch.arange(len(users)), last - 1]
            best, _ = head.predict(vectors, 10)
            hits.append((best == users[torch.arange(len(users)), last][:, None]).any(1))
    return torch.cat(hits).double().mean().item(), seconds


if __name__ == "__main__":
    main()
