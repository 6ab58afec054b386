"""The requests of tools about one replica: its status, planned switches and forced elections.

A broker knows its own role and, as master, what its slaves have. If roles come from the consensus
service, a `RoleController` above the broker decides about them: it knows the present term, hands
the role of master over (SLUICE_SWITCH_MASTER, 900303), and makes a replica master because an
operator says so (SLUICE_ELECT_MASTER, 900304). Both requests are answered when the change has
begun. A tool asks for the status again to see the result.
"""

import os
from collections.abc import Callable
from typing import Any, Protocol

import orjson

from sluicemq.broker.replication.in_sync import InSyncReplicas
from sluicemq.broker.settings import Settings
from sluicemq.errors import RequestError
from sluicemq.files.machine import process_space
from sluicemq.model.addresses import format_address
from sluicemq.net.dispatch import Handler, Peer
from sluicemq.numbers import natural
from sluicemq.wire.codes import ResponseCode
from sluicemq.wire.frames import Command

MeasureLag = Callable[[], tuple[int | None, int | None]]
"""Returns how far a slave is behind its master, in bytes and in ms; None means that only the master
knows."""


class RoleController(Protocol):
    """What decides about the roles of a broker with failover: `failover.replica.Replica`."""

    def status(self) -> dict[str, Any]:
        """Return what the controller knows about the roles, as fields of the JSON answer.

        The fields are `role` (master, slave or none), `epoch` (the number of the term), `inSync`
        (the ids of the in-sync set), `members` (the live replicas), `consensus` and, while the
        replica is neither master nor slave, the `reason`.
        """
        ...

    def switch(self, to: int | None) -> None:
        """Start to hand the role of master over to the replica `to`.

        None means the slave that has most of the log. Raises RequestError if this replica is not
        the master, or if the replica cannot take over.
        """
        ...

    def elect(self) -> None:
        """Start to make this replica master, although it may lack messages.

        Raises RequestError if it is the master already.
        """
        ...

    def handlers(self, local: dict[int, Handler], *, is_slave: bool) -> dict[int, Handler]:
        """Return the handlers of a replica in its role, based on the broker's handlers `local`."""
        ...

    def disconnected(self, peer: Peer) -> None:
        """Clean up after the client `peer`, whose connection has ended."""
        ...


class ReplicaAdmin:
    """Handlers of the requests about one replica."""

    def __init__(
        self,
        settings: Settings,
        in_sync: InSyncReplicas | None,
        role_controller: RoleController | None,
        log_end: Callable[[], int],
        measure_lag: MeasureLag,
    ) -> None:
        """Create the handlers.

        `in_sync` tracks the slaves of a master; it is None on a slave. `role_controller` changes
        the role; it is None if the configuration file decides the role. `log_end()` returns the end
        of this broker's log. `measure_lag()` returns how far a slave is behind its master, as
        (bytes, ms).
        """
        self._settings = settings
        self._in_sync = in_sync
        self._role_controller = role_controller
        self._log_end = log_end
        self._measure_lag = measure_lag

    def status(self, command: Command, peer: Peer) -> Command:
        """Answer SLUICE_REPLICA_STATUS (900302) with the status of this replica as JSON.

        Only a master sets the fields "confirmed" (the position up to which enough replicas have the
        log) and "slaves". With failover, the fields of `RoleController.status`, such as "epoch" and
        "inSync", replace those of the same name.
        """
        broker = self._settings.broker
        host = self._settings.host
        is_slave = self._settings.is_slave
        lag_bytes, lag_ms = self._measure_lag() if is_slave else (0, 0)
        fields: dict[str, Any] = {
            "broker": broker.broker_name,
            "cluster": broker.cluster_name,
            "id": broker.broker_id,
            "role": "slave" if is_slave else "master",
            "address": format_address(*host),
            "epoch": None,
            "inSync": None,
            "lagBytes": lag_bytes,
            "lagMs": lag_ms,
            "logEnd": self._log_end(),
            "confirmed": None,
            "slaves": [],
            "consensus": broker.consensus,
            "pid": os.getpid(),
            "processSpace": process_space(),
        }
        if not is_slave and self._in_sync is not None:
            fields["confirmed"] = self._in_sync.confirmed
            fields["slaves"] = self._describe_slaves(self._in_sync)
        if self._role_controller is not None:
            fields |= self._role_controller.status()
        return Command(ResponseCode.SUCCESS, body=orjson.dumps(fields))

    def _describe_slaves(self, in_sync: InSyncReplicas) -> list[dict[str, Any]]:
        """Return the field `slaves`: one JSON object for each connected slave."""
        end = in_sync.local_end()
        return [
            {
                "id": link.replica_id,
                "address": str(link.remote),
                "ackOffset": slave.acked_end,
                "lagBytes": max(end - max(slave.acked_end, 0), 0),
                "lagMs": in_sync.lag_ms(slave),
            }
            for link, slave in in_sync.slaves.items()
        ]

    def switch(self, command: Command, peer: Peer) -> Command:
        """Answer SLUICE_SWITCH_MASTER (900303): start to make another replica the master.

        The field "brokerId" is the id of the new master. If it is missing, the role controller
        chooses a replica. Raises RequestError if it is not a natural number, if the role controller
        refuses, or if the configuration file decides the role.
        """
        requested_id = (command.fields or {}).get("brokerId")
        broker_id = None if requested_id is None else natural(requested_id)
        if requested_id is not None and broker_id is None:
            raise RequestError(
                ResponseCode.INVALID_PARAMETER,
                f"brokerId must be a number of 0 or more, got {requested_id!r:.80}.",
            )
        self._require_role_controller().switch(broker_id)
        return Command(ResponseCode.SUCCESS)

    def elect(self, command: Command, peer: Peer) -> Command:
        """Answer SLUICE_ELECT_MASTER (900304): make this replica master. Raises RequestError."""
        self._require_role_controller().elect()
        return Command(ResponseCode.SUCCESS)

    def _require_role_controller(self) -> RoleController:
        """Return the role controller. Raise RequestError if roles come from the configuration."""
        if self._role_controller is None:
            raise RequestError(
                ResponseCode.SYSTEM_ERROR,
                "The role of this broker is set in its configuration file (brokerRole). Only "
                "replicas with sluiceConsensus can change roles.",
            )
        return self._role_controller
