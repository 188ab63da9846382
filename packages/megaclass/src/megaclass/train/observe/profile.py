"""train.profile: a Chrome trace, and on a GPU a memory snapshot, of a few steps of chosen ranks, in the run folder."""

import logging

import torch
from torch.profiler import ProfilerActivity, profile

from megaclass.train.run.run import Run
from megaclass_launch.files import make_private_folder, published_file

PROFILE_FOLDER = "profile"
_logger = logging.getLogger("megaclass.train")
_MAX_ALLOCATIONS = 200_000


class StepProfile:
    """Profiles the steps from `first` to before `stop`, counted from 0, if this rank is one of the chosen."""

    def __init__(self, run: Run) -> None:
        settings = run.config.train
        self._folder = run.folder.path / PROFILE_FOLDER
        self._run = run
        self._ranks = [rank for rank in settings.profile_ranks if rank < run.world.size]
        self._first, self._stop = settings.profiled_steps()
        self._is_chosen = run.world.rank in self._ranks
        self._profile: profile | None = None

    def before(self, step: int) -> None:
        """Starts to record if this is the first of the profiled steps."""
        if step != self._first or self._first == self._stop or not self._is_chosen:
            return
        activities = [ProfilerActivity.CPU]
        if self._run.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.memory._record_memory_history(max_entries=_MAX_ALLOCATIONS)
        # Python stacks are left out: they make a step several times slower than it is.
        self._profile = profile(activities=activities, record_shapes=True, profile_memory=True, acc_events=True)
        self._profile.start()

    def after(self, step: int, is_last: bool) -> None:
        """Writes the files after the last of the profiled steps, or of the run."""
        is_over = step == self._stop - 1 or is_last
        if self._first == self._stop or not self._first <= step < self._stop or not is_over:
            return
        if self._profile is not None:
            self._write(self._profile)
            self._profile = None
        names = [name for rank in self._ranks for name in self._names(rank)]
        self._run.events.note("profile", step + 1, ranks=self._ranks, files=names)

    def _write(self, recorded: profile) -> None:
        if self._run.device.type == "cuda":
            torch.cuda.synchronize(self._run.device)
        recorded.stop()
        trace, *snapshots = (self._run.folder.path / name for name in self._names(self._run.world.rank))
        try:
            make_private_folder(self._folder)
            with published_file(trace, is_private=True) as unfinished:
                recorded.export_chrome_trace(str(unfinished))
            for path in snapshots:
                with published_file(path, is_private=True) as unfinished:
                    torch.cuda.memory._dump_snapshot(str(unfinished))
                torch.cuda.memory._record_memory_history(enabled=None)
        except (OSError, RuntimeError) as error:
            # A profile is not worth a run.
            _logger.warning(
                f"the profile of rank {self._run.world.rank} could not be written to {trace.parent}: {error}"
            )
            return
        where = "https://ui.perfetto.dev or chrome://tracing"
        if snapshots:
            where += ", the memory snapshot with https://pytorch.org/memory_viz"
        _logger.info(
            f"profile of rank {self._run.world.rank}, steps {self._first}:{self._stop}: {trace}; open it with {where}."
        )

    def _names(self, rank: int) -> list[str]:
        names = [f"{PROFILE_FOLDER}/rank-{rank}.trace.json"]
        return names + ([f"{PROFILE_FOLDER}/rank-{rank}.memory.pickle"] if self._run.device.type == "cuda" else [])
