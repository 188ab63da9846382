"""The program of each rank of run(): receives the function, calls it and sends back its result."""

import multiprocessing.spawn
import os
import pickle
import sys
import traceback
from typing import Any

import cloudpickle

from megaclass_launch.wire.call import RankCall


def main() -> int:
    """Returns the exit code: 0 if the function returned, 1 if it raised."""
    rank_call = RankCall()
    place, call = pickle.loads(rank_call.read())
    # Before the function is unpickled: its module may be on the caller's path only.
    _take_over(place)
    succeeded = False
    try:
        func, args, kwargs = pickle.loads(call)
        answer = cloudpickle.dumps((True, func(*args, **kwargs), _rank()))
        succeeded = True
    except BaseException:
        traceback.print_exc()
        answer = pickle.dumps((False, traceback.format_exc(), _rank()))
    rank_call.send(answer)
    return 0 if succeeded else 1


def _rank() -> int:
    """Returns the rank of this process, which may have changed since its start if the job is elastic."""
    return int(os.environ.get("HOROVOD_RANK", 0))


def _take_over(place: dict[str, Any]) -> None:
    """Takes over the caller's sys.path and arguments."""
    place["sys_path"] = [*sys.path, *[folder for folder in place["sys_path"] if folder not in sys.path]]
    multiprocessing.spawn.prepare(place)


if __name__ == "__main__":
    sys.exit(main())
