"""Which replica of each broker is master, who follows it and how far behind; changing that.

The name servers know who is registered; each of them is asked (900302), and the master's word
counts for its slaves. A broker of RocketMQ does not know the request: it is shown with what the
routes say. A replica that the in-sync set names and nobody can reach is `gone`.
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
"""Who takes longer to say how it does is shown as gone."""
MASTER, SLAVE, GONE = "master", "slave", "gone"
TOLD: Final = ("id", "role", "address", "epoch", "lagBytes", "lagMs", "logEnd")
Status = dict[str, Any]


def replicas(directory: Directory) -> Conversation[list[Status]]:
    """One record a replica, the master of each broker first: `broker, cluster, id, role` (master,
    slave, none while it has none, gone), `address, epoch, inSync, lagBytes, lagMs, logEnd, state`
    and the whole answer of a broker of ours in `said`, None where nobody knows."""
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
                    row["said"] = said = fastjson.loads(answer.body)
                    row |= {name: said.get(name) for name in TOLD}
            rows.append(row)
        found += sorted(_completed(rows), key=lambda row: (row["role"] != MASTER, row["id"]))
    return found


def _row(broker: str, cluster: str, broker_id: int, address: str | None) -> Status:
    """What the routes say, and nothing else."""
    unknown = dict.fromkeys(("epoch", "inSync", "lagBytes", "lagMs", "logEnd", "said"))
    role = MASTER if broker_id == MASTER_ID else SLAVE
    return {
        "broker": broker, "cluster": cluster, "id": broker_id, "role": role, "address": address,
        "state": "up", **unknown,
    }  # fmt: skip


def _completed(rows: list[Status]) -> list[Status]:
    """The newest master's word about the in-sync set, the lag of its slaves, and who is gone;
    without a master that of any replica."""
    ours = [row for row in rows if row["said"]]
    if not ours:
        return rows
    master = max(ours, key=lambda row: (row["role"] == MASTER, row["epoch"] or 0))
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
    """The replicas of a broker, which may be left out when there is one only. Raises
    ConfigurationError."""
    ours: dict[str, list[Status]] = {}
    for row in rows:
        ours.setdefault(row["broker"], []).append(row)
    if broker is None and len(ours) == 1:
        broker = next(iter(ours))
    if broker is None or broker not in ours:
        what = "there are several brokers" if broker is None else f"there is no broker {broker!r}"
        names = ", ".join(ours) or "none"
        raise ConfigurationError(f"{what}.", fix=f"Name one of them with --broker: {names}.")
    return broker, ours[broker]


def switch_master(
    directory: Directory, *, broker: str | None = None, to: int | None = None
) -> Conversation[Mapping[str, Any]]:
    """Asks the master of a broker to hand over, to a replica or to whoever has most.

    Returns the master's record from before; it answers when it has begun. Raises
    ConfigurationError, RequestError when it cannot.
    """
    name, rows = _broker_of((yield from replicas(directory)), broker)
    master = next((row for row in rows if row["role"] == MASTER), None)
    if master is None or master["said"] is None or master["epoch"] is None:
        raise ConfigurationError(
            f"broker {name} has no master whose place another one could take.",
            fix="A switch is for replicas with sluiceConsensus that have a master: see `sluice "
            "cluster status`.",
        )
    expect_success((yield Call(master["address"], requests.switch_master(to))), master["address"])
    return master


def elect_master(
    directory: Directory, broker_id: int, *, broker: str | None = None
) -> Conversation[Mapping[str, Any]]:
    """Makes a replica master though it may lack what was acknowledged. Returns its record from
    before. Raises ConfigurationError, RequestError when it is refused."""
    name, rows = _broker_of((yield from replicas(directory)), broker)
    chosen = next((row for row in rows if row["id"] == broker_id and row["said"]), None)
    if chosen is None:
        living = ", ".join(str(row["id"]) for row in rows if row["said"])
        raise ConfigurationError(
            f"broker {name} has no living replica {broker_id}.",
            fix=f"There are: {living or 'none'}.",
        )
    expect_success((yield Call(chosen["address"], requests.elect_master())), chosen["address"])
    return chosen
