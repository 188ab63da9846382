import time


class TimeoutException(Exception):  # noqa: N818 (Horovod's name)
    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class Timeout:
    """A deadline, `timeout` seconds after its creation. `message` may contain {activity}."""

    def __init__(self, timeout: float, message: str) -> None:
        self._timeout = timeout
        self._timeout_at = time.time() + timeout
        self._message = message

    def remaining(self) -> float:
        return max(0, self._timeout_at - time.time())

    def timed_out(self) -> bool:
        return time.time() > self._timeout_at

    def check_time_out_for(self, activity: str) -> None:
        if self.timed_out():
            said = self._message.format(activity=activity)
            dot = "" if said.rstrip().endswith(".") else "."
            raise TimeoutException(f"{said}{dot} Timeout after {self._timeout} seconds.")
