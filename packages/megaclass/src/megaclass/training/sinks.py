"""Receivers of metrics: metrics.jsonl, which is authoritative, and on request copies for other services.

The services are one table: TensorBoard, Weights & Biases, MLflow, trackio, Prometheus. A new one is
a function that opens it, a setting in config/schema.py, an extra in pyproject.toml and a line in
TRACKERS. Rank 0 alone opens them. If a service refuses at the start, the run does not begin; if it
fails later, the run continues without it.
"""

import logging
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megaclass.config.read import flat_values, to_toml
from megaclass.config.schema import Config, TrainConfig
from megaclass.errors import CheckpointError
from megaclass.training.run.folder import RunFolder
from megaclass_launch.errors import ConfigError, UserError, is_transient
from megaclass_launch.files import make_private_folder

SendNumbers = Callable[[Mapping[str, float], int], None]
"""Takes the numbers of a row, and its step."""


@dataclass(frozen=True, slots=True)
class Tracker:
    """One service. `open_session` may import the packages: they are checked before the first step."""

    title: str
    setting: str
    """Full name of the setting that turns it on."""
    off: str
    """Value of the setting that turns it off, as typed."""
    packages: tuple[str, ...]
    open_session: Callable[[Config, Path], AbstractContextManager[SendNumbers]]

    def is_wanted(self, settings: TrainConfig) -> bool:
        return bool(getattr(settings, self.setting.removeprefix("train.")))

    @property
    def extra(self) -> str:
        """Returns the extra of this package that installs what is needed."""
        return self.packages[0].partition("_")[0]


@contextmanager
def _tensorboard(config: Config, folder: Path) -> Iterator[SendNumbers]:
    from torch.utils.tensorboard import SummaryWriter

    # TensorBoard's files follow the umask; the private folder keeps other users out.
    make_private_folder(folder / "tensorboard")
    writer = SummaryWriter(str(folder / "tensorboard"))

    def send(numbers: Mapping[str, float], step: int) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)

    try:
        yield send
    finally:
        writer.close()


def _wandb(config: Config, folder: Path) -> AbstractContextManager[SendNumbers]:
    import wandb

    def begin() -> Any:
        make_private_folder(folder / "wandb")
        settings = {"toml": to_toml(config)}
        return wandb.init(project=config.train.wandb_project, name=folder.name, dir=str(folder), config=settings)

    advice = "WANDB_MODE=offline writes to files;"
    return _session("Weights & Biases", "wandb_project", config, begin, (wandb.Error,), advice)


def _trackio(config: Config, folder: Path) -> AbstractContextManager[SendNumbers]:
    import trackio

    settings = {name: str(value) for name, value in flat_values(config).items()}
    begin = partial(
        trackio.init,
        project=config.train.trackio_project,
        name=folder.name,
        config=settings,
        resume="allow",
        embed=False,
    )
    return _session("trackio", "trackio_project", config, begin, (ValueError, RuntimeError))


@contextmanager
def _session(
    title: str,
    setting: str,
    config: Config,
    begin: Callable[[], Any],
    errors: tuple[type[Exception], ...],
    advice: str = "",
) -> Iterator[SendNumbers]:
    """Begins a session of Weights & Biases, or of trackio, which has the same interface."""
    try:
        session = begin()
    except errors as error:
        raise _refused(title, setting, config, error, advice) from error
    try:
        yield lambda numbers, step: session.log(dict(numbers), step=step)
    finally:
        session.finish()


@contextmanager
def _mlflow(config: Config, folder: Path) -> Iterator[SendNumbers]:
    import mlflow
    from mlflow.entities import Metric, Param

    try:
        # The client instead of the module's own functions: those share one current run with the rest of the process.
        client = mlflow.MlflowClient()
        name = config.train.mlflow_experiment
        experiment = client.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment is not None else client.create_experiment(name)
        run = client.create_run(number, run_name=folder.name)
        values = [Param(key, str(value)[:500]) for key, value in flat_values(config).items()]
        for start in range(0, len(values), 100):
            client.log_batch(run.info.run_id, params=values[start : start + 100])
    except mlflow.MlflowException as error:
        advice = "MLFLOW_TRACKING_URI names a server; the default, a file, needs pip install 'megaclass[mlflow]';"
        raise _refused("MLflow", "mlflow_experiment", config, error, advice) from error
    begun = int(run.info.start_time)

    def send(numbers: Mapping[str, float], step: int) -> None:
        stamp = begun + int(1000 * numbers.get("elapsed_s", 0.0))
        try:
            client.log_batch(
                run.info.run_id, metrics=[Metric(key, value, stamp, step) for key, value in numbers.items()]
            )
        except mlflow.MlflowException as error:
            raise OSError(str(error)) from error

    try:
        yield send
    except BaseException:
        client.set_terminated(run.info.run_id, status="FAILED")
        raise
    client.set_terminated(run.info.run_id)


@contextmanager
def _prometheus(config: Config, folder: Path) -> Iterator[SendNumbers]:
    """Offers the newest numbers at http://ADDRESS:PORT/metrics, as gauges called megaclass_NAME."""
    from prometheus_client import CollectorRegistry, Gauge, start_http_server

    address, port = config.train.metrics_address, config.train.metrics_port
    # A registry of its own: the default one adds numbers about this process.
    registry, gauges = CollectorRegistry(), dict[str, Gauge]()
    try:
        server, thread = start_http_server(port, address, registry)
    except (OSError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ConfigError(
            f"Cannot listen at {address}:{port} (train.metrics_address, train.metrics_port): {reason}. "
            f"Choose another port, or train.metrics_port=0."
        ) from error

    def send(numbers: Mapping[str, float], step: int) -> None:
        for name, value in {"step": float(step), **numbers}.items():
            full = "megaclass_" + re.sub("[^a-zA-Z0-9_]", "_", name)
            if full not in gauges:
                gauges[full] = Gauge(full, f"{name} in the newest row of metrics", registry=registry)
            gauges[full].set(value)

    try:
        yield send
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _refused(title: str, setting: str, config: Config, error: Exception, advice: str) -> ConfigError:
    given = f"train.{setting}={getattr(config.train, setting)}"
    advice = f"{advice} train.{setting}='' disables it.".strip()
    return ConfigError(f"{title} did not open {given}: {error} {advice}")


TRACKERS = (
    Tracker("TensorBoard", "train.tensorboard", "false", ("tensorboard",), _tensorboard),
    Tracker("Weights & Biases", "train.wandb_project", "''", ("wandb",), _wandb),
    Tracker("MLflow", "train.mlflow_experiment", "''", ("mlflow",), _mlflow),
    Tracker("trackio", "train.trackio_project", "''", ("trackio",), _trackio),
    Tracker("Prometheus", "train.metrics_port", "0", ("prometheus_client",), _prometheus),
)


def numbers_of(row: Mapping[str, object]) -> dict[str, float]:
    """Returns the fields of a row that are numbers, without its step: services draw curves, not tables of ranks."""
    return {
        name: float(value)
        for name, value in row.items()
        if name != "step" and isinstance(value, int | float) and not isinstance(value, bool)
    }


Sink = Callable[[Mapping[str, Any]], None]
_logger = logging.getLogger("megaclass.training")
# Before each attempt to write the rows that are left at the end.
_LAST_PAUSES_S = (0.0, 1.0, 4.0)


@contextmanager
def open_sinks(config: Config, run: RunFolder, *, is_new: bool) -> Iterator[Sink]:
    """Yields one function that sends a row of metrics to every sink. Rank 0 alone calls it.

    is_new: nothing was trained yet. If a sink cannot be opened, the run folder is then cleared for the next attempt.
    """
    with ExitStack() as opened:
        write = opened.enter_context(_metrics_file(run))
        copies: list[tuple[str, SendNumbers]] = []
        try:
            # The packages are installed: start/restart.py:require_packages has checked that before the first step.
            copies += [
                (tracker.title, opened.enter_context(tracker.open_session(config, run.path)))
                for tracker in TRACKERS
                if tracker.is_wanted(config.train)
            ]
        except (UserError, OSError):
            if is_new:
                opened.close()
                run.clear()
            raise

        def send(row: Mapping[str, Any]) -> None:
            write(row)
            for title, copy in list(copies):
                try:
                    copy(numbers_of(row), int(row["step"]))
                except OSError as error:
                    # A copy for display only is not worth the run.
                    copies.remove((title, copy))
                    _logger.warning(
                        f"the copy of the metrics for {title} cannot be written ({error}); the run continues without it."
                    )

        yield send


@contextmanager
def _metrics_file(run: RunFolder) -> Iterator[Sink]:
    """Yields the sink for metrics.jsonl. Rows that a full disk refuses are kept in memory and written with the next one."""
    waiting: deque[Mapping[str, Any]] = deque()

    def send(row: Mapping[str, Any]) -> None:
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
        # The disk may have room by now, or soon: the last checkpoint is repeated as well.
        for pause_s in _LAST_PAUSES_S:
            if waiting:
                time.sleep(pause_s)
                last = waiting.pop()
                send(last)
        if waiting:
            _logger.warning(f"the last {len(waiting)} rows of metrics could not be written.")
