"""The classic Horovod script: MNIST on several processes. It runs without data and without a GPU.

    python examples/mnist.py                                                  one process
    megaclass run -np 2 -H localhost:2 python examples/mnist.py               two, started from outside
    python examples/mnist.py --num-proc 2                                     two, started by the script itself
    … --data-dir DIR                                                          MNIST as IDX files, gzipped or not
    … --data-dir DIR --download [--mirror URL]                                downloaded first, checksums verified

Without --data-dir, digits are drawn. `Horovod:` marks what Horovod adds to a script for one process.
"""

import argparse
import gzip
import hashlib
import http.client
import struct
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import horovod
import horovod.torch as hvd

MIRROR = "https://ossci-datasets.s3.amazonaws.com/mnist/"
FILES = {
    "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
}

# 5 x 7 dots per digit.
GLYPHS = """
01110 00100 01110 01110 00010 11111 00110 11111 01110 01110
10001 01100 10001 10001 00110 10000 01000 00001 10001 10001
10011 00100 00001 00001 01010 11110 10000 00010 10001 10001
10101 00100 00110 00110 10010 00001 11110 00100 01110 01111
11001 00100 01000 00001 11111 00001 10001 01000 10001 00001
10001 00100 10000 10001 00010 10001 10001 01000 10001 00010
01110 01110 11111 01110 00010 01110 01110 01000 01110 01100
"""


class Net(nn.Module):
    """1.2 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3, stride=2)
        self.fc1 = nn.Linear(64 * 12 * 12, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, images: Tensor) -> Tensor:
        hidden = torch.relu(self.conv2(torch.relu(self.conv1(images)))).flatten(1)
        return self.fc2(torch.relu(self.fc1(hidden)))


def main() -> None:
    options = parse()
    if options.num_proc > 1:
        horovod.run(train, args=(options,), num_proc=options.num_proc)
    else:
        train(options)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=64, help="images per process and step")
    parser.add_argument("--test-batch-size", type=int, default=1000)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument(
        "--lr",
        type=float,
        default=0.02,
        help="learning rate, multiplied by the number of processes because the batch grows with it",
    )
    parser.add_argument("--momentum", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--log-interval", type=int, default=20)
    parser.add_argument("--compression", choices=["none", "fp16", "bf16", "fp8", "int8"], default="none")
    parser.add_argument("--fp16-allreduce", action="store_true", help="same as --compression fp16")
    parser.add_argument("--use-adasum", action="store_true")
    parser.add_argument("--gradient-predivide-factor", type=float, default=1.0)
    parser.add_argument(
        "--num-proc", type=int, default=1, help="number of processes to start, if not started by a launcher"
    )
    parser.add_argument("--no-cuda", action="store_true")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--download", action="store_true", help="download the files missing in --data-dir")
    parser.add_argument("--mirror", default=MIRROR, help="URL of the four files, http or file")
    parser.add_argument("--drawn", type=int, default=4000, help="number of training images to draw without --data-dir")
    return parser.parse_args()


def train(options: argparse.Namespace) -> float:
    """Trains and returns the accuracy, the same on every process."""
    # Horovod: join the other processes, and use one GPU; if there are more processes than GPUs, they share them.
    hvd.init()
    torch.manual_seed(options.seed)
    uses_cuda = torch.cuda.is_available() and not options.no_cuda
    device = torch.device("cuda", hvd.local_rank() % torch.cuda.device_count()) if uses_cuda else torch.device("cpu")

    train_set, test_set = datasets(options)
    # Horovod: each process sees its own part.
    sampler = DistributedSampler(train_set, num_replicas=hvd.size(), rank=hvd.rank(), seed=options.seed)
    loader = DataLoader(train_set, batch_size=options.batch_size, sampler=sampler)
    test_sampler = DistributedSampler(test_set, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=False)
    test_loader = DataLoader(test_set, batch_size=options.test_batch_size, sampler=test_sampler)

    model = Net().to(device)
    # Horovod: the batch, and with it the learning rate, grows with the number of processes; not with Adasum.
    lr = options.lr * (1 if options.use_adasum else hvd.size())
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=options.momentum)
    # Horovod: all start from the weights of rank 0.
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    # Horovod: gradients are averaged while backward runs.
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=getattr(hvd.Compression, "fp16" if options.fp16_allreduce else options.compression),
        op=hvd.Adasum if options.use_adasum else hvd.Average,
        gradient_predivide_factor=options.gradient_predivide_factor,
    )

    accuracy = 0.0
    for epoch in range(1, options.epochs + 1):
        model.train()
        sampler.set_epoch(epoch)
        begun = time.perf_counter()
        for step, (images, labels) in enumerate(loader):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            if step % options.log_interval == 0 and hvd.rank() == 0:
                print(f"epoch {epoch}  step {step}/{len(loader)}  loss {loss.item():.4f}", flush=True)
        seconds = time.perf_counter() - begun
        loss_value, accuracy = evaluate(model, test_loader, device)
        if hvd.rank() == 0:
            print(
                f"epoch {epoch}: {seconds / len(loader) * 1e3:.1f} ms per step on {hvd.size()} process(es), "
                f"test loss {loss_value:.4f}, accuracy {accuracy:.2%}",
                flush=True,
            )
    return accuracy


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader, device: torch.device) -> tuple[float, float]:
    model.eval()
    sums = torch.zeros(3)
    for images, labels in loader:
        scores = model(images.to(device)).cpu()
        loss = nn.functional.cross_entropy(scores, labels, reduction="sum")
        sums += torch.tensor([loss.item(), (scores.argmax(1) == labels).sum().item(), len(labels)])
    # Horovod: sums over all processes.
    loss_sum, correct, count = hvd.allreduce(sums, op=hvd.Sum, name="evaluation").tolist()
    return loss_sum / count, correct / count


def datasets(options: argparse.Namespace) -> tuple[TensorDataset, TensorDataset]:
    if options.data_dir is None:
        return TensorDataset(*draw(options.drawn, seed=1)), TensorDataset(*draw(options.drawn // 2, seed=2))
    if options.download:
        # Horovod: one process per host downloads, the others wait.
        if hvd.local_rank() == 0:
            download(options.data_dir, options.mirror)
        hvd.barrier()
    parts = []
    for name in ("train", "t10k"):
        images = read_idx(options.data_dir, f"{name}-images-idx3-ubyte").float()[:, None] / 255
        parts.append(
            TensorDataset((images - 0.1307) / 0.3081, read_idx(options.data_dir, f"{name}-labels-idx1-ubyte").long())
        )
    return parts[0], parts[1]


def download(folder: Path, mirror: str, checksums: Mapping[str, str] = FILES) -> None:
    """Downloads missing files; a file appears complete and verified, or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, checksum in checksums.items():
        target = folder / name
        if target.exists():
            check(str(target), target.read_bytes(), checksum, "remove it, or leave out --download to use it as it is")
            continue
        url = f"{mirror.rstrip('/')}/{name}"
        try:
            with urllib.request.urlopen(url, timeout=60) as answer:
                data = answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise SystemExit(f"Cannot download {url}: {error}. Give another --mirror, or put {name} there.") from error
        check(url, data, checksum, "nothing was kept; give another --mirror")
        partial = target.with_suffix(".partial")
        partial.write_bytes(data)
        partial.rename(target)


def check(source: str, data: bytes, checksum: str, advice: str) -> None:
    found = hashlib.md5(data, usedforsecurity=False).hexdigest()
    if found != checksum:
        raise SystemExit(f"{source} has the MD5 {found}, not {checksum}: {advice}.")


def read_idx(folder: Path, name: str) -> Tensor:
    """Reads an IDX file of bytes: 00 00 08, number of dimensions, each as a big-endian int32, then the values."""
    plain, packed = folder / name, folder / f"{name}.gz"
    if packed.exists():
        data = gzip.decompress(packed.read_bytes())
    elif plain.exists():
        data = plain.read_bytes()
    else:
        raise SystemExit(f"{folder} has neither {name} nor {name}.gz: add --download, or leave out --data-dir.")
    if data[:3] != b"\x00\x00\x08":
        raise SystemExit(f"{folder / name} is not an IDX file of bytes: it begins with {data[:4]!r}.")
    shape = struct.unpack_from(f">{data[3]}i", data, 4)
    start = 4 + 4 * data[3]
    count = torch.Size(shape).numel()
    if len(data) != start + count:
        raise SystemExit(f"{folder / name} says {shape}, {start + count} bytes, but has {len(data)}.")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8, offset=start).view(shape)


def draw(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Draws digits, shifted, rotated, sheared, scaled and with noise; the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    rows = [row.split() for row in GLYPHS.split("\n") if row]
    glyphs = torch.tensor([[[float(dot) for dot in row[digit]] for row in rows] for digit in range(10)])
    labels = torch.randint(10, (count,), generator=generator)
    angle = (torch.rand(count, generator=generator) - 0.5) * 0.7
    scale = 1.1 + torch.rand(count, generator=generator) * 0.6
    shear = (torch.rand(count, generator=generator) - 0.5) * 0.5
    shift = (torch.rand(count, 2, generator=generator) - 0.5) * 0.5
    rotation = torch.stack([angle.cos(), -angle.sin() + shear, angle.sin(), angle.cos()], 1).view(-1, 2, 2)
    affine = torch.cat([rotation * scale[:, None, None], shift[..., None]], 2)
    # Narrower than high, as the glyphs are.
    affine[:, 0] *= 1.4
    grid = nn.functional.affine_grid(affine, [count, 1, 28, 28], align_corners=False)
    images = nn.functional.grid_sample(glyphs[labels][:, None], grid, align_corners=False)
    images = images + 0.35 * torch.randn(images.shape, generator=generator)
    return images, labels


if __name__ == "__main__":
    main()
