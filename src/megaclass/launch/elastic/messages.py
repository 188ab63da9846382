"""Checks the messages of an elastic job's agent: it may speak about its own workers only. Standard library only."""

from collections.abc import Mapping
from typing import Any

from megaclass.launch.elastic.worker import Why
from megaclass.launch.wire.agent_messages import MAX_STEP, AgentMessageChecker
from megaclass.launch.wire.checks import Check, one_of, text, whole

_MAX_TOKEN = 64


class ElasticMessageChecker(AgentMessageChecker):
    """Checks the messages of one agent, whose workers become more over time."""

    def __init__(self) -> None:
        super().__init__(())
        self._starting: set[int] = set()

    def expect(self, workers: set[int]) -> None:
        """Notes that the agent was told to start these workers."""
        self._ranks |= workers
        self._starting |= workers

    def _fields(self) -> Mapping[str, Mapping[str, tuple[Check, bool]]]:
        rank, token = (self._rank, True), (_token, True)
        port = (whole(1, 65535), True)
        known = super()._fields()
        return {
            **known,
            "hello": {**known["hello"], "port": port, "store_port": port},
            # These come from workers by way of their agent, and the driver trusts neither.
            "ready": {"rank": rank, "token": token, "why": (one_of(tuple(Why)), True)},
            "committed": {"rank": rank, "token": token, "step": (whole(0, MAX_STEP), True)},
            "failed": {"rank": rank, "token": token, "text": (text(), True)},
            "spare": {"port": port, "store_port": port},
        }

    def _pids(self, value: Any) -> dict[int, int]:
        # The agent may have been told to start others before it could report about these.
        named = {number for number in self._starting if isinstance(value, dict) and str(number) in value}
        pids = self._pids_of(value, named)
        self._starting -= named
        return pids


def _token(value: Any) -> str:
    if not isinstance(value, str) or len(value) > _MAX_TOKEN or not value.isascii():
        raise ValueError("a token")
    return value
