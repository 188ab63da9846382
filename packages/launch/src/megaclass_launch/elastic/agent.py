"""The agent of an elastic job: it starts and ends single workers and passes messages between them and the driver.

    driver -> agent     start (workers), publish (a generation), changed (hosts), broken (a generation),
                        dismiss (workers), kill (workers)
    agent -> driver     started, ready, committed, failed, exit, spare (ports for the next generation)

A worker has a number that no other worker of the job ever has; messages name it in the field `rank`, as those of other jobs
name the rank. Its rank may change with every generation, and only the driver knows it. Standard library only.

    field       changed by                      meaning
    _channels   start, the worker's end         the channel to each worker
    _tokens     publish                         the token that each worker knows: others are refused
    _held       _hold_ports, publish            sockets that hold the ports of the last two generations with rank 0 here, and
                                                the spare ones
"""

import os
import selectors
import signal
import socket
import sys
from contextlib import suppress
from functools import partial

from megaclass_launch.agent.agent import Agent, main
from megaclass_launch.agent.orphan_killer import processes_of, send
from megaclass_launch.agent.supervisor import Supervisor, Worker
from megaclass_launch.elastic.channel import FD_NAME, Channel, ChannelError
from megaclass_launch.elastic.worker import IS_RUNNING_NAME, MAX_RANKS_NAME
from megaclass_launch.network import hold_store_port, reserve_port
from megaclass_launch.placement import job_environment
from megaclass_launch.signals import SignalQueue
from megaclass_launch.wire.protocol import Message
from megaclass_launch.world import World

_NUM_HELD = 6
"""Two sockets for the running generation, two for the previous one, whose ranks may still leave it, and two spare ones."""
_FORWARDED = ("ready", "committed", "failed")


class ElasticAgent(Agent):
    """Carries out the part of an elastic job that runs on this host."""

    def __init__(self, job: Message, supervisor: Supervisor, signals: SignalQueue) -> None:
        super().__init__(job, supervisor, signals)
        self._channels: dict[int, Channel] = {}
        self._tokens: dict[int, str] = {}
        self._held: list[socket.socket] = []

    # ---- messages of the driver ----

    def _carry_out(self, message: Message) -> None:
        match message.get("do"):
            case "start":
                self._start_all(message)
            case "publish":
                self._publish(message)
            case "changed" | "broken":
                said = {"say": message["do"], **{name: message[name] for name in message if name != "do"}}
                # Only members of that generation: another worker may be in the next one already.
                for number, channel in self._channels.items():
                    if self._tokens.get(number) == message["token"]:
                        channel.send(said)
            case "dismiss":
                for number in message["workers"]:
                    if number in self._channels:
                        self._channels[number].send({"say": "dismissed", "why": message["why"]})
            case "kill":
                for worker in self._supervisor.running():
                    # Checked here, at the last moment: since the driver's order it may have been continued by SIGCONT.
                    may_live = message.get("if_stopped") and not self._supervisor.is_stopped(worker)
                    if worker.rank in message["workers"] and not may_live:
                        self._kill_session(worker)
            case _:
                super()._carry_out(message)

    def _hold_ports(self) -> Message:
        """Holds a pair of ports for the next generation whose rank 0 is on this host."""
        self._held = [*self._held, reserve_port(0), hold_store_port()]
        # Closed late: ranks of that generation may still be leaving it, and no other process may listen there meanwhile.
        for old in self._held[:-_NUM_HELD]:
            old.close()
        self._held = self._held[-_NUM_HELD:]
        port, store_port = (held.getsockname()[1] for held in self._held[-2:])
        return {"port": port, "store_port": store_port}

    def _start_all(self, start: Message) -> None:
        """Starts the listed workers, each with its own channel."""
        pids = {}
        for entry in start["workers"]:
            number = int(entry["worker"])
            ours, theirs = socket.socketpair()
            env = {
                **self._environment(World(**entry["world"]), start),
                FD_NAME: str(theirs.fileno()),
                IS_RUNNING_NAME: str(int(bool(start["is_running"]))),
                MAX_RANKS_NAME: str(int(start["max_ranks"])),
                "MEGACLASS_RESTART": "0",
                "HOROVOD_ELASTIC": "1",
            }
            worker = self._start_worker(number, env, pass_fds=[theirs.fileno()])
            # The worker has a copy. With this one open, the end of the worker would not end the channel.
            theirs.close()
            if worker is None:
                ours.close()
                return
            self._channels[number] = Channel(ours)
            self._tokens[number] = ""
            self._selector.register(ours, selectors.EVENT_READ, partial(self._on_worker, number))
            pids[str(number)] = worker.pid
        self._say({"say": "started", "pids": pids})

    def _environment(self, world: World, where: Message) -> dict[str, str]:
        """Returns the variables of one generation: place, address, ports, secret and network interface."""
        return {**self._setup.placed(world, where), **job_environment(where["secret"], where["store_port"])}

    def _publish(self, generation: Message) -> None:
        """Tells the workers of this host their places in the next generation."""
        fields = ("generation", "token", "secret", "members", "previous_size", "needs_sync", "has_progressed")
        for number, world in generation["worlds"].items():
            if (channel := self._channels.get(int(number))) is None:
                continue  # it has ended meanwhile, which the driver learns as well
            self._tokens[int(number)] = generation["token"]
            env = self._environment(World(**world), generation)
            channel.send(
                {
                    "say": "assignment",
                    **{name: generation[name] for name in fields},
                    "worker": int(number),
                    "world": {**world, "address": generation["address"], "port": generation["store_port"]},
                    "env": env,
                }
            )
        if generation["uses_ports"]:
            self._say({"say": "spare", **self._hold_ports()})

    # ---- messages of the workers ----

    def _on_worker(self, number: int) -> None:
        channel = self._channels[number]
        try:
            messages = channel.receive()
        except ChannelError as error:
            self._say({"say": "note", "text": f"a worker sent {error} to its agent and is ended"})
            self._close_channel(number)
            self._carry_out({"do": "kill", "workers": [number]})
            return
        for message in messages:
            kind = message.get("do")
            # A token of an earlier generation: the worker is late, and what it says concerns that generation only.
            if kind in _FORWARDED and message.get("token") == self._tokens[number]:
                known: Message = {name: message[name] for name in ("why", "step", "text", "token") if name in message}
                self._say({"say": kind, "rank": number, **known})
        if not channel.is_open:
            self._close_channel(number)

    def _close_channel(self, number: int) -> None:
        if (channel := self._channels.pop(number, None)) is not None:
            with suppress(KeyError, ValueError):
                self._selector.unregister(channel.fileno())
            channel.close()

    def _balance(self) -> None:
        for channel in self._channels.values():
            channel.write()
        super()._balance()

    def _wait_s(self) -> float:
        # Assignments of very large jobs may not fit into a socket at once.
        is_waiting = any(channel.has_unsent for channel in self._channels.values())
        return min(super()._wait_s(), 0.02) if is_waiting else super()._wait_s()

    # ---- ends of the workers ----

    def _note_exit(self, worker: Worker) -> None:
        # First what it said last, for example why it failed; the driver forgets the worker with its exit.
        if worker.rank in self._channels:
            self._on_worker(worker.rank)
        self._close_channel(worker.rank)
        super()._note_exit(worker)
        # What it started ends with it; its pid may belong to another process later.
        self._kill_session(worker)
        self._supervisor.forget(worker)
        self._hangs.forget(worker.rank)

    def _kill_session(self, worker: Worker) -> None:
        for pid in processes_of("none", {worker.pid}):
            send(pid, signal.SIGKILL)

    def _end_leftovers(self) -> None:
        """Does nothing: the driver may start further workers here, and ends the agent when the job ends."""


if __name__ == "__main__":
    os.environ.pop(FD_NAME, None)
    sys.exit(main(ElasticAgent))
