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
    """Return one record, a dictionary, for each replica of each broker; the master comes first.

    The fields are broker, cluster, id, role ("master", "slave", "none" while the broker has no
    master, or "gone" if the replica does not respond), address, epoch, inSync, lagBytes, lagMs,
    logEnd and state. `state` is "up", or why the replica waits or does not respond. `said` is the
    whole answer of a SluiceMQ replica. A field is None if its value is unknown.
    """
    cluster_state = yield from cluster_info(directory)
    records = []
    for name, broker_data in sorted(cluster_state.brokers.items()):
        records_of_broker = []
        for broker_id, address in sorted(broker_data.addresses.items()):
            record = _make_record(name, broker_data.cluster, broker_id, address)
            yield from _ask_replica(record, address)
            records_of_broker.append(record)
        records_of_broker = _add_report_of_master(records_of_broker)
        records_of_broker.sort(key=lambda record: (record["role"] != MASTER, record["id"]))
        records += records_of_broker
    return records


def _ask_replica(record: Status, address: str) -> Conversation[None]:
    """Ask the replica at `address` for its state, and add the answer to `record`.

    A replica that does not respond gets the role "gone". A RocketMQ replica does not know the
    request, and its record does not change.
    """
    try:
        answer = yield Call(address, requests.replica_status(), ASK_S)
    except ClientError as error:
        record |= {"role": GONE, "state": f"unreachable: {error.fact}"}
        return
    if answer.code == SUCCESS:
        status = fastjson.loads(answer.body)
        record["said"] = status
        record |= {name: status.get(name) for name in REPORTED_FIELDS}
        record["state"] = status.get("reason") or "up"


def _make_record(broker: str, cluster: str, broker_id: int, address: str | None) -> Status:
    """Return the first record of a replica, from what the name servers report about it.

    Fields that only the replica itself knows, such as its epoch and lag, are None.
    """
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


def _add_report_of_master(records: list[Status]) -> list[Status]:
    """Add to the records of a broker what its master reports about its slaves, and return them.

    The master reports which replicas are in sync and how far each slave lags. If several replicas
    believe to be master, the one with the highest epoch counts. If none does, any replica counts. A
    replica that is in sync but not registered gets a new record with the role "gone".
    """
    answered = [record for record in records if record["said"]]
    if not answered:
        return records
    # A master is preferred, and of several masters the one that was elected last.
    master = max(answered, key=lambda record: (record["role"] == MASTER, record["epoch"] or 0))
    in_sync = master["said"].get("inSync")
    slaves_by_id = {
        slave["id"]: slave for slave in master["said"].get("slaves", ()) if slave.get("id")
    }
    ids_with_role = {record["id"] for record in answered if record["role"] in (MASTER, SLAVE)}
    for record in records:
        if record["role"] not in (MASTER, SLAVE) and record["id"] in ids_with_role:
            # Another process with the same brokerId: the report of the master is not about it.
            record["inSync"] = False
            continue
        if in_sync is not None:
            record["inSync"] = record["id"] in in_sync
        slave = slaves_by_id.get(record["id"])
        if record is not master and slave is not None:
            record |= {"lagBytes": slave["lagBytes"], "lagMs": slave["lagMs"]}

    # Replicas that the master counts as in sync, although no name server knows them.
    registered_ids = {record["id"] for record in records}
    for broker_id in in_sync or ():
        if broker_id not in registered_ids:
            gone = _make_record(master["broker"], master["cluster"], broker_id, None)
            records.append(gone | {"role": GONE, "state": "not there", "inSync": True})
    return records


def _select_broker(records: list[Status], broker: str | None) -> tuple[str, list[Status]]:
    """Return (broker name, its records) for the broker that an operator has named.

    `broker` may be None if there is only one broker. Raises ConfigurationError if the broker does
    not exist, or if `broker` is None and there are several.
    """
    records_by_broker: dict[str, list[Status]] = {}
    for record in records:
        records_by_broker.setdefault(record["broker"], []).append(record)
    if broker is None and len(records_by_broker) == 1:
        (broker,) = records_by_broker
    if broker is None or broker not in records_by_broker:
        problem = f"the broker {broker!r} does not exist"
        if broker is None:
            problem = "there are several brokers"
        names = ", ".join(records_by_broker) or "none"
        raise ConfigurationError(f"{problem}.", fix=f"Name one of them with --broker: {names}.")
    return broker, records_by_broker[broker]


def switch_master(
    directory: Directory, *, broker: str | None = None, to: int | None = None
) -> Conversation[Mapping[str, Any]]:
    """Ask the master of a broker to hand over to another replica.

    Returns the record of the old master from before the switch. `to` is the id of the new master;
    None means the replica with the longest log. The switch has begun when this returns, but it is
    not finished. `broker` may be None if there is only one.

    Raises ConfigurationError if the broker has no master that can hand over, RequestError if the
    master refuses.
    """
    all_records = yield from replicas(directory)
    name, records = _select_broker(all_records, broker)
    master = next((record for record in records if record["role"] == MASTER), None)
    if master is None or master["said"] is None or master["epoch"] is None:
        raise ConfigurationError(
            f"broker {name} has no master that could hand over.",
            fix="Only replicas with sluiceConsensus and a master can switch. See "
            '"sluice cluster status".',
        )
    answer = yield Call(master["address"], requests.switch_master(to))
    expect_success(answer, master["address"])
    return master


def elect_master(
    directory: Directory, broker_id: int, *, broker: str | None = None
) -> Conversation[Mapping[str, Any]]:
    """Force a replica to become master, even if acknowledged messages are missing in its log.

    Returns the record of the replica from before the change. `broker` may be None if there is only
    one. Raises ConfigurationError if the replica does not respond, or if two processes have its id.
    Raises RequestError if it refuses, because it is the master, or another replica is or can become
    it without a loss.
    """
    all_records = yield from replicas(directory)
    name, records = _select_broker(all_records, broker)
    responding = [record for record in records if record["said"]]
    with_id = [record for record in responding if record["id"] == broker_id]
    if not with_id:
        responding_ids = ", ".join(str(record["id"]) for record in responding) or "none"
        raise ConfigurationError(
            f"broker {name} has no replica {broker_id} that responds.",
            fix=f"Use one of: {responding_ids}.",
        )
    if len(with_id) > 1:
        addresses = " and ".join(record["address"] for record in with_id)
        raise ConfigurationError(
            f"replica {broker_id} of broker {name} is running at {addresses}.",
            fix="Give each replica its own brokerId, and try again.",
        )
    (chosen,) = with_id
    answer = yield Call(chosen["address"], requests.elect_master())
    expect_success(answer, chosen["address"])
    return chosen
