"""Receivers of metrics: metrics.jsonl, which is authoritative, and copies for TensorBoard and Weights & Biases on request."""

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

from megaclass.config.read import to_toml
from megaclass.config.schema import Config
from megaclass.errors import CheckpointError, ConfigError, UserError, is_transient
from megaclass.files import make_private_folder
from megaclass.train.run.folder import RunFolder

Sink = Callable[[Mapping[str, float]], None]
_logger = logging.getLogger("megaclass.train")


@contextmanager
def open_sinks(config: Config, run: RunFolder, *, is_new: bool) -> Iterator[Sink]:
    """Yields one function that sends a row of metrics to every sink. Rank 0 alone calls it.

    is_new: nothing was trained yet. If a sink cannot be opened, the run folder is then cleared for the next attempt.
    """
    with ExitStack() as opened:
        # The first sink is the authoritative one.
        sinks: list[Sink] = [opened.enter_context(_metrics_file(run))]
        try:
            if config.train.tensorboard:
                sinks.append(opened.enter_context(_tensorboard(run)))
            if config.train.wandb_project:
                sinks.append(opened.enter_context(_wandb(config, run)))
        except (UserError, OSError):
            if is_new:
                opened.close()
                run.clear()
            raise

        def send(row: Mapping[str, float]) -> None:
            for sink in list(sinks):
                try:
                    sink(row)
                except OSError as error:
                    # A copy for display only: metrics.jsonl, the first sink, raises no OSError.
                    sinks.remove(sink)
                    _logger.warning(
                        f"the copy of the metrics for TensorBoard cannot be written ({error}); the run continues without it."
                    )

        yield send


@contextmanager
def _metrics_file(run: RunFolder) -> Iterator[Sink]:
    """Yields the sink for metrics.jsonl. Rows that a full disk refuses are kept in memory and written with the next one."""
    waiting: deque[Mapping[str, float]] = deque()

    def send(row: Mapping[str, float]) -> None:
        waiting.append(dict(row))
        try:
            # Oldest first: rows stay in the order of their steps.
            while waiting:
                run.append_metrics(waiting[0])
                waiting.popleft()
        except CheckpointError as error:
            if not is_transient(error):
                raise
            if len(waiting) == 1:
                _logger.warning(
                    f"{error} Training continues; rows of metrics are kept and written as soon as possible."
                )

    try:
        yield send
    finally:
        # One more attempt at the end: the disk may have room by now.
        if waiting:
            last = waiting.pop()
            send(last)
        if waiting:
            _logger.warning(f"the last {len(waiting)} rows of metrics could not be written.")


@contextmanager
def no_sinks() -> Iterator[Sink]:
    """Yields a sink that ignores every row, for the ranks that do not report."""
    yield lambda row: None


# The two packages below are installed: restart.require_packages has checked that before the first step.


@contextmanager
def _tensorboard(run: RunFolder) -> Iterator[Sink]:
    from torch.utils.tensorboard import SummaryWriter

    # TensorBoard's files follow the umask; the private folder keeps other users out.
    make_private_folder(run.path / "tensorboard")
    writer = SummaryWriter(str(run.path / "tensorboard"))

    def send(row: Mapping[str, float]) -> None:
        for name, value in row.items():
            if name != "step":
                writer.add_scalar(name, value, int(row["step"]))

    try:
        yield send
    finally:
        writer.close()


@contextmanager
def _wandb(config: Config, run: RunFolder) -> Iterator[Sink]:
    import wandb

    try:
        make_private_folder(run.path / "wandb")
        session = wandb.init(
            project=config.train.wandb_project, name=run.path.name, dir=str(run.path), config={"toml": to_toml(config)}
        )
    except wandb.Error as error:
        raise ConfigError(
            f"Weights & Biases did not open train.wandb_project={config.train.wandb_project}: {error} "
            f"WANDB_MODE=offline writes to files; train.wandb_project='' disables it."
        ) from error
    try:
        yield lambda row: session.log(dict(row), step=int(row["step"]))
    finally:
        session.finish()
