"""What a cluster is, as JSON files: its topics and groups, its settings, its numbers."""

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
from sluicemq.mqadmin.commands import TEMPORARY, Given, Session, WrongFlagsError
from sluicemq.wire import tables

EXPORT: Final = f"{TEMPORARY}/rocketmq/export"
CHOSEN: Final = [
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


def _save(session: Session, given: Given, name: str, value: object) -> None:
    path = session.save(given.get("filePath", EXPORT), f"{name}.json", java.pretty(value).encode())
    session.write(f"export {path} success")


def _topics(session: Session, given: Given, address: str) -> dict[str, dict[str, Any]]:
    """Those of users; with -s their retry and dead-letter topics."""
    system = set(session.admin.system_topics(address))
    with_group_topics = "specialTopic" in given
    return {
        name: tables.topic_object(config)
        for name, config in session.admin.topic_table(address).topics.items()
        if name not in system and (with_group_topics or not is_group_topic(name))
    }


def _groups(session: Session, address: str) -> dict[str, dict[str, Any]]:
    return {
        name: tables.group_object(config)
        for name, config in session.admin.group_table(address).groups.items()
        if not is_rocketmq_system_group(name)
    }


def metadata(session: Session, given: Given) -> None:
    """Topics and groups, of a broker or summed up over a cluster."""
    kinds = [kind for kind in ("topic", "subscriptionGroup") if kind in given]
    if (address := given.get("brokerAddr")) is not None:
        for kind in kinds[:1]:
            is_topic = kind == "topic"
            found = _topics(session, given, address) if is_topic else _groups(session, address)
            name = "topicConfigTable" if is_topic else "subscriptionGroupTable"
            table = session.admin.topic_table if is_topic else session.admin.group_table
            version = tables.data_version_object(table(address).data_version)
            _save(session, given, kind, {"dataVersion": version, name: found})
        return
    if "clusterName" not in given:
        raise WrongFlagsError("", exit_code=0)
    topics: dict[str, dict[str, Any]] = {}
    groups: dict[str, dict[str, Any]] = {}
    for address in session.masters(given["clusterName"]):
        _add(topics, _topics(session, given, address), ("readQueueNums", "writeQueueNums"))
        _add(groups, _groups(session, address), ("retryQueueNums",))
    result: dict[str, object] = {"exportTime": session.admin.clock.now_ms()}
    if "subscriptionGroup" not in kinds[:1]:
        result["topicConfigTable"] = topics
    if "topic" not in kinds[:1]:
        result["subscriptionGroupTable"] = groups
    _save(session, given, kinds[0] if kinds else "metadata", result)
    session.say()


def _add(
    found: dict[str, dict[str, Any]], more: dict[str, dict[str, Any]], summed: tuple[str, ...]
) -> None:
    for name, value in more.items():
        for key in summed if name in found else ():
            value[key] += found[name][key]
        found[name] = value


def settings(session: Session, given: Given) -> None:
    """What brokers are set to, as far as another cluster should be the same."""
    brokers, slaves = {}, 0
    for master, its_slaves in session.brokers(given["clusterName"]):
        known = session.admin.broker_settings(master)
        brokers[known["brokerName"]] = {key: known[key] for key in CHOSEN if key in known}
        slaves += len(its_slaves)
    scale = {
        "namesrvSize": len(session.admin.name_servers), "slaveBrokerSize": slaves,
        "masterBrokerSize": len(brokers),
    }  # fmt: skip
    _save(session, given, "configs", {"clusterScale": scale, "brokerConfigs": brokers})


def metrics(session: Session, given: Given) -> None:
    """How much each master has to do."""
    report = {}
    rates = dict.fromkeys(("NormalIn", "NormalOut", "TransIn", "ScheduleIn"), 0.0)
    numbers = dict.fromkeys(rates, 0)
    for name, address in session.admin.masters(given["clusterName"]).items():
        groups = _groups(session, address)
        own_rates, own_numbers, quota = _quota(session, address)
        for key in rates:
            rates[key] += own_rates[key]
            numbers[key] += own_numbers[key]
        quota["topicSize"] = len(_topics(session, given, address))
        quota["groupSize"] = len(groups)
        version = {
            "rocketmqVersion": session.admin.runtime(address).get("brokerVersionDesc"),
            "clientInfo": sorted(set(_client_versions(session, groups))),
        }
        report[name] = {"runtimeVersion": version, "runtimeQuota": quota, "runtimeEnv": {}}
    totals = {
        "totalOneDayNum": {_one_day(key): value for key, value in numbers.items()},
        "totalTps": {f"total{key}Tps": value for key, value in rates.items()},
    }
    _save(session, given, "metrics", {"totalData": totals, "evaluateReport": report})


def _client_versions(session: Session, groups: dict[str, dict[str, Any]]) -> Iterator[str]:
    for group in groups:
        try:
            found = session.admin.group_connections(group)
        except SluiceError:
            continue  # nobody is online
        yield from (f"{one.language}%{java.version(one.version)}" for one in found.connections)


def _quota(
    session: Session, address: str
) -> tuple[dict[str, float], dict[str, int], dict[str, object]]:
    counts = session.admin.runtime(address)
    half, late = (
        session.admin.statistic_at(address, "TOPIC_PUT_NUMS", topic)
        for topic in (HALF_TOPIC, SCHEDULE_TOPIC)
    )

    def yesterday(way: str) -> int:
        return int(counts[f"{way}TotalTodayMorning"]) - int(counts[f"{way}TotalYesterdayMorning"])

    rates = {
        "NormalIn": float(counts["putTps"].split()[0]),
        "NormalOut": float(counts["getTransferredTps"].split()[0]),
        "TransIn": half[0], "ScheduleIn": late[0],
    }  # fmt: skip
    numbers = {
        "NormalIn": yesterday("msgPut"), "NormalOut": yesterday("msgGet"), "TransIn": half[1],
        "ScheduleIn": late[1],
    }  # fmt: skip
    ratios = ("commitLogDiskRatio", "consumeQueueDiskRatio")
    quota: dict[str, object] = {
        "diskRatio": {key: counts.get(key) for key in ratios},
        "tps": {f"{key[0].lower()}{key[1:]}Tps": value for key, value in rates.items()},
        "oneDayNum": {_one_day(key): value for key, value in numbers.items()},
        "messageAverageSize": counts.get("putMessageAverageSize"),
    }
    return rates, numbers, quota


def _one_day(key: str) -> str:
    """`NormalIn` -> `normalOneDayInNum`."""
    way = "Out" if key.endswith("Out") else "In"
    return f"{key[0].lower()}{key[1:].removesuffix(way)}OneDay{way}Num"


def pops(session: Session, given: Given) -> None:
    """Has brokers write out what is popped and not acknowledged."""
    if (address := given.get("brokerAddr")) is not None:
        name = session.admin.broker_settings(address)["brokerName"]
        brokers = [(name, address)]
    else:
        info = session.admin.cluster_info()
        brokers = [
            (name, address)
            for name in info.clusters.get(given.get("clusterName", ""), ())
            for address in info.brokers[name].addresses.values()
        ]
    is_dry = given.get("dryRun", "").lower() == "false"  # as the tool understands it
    for name, address in brokers:
        end = f"brokerName={name}, brokerAddr={address}, dryRun={java.shown(is_dry)}"
        try:
            if not is_dry:
                session.admin.roll_back_pops(address)
        except SluiceError as error:
            session.say(f"Export broker records error, {end}")
            session.write(str(error))
        else:
            session.say(f"Export broker records, {end}")
