"""Replicas of brokers: which one is master, how far the others are behind, and changing the master.

Name servers know which replicas are registered. Each replica is asked for its state (900302), and
the master's answer counts for its slaves. A RocketMQ broker does not support the request and is
reported with what the routes contain. A replica that is in the in-sync set, but cannot be reached,
has the role "gone".
"""

from collections.abc import Mapping
from typing import Any, Final

from sluicemq.client.admin.topics import cluster_info
from sluicemq.client.core import requests
from sluicemq.client.core.conversations import Call, Conversation
from sluicemq.client.core.directory import Directory
from sluicemq.client.core.requests import SUCCESS, expect_success
from sluicemq.errors import ClientError, ConfigurationError
from sluicemq.model.topic import MASTER_ID
from sluicemq.wire import fastjson

ASK_S: Final = 2.0
"""The timeout of the request for the state of a replica."""
MASTER = "master"
SLAVE = "slave"
GONE = "gone"
REPORTED_FIELDS: Final = ("id", "role", "address", "epoch", "lagBytes", "lagMs", "logEnd")
"""The fields of a replica's answer that become fields of its record."""
Status = dict[str, Any]


def replicas(directory: Directory) -> Conversation[list[Status]]:
    """Return one record for each replica; the master of each broker comes first.

    The fields are broker, cluster, id, role ("master", "slave", "none" while it has no master, or
    "gone"), address, epoch, inSync, lagBytes, lagMs, logEnd, state, and `said`, the whole answer of
    a SluiceMQ broker. A field is None if its value is unknown.
    """
    info = yield from cluster_info(directory)
    found = []
    for name, data in sorted(info.brokers.items()):
        rows = []
        for broker_id, address in sorted(data.addresses.items()):
            row = _row(name, data.cluster, broker_id, address)
            try:
                answer = yield Call(address, requests.replica_status(), ASK_S)
            except ClientError as error:
                row |= {"role": GONE, "state": f"unreachable: {error.fact}"}
            else:
                if answer.code == SUCCESS:
                    row["said"] = status = fastjson.loads(answer.body)
                    row |= {name: status.get(name) for name in REPORTED_FIELDS}
            rows.append(row)
        found += sorted(_completed(rows), key=lambda row: (row["role"] != MASTER, row["id"]))
    return found


def _row(broker: str, cluster: str, broker_id: int, address: str | None) -> Status:
    """Return the record of a replica with what the routes say about it."""
    unknown = dict.fromkeys(("epoch", "inSync", "lagBytes", "lagMs", "logEnd", "said"))
    role = MASTER if broker_id == MASTER_ID else SLAVE
    return {
        "broker": broker,
        "cluster": cluster,
        "id": broker_id,
        "role": role,
        "address": address,
        "state": "up",
        **unknown,
    }


def _completed(rows: list[Status]) -> list[Status]:
    """Return the records of one broker with what its master reports of the other replicas.

    The master reports the in-sync set and the lag of its slaves. The newest master counts if
    several replicas think that they are master, and any replica if none does. Replicas of the
    in-sync set that are not registered are added as gone.
    """
    answered = [row for row in rows if row["said"]]
    if not answered:
        return rows
    master = max(answered, key=lambda row: (row["role"] == MASTER, row["epoch"] or 0))
    in_sync = master["said"].get("inSync")
    slaves = {one["id"]: one for one in master["said"].get("slaves", ()) if one.get("id")}
    for row in rows:
        row["inSync"] = None if in_sync is None else row["id"] in in_sync
        if row is not master and (seen := slaves.get(row["id"])) is not None:
            row |= {"lagBytes": seen["lagBytes"], "lagMs": seen["lagMs"]}
    known = {row["id"] for row in rows}
    for broker_id in in_sync or ():
        if broker_id not in known:
            gone = _row(master["broker"], master["cluster"], broker_id, None)
            rows.append(gone | {"role": GONE, "state": "not there", "inSync": True})
    return rows


def _broker_of(rows: list[Status], broker: str | None) -> tuple[str, list[Status]]:
    """Return (broker name, its records) for the broker that a command is about.

    `broker` may be None if there is only one. Raises ConfigurationError if it does not exist, or if
    there are several brokers and none is named.
    """
    by_broker: dict[str, list[Status]] = {}
    for row in rows:
        by_broker.setdefault(row["broker"], []).append(row)
    if broker is None and len(by_broker) == 1:
        broker = next(iter(by_broker))
    if broker is None or broker not in by_broker:
        what = f"the broker {broker!r} does not exist"
        if broker is None:
            what = "there are several brokers"
        names = ", ".join(by_broker) or "none"
        raise ConfigurationError(f"{what}.", fix=f"Name one of them with --broker: {names}.")
    return broker, by_broker[broker]


def switch_master(
    directory: Directory, *, broker: str | None = None, to: int | None = None
) -> Conversation[Mapping[str, Any]]:
    """Ask the master of a broker to hand over to another replica. Return its record from before.

    `to` is the id of the new master; None means the replica with the longest log. The master
    answers when it has begun to hand over. `broker` may be None if there is only one. Raises
    ConfigurationError if there is no such master, RequestError if it cannot hand over.
    """
    name, rows = _broker_of((yield from replicas(directory)), broker)
    master = next((row for row in rows if row["role"] == MASTER), None)
    if master is None or master["said"] is None or master["epoch"] is None:
        raise ConfigurationError(
            f"broker {name} has no master that could hand over.",
            fix="Only replicas with sluiceConsensus and a master can switch. See "
            '"sluice cluster status".',
        )
    expect_success((yield Call(master["address"], requests.switch_master(to))), master["address"])
    return master


def elect_master(
    directory: Directory, broker_id: int, *, broker: str | None = None
) -> Conversation[Mapping[str, Any]]:
    """Make a replica master, although acknowledged messages may be missing in it.

    Return its record from before. `broker` may be None if there is only one. Raises
    ConfigurationError if the replica does not respond, RequestError if it refuses.
    """
    name, rows = _broker_of((yield from replicas(directory)), broker)
    chosen = next((row for row in rows if row["id"] == broker_id and row["said"]), None)
    if chosen is None:
        responding = ", ".join(str(row["id"]) for row in rows if row["said"])
        raise ConfigurationError(
            f"broker {name} has no replica {broker_id} that responds.",
            fix=f"Use one of: {responding or 'none'}.",
        )
    expect_success((yield Call(chosen["address"], requests.elect_master())), chosen["address"])
    return chosen
