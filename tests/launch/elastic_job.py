"""An elastic training that counts how often each sample was trained on. Used by test_elastic.py and by the soak.

usage: elastic_job.py NUM_SAMPLES NUM_EPOCHS SECONDS_PER_STEP

The counts are part of the state: a step that is undone after a failure takes its counts with it. Samples that the sampler deals
out twice, to give all ranks as many, are not counted. The last line of each rank says whether every sample was trained on once
per epoch.
"""

import os
import sys
import time

import torch

import megaclass.hvd as hvd

NUM_SAMPLES, NUM_EPOCHS, STEP_S = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
BATCH = 4


def batches(sampler: hvd.elastic.ElasticSampler) -> list[list[int]]:
    """The samples of this rank in batches, without those that are dealt out a second time."""
    mine = list(sampler)
    num_real = len(range(sampler.rank, len(sampler.remaining_indices), sampler.num_replicas))
    return [mine[i : min(i + BATCH, num_real)] for i in range(0, len(mine), BATCH)]


@hvd.elastic.run
def train(state) -> None:
    print(f"pid {os.getpid()} rank {hvd.rank()} of {hvd.size()} from epoch {state.epoch}", flush=True)
    while state.epoch < NUM_EPOCHS:
        for number, indices in enumerate(batches(state.sampler)):
            counts = torch.bincount(torch.tensor(indices, dtype=torch.int64), minlength=NUM_SAMPLES)
            state.optimizer.zero_grad()
            state.model(torch.ones(BATCH, 4)).sum().backward()
            state.optimizer.step()
            state.seen = state.seen + hvd.allreduce(counts, op=hvd.Sum)
            state.num_steps += 1
            state.sampler.record_batch(number, BATCH)
            time.sleep(STEP_S)
            state.commit()
        state.epoch += 1
        state.sampler.set_epoch(state.epoch)
        state.commit()


hvd.init()
torch.manual_seed(hvd.rank())
model = torch.nn.Linear(4, 1)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.001), named_parameters=model.named_parameters()
)
state = hvd.elastic.TorchState(
    model,
    optimizer,
    sampler=hvd.elastic.ElasticSampler(range(NUM_SAMPLES), seed=7),
    epoch=0,
    num_steps=0,
    seen=torch.zeros(NUM_SAMPLES, dtype=torch.int64),
)
train(state)
lost, repeated = int((state.seen < NUM_EPOCHS).sum()), int((state.seen > NUM_EPOCHS).sum())
weights = [round(float(value), 4) for value in model.weight.detach().flatten()]
print(f"end: {lost} samples lost, {repeated} repeated, {state.num_steps} steps, weights {weights}", flush=True)
