"""The loader of a rank on paper: its processes and threads, and the decoded batches that it keeps in host memory."""

from dataclasses import dataclass

from megaclass.data.loader import batches_of_threads, prefetched_by_threads
from megaclass.data.loading.choose import automatic_processes
from megaclass.data.loading.prefetch import num_slots
from megaclass.plan.job import PlannedJob


@dataclass(frozen=True)
class LoaderPlan:
    """Processes and threads that read and decode the images of one rank."""

    num_processes: int
    """0: threads of the rank itself."""
    num_threads: int
    """Of all processes together."""
    num_batches: int
    """Decoded batches in host memory; 0 once the images are on the GPU."""
    host_bytes: int


def plan_loader(job: PlannedJob) -> LoaderPlan:
    """Follows data.workers, data.threads and data.on_gpu; `auto` chooses by the CPU cores of this machine."""
    settings = job.config.data
    height, width = job.image_size
    batch_bytes = job.max_batch * height * width * 3
    if settings.workers == "auto":
        num_processes = automatic_processes(settings.threads, min(job.num_ranks, job.ranks_per_host))
    else:
        num_processes = settings.workers
    num_threads = settings.threads * max(1, num_processes)
    if settings.on_gpu:
        num_batches = 0
    elif num_processes:
        num_batches = num_slots(batch_bytes)
    else:
        num_batches = batches_of_threads(num_threads, prefetched_by_threads(num_threads))
    return LoaderPlan(num_processes, num_threads, num_batches, num_batches * batch_bytes)
