"""Elastic training in Horovod's idiom: the job continues when workers die and when hosts come and go.

    megaclass run --min-np 2 --max-np 4 --host-discovery-script ./hosts.sh python examples/elastic_torch.py

where `hosts.sh` prints lines such as `localhost:2`. Kill a worker, or change what the script prints, and watch. With
`import horovod.torch as hvd` and `megaclass run --horovod` the program is one for Horovod.
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import horovod.torch as hvd

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--base-lr", type=float, default=0.02)
arguments = parser.parse_args()

hvd.init()
torch.manual_seed(42)
torch.set_num_threads(1)

# Points around four centres, which the model learns to tell apart.
labels = torch.arange(2048) % 4
points = 4 * nn.functional.one_hot(labels, 4) + torch.randn(2048, 4)
dataset = TensorDataset(points, labels)
sampler = hvd.elastic.ElasticSampler(dataset)
loader = DataLoader(dataset, batch_size=arguments.batch_size, sampler=sampler)

model = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 4))
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=arguments.base_lr * hvd.size(), momentum=0.9),
    named_parameters=model.named_parameters(),
)


def scale_learning_rate() -> None:
    """Adapts the learning rate to the global batch, which grows with the number of ranks."""
    for group in optimizer.param_groups:
        group["lr"] = arguments.base_lr * hvd.size()


@hvd.elastic.run
def train(state: hvd.elastic.TorchState) -> None:
    while state.epoch < arguments.epochs:
        for number, (inputs, targets) in enumerate(loader):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            sampler.record_batch(number, arguments.batch_size)
            # What happened since the last commit is done again after a failure.
            if number % 5 == 4:
                state.commit()
        accuracy = hvd.allreduce((model(points).argmax(1) == labels).float().mean(), name="accuracy")
        if hvd.rank() == 0:
            print(f"epoch {state.epoch}: accuracy {float(accuracy):.3f} with {hvd.size()} ranks", flush=True)
        state.epoch += 1
        # At the end of an epoch, not at its beginning: it forgets which samples were processed.
        sampler.set_epoch(state.epoch)
        state.commit()


state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0)
state.register_reset_callbacks([scale_learning_rate])
train(state)
