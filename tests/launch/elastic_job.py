"""An elastic training that counts how often each sample was trained on. Used by test_elastic.py and by the soak.

usage: elastic_job.py NUM_SAMPLES NUM_EPOCHS SECONDS_PER_STEP [FILE [DEVICE]]

FILE: the training ends with the epoch in which this file appears. DEVICE: cpu, or cuda for the GPU of the local rank, or the
only one.

It has no torch.optim, whose import takes longer than all others together. The counts are part of the state: a step that is
undone after a failure takes its counts with it. Samples that the sampler deals out twice, to give all ranks as many, are not
counted. The last line of each rank says whether every sample was trained on once per epoch.
"""

import os
import sys
import time
from pathlib import Path

import torch

import horovod.torch as hvd

NUM_SAMPLES, NUM_EPOCHS, STEP_S = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
STOP_FILE = sys.argv[4] if len(sys.argv) > 4 else ""
ON_GPU = sys.argv[5:] == ["cuda"]
BATCH = 4


def batches(sampler: hvd.elastic.ElasticSampler) -> list[list[int]]:
    """The samples of this rank in batches, without those that are dealt out a second time."""
    mine = list(sampler)
    num_real = len(range(sampler.rank, len(sampler.remaining_indices), sampler.num_replicas))
    return [mine[i : min(i + BATCH, num_real)] for i in range(0, len(mine), BATCH)]


@hvd.elastic.run
def train(state) -> None:
    print(f"pid {os.getpid()} rank {hvd.rank()} of {hvd.size()} from epoch {state.epoch}", flush=True)
    while state.epoch < NUM_EPOCHS and not state.is_stopped:
        for number, indices in enumerate(batches(state.sampler)):
            counts = torch.bincount(torch.tensor(indices, dtype=torch.int64), minlength=NUM_SAMPLES).to(DEVICE)
            loss = state.model(torch.ones(BATCH, 4, device=DEVICE)).sum()
            gradients = torch.autograd.grad(loss, list(state.model.parameters()))
            averages = hvd.grouped_allreduce(list(gradients), name="gradients")
            with torch.no_grad():
                for parameter, gradient in zip(state.model.parameters(), averages, strict=True):
                    parameter -= 0.001 * gradient
            state.seen = state.seen + hvd.allreduce(counts, op=hvd.Sum).cpu()
            state.num_steps += 1
            state.sampler.record_batch(number, BATCH)
            time.sleep(STEP_S)
            state.commit()
        state.epoch += 1
        # All ranks must end with the same epoch, and a rank that joins later with them.
        state.is_stopped = hvd.broadcast_object(bool(STOP_FILE) and Path(STOP_FILE).exists(), 0)
        state.sampler.set_epoch(state.epoch)
        state.commit()


hvd.init()
DEVICE = torch.device("cuda", hvd.local_rank() % torch.cuda.device_count()) if ON_GPU else torch.device("cpu")
torch.manual_seed(hvd.rank())
model = torch.nn.Linear(4, 1).to(DEVICE)
state = hvd.elastic.TorchState(
    model,
    sampler=hvd.elastic.ElasticSampler(range(NUM_SAMPLES), seed=7),
    epoch=0,
    num_steps=0,
    is_stopped=False,
    seen=torch.zeros(NUM_SAMPLES, dtype=torch.int64),
)
train(state)
lost, repeated = int((state.seen < state.epoch).sum()), int((state.seen > state.epoch).sum())
weights = [round(float(value), 4) for value in model.weight.detach().flatten().tolist()]
print(f"end: {lost} samples lost, {repeated} repeated, {state.num_steps} steps, weights {weights}", flush=True)
