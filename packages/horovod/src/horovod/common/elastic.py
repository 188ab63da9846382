"""The part of Horovod's elastic API that does not depend on a framework: State, ObjectState and run_fn.

    sync ---> func(state) ---> return
     ^           |
     |           | HorovodInternalError: restore the last commit   HostsUpdatedInterrupt: keep the state
     |           v
     +------- reset: leave the generation, join the next one, call the reset callbacks

After a failure, or when new ranks have joined, all ranks take the state of rank 0, which is the survivor with the lowest rank.
If hosts were only removed, all remaining ranks have the same state already, and sync is left out, as in Horovod. The driver
decides that (Assignment.needs_sync), because ranks may have left the generation for different reasons.
"""

import copy
import functools
import queue
import sys
import time
from collections.abc import Callable, Iterable
from enum import IntFlag
from typing import Any

from horovod.common.basics import _basics
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from megaclass_launch.elastic import Why, elastic_worker
from megaclass_launch.errors import StateLostError
from megaclass_launch.exit_codes import EXIT_USER_ERROR


class HostUpdateResult(IntFlag):
    """How the hosts of a job have changed."""

    no_update = 0
    removed = 1
    added = 2
    mixed = removed | added


class WorkerNotificationManager:
    """Tells states that hosts have changed. run_fn() registers each state for the duration of its function.

    The driver's own announcements do not come this way: a state asks for them when it looks at its messages. A program that
    knows of a change by other means may call handle_hosts_updated() on rank 0.
    """

    def __init__(self) -> None:
        self._listeners: list[State] = []

    def init(self) -> None:
        """Exists for programs that call it; nothing has to be started."""

    def register_listener(self, listener: "State") -> None:
        self._listeners.append(listener)

    def remove_listener(self, listener: "State") -> None:
        self._listeners = [other for other in self._listeners if other is not listener]

    def handle_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Makes the next check_host_updates() of all registered states raise HostsUpdatedInterrupt."""
        for listener in self._listeners:
            listener.on_hosts_updated(timestamp, update_res)


notification_manager = WorkerNotificationManager()


class _HostMessages(queue.Queue[tuple[float, int]]):
    """Changes of the hosts that a state has not acted on. Scripts of Horovod's look at empty() in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self._has_drivers_news = False

    def empty(self) -> bool:
        """Returns whether there is no change; also asks for the driver's announcement, which counts once per generation."""
        worker = elastic_worker()
        if not self._has_drivers_news and worker is not None and worker.hosts_changed():
            self._has_drivers_news = True
            self.put((time.time(), HostUpdateResult.removed if worker.has_only_removals else HostUpdateResult.added))
        return super().empty()


class State:
    """State of a training that ranks commit, restore and send to new ranks. Subclasses implement save, restore and sync."""

    def __init__(self, bcast_object: Callable[..., Any], get_rank: Callable[[], int]) -> None:
        """bcast_object: sends an object of rank 0 to all ranks and returns it. get_rank: returns the rank of this process."""
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._host_messages = _HostMessages()
        self._last_updated_timestamp: float = 0
        self._reset_callbacks: list[Callable[[], object]] = []

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], object]]) -> None:
        """Adds functions to call after each change of the ranks, for example to scale the learning rate."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Is called after each change of the ranks."""
        self._host_messages = _HostMessages()
        # Times are compared by the clock of rank 0, which may be another host's now.
        self._last_updated_timestamp = 0
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Notes that hosts have changed; the next check_host_updates() raises HostsUpdatedInterrupt on all ranks."""
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Saves the state, and then checks for changed hosts."""
        self.save()
        if (worker := elastic_worker()) is not None:
            worker.committed()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raises HostsUpdatedInterrupt, on all ranks at the same call, if rank 0 knows of changed hosts."""
        previous = latest = self._last_updated_timestamp
        result = HostUpdateResult.no_update
        while not self._host_messages.empty():
            timestamp, update = self._host_messages.get()
            if timestamp > latest:
                latest = timestamp
                result |= HostUpdateResult(update)
        # All ranks must leave at the same call: rank 0's knowledge counts.
        previous, self._last_updated_timestamp, result = self._bcast_object((previous, latest, result))
        if self._last_updated_timestamp > previous:
            raise HostsUpdatedInterrupt(result == HostUpdateResult.removed)

    def check_holder(self, holds_state: bool) -> None:
        """Raises StateLostError on all ranks unless rank 0, from which all take the state, holds it.

        The survivor with the lowest rank is rank 0. It holds no state if it joined a running job, and the last rank that had
        the state was lost before it was sent. A script that does not handle the error ends with exit code 2, which
        ends the job.
        """
        if not self._bcast_object(holds_state):
            sys.excepthook = functools.partial(_end_with_user_error, sys.excepthook)
            raise StateLostError(
                "No rank of this elastic job holds the state of the training any more: all ranks that had it were lost before "
                "a new rank received it. The job does not start again at step 0 by itself. Start it again from the "
                "latest checkpoint that the script has saved."
            )

    def save(self) -> None:
        """Copies the state to host memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Returns to the last saved state."""
        raise NotImplementedError

    def sync(self) -> None:
        """Takes over the state of rank 0."""
        raise NotImplementedError

    def reset(self) -> None:
        """Is called after each change of the ranks, before the callbacks."""


class ObjectState(State):
    """State of plain Python objects, which are attributes of it. They must be picklable."""

    def __init__(self, bcast_object: Callable[..., Any], get_rank: Callable[[], int], **kwargs: Any) -> None:
        self._bcast_object = bcast_object
        self._saved_state = kwargs
        self._set_attrs()
        super().__init__(bcast_object=bcast_object, get_rank=get_rank)

    def save(self) -> None:
        # Copies: a list that the program extends after a commit must not change what was committed.
        self._saved_state = {name: copy.deepcopy(getattr(self, name)) for name in self._saved_state}

    def restore(self) -> None:
        self._set_attrs()

    def sync(self) -> None:
        if self._saved_state:
            self._saved_state = self._bcast_object(self._saved_state)
            self._set_attrs()

    def _set_attrs(self) -> None:
        for name, value in self._saved_state.items():
            setattr(self, name, copy.deepcopy(value))


def reset() -> None:
    """Leaves the job and joins it again, with the ranks that it has by then."""
    _basics.abandon(_basics.why_joining)
    _basics.init()


def run_fn(func: Callable[..., Any], reset: Callable[[], object]) -> Callable[..., Any]:
    """Returns `func(state, …)` with the loop of this module's docstring around it.

    reset: leaves the current ranks and joins the next ones.
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        needs_sync = True
        worker = elastic_worker()
        # Until the first commit every process holds the state: that of the start. Later ones hold it once it was sent to them.
        holds_state = worker is None or worker.here is None or not worker.here.has_progressed
        notification_manager.init()
        notification_manager.register_listener(state)
        try:
            while True:
                try:
                    if needs_sync:
                        if worker is not None:
                            state.check_holder(holds_state)
                        state.sync()
                    holds_state = True
                    return func(state, *args, **kwargs)
                except HorovodInternalError as error:
                    _tell_driver(str(error))
                    state.restore()
                    _basics.why_joining, skips_sync = Why.FAILED, False
                except HostsUpdatedInterrupt as change:
                    _basics.why_joining, skips_sync = Why.CHANGED, change.skip_sync
                reset()
                needs_sync = _needs_sync(skips_sync)
                state.on_reset()
        finally:
            notification_manager.remove_listener(state)

    return wrapper


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a training function whose first argument is a State: it is called again whenever the ranks have changed."""
    return run_fn(func, reset)


def _end_with_user_error(hook: Callable[..., object], kind: type[BaseException], error: BaseException, at: Any) -> None:
    """Is sys.excepthook once the state is lost: Python ends with the code of a SystemExit that leaves the hook."""
    hook(kind, error, at)
    if issubclass(kind, StateLostError):
        raise SystemExit(EXIT_USER_ERROR)


def _needs_sync(skips_sync: bool) -> bool:
    worker = elastic_worker()
    return worker.here.needs_sync if worker is not None and worker.here is not None else not skips_sync


def _tell_driver(why: str) -> None:
    if (worker := elastic_worker()) is not None:
        worker.failed(why)


# Names that Horovod's own module has as well.
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
