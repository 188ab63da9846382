"""When to stop restarting: three starts in a row that brought the job no further. Standard library only."""

from dataclasses import dataclass

MAX_IDLE_STARTS = 3
SHORT_S = 60.0


@dataclass(slots=True)
class RestartLimit:
    """Counts starts without progress.

    Progress is a checkpoint of a later step than any start before has published. A program that reports no checkpoints
    makes progress by running for a minute. A start in which no rank ran, because a host could not be reached, does not
    count: the host may be booting.
    """

    num_idle: int = 0
    num_short: int = 0
    """Starts in a row that ended within a minute without a new checkpoint: the next one waits longer."""
    best_step: int | None = None

    def note(self, *, has_started: bool, step: int | None, seconds: float) -> None:
        """After each start. step: of the last checkpoint that it published."""
        has_advanced = step is not None and (self.best_step is None or step > self.best_step)
        self.num_short = self.num_short + 1 if seconds < SHORT_S and not has_advanced else 0
        if not has_started:
            return
        reports = step is not None or self.best_step is not None
        if has_advanced:
            self.best_step = step
        is_idle = not has_advanced if reports else seconds < SHORT_S
        self.num_idle = self.num_idle + 1 if is_idle else 0

    def forget(self) -> None:
        """The next start has other hosts: what failed on those before may go well on them."""
        self.num_idle = 0

    def why_not_again(self) -> str | None:
        """Why the job should not be started again; None when it may."""
        if self.num_idle < MAX_IDLE_STARTS:
            return None
        what = (
            f"no checkpoint after step {self.best_step}"
            if self.best_step is not None
            else (f"no checkpoint, and none ran for {SHORT_S:g} s")
        )
        return (
            f"no restart: the last {self.num_idle} starts made no progress ({what}), so the same failure is to be "
            f"expected again. Mend its cause, which is shown above, then start again."
        )
