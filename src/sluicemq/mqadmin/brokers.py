"""Brokers and name servers: what they are set to, what they count, what they are told to do."""

from collections.abc import Iterator
from functools import partial
from typing import Final

from sluicemq.errors import SluiceError
from sluicemq.model.system_names import is_group_topic
from sluicemq.mqadmin import java
from sluicemq.mqadmin.commands import Function, Given, Session, WrongFlagsError
from sluicemq.wire import tables

_CLUSTER: Final = (
    "{:<22}  {:<22}  {:<4}  {:<22} {:<16}  {:>16}  {:>30}  {:<22}  {:{a}11}  {:<12}  {:<8}  "
    "{:{a}10}"
)
_MORE: Final = "{:<16}  {:<32} {:>14} {:>14} {:>14} {:>14}"
_STATS: Final = "{:<64}  {:<64} {:>12} {:>11} {:>11} {:>14} {:>14}"


def cluster_list(session: Session, given: Given) -> None:
    """Every broker with its rates, or with how many messages came and went."""
    while True:
        info = session.admin.cluster_info()
        wanted = given.get("clusterName")
        clusters = [wanted] if wanted is not None else tables.sort_keys_as_java(info.clusters)
        if "moreStats" in given:
            session.say(
                _MORE.format(
                    "#Cluster Name", "#Broker Name", "#InTotalYest", "#OutTotalYest",
                    "#InTotalToday", "#OutTotalToday",
                )
            )  # fmt: skip
        else:
            session.say(
                _CLUSTER.format(
                    "#Cluster Name", "#Broker Name", "#BID", "#Addr", "#Version", "#InTPS(LOAD)",
                    "#OutTPS(LOAD)", "#Timer(Progress)", "#PCWait(ms)", "#Hour", "#SPACE",
                    "#ACTIVATED", a="<",
                )
            )  # fmt: skip
        for cluster in clusters:
            for name in sorted(info.clusters.get(cluster, ())):
                for number, address in sorted(info.brokers[name].addresses.items()):
                    try:
                        counts = session.admin.runtime(address)
                    except SluiceError:
                        counts = {}
                    show = _more if "moreStats" in given else _base
                    session.say(show(session, cluster, name, (number, address), counts))
        if "interval" not in given:
            return
        session.admin.sleep(given.number("interval"))


def _more(
    _session: Session, cluster: str, name: str, _who: tuple[int, str], counts: dict[str, str]
) -> str:
    def between(kind: str, later: str, earlier: str) -> int:
        return int(counts.get(kind + later, 0)) - int(counts.get(kind + earlier, 0))

    ways = ("msgPutTotal", "msgGetTotal")
    yesterday = [between(way, "TodayMorning", "YesterdayMorning") for way in ways]
    today = [between(way, "TodayNow", "TodayMorning") for way in ways]
    return _MORE.format(cluster, name, *yesterday, *today)


def _base(
    session: Session, cluster: str, name: str, who: tuple[int, str], counts: dict[str, str]
) -> str:
    def load(queue: str, default: str = "") -> str:
        size = counts.get(f"{queue}ThreadPoolQueueSize", default)
        return f"{size},{counts.get(f'{queue}ThreadPoolQueueHeadWaitTimeMills', default)}ms"

    def rate(key: str) -> float:
        return float((counts.get(key) or "0").split()[0])

    earliest = counts.get("earliestMessageTimeStamp")
    hours = (session.admin.clock.now_ms() - int(earliest)) / 3_600_000 if earliest else 0.0
    timer = "{}-{}({:.1f}w, {:.1f}, {:.1f})".format(
        counts.get("timerReadBehind", 0), counts.get("timerOffsetBehind", 0),
        int(counts.get("timerCongestNum", 0)) / 10_000, rate("timerEnqueueTps"),
        rate("timerDequeueTps"),
    )  # fmt: skip
    return _CLUSTER.format(
        cluster, name, *who, counts.get("brokerVersionDesc", ""),
        f"{rate('putTps'):9.2f}({load('send')})",
        f"{rate('getTransferredTps'):9.2f}({load('pull')}|{load('ack', 'N')})",
        timer, counts.get("pageCacheLockTimeMills", ""), f"{hours:2.2f}",
        f"{rate('commitLogDiskRatio'):.4f}", counts.get("brokerActive", "false"), a=">",
    )  # fmt: skip


def broker_status(session: Session, given: Given) -> None:
    """Every counter of a broker, or of all of a cluster."""
    if (address := given.get("brokerAddr")) is not None:
        for key, value in sorted(session.admin.runtime(address).items()):
            session.say(f"{key:<32}: {value}")
        return
    for master, slaves in session.brokers(given["clusterName"]):
        for address in filter(None, (master, *slaves)):
            for key, value in sorted(session.admin.runtime(address).items()):
                session.say(f"{address:<24} {key:<32}: {value}")


def _each(session: Session, given: Given) -> Iterator[tuple[str, str]]:
    """(Heading, address) of the broker that is named, or of all of a cluster."""
    if (address := given.get("brokerAddr")) is not None:
        yield f"============{address}============", address
        return
    for master, slaves in session.brokers(given["clusterName"]):
        yield f"============Master: {master}============", master
        for slave in slaves:
            yield f"============My Master: {master}=====Slave: {slave}============", slave


def broker_settings(session: Session, given: Given) -> None:
    """All of them."""
    for heading, address in _each(session, given):
        session.say(heading)
        if address:
            for key, value in tables.sort_map_as_java(
                session.admin.broker_settings(address)
            ).items():
                session.say(f"{key:<50}=  {value}")
            session.say()


def update_broker_settings(session: Session, given: Given) -> None:
    """One of them."""
    if "updateAllBroker" in given and "clusterName" in given:
        found = session.brokers(given["clusterName"])
        addresses = [one for master, slaves in found for one in (master, *slaves) if one]
    else:
        addresses = session.addresses(given)
    for address in addresses:
        session.admin.change_broker_settings(address, {given["key"]: given["value"]})
        session.say(f"update broker config success, {address}")


def name_server_settings(session: Session, _given: Given) -> None:
    """All of them, of each."""
    for server in session.admin.name_servers:
        session.say(f"============{server}============")
        for key, value in tables.sort_map_as_java(
            session.admin.name_server_settings(server)
        ).items():
            session.say(f"{key:<50}=  {value}")


def update_name_server_settings(session: Session, given: Given) -> None:
    """One of them, at each."""
    key, value = given["key"], given["value"]
    for server in session.admin.name_servers:
        session.admin.change_name_server_settings(server, {key: value})
    named = java.shown(session.admin.name_servers) if "namesrvAddr" in given else ""
    session.say(f"update name server config success!{named}\n{key} : {value}")


def put_value(session: Session, given: Given) -> None:
    """A value that name servers keep."""
    session.admin.put_kv_config(given["namespace"], given["key"], given["value"])
    session.say("create or update kv config to namespace success.")


def delete_value(session: Session, given: Given) -> None:
    """Forget it."""
    session.admin.delete_kv_config(given["namespace"], given["key"])
    session.say("delete kv config from namespace success.")


def _allow(session: Session, given: Given, *, allowed: bool) -> None:
    broker, word = given["brokerName"], "add" if allowed else "wipe"
    for server in session.admin.name_servers:
        begin = f"{word} write perm of broker[{broker}] in name server[{server}]"
        try:
            count = session.admin.set_write_permission(server, broker, allowed=allowed)
            session.say(f"{begin} OK, {count}")
        except SluiceError as error:
            session.say(f"{begin} Failed")
            session.say(str(error))


wipe_write_permission: Final[Function] = partial(_allow, allowed=False)
add_write_permission: Final[Function] = partial(_allow, allowed=True)


def clean(what: str) -> Function:
    """A command that deletes what nobody needs (`Admin.clean_up`): of a broker, or of masters."""

    def run(session: Session, given: Given) -> None:
        if "brokerAddr" in given:
            addresses = [given["brokerAddr"]]
        else:
            addresses = list(session.admin.masters(given.get("cluster")).values())
        for address in addresses:
            session.admin.clean_up(address, what)
        session.write("success" if addresses else "false")

    return run


def replication(session: Session, given: Given) -> None:
    """A master's slaves, or a slave's master."""
    while True:
        for address in session.addresses(given):
            _replication(session, address)
        if "interval" not in given:
            return
        session.admin.sleep(given.number("interval", 3))


def _replication(session: Session, address: str) -> None:
    found = session.admin.replication_status(address)
    if not found["master"]:
        own = found["haClientRuntimeInfo"]
        session.say(f"\n#MasterAddr\t{java.shown(own['masterAddr'])}")
        session.say(f"#CommitLogMaxOffset\t{own['maxOffset']}")
        session.say(f"#TransferSpeed(KB/s)\t{own['transferredByteInSecond'] / 1024:.2f}")
        session.say(f"#LastReadTime\t{java.time_text(own['lastReadTimestamp'])}")
        session.say(f"#LastWriteTime\t{java.time_text(own['lastWriteTimestamp'])}")
        session.say(f"#MasterFlushOffset\t{own['masterFlushOffset']}")
        return
    slaves = found["haConnectionInfo"]
    session.say(f"\n#MasterAddr\t{address}")
    session.say(f"#MasterCommitLogMaxOffset\t{found['masterCommitLogMaxOffset']}")
    session.say(f"#SlaveNum\t{len(slaves)}\n#InSyncSlaveNum\t{found['inSyncSlaveNums']}")
    row = "{:<32}  {:<16} {:>16} {:>16} {:>16} {:>16}".format
    session.say(
        row(
            "#SlaveAddr", "#SlaveAckOffset", "#Diff", "#TransferSpeed(KB/s)", "#Status",
            "#TransferFromWhere",
        )
    )  # fmt: skip
    for one in slaves:
        session.say(
            row(
                one["addr"], one["slaveAckOffset"], one["diff"],
                f"{one['transferredByteInSecond'] / 1024:.2f}",
                "OK" if one["inSync"] else "Fall Behind", one["transferFromWhere"],
            )
        )  # fmt: skip


def reset_flushed(session: Session, given: Given) -> None:
    """Tell a slave how far its master is flushed."""
    if "brokerAddr" not in given:
        raise WrongFlagsError("", exit_code=0)
    offset = given.number("offset")
    session.admin.reset_flushed_position(given["brokerAddr"], offset)
    session.say(f"reset master flush offset to {offset} success")


def statistics(session: Session, given: Given) -> None:
    """Every topic with its groups: how much comes in and goes out, and waits."""
    session.say(
        _STATS.format(
            "#Topic", "#Consumer Group", "#Accumulation", "#InTPS", "#OutTPS", "#InMsg24Hour",
            "#OutMsg24Hour",
        )
    )  # fmt: skip
    for topic in tables.sort_keys_as_java(session.admin.topics()):
        if is_group_topic(topic) or given.get("topic", topic) != topic:
            continue
        for line in _topic_statistics(session, topic, only_active="activeTopic" in given):
            session.say(line)


def _topic_statistics(session: Session, topic: str, *, only_active: bool) -> Iterator[str]:
    try:
        groups = session.admin.groups_of_topic(topic)
    except SluiceError:
        return  # as the tool does: it is gone
    came_rate, came = session.admin.statistic("TOPIC_PUT_NUMS", topic, topic)
    if not groups and (came or not only_active):
        yield _STATS.format(topic[:64], "", 0, f"{came_rate:.2f}", "", came, "NO_CONSUMER")
    for group in tables.sort_keys_as_java(groups):
        went_rate, went = session.admin.statistic("GROUP_GET_NUMS", f"{topic}@{group}", topic)
        behind = sum(one.offset_max - one.committed for one in session.admin.progress(group, topic))
        if not only_active or came or went:
            yield _STATS.format(
                topic[:64], group[:64], max(behind, 0), f"{came_rate:.2f}", f"{went_rate:.2f}",
                came, went,
            )  # fmt: skip


def broker_consume_stats(session: Session, given: Given) -> None:
    """How far all groups are at a broker."""
    level = given.number("level")
    found = session.admin.consume_stats_at(given["brokerAddr"], is_ordered=given.truth("order"))
    row = "{:<64}  {:<64}  {:<32}  {:<4}  {:<20}  {:<20}  {:<20}  {}".format
    session.say(
        row(
            "#Topic", "#Group", "#Broker Name", "#QID", "#Broker Offset", "#Consumer Offset",
            "#Diff", "#LastTime",
        )
    )  # fmt: skip
    total = 0
    for group, queue, own in found:
        diff = own.broker_offset - own.consumer_offset
        total += diff
        if diff >= level and own.last_time_ms > 0:
            session.say(
                row(
                    queue.topic[:64], group, queue.broker[:32], queue.queue_id, own.broker_offset,
                    own.consumer_offset, diff, java.second_text(own.last_time_ms),
                )
            )  # fmt: skip
    session.say(f"\nDiff Total: {total}")
