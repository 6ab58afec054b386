"""Commands that export topics, groups, settings and metrics of a cluster into JSON files."""

from collections.abc import Iterator
from typing import Any, Final

from sluicemq.errors import SluiceError
from sluicemq.model.system_names import (
    HALF_TOPIC,
    SCHEDULE_TOPIC,
    is_group_topic,
    is_rocketmq_system_group,
)
from sluicemq.mqadmin import java
from sluicemq.mqadmin.commands import TEMPORARY_DIRECTORY, FlagValues, Session, WrongFlagsError
from sluicemq.wire import tables

EXPORT_DIRECTORY: Final = f"{TEMPORARY_DIRECTORY}/rocketmq/export"
"""Where files are written without flag `filePath`."""

TOPICS: Final = "topic"
GROUPS: Final = "subscriptionGroup"
"""The flags of exportMetadata that select a table, which are also the names of its files."""

EXPORTED_SETTINGS: Final = [
    "brokerClusterName",
    "brokerId",
    "brokerName",
    "brokerRole",
    "fileReservedTime",
    "filterServerNums",
    "flushDiskType",
    "maxMessageSize",
    "messageDelayLevel",
    "msgTraceTopicName",
    "slaveReadEnable",
    "traceOn",
    "traceTopicEnable",
    "useTLS",
    "autoCreateTopicEnable",
    "autoCreateSubscriptionGroup",
]


def _save_json(session: Session, values: FlagValues, name: str, content: object) -> None:
    """Write `content` as JSON into the file `name`.json, and print its path."""
    directory = values.get("filePath", EXPORT_DIRECTORY)
    path = session.save_file(directory, f"{name}.json", java.format_json(content).encode())
    session.write(f"export {path} success")


def _fetch_user_topics(
    session: Session, values: FlagValues, address: str
) -> dict[str, dict[str, Any]]:
    """Return name -> settings of the topics of a broker that applications use.

    System topics are left out. Retry and dead-letter topics are included only with flag
    `specialTopic`.
    """
    system_topics = set(session.admin.system_topics(address))
    with_group_topics = "specialTopic" in values
    user_topics = {}
    for name, config in session.admin.topic_table(address).topics.items():
        is_left_out = is_group_topic(name) and not with_group_topics
        if name not in system_topics and not is_left_out:
            user_topics[name] = tables.topic_object(config)
    return user_topics


def _fetch_user_groups(session: Session, address: str) -> dict[str, dict[str, Any]]:
    """Return name -> settings of the groups of a broker, without system groups."""
    return {
        name: tables.group_object(config)
        for name, config in session.admin.group_table(address).groups.items()
        if not is_rocketmq_system_group(name)
    }


def export_metadata(session: Session, values: FlagValues) -> None:
    """Run `mqadmin exportMetadata`: write topics and groups of brokers to a JSON file.

    Flag `-t` selects topics, flag `-g` groups. Without both, everything of a cluster is written,
    and nothing of a broker. The numbers of queues are the sums over the masters of the cluster.
    Raises WrongFlagsError if neither a broker nor a cluster is given.
    """
    selected_table = ""  # both tables
    if TOPICS in values:
        selected_table = TOPICS
    elif GROUPS in values:
        selected_table = GROUPS

    if (address := values.get("brokerAddr")) is not None:
        if selected_table:
            _export_table_of_broker(session, values, address, selected_table)
        return
    if "clusterName" not in values:
        raise WrongFlagsError("", exit_code=0)

    topics: dict[str, dict[str, Any]] = {}
    groups: dict[str, dict[str, Any]] = {}
    for address in session.master_addresses(values["clusterName"]):
        topics_of_broker = _fetch_user_topics(session, values, address)
        _add_configs(topics, topics_of_broker, ("readQueueNums", "writeQueueNums"))
        _add_configs(groups, _fetch_user_groups(session, address), ("retryQueueNums",))
    metadata: dict[str, object] = {"exportTime": session.admin.clock.now_ms()}
    if selected_table != GROUPS:
        metadata["topicConfigTable"] = topics
    if selected_table != TOPICS:
        metadata["subscriptionGroupTable"] = groups
    _save_json(session, values, selected_table or "metadata", metadata)
    session.print_line()


def _export_table_of_broker(
    session: Session, values: FlagValues, address: str, selected_table: str
) -> None:
    """Write the topics or the groups of one broker, and the version of that table, to a JSON file.

    `selected_table` is `TOPICS` or `GROUPS`.
    """
    if selected_table == TOPICS:
        key = "topicConfigTable"
        configs = _fetch_user_topics(session, values, address)
        data_version = session.admin.topic_table(address).data_version
    else:
        key = "subscriptionGroupTable"
        configs = _fetch_user_groups(session, address)
        data_version = session.admin.group_table(address).data_version
    content = {"dataVersion": tables.data_version_object(data_version), key: configs}
    _save_json(session, values, selected_table, content)


def _add_configs(
    totals: dict[str, dict[str, Any]],
    configs: dict[str, dict[str, Any]],
    summed_keys: tuple[str, ...],
) -> None:
    """Add the configurations of one broker to `totals`, which is changed in place.

    `totals` and `configs` map names to settings. The settings in `summed_keys` are added up, also
    in `configs`. For other settings, those of the later broker count.
    """
    for name, config in configs.items():
        if name in totals:
            for key in summed_keys:
                config[key] += totals[name][key]
        totals[name] = config


def export_settings(session: Session, values: FlagValues) -> None:
    """Run `mqadmin exportConfigs`: write settings of a cluster's masters to a JSON file.

    The settings are `EXPORTED_SETTINGS`; the numbers of servers are added.
    """
    brokers = {}
    slave_count = 0
    for master, slaves in session.broker_addresses(values["clusterName"]):
        settings = session.admin.broker_settings(master)
        brokers[settings["brokerName"]] = {
            key: settings[key] for key in EXPORTED_SETTINGS if key in settings
        }
        slave_count += len(slaves)
    scale = {
        "namesrvSize": len(session.admin.name_servers),
        "slaveBrokerSize": slave_count,
        "masterBrokerSize": len(brokers),
    }
    _save_json(session, values, "configs", {"clusterScale": scale, "brokerConfigs": brokers})


def export_metrics(session: Session, values: FlagValues) -> None:
    """Run `mqadmin exportMetrics`: write the load of each master of a cluster into a JSON file."""
    report_by_broker = {}
    total_rates = dict.fromkeys(("NormalIn", "NormalOut", "TransIn", "ScheduleIn"), 0.0)
    total_counts = dict.fromkeys(total_rates, 0)  # messages of one day
    for name, address in session.admin.masters(values["clusterName"]).items():
        groups = _fetch_user_groups(session, address)
        rates, counts, quota = _measure_load(session, address)
        quota["topicSize"] = len(_fetch_user_topics(session, values, address))
        quota["groupSize"] = len(groups)
        version = _fetch_versions(session, address, groups)
        report_by_broker[name] = {
            "runtimeVersion": version,
            "runtimeQuota": quota,
            "runtimeEnv": {},
        }
        for key in total_rates:
            total_rates[key] += rates[key]
            total_counts[key] += counts[key]
    totals = {
        "totalOneDayNum": {_make_one_day_key(key): count for key, count in total_counts.items()},
        "totalTps": {f"total{key}Tps": rate for key, rate in total_rates.items()},
    }
    content = {"totalData": totals, "evaluateReport": report_by_broker}
    _save_json(session, values, "metrics", content)


def _fetch_versions(
    session: Session, address: str, groups: dict[str, dict[str, Any]]
) -> dict[str, object]:
    """Return the version of a broker, and the versions of the clients in its groups.

    The keys are `rocketmqVersion` and `clientInfo`, a sorted list such as ["JAVA%V5_3_3"].
    """
    return {
        "rocketmqVersion": session.admin.runtime(address).get("brokerVersionDesc"),
        "clientInfo": sorted(set(_fetch_client_versions(session, groups))),
    }


def _fetch_client_versions(session: Session, groups: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield language and version, such as `JAVA%V5_3_3`, of each member of the groups."""
    for group in groups:
        try:
            group_info = session.admin.group_connections(group)
        except SluiceError:
            continue  # the group has no members
        yield from (
            f"{member.language}%{java.format_version(member.version)}"
            for member in group_info.connections
        )


def _measure_load(
    session: Session, address: str
) -> tuple[dict[str, float], dict[str, int], dict[str, object]]:
    """Return (rates per second, numbers of messages of one day, report) of a broker.

    The keys of the first two are NormalIn, NormalOut, TransIn and ScheduleIn. The report contains
    the same numbers and those of the disk, by the names of RocketMQ's file.
    """
    counters = session.admin.runtime(address)
    put_statistic = "TOPIC_PUT_NUMS"
    prepared_rate, prepared_count = session.admin.statistic_at(address, put_statistic, HALF_TOPIC)
    delayed_rate, delayed_count = session.admin.statistic_at(address, put_statistic, SCHEDULE_TOPIC)

    def count_yesterday(counter: str) -> int:
        """Return how much a counter increased from yesterday morning to this morning."""
        end = int(counters[f"{counter}TodayMorning"])
        return end - int(counters[f"{counter}YesterdayMorning"])

    rates = {
        "NormalIn": float(counters["putTps"].split()[0]),
        "NormalOut": float(counters["getTransferredTps"].split()[0]),
        "TransIn": prepared_rate,
        "ScheduleIn": delayed_rate,
    }
    counts = {
        "NormalIn": count_yesterday("msgPutTotal"),
        "NormalOut": count_yesterday("msgGetTotal"),
        "TransIn": prepared_count,
        "ScheduleIn": delayed_count,
    }
    quota: dict[str, object] = {
        "diskRatio": {
            "commitLogDiskRatio": counters.get("commitLogDiskRatio"),
            "consumeQueueDiskRatio": counters.get("consumeQueueDiskRatio"),
        },
        "tps": {f"{key[0].lower()}{key[1:]}Tps": rate for key, rate in rates.items()},
        "oneDayNum": {_make_one_day_key(key): count for key, count in counts.items()},
        "messageAverageSize": counters.get("putMessageAverageSize"),
    }
    return rates, counts, quota


def _make_one_day_key(key: str) -> str:
    """Return the key of a number of one day: `normalOneDayInNum` for `NormalIn`."""
    direction = "Out" if key.endswith("Out") else "In"
    return f"{key[0].lower()}{key[1:].removesuffix(direction)}OneDay{direction}Num"


def roll_back_pops(session: Session, values: FlagValues) -> None:
    """Run `mqadmin exportPopRecord`: make brokers deliver popped, unacknowledged messages again.

    It concerns the broker in flag `brokerAddr`, or all brokers of a cluster.
    """
    brokers: list[tuple[str, str]] = []  # name, address
    if (address := values.get("brokerAddr")) is not None:
        name = session.admin.broker_settings(address)["brokerName"]
        brokers.append((name, address))
    else:
        cluster_info = session.admin.cluster_info()
        for name in cluster_info.clusters.get(values.get("clusterName", ""), ()):
            addresses = cluster_info.brokers[name].addresses.values()
            brokers += [(name, address) for address in addresses]

    # RocketMQ's tool also takes `-d false`, not `-d true`, for a dry run.
    is_dry_run = values.get("dryRun", "").lower() == "false"
    for name, address in brokers:
        details = f"brokerName={name}, brokerAddr={address}, dryRun={java.format_value(is_dry_run)}"
        try:
            if not is_dry_run:
                session.admin.roll_back_pops(address)
        except SluiceError as error:
            session.print_line(f"Export broker records error, {details}")
            session.write(str(error))
        else:
            session.print_line(f"Export broker records, {details}")
