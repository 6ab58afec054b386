"""What tools ask of one replica: its place among the others (900302), and to change places.

A broker knows its own role and, as master, what its slaves have. Who decides about roles, where it
is not the file, stands above it (`Steering`): it says which term holds, hands over on purpose
(900303), and makes a replica master on a person's word (900304). Both are answered when they have
begun; what came of it is seen by asking again.
"""

import os
from collections.abc import Callable
from typing import Any, Protocol

import orjson

from sluicemq.broker.replication.insync import InSync
from sluicemq.broker.settings import Settings
from sluicemq.errors import RequestError
from sluicemq.files.machine import process_space
from sluicemq.model.addresses import format_address
from sluicemq.net.dispatch import Handler, Peer
from sluicemq.numbers import natural
from sluicemq.wire.codes import ResponseCode
from sluicemq.wire.frames import Command

Behind = Callable[[], tuple[int | None, int | None]]
"""How far a slave is behind its master, in bytes and ms; None: the master alone knows."""


class Steering(Protocol):
    """Who decides about the roles of a broker that fails over: `replication.replica.Replica`."""

    def status(self) -> dict[str, Any]:
        """`role` (master, slave, none), `epoch`, `inSync` (ids), `members` that live, `consensus`,
        and `reason` while it can be neither."""
        ...

    def switch(self, to: int | None) -> None:
        """Begins to hand over, to a replica or to whoever has most. Raises RequestError."""
        ...

    def elect(self) -> None:
        """Begins to make this replica master though it may lack messages. Raises RequestError."""
        ...

    def handlers(self, local: dict[int, Handler], *, is_slave: bool) -> dict[int, Handler]:
        """Those of a replica in its role, made of the broker's."""
        ...

    def disconnected(self, peer: Peer) -> None:
        """A client is gone."""
        ...


class ReplicaAdmin:
    """Handlers. `log_end` is where this broker's log ends."""

    def __init__(
        self,
        settings: Settings,
        in_sync: InSync | None,
        steering: Steering | None,
        log_end: Callable[[], int],
        behind: Behind,
    ) -> None:
        self._settings = settings
        self._in_sync = in_sync
        self._steering = steering
        self._log_end = log_end
        self._behind = behind

    def status(self, command: Command, peer: Peer) -> Command:
        """900302."""
        broker, host = self._settings.broker, self._settings.host
        is_slave = self._settings.is_slave
        lag_bytes, lag_ms = self._behind() if is_slave else (0, 0)
        found: dict[str, Any] = {
            "broker": broker.broker_name, "cluster": broker.cluster_name, "id": broker.broker_id,
            "role": "slave" if is_slave else "master", "address": format_address(*host),
            "epoch": None, "inSync": None, "lagBytes": lag_bytes, "lagMs": lag_ms,
            "logEnd": self._log_end(), "confirmed": None, "slaves": [],
            "consensus": broker.consensus, "pid": os.getpid(), "processSpace": process_space(),
        }  # fmt: skip
        if not is_slave and self._in_sync is not None:
            found |= {"confirmed": self._in_sync.confirmed, "slaves": self._slaves(self._in_sync)}
        if self._steering is not None:
            found |= self._steering.status()
        return Command(ResponseCode.SUCCESS, body=orjson.dumps(found))

    def _slaves(self, in_sync: InSync) -> list[dict[str, Any]]:
        end = in_sync.own_end()
        return [
            {
                "id": link.replica_id, "address": str(link.remote), "ackOffset": one.acknowledged,
                "lagBytes": max(end - max(one.acknowledged, 0), 0), "lagMs": in_sync.lag_ms(one),
            }
            for link, one in in_sync.replicas.items()
        ]  # fmt: skip

    def switch(self, command: Command, peer: Peer) -> Command:
        """900303; field `brokerId`, optional."""
        text = (command.fields or {}).get("brokerId")
        broker_id = None if text is None else natural(text)
        if text is not None and broker_id is None:
            raise RequestError(ResponseCode.INVALID_PARAMETER, f"brokerId = {text!r:.80} is no id.")
        self._steered().switch(broker_id)
        return Command(ResponseCode.SUCCESS)

    def elect(self, command: Command, peer: Peer) -> Command:
        """900304."""
        self._steered().elect()
        return Command(ResponseCode.SUCCESS)

    def _steered(self) -> Steering:
        if self._steering is None:
            raise RequestError(
                ResponseCode.SYSTEM_ERROR,
                "the role of this broker stands in its file (brokerRole); only replicas with "
                "sluiceConsensus change places.",
            )
        return self._steering
