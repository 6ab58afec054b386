"""Commands for brokers and name servers: settings, counters, replication and cleaning."""

from collections.abc import Iterator
from functools import partial
from typing import Any, Final

from sluicemq.errors import SluiceError
from sluicemq.model.system_names import is_group_topic
from sluicemq.mqadmin import java
from sluicemq.mqadmin.commands import CommandFunction, FlagValues, Session, WrongFlagsError
from sluicemq.wire import tables

_RATES_ROW: Final = (
    "{:<22}  {:<22}  {:<4}  {:<22} {:<16}  {:>16}  {:>30}  {:<22}  {:{a}11}  {:<12}  {:<8}  "
    "{:{a}10}"
)
_RATES_HEADING: Final = _RATES_ROW.format(
    "#Cluster Name",
    "#Broker Name",
    "#BID",
    "#Addr",
    "#Version",
    "#InTPS(LOAD)",
    "#OutTPS(LOAD)",
    "#Timer(Progress)",
    "#PCWait(ms)",
    "#Hour",
    "#SPACE",
    "#ACTIVATED",
    a="<",
)
_TOTALS_ROW: Final = "{:<16}  {:<32} {:>14} {:>14} {:>14} {:>14}"
_TOTALS_HEADING: Final = _TOTALS_ROW.format(
    "#Cluster Name",
    "#Broker Name",
    "#InTotalYest",
    "#OutTotalYest",
    "#InTotalToday",
    "#OutTotalToday",
)
_STATISTICS_ROW: Final = "{:<64}  {:<64} {:>12} {:>11} {:>11} {:>14} {:>14}"
_STATISTICS_HEADING: Final = _STATISTICS_ROW.format(
    "#Topic",
    "#Consumer Group",
    "#Accumulation",
    "#InTPS",
    "#OutTPS",
    "#InMsg24Hour",
    "#OutMsg24Hour",
)
_SLAVE_ROW: Final = "{:<32}  {:<16} {:>16} {:>16} {:>16} {:>16}"
_SLAVE_HEADING: Final = _SLAVE_ROW.format(
    "#SlaveAddr",
    "#SlaveAckOffset",
    "#Diff",
    "#TransferSpeed(KB/s)",
    "#Status",
    "#TransferFromWhere",
)
_CONSUME_STATS_ROW: Final = "{:<64}  {:<64}  {:<32}  {:<4}  {:<20}  {:<20}  {:<20}  {}"
_CONSUME_STATS_HEADING: Final = _CONSUME_STATS_ROW.format(
    "#Topic",
    "#Group",
    "#Broker Name",
    "#QID",
    "#Broker Offset",
    "#Consumer Offset",
    "#Diff",
    "#LastTime",
)


def list_brokers(session: Session, values: FlagValues) -> None:
    """Run `mqadmin clusterList`: print a line for each broker of each cluster.

    The line shows the rates and the disk of the broker, or, with `-m`, its numbers of messages
    yesterday and today. With `-i`, print again every given number of seconds, without end.
    """
    while True:
        _print_brokers(session, values)
        if "interval" not in values:
            return
        session.admin.sleep(values.get_int("interval"))


def _print_brokers(session: Session, values: FlagValues) -> None:
    """Print the lines of clusterList once: a heading, and a line for each broker.

    With flag `moreStats`, the lines have numbers of messages, else rates. A broker that does not
    answer has a line without numbers.
    """
    cluster_info = session.admin.cluster_info()
    only_cluster = values.get("clusterName")
    if only_cluster is not None:
        clusters = [only_cluster]
    else:
        clusters = tables.sort_keys_as_java(cluster_info.clusters)

    show_totals = "moreStats" in values
    session.print_line(_TOTALS_HEADING if show_totals else _RATES_HEADING)
    for cluster in clusters:
        for name in sorted(cluster_info.clusters.get(cluster, ())):
            for broker_id, address in sorted(cluster_info.brokers[name].addresses.items()):
                try:
                    counters = session.admin.runtime(address)
                except SluiceError:
                    counters = {}
                if show_totals:
                    line = _format_totals_line(cluster, name, counters)
                else:
                    line = _format_rates_line(
                        session, cluster, name, (broker_id, address), counters
                    )
                session.print_line(line)


def _format_totals_line(cluster: str, name: str, counters: dict[str, str]) -> str:
    """Return the line of a broker with its numbers of messages yesterday and today.

    `counters` are those of the broker, {} if it did not answer.
    """

    def count_between(earlier: str, later: str) -> int:
        """Return the difference of two counters; a missing one is 0."""
        return int(counters.get(later, 0)) - int(counters.get(earlier, 0))

    return _TOTALS_ROW.format(
        cluster,
        name,
        count_between("msgPutTotalYesterdayMorning", "msgPutTotalTodayMorning"),
        count_between("msgGetTotalYesterdayMorning", "msgGetTotalTodayMorning"),
        count_between("msgPutTotalTodayMorning", "msgPutTotalTodayNow"),
        count_between("msgGetTotalTodayMorning", "msgGetTotalTodayNow"),
    )


def _format_rates_line(
    session: Session,
    cluster: str,
    name: str,
    id_and_address: tuple[int, str],
    counters: dict[str, str],
) -> str:
    """Return the line of a broker with its rates, the age of its oldest message, and its disk.

    `counters` are those of the broker, {} if it did not answer.
    """

    def load_text(queue: str, default: str = "") -> str:
        """Return the length of a queue of requests, and the wait of its oldest one."""
        size = counters.get(f"{queue}ThreadPoolQueueSize", default)
        wait_ms = counters.get(f"{queue}ThreadPoolQueueHeadWaitTimeMills", default)
        return f"{size},{wait_ms}ms"

    put_rate = _parse_first_rate(counters, "putTps")
    get_rate = _parse_first_rate(counters, "getTransferredTps")
    age_hours = 0.0  # of the oldest message
    if earliest_ms := counters.get("earliestMessageTimeStamp"):
        age_hours = (session.admin.clock.now_ms() - int(earliest_ms)) / 3_600_000
    return _RATES_ROW.format(
        cluster,
        name,
        *id_and_address,
        counters.get("brokerVersionDesc", ""),
        f"{put_rate:9.2f}({load_text('send')})",
        f"{get_rate:9.2f}({load_text('pull')}|{load_text('ack', 'N')})",
        _format_timer_cell(counters),
        counters.get("pageCacheLockTimeMills", ""),
        f"{age_hours:2.2f}",
        f"{_parse_first_rate(counters, 'commitLogDiskRatio'):.4f}",
        counters.get("brokerActive", "false"),
        a=">",
    )


def _parse_first_rate(counters: dict[str, str], key: str) -> float:
    """Return the first number of a counter, which may have several; 0 without the counter."""
    return float((counters.get(key) or "0").split()[0])


def _format_timer_cell(counters: dict[str, str]) -> str:
    """Return the counters of timed messages as RocketMQ's tool prints them: `0-0(0.0w, 0.0, 0.0)`.

    These are timerReadBehind, timerOffsetBehind, timerCongestNum in units of 10,000 (`w`), and the
    rates at which messages enter and leave the timer.
    """
    return "{}-{}({:.1f}w, {:.1f}, {:.1f})".format(
        counters.get("timerReadBehind", 0),
        counters.get("timerOffsetBehind", 0),
        int(counters.get("timerCongestNum", 0)) / 10_000,
        _parse_first_rate(counters, "timerEnqueueTps"),
        _parse_first_rate(counters, "timerDequeueTps"),
    )


def show_broker_status(session: Session, values: FlagValues) -> None:
    """Run `mqadmin brokerStatus`: print all counters of one broker or of a whole cluster.

    The flags are `brokerAddr` and `clusterName`.
    """
    if (address := values.get("brokerAddr")) is not None:
        for name, counter in sorted(session.admin.runtime(address).items()):
            session.print_line(f"{name:<32}: {counter}")
        return
    for address in session.all_addresses(values["clusterName"]):
        for name, counter in sorted(session.admin.runtime(address).items()):
            session.print_line(f"{address:<24} {name:<32}: {counter}")


def _list_headings_and_addresses(session: Session, values: FlagValues) -> Iterator[tuple[str, str]]:
    """Yield (heading, address) for the broker in flag `brokerAddr`.

    Without this flag, yield a pair for each broker of the cluster in flag `clusterName`, each
    master before its slaves. The address is "" for a master that is not registered.
    """
    if (address := values.get("brokerAddr")) is not None:
        yield f"============{address}============", address
        return
    for master, slaves in session.broker_addresses(values["clusterName"]):
        yield f"============Master: {master}============", master
        for slave in slaves:
            yield f"============My Master: {master}=====Slave: {slave}============", slave


def show_broker_settings(session: Session, values: FlagValues) -> None:
    """Run `mqadmin getBrokerConfig`: print the settings of one broker or of a whole cluster.

    The flags are `brokerAddr` and `clusterName`.
    """
    for heading, address in _list_headings_and_addresses(session, values):
        session.print_line(heading)
        if address:
            settings = tables.sort_map_as_java(session.admin.broker_settings(address))
            for key, setting in settings.items():
                session.print_line(f"{key:<50}=  {setting}")
            session.print_line()


def update_broker_settings(session: Session, values: FlagValues) -> None:
    """Run `mqadmin updateBrokerConfig`: change one setting of a broker or of a cluster.

    In a cluster, the masters are changed, and with `-a` the slaves, too.
    """
    if "updateAllBroker" in values and "clusterName" in values:
        addresses = session.all_addresses(values["clusterName"])
    else:
        addresses = session.target_addresses(values)
    for address in addresses:
        session.admin.change_broker_settings(address, {values["key"]: values["value"]})
        session.print_line(f"update broker config success, {address}")


def show_name_server_settings(session: Session, _values: FlagValues) -> None:
    """Run `mqadmin getNamesrvConfig`: print the settings of each name server."""
    for server in session.admin.name_servers:
        session.print_line(f"============{server}============")
        settings = tables.sort_map_as_java(session.admin.name_server_settings(server))
        for key, setting in settings.items():
            session.print_line(f"{key:<50}=  {setting}")


def update_name_server_settings(session: Session, values: FlagValues) -> None:
    """Run `mqadmin updateNamesrvConfig`: change one setting of all name servers."""
    key = values["key"]
    setting = values["value"]
    for server in session.admin.name_servers:
        session.admin.change_name_server_settings(server, {key: setting})
    servers = java.format_value(session.admin.name_servers) if "namesrvAddr" in values else ""
    session.print_line(f"update name server config success!{servers}\n{key} : {setting}")


def put_kv_config(session: Session, values: FlagValues) -> None:
    """Run `mqadmin updateKvConfig`: store a value at all name servers."""
    session.admin.put_kv_config(values["namespace"], values["key"], values["value"])
    session.print_line("create or update kv config to namespace success.")


def delete_kv_config(session: Session, values: FlagValues) -> None:
    """Run `mqadmin deleteKvConfig`: delete a value from all name servers."""
    session.admin.delete_kv_config(values["namespace"], values["key"])
    session.print_line("delete kv config from namespace success.")


def _set_write_permission(session: Session, values: FlagValues, *, allowed: bool) -> None:
    """Allow or forbid producers to send to a broker, at each name server.

    A line for each name server says how many topics have changed, or that it failed.
    """
    broker = values["brokerName"]
    verb = "add" if allowed else "wipe"
    for server in session.admin.name_servers:
        action = f"{verb} write perm of broker[{broker}] in name server[{server}]"
        try:
            topic_count = session.admin.set_write_permission(server, broker, allowed=allowed)
            session.print_line(f"{action} OK, {topic_count}")
        except SluiceError as error:
            session.print_line(f"{action} Failed")
            session.print_line(str(error))


wipe_write_permission: Final[CommandFunction] = partial(_set_write_permission, allowed=False)
add_write_permission: Final[CommandFunction] = partial(_set_write_permission, allowed=True)


def clean_up_command(kind: str) -> CommandFunction:
    """Return the function of a mqadmin command that lets brokers clean up.

    `kind` is what they delete, as `Admin.clean_up` takes it. The command applies to the broker in
    flag `brokerAddr`, else to the masters of one cluster or of all.
    """

    def run(session: Session, values: FlagValues) -> None:
        """Clean up, and print whether there was a broker."""
        if "brokerAddr" in values:
            addresses = [values["brokerAddr"]]
        else:
            addresses = list(session.admin.masters(values.get("cluster")).values())
        for address in addresses:
            session.admin.clean_up(address, kind)
        outcome = "success" if addresses else "false"
        session.write(outcome)

    return run


def show_replication(session: Session, values: FlagValues) -> None:
    """Run `mqadmin haStatus`: print the slaves of each master, or the master of a slave.

    With `-i`, print again every given number of seconds, without end.
    """
    while True:
        for address in session.target_addresses(values):
            _print_replication(session, address)
        if "interval" not in values:
            return
        session.admin.sleep(values.get_int("interval", 3))


def _print_replication(session: Session, address: str) -> None:
    """Print the replication status of the broker at an address.

    For a master this is a table of its slaves, for a slave the connection to its master.
    """
    status = session.admin.replication_status(address)
    if status["master"]:
        _print_slaves(session, address, status)
    else:
        _print_master_of_slave(session, status["haClientRuntimeInfo"])


def _print_master_of_slave(session: Session, connection: dict[str, Any]) -> None:
    """Print the connection of a slave to its master, which the slave reports as `connection`."""
    session.print_line(f"\n#MasterAddr\t{java.format_value(connection['masterAddr'])}")
    session.print_line(f"#CommitLogMaxOffset\t{connection['maxOffset']}")
    session.print_line(f"#TransferSpeed(KB/s)\t{connection['transferredByteInSecond'] / 1024:.2f}")
    session.print_line(f"#LastReadTime\t{java.format_time(connection['lastReadTimestamp'])}")
    session.print_line(f"#LastWriteTime\t{java.format_time(connection['lastWriteTimestamp'])}")
    session.print_line(f"#MasterFlushOffset\t{connection['masterFlushOffset']}")


def _print_slaves(session: Session, address: str, status: dict[str, Any]) -> None:
    """Print the replication status of a master, and a table of its slaves.

    `status` is what the broker at `address` reports, by RocketMQ's keys.
    """
    slaves = status["haConnectionInfo"]
    session.print_line(f"\n#MasterAddr\t{address}")
    session.print_line(f"#MasterCommitLogMaxOffset\t{status['masterCommitLogMaxOffset']}")
    session.print_line(f"#SlaveNum\t{len(slaves)}\n#InSyncSlaveNum\t{status['inSyncSlaveNums']}")
    session.print_line(_SLAVE_HEADING)
    for slave in slaves:
        status_text = "OK" if slave["inSync"] else "Fall Behind"
        session.print_line(
            _SLAVE_ROW.format(
                slave["addr"],
                slave["slaveAckOffset"],
                slave["diff"],
                f"{slave['transferredByteInSecond'] / 1024:.2f}",
                status_text,
                slave["transferFromWhere"],
            )
        )


def reset_flushed_position(session: Session, values: FlagValues) -> None:
    """Run `mqadmin resetMasterFlushOffset`: set the flushed position of the master at a slave."""
    if "brokerAddr" not in values:
        raise WrongFlagsError("", exit_code=0)
    offset = values.get_int("offset")
    session.admin.reset_flushed_position(values["brokerAddr"], offset)
    session.print_line(f"reset master flush offset to {offset} success")


def show_statistics(session: Session, values: FlagValues) -> None:
    """Run `mqadmin statsAll`: print rates and daily numbers of each topic and its groups.

    Retry and dead-letter topics are left out. With `-a`, only topics and groups with messages on
    this day are printed.
    """
    session.print_line(_STATISTICS_HEADING)
    for topic in tables.sort_keys_as_java(session.admin.topics()):
        if is_group_topic(topic) or values.get("topic", topic) != topic:
            continue
        for line in _format_statistics(session, topic, only_active="activeTopic" in values):
            session.print_line(line)


def _format_statistics(session: Session, topic: str, *, only_active: bool) -> Iterator[str]:
    """Yield the lines of a topic: one for each group that reads it, or one if there is none.

    A line has the rates and the numbers of messages of one day. With `only_active`, a line is left
    out if no message was sent or delivered on this day.
    """
    try:
        groups = session.admin.groups_of_topic(topic)
    except SluiceError:
        return  # RocketMQ's tool also ignores a topic that was deleted in the meantime
    put_rate, put_count = session.admin.statistic("TOPIC_PUT_NUMS", topic, topic)
    put_cell = f"{put_rate:.2f}"
    if not groups and (put_count or not only_active):
        yield _STATISTICS_ROW.format(topic[:64], "", 0, put_cell, "", put_count, "NO_CONSUMER")
    for group in tables.sort_keys_as_java(groups):
        get_rate, get_count = session.admin.statistic("GROUP_GET_NUMS", f"{topic}@{group}", topic)
        progress = session.admin.progress(group, topic)
        lag = sum(queue.offset_max - queue.committed for queue in progress)
        is_active = put_count or get_count
        if is_active or not only_active:
            yield _STATISTICS_ROW.format(
                topic[:64],
                group[:64],
                max(lag, 0),
                put_cell,
                f"{get_rate:.2f}",
                put_count,
                get_count,
            )


def show_broker_consume_stats(session: Session, values: FlagValues) -> None:
    """Run `mqadmin brokerConsumeStats`: print the offsets of all groups at a broker.

    A queue is printed if its lag is at least `-l` and the group has consumed a message of it. The
    last line is the total lag.
    """
    lag_min = values.get_int("level")
    progress = session.admin.consume_stats_at(
        values["brokerAddr"], is_ordered=values.get_bool("order")
    )
    session.print_line(_CONSUME_STATS_HEADING)
    total_lag = 0
    for group, queue, offsets in progress:
        lag = offsets.broker_offset - offsets.consumer_offset
        total_lag += lag
        if lag >= lag_min and offsets.last_time_ms > 0:
            session.print_line(
                _CONSUME_STATS_ROW.format(
                    queue.topic[:64],
                    group,
                    queue.broker[:32],
                    queue.queue_id,
                    offsets.broker_offset,
                    offsets.consumer_offset,
                    lag,
                    java.format_time_seconds(offsets.last_time_ms),
                )
            )
    session.print_line(f"\nDiff Total: {total_lag}")
