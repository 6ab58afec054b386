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


def _save_json(session: Session, values: FlagValues, name: str, value: object) -> None:
    """Write `value` as JSON into the file `name`.json, and print its path."""
    path = session.save_file(
        values.get("filePath", EXPORT_DIRECTORY), f"{name}.json", java.format_json(value).encode()
    )
    session.write(f"export {path} success")


def _user_topics(session: Session, values: FlagValues, address: str) -> dict[str, dict[str, Any]]:
    """Return name -> configuration of a broker's topics that are no system topics.

    Retry and dead-letter topics are included with flag `specialTopic`.
    """
    system = set(session.admin.system_topics(address))
    with_group_topics = "specialTopic" in values
    return {
        name: tables.topic_object(config)
        for name, config in session.admin.topic_table(address).topics.items()
        if name not in system and (with_group_topics or not is_group_topic(name))
    }


def _user_groups(session: Session, address: str) -> dict[str, dict[str, Any]]:
    """Return name -> configuration of a broker's groups that are no system groups."""
    return {
        name: tables.group_object(config)
        for name, config in session.admin.group_table(address).groups.items()
        if not is_rocketmq_system_group(name)
    }


def export_metadata(session: Session, values: FlagValues) -> None:
    """Run exportMetadata: write topics and groups of a broker or a cluster into a JSON file.

    Of a broker, topics are written with flag `-t`, else groups with `-g`, else nothing. Of a
    cluster, both are written, unless one of the flags selects one; over its masters, the numbers of
    queues are added up. Raises WrongFlagsError without a broker and a cluster.
    """
    kinds = [kind for kind in ("topic", "subscriptionGroup") if kind in values]
    if (address := values.get("brokerAddr")) is not None:
        for kind in kinds[:1]:
            is_topic = kind == "topic"
            configs = (
                _user_topics(session, values, address)
                if is_topic
                else _user_groups(session, address)
            )
            name = "topicConfigTable" if is_topic else "subscriptionGroupTable"
            table = session.admin.topic_table if is_topic else session.admin.group_table
            version = tables.data_version_object(table(address).data_version)
            _save_json(session, values, kind, {"dataVersion": version, name: configs})
        return
    if "clusterName" not in values:
        raise WrongFlagsError("", exit_code=0)
    topics: dict[str, dict[str, Any]] = {}
    groups: dict[str, dict[str, Any]] = {}
    for address in session.master_addresses(values["clusterName"]):
        _add_configs(
            topics, _user_topics(session, values, address), ("readQueueNums", "writeQueueNums")
        )
        _add_configs(groups, _user_groups(session, address), ("retryQueueNums",))
    result: dict[str, object] = {"exportTime": session.admin.clock.now_ms()}
    if "subscriptionGroup" not in kinds[:1]:
        result["topicConfigTable"] = topics
    if "topic" not in kinds[:1]:
        result["subscriptionGroupTable"] = groups
    _save_json(session, values, kinds[0] if kinds else "metadata", result)
    session.print_line()


def _add_configs(
    totals: dict[str, dict[str, Any]],
    configs: dict[str, dict[str, Any]],
    summed_keys: tuple[str, ...],
) -> None:
    """Put configurations of one broker into `totals`, which is changed.

    The values of `summed_keys` are added to those that are already there, in both arguments; other
    values replace older ones.
    """
    for name, config in configs.items():
        for key in summed_keys if name in totals else ():
            config[key] += totals[name][key]
        totals[name] = config


def export_settings(session: Session, values: FlagValues) -> None:
    """Run exportConfigs: write `EXPORTED_SETTINGS` of a cluster's masters into a JSON file."""
    brokers = {}
    slave_count = 0
    for master, slaves in session.broker_addresses(values["clusterName"]):
        current = session.admin.broker_settings(master)
        brokers[current["brokerName"]] = {
            key: current[key] for key in EXPORTED_SETTINGS if key in current
        }
        slave_count += len(slaves)
    scale = {
        "namesrvSize": len(session.admin.name_servers),
        "slaveBrokerSize": slave_count,
        "masterBrokerSize": len(brokers),
    }
    _save_json(session, values, "configs", {"clusterScale": scale, "brokerConfigs": brokers})


def export_metrics(session: Session, values: FlagValues) -> None:
    """Run exportMetrics: write the load of each master of a cluster into a JSON file."""
    report = {}
    rates = dict.fromkeys(("NormalIn", "NormalOut", "TransIn", "ScheduleIn"), 0.0)
    numbers = dict.fromkeys(rates, 0)
    for name, address in session.admin.masters(values["clusterName"]).items():
        groups = _user_groups(session, address)
        broker_rates, broker_numbers, quota = _load_of_broker(session, address)
        for key in rates:
            rates[key] += broker_rates[key]
            numbers[key] += broker_numbers[key]
        quota["topicSize"] = len(_user_topics(session, values, address))
        quota["groupSize"] = len(groups)
        version = {
            "rocketmqVersion": session.admin.runtime(address).get("brokerVersionDesc"),
            "clientInfo": sorted(set(_client_versions(session, groups))),
        }
        report[name] = {"runtimeVersion": version, "runtimeQuota": quota, "runtimeEnv": {}}
    totals = {
        "totalOneDayNum": {_one_day_key(key): value for key, value in numbers.items()},
        "totalTps": {f"total{key}Tps": value for key, value in rates.items()},
    }
    _save_json(session, values, "metrics", {"totalData": totals, "evaluateReport": report})


def _client_versions(session: Session, groups: dict[str, dict[str, Any]]) -> Iterator[str]:
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


def _load_of_broker(
    session: Session, address: str
) -> tuple[dict[str, float], dict[str, int], dict[str, object]]:
    """Return (rates per second, numbers of one day, report) of the broker at an address.

    The keys of the first two are NormalIn, NormalOut, TransIn and ScheduleIn. The report contains
    the same numbers and those of the disk, by the names of RocketMQ's file.
    """
    counts = session.admin.runtime(address)
    prepared, delayed = (
        session.admin.statistic_at(address, "TOPIC_PUT_NUMS", topic)
        for topic in (HALF_TOPIC, SCHEDULE_TOPIC)
    )

    def yesterday(kind: str) -> int:
        return int(counts[f"{kind}TotalTodayMorning"]) - int(counts[f"{kind}TotalYesterdayMorning"])

    rates = {
        "NormalIn": float(counts["putTps"].split()[0]),
        "NormalOut": float(counts["getTransferredTps"].split()[0]),
        "TransIn": prepared[0],
        "ScheduleIn": delayed[0],
    }
    numbers = {
        "NormalIn": yesterday("msgPut"),
        "NormalOut": yesterday("msgGet"),
        "TransIn": prepared[1],
        "ScheduleIn": delayed[1],
    }
    ratios = ("commitLogDiskRatio", "consumeQueueDiskRatio")
    quota: dict[str, object] = {
        "diskRatio": {key: counts.get(key) for key in ratios},
        "tps": {f"{key[0].lower()}{key[1:]}Tps": value for key, value in rates.items()},
        "oneDayNum": {_one_day_key(key): value for key, value in numbers.items()},
        "messageAverageSize": counts.get("putMessageAverageSize"),
    }
    return rates, numbers, quota


def _one_day_key(key: str) -> str:
    """Return the key of a number of one day: `normalOneDayInNum` for `NormalIn`."""
    direction = "Out" if key.endswith("Out") else "In"
    return f"{key[0].lower()}{key[1:].removesuffix(direction)}OneDay{direction}Num"


def roll_back_pops(session: Session, values: FlagValues) -> None:
    """Run exportPopRecord: make brokers deliver popped, unacknowledged messages again.

    It concerns the broker in flag `brokerAddr`, or all brokers of a cluster.
    """
    if (address := values.get("brokerAddr")) is not None:
        name = session.admin.broker_settings(address)["brokerName"]
        brokers = [(name, address)]
    else:
        info = session.admin.cluster_info()
        brokers = [
            (name, address)
            for name in info.clusters.get(values.get("clusterName", ""), ())
            for address in info.brokers[name].addresses.values()
        ]
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
