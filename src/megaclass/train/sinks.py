"""Where metrics go besides metrics.jsonl, which is the truth: TensorBoard and Weights & Biases, when asked for."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

from megaclass.config import Config, to_toml
from megaclass.errors import ConfigError
from megaclass.train.run_folder import RunFolder

Sink = Callable[[Mapping[str, float]], None]


@contextmanager
def open_sinks(config: Config, run: RunFolder) -> Iterator[Sink]:
    """One function that hands a row of metrics to every sink; rank 0 alone calls it."""
    with ExitStack() as opened:
        sinks: list[Sink] = [run.append_metrics]
        if config.train.tensorboard:
            sinks.append(opened.enter_context(_tensorboard(run)))
        if config.train.wandb_project:
            sinks.append(opened.enter_context(_wandb(config, run)))

        def send(row: Mapping[str, float]) -> None:
            for sink in sinks:
                sink(row)

        yield send


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
    session = wandb.init(
        project=config.train.wandb_project, name=run.path.name, dir=str(run.path), config={"toml": to_toml(config)}
    )
    try:
        yield lambda row: session.log(dict(row), step=int(row["step"]))
    finally:
        session.finish()
