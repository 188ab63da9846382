"""Where metrics go besides metrics.jsonl, which is the truth: TensorBoard and Weights & Biases, when asked for."""

import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

from megaclass.config.read import to_toml
from megaclass.config.schema import Config
from megaclass.errors import CheckpointError, ConfigError, UserError, is_transient
from megaclass.files import make_private_folder
from megaclass.train.run.folder import RunFolder

Sink = Callable[[Mapping[str, float]], None]


@contextmanager
def open_sinks(config: Config, run: RunFolder, *, is_new: bool) -> Iterator[Sink]:
    """One function that hands a row of metrics to every sink; rank 0 alone calls it.

    is_new: nothing was trained yet. Where a sink cannot be opened, the run folder is then left empty for the next try.
    """
    with ExitStack() as opened:
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
                    # Only what draws the curves again: metrics.jsonl, the first, raises none.
                    sinks.remove(sink)
                    _warn(
                        f"the copy of the metrics for TensorBoard cannot be written ({error}); the run goes on without it."
                    )

        yield send


@contextmanager
def _metrics_file(run: RunFolder) -> Iterator[Sink]:
    """Rows that a full disk refuses are kept and written with the next one: the run goes on meanwhile."""
    waiting: deque[Mapping[str, float]] = deque()

    def send(row: Mapping[str, float]) -> None:
        waiting.append(dict(row))
        try:
            while waiting:
                run.append_metrics(waiting[0])
                waiting.popleft()
        except CheckpointError as error:
            if not is_transient(error):
                raise
            if len(waiting) == 1:
                _warn(f"{error} Training goes on; rows of metrics are kept and written as soon as that is possible.")

    try:
        yield send
    finally:
        if waiting:
            last = waiting.pop()
            send(last)
        if waiting:
            _warn(f"the last {len(waiting)} rows of metrics could not be written.")


def _warn(text: str) -> None:
    print(f"WARNING megaclass: {text}", file=sys.stderr, flush=True)


@contextmanager
def no_sinks() -> Iterator[Sink]:
    """For the ranks that do not report."""
    yield lambda row: None


@contextmanager
def _tensorboard(run: RunFolder) -> Iterator[Sink]:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ConfigError("train.tensorboard needs its package: pip install 'megaclass[tensorboard]'") from None
    # Its files follow the umask; the folder keeps others out.
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
    try:
        import wandb
    except ImportError:
        raise ConfigError("train.wandb_project needs its package: pip install 'megaclass[wandb]'") from None
    try:
        make_private_folder(run.path / "wandb")
        session = wandb.init(
            project=config.train.wandb_project, name=run.path.name, dir=str(run.path), config={"toml": to_toml(config)}
        )
    except wandb.Error as error:
        raise ConfigError(
            f"Weights & Biases did not open train.wandb_project={config.train.wandb_project}: {error} "
            f"WANDB_MODE=offline writes to files; train.wandb_project='' goes without."
        ) from error
    try:
        yield lambda row: session.log(dict(row), step=int(row["step"]))
    finally:
        session.finish()
