"""Commands for consumer groups, their members and offsets, and for connected producers."""

import contextlib
from collections.abc import Iterator
from typing import Final

from sluicemq.errors import RequestError, SluiceError
from sluicemq.model.system_names import is_retry_topic
from sluicemq.model.topic import DLQ_PREFIX, RETRY_PREFIX, GroupConfig, MessageQueue
from sluicemq.mqadmin import java
from sluicemq.mqadmin.commands import FlagValues, Session
from sluicemq.mqadmin.topics import parse_attributes, read_json_list
from sluicemq.wire import bodies, fastjson, tables
from sluicemq.wire.codes import ResponseCode

PUSH_TYPE: Final = "CONSUME_PASSIVELY"
"""The consume type that a push consumer reports."""

_PROGRESS_ROW: Final = "{:<64}  {:<32}  {:<4}  {:<20}  {:<20}  {}{:<20} {:<20}{}"
_GROUP_ROW: Final = "{:<64}  {:<6}  {:<24} {:<5}  {:<14}  {:<7}  {}"
_IDLE_MAX_MS: Final = 60_000
"""A queue with cached messages that was idle for longer is reported as blocked."""

_SETTLED_MS: Final = 120_000
"""Subscriptions of a group are compared once its first member has run for longer."""


def update_group(session: Session, values: FlagValues) -> None:
    """Run updateSubGroup: create or change a group on a broker, or on all masters of a cluster."""
    changes = parse_attributes(values.get("attributes", ""))
    policy = values.get("groupRetryPolicy")
    config = GroupConfig(
        name=values["groupName"],
        consume_enable=values.get_bool("consumeEnable", True),
        consume_from_min_enable=values.get_bool("consumeFromMinEnable"),
        consume_broadcast_enable=values.get_bool("consumeBroadcastEnable"),
        consume_message_orderly=values.get_bool("consumeMessageOrderly"),
        retry_queues=values.get_int("retryQueueNums", 1),
        retry_times_max=values.get_int("retryMaxTimes", 16),
        broker_id=values.get_int("brokerId"),
        broker_id_when_slow=values.get_int("whichBrokerWhenConsumeSlowly", 1),
        notify_changes_enable=values.get_bool("notifyConsumerIdsChanged", True),
        attributes={f"-{k}" if v is None else f"+{k}": v or "" for k, v in changes.items()},
        retry_policy=None if policy is None else fastjson.loads(policy),
    )
    for address in session.target_addresses(values):
        session.admin.put_groups(address, [config])
        session.print_line(f"create subscription group to {address} success.")
    session.write(
        java.format_object("SubscriptionGroupConfig", java.group_config_fields(config), "{}")
    )


def update_group_list(session: Session, values: FlagValues) -> None:
    """Run updateSubGroupList: create or change the groups of a JSON file."""
    items = read_json_list(session, values)
    configs = [tables.group_from(item, "group") for item in items or ()]
    of_cluster = "" if "brokerAddr" in values else "subscription "
    for address in session.target_addresses(values) if configs else ():
        session.admin.put_groups(address, configs)
        session.print_line(
            f"submit batch of {of_cluster}group config to {address} success, please check the "
            "result later."
        )


def set_consume_mode(session: Session, values: FlagValues) -> None:
    """Run setConsumeMode: let a group consume a topic by PULL or by POP."""
    topic = values["topicName"]
    group = values["groupName"]
    mode = values["mode"]
    share = values.get_int("popShareQueueNum")
    for address in session.target_addresses(values):
        session.admin.set_request_mode(address, tables.RequestMode(topic, group, mode, share))
        session.print_line(f"set consume mode to {address} success.")
    session.write(f"topic[{topic}] group[{group}] consume mode[{mode}] popShareQueueNum[{share}]")


def delete_group(session: Session, values: FlagValues) -> None:
    """Run deleteSubGroup: delete a group from a broker or from the masters of a cluster.

    From a cluster, its retry and dead-letter topics are deleted, too.
    """
    group = values["groupName"]
    cluster = f" in cluster [{values.get('clusterName')}]" if "brokerAddr" not in values else ""
    for address in session.target_addresses(values):
        removes_offsets = values.get_bool("removeOffset")
        session.admin.delete_group(address, group, clean_offset=removes_offsets)
        session.print_line(
            f"delete subscription group [{group}] from broker [{address}]{cluster} success."
        )
    if cluster:
        for prefix in (RETRY_PREFIX, DLQ_PREFIX):
            session.admin.delete_topic(prefix + group, cluster=values["clusterName"])


def show_group_settings(session: Session, values: FlagValues) -> None:
    """Run getConsumerConfig: print the settings of a group at each broker that has it."""
    for name, data in session.admin.cluster_info().brokers.items():
        address = next(iter(data.addresses.values()))
        config = session.admin.group_table(address).groups.get(values["groupName"])
        if config is None:
            continue
        bar = "=" * 29
        session.print_line(f"{bar}{data.cluster}:{name}{bar}")
        for key, value in java.group_config_fields(config).items():
            session.print_line(f"{key:<40}=  {'' if value is None else java.format_value(value)}")


def show_members(session: Session, values: FlagValues) -> None:
    """Run consumerConnection: print the members and subscriptions of a group."""
    group_info = session.admin.group_connections(values["consumerGroup"], values.get("brokerAddr"))
    row = "{:<36} {:<22} {:<10} {}".format
    session.print_line(row("#ClientId", "#ClientAddr", "#Language", "#Version"))
    for member in group_info.connections:
        session.print_line(
            row(
                member.client_id,
                member.address,
                member.language,
                java.format_version(member.version),
            )
        )
    session.print_line("\nBelow is subscription:")
    session.print_line(f"{'#Topic':<20} #SubExpression")
    for subscription in group_info.subscriptions.values():
        session.print_line(f"{subscription.topic:<20} {subscription.expression}")
    session.print_line(f"\nConsumeType: {group_info.consume_type}")
    session.print_line(f"MessageModel: {group_info.message_model}")
    session.print_line(f"ConsumeFromWhere: {group_info.consume_from_where}")


def show_group_producers(session: Session, values: FlagValues) -> None:
    """Run producerConnection: print the producers of a group."""
    producers = session.admin.producer_connections(values["producerGroup"], values["topic"])
    for index, producer in enumerate(producers, start=1):
        version = java.format_version(producer.version)
        session.print_line(
            f"{index:04}  {producer.client_id:<32} {producer.address:<22} "
            f"{producer.language:<8} {version}"
        )


def show_broker_producers(session: Session, values: FlagValues) -> None:
    """Run producer: print all producers that a broker knows."""
    for group, producers in tables.sort_map_as_java(
        session.admin.producers(values["broker"])
    ).items():
        for producer in producers:
            client = ", ".join(f"{key}={producer[key]}" for key in ("language", "version"))
            session.print_line(
                f"producer group ({group}) instance : clientId={producer['clientId']},"
                f"remoteIP={producer['remoteIP']}, {client}, lastUpdateTimestamp="
                f"{producer['lastUpdateTimestamp']}"
            )


def show_consumer_progress(session: Session, values: FlagValues) -> None:
    """Run consumerProgress: print a line for each group, or for each queue of one group."""
    if "groupName" not in values:
        _print_all_groups(session)
        return
    group = values["groupName"]
    stats = _fetch_consume_stats(session, group, values.get("topicName"))
    show_client = values.get_bool("showClientIP")
    readers = _reader_addresses(session, group) if show_client else {}

    def client_cell(text: str) -> str:
        return f"{text:<20} " if show_client else ""

    session.print_line(
        _PROGRESS_ROW.format(
            "#Topic",
            "#Broker Name",
            "#QID",
            "#Broker Offset",
            "#Consumer Offset",
            client_cell("#Client IP"),
            "#Diff",
            "#Inflight",
            "#LastTime",
        )
    )
    total = in_flight = 0
    for queue, offsets in stats.queues.items():
        last_time_ms = offsets.last_time_ms
        queue_lag = offsets.broker_offset - offsets.consumer_offset
        queue_in_flight = offsets.pull_offset - offsets.consumer_offset
        total = total + queue_lag
        in_flight = in_flight + queue_in_flight
        session.print_line(
            _PROGRESS_ROW.format(
                queue.topic[:64],
                queue.broker[:32],
                queue.queue_id,
                offsets.broker_offset,
                offsets.consumer_offset,
                client_cell(readers.get(queue, "N/A")),
                queue_lag,
                queue_in_flight,
                f" {java.format_time_seconds(last_time_ms) if last_time_ms else 'N/A'}",
            )
        )
    session.print_line()
    session.print_line(f"Consume TPS: {stats.consumes_per_second:.2f}")
    session.print_line(f"Consume Diff Total: {total}")
    session.print_line(f"Consume Inflight Total: {in_flight}")


def _fetch_consume_stats(session: Session, group: str, topic: str | None) -> bodies.ConsumeStats:
    """Return the offsets of a group, of one topic or of all if `topic` is None.

    Without any offset, raises RequestError as RocketMQ's tool does: with the code 2002 if the group
    broadcasts, because its members keep their offsets themselves, or 206 if it has no member.
    """
    stats = session.admin.consume_stats(group, topic)
    if not stats.queues:
        text = "Not found the consumer group consume stats, because return offset table is empty, "
        try:
            connections = session.admin.group_connections(group)
        except SluiceError as error:
            remark = f"{text}maybe the consumer not online"
            raise RequestError(ResponseCode.CONSUMER_NOT_ONLINE, remark) from error
        if connections.message_model == bodies.BROADCASTING:
            raise RequestError(2002, f"{text}the consumer is under the broadcast mode")
    return stats


def _reader_addresses(session: Session, group: str) -> dict[MessageQueue, str]:
    """Return queue -> IP address of the member that reads it.

    It is the part of the client id before `@`. Members that do not answer are left out.
    """
    readers: dict[MessageQueue, str] = {}
    for member in session.admin.group_connections(group).connections:
        with contextlib.suppress(SluiceError):
            for queue in session.admin.running_info(group, member.client_id).queues:
                readers[queue] = member.client_id.partition("@")[0]
    return readers


def _print_all_groups(session: Session) -> None:
    """Print a line for each group that has a retry topic: members, rate and lag."""
    session.print_line(
        _GROUP_ROW.format("#Group", "#Count", "#Version", "#Type", "#Model", "#TPS", "#Diff Total")
    )
    for topic in tables.sort_keys_as_java(session.admin.topics()):
        if not is_retry_topic(topic):
            continue
        group = topic.removeprefix(RETRY_PREFIX)
        rate = 0
        lag = 0
        cells = [0, "OFFLINE", "", ""]
        with contextlib.suppress(SluiceError):
            stats = session.admin.consume_stats(group)
            rate = int(stats.consumes_per_second)
            lag = sum(o.broker_offset - o.consumer_offset for o in stats.queues.values())
        with contextlib.suppress(SluiceError):
            group_info = session.admin.group_connections(group)
            is_push = group_info.consume_type == PUSH_TYPE
            cells = [
                len(group_info.connections),
                java.format_version(min(member.version for member in group_info.connections)),
                "PUSH" if is_push else "PULL",
                group_info.message_model if is_push else "",
            ]
        session.print_line(_GROUP_ROW.format(group[:64], *cells, rate, lag))


def show_consumer_status(session: Session, values: FlagValues) -> None:
    """Run consumerStatus: report the state of members of a group.

    The state of the member in flag `clientId` is printed. Without the flag, the state of each
    member is written into a file of a directory named after the current time in milliseconds, and
    their subscriptions are compared.
    """
    group = values["consumerGroup"]
    stack = "jstack" in values
    group_info = session.admin.group_connections(group, values.get("brokerAddr"))
    if (client_id := values.get("clientId")) is not None:
        info = session.admin.running_info(group, client_id, stack=stack)
        session.write("".join(f"{line}\n" for line in running_info_lines(info)))
        return
    now_ms = session.admin.clock.now_ms()
    row = "{:<10} {:<40} {:<20} {}".format
    session.print_line(row("#Index", "#ClientId", "#Version", "#ConsumerRunningInfoFile"))
    infos: dict[str, bodies.RunningInfo] = {}
    for member in group_info.connections:
        info = session.admin.running_info(group, member.client_id, stack=stack)
        text = "".join(f"{line}\n" for line in running_info_lines(info))
        path = session.save_file(str(now_ms), member.client_id, text.encode())
        infos[member.client_id] = info
        session.print_line(
            row(len(infos), member.client_id, java.format_version(member.version), path)
        )
    if not infos:
        return
    if _has_different_subscriptions(infos, now_ms):
        session.write("\n\nWARN: Different subscription in the same group of consumer!!!")
        return
    session.write("\n\nSame subscription in the same group of consumer\n\nRebalance OK\n")
    for client_id, info in sorted(infos.items()):
        for line in _problem_lines(client_id, info, now_ms):
            session.print_line(line)


def _has_different_subscriptions(infos: dict[str, bodies.RunningInfo], now_ms: int) -> bool:
    """Return whether push consumers of a group differ in their subscriptions.

    `infos` is client id -> state. The result is False if the first member, by client id, is not a
    push consumer, or has run for `_SETTLED_MS` at most.
    """
    first = infos[min(infos)]
    start_ms = int(first.properties.get("PROP_CONSUMER_START_TIMESTAMP", "0"))
    is_settled = now_ms - start_ms > _SETTLED_MS
    subscriptions = {
        frozenset((one.topic, one.expression, one.kind) for one in info.subscriptions)
        for info in infos.values()
    }
    return (
        first.properties.get("PROP_CONSUME_TYPE") == PUSH_TYPE
        and is_settled
        and len(subscriptions) > 1
    )


def _problem_lines(client_id: str, info: bodies.RunningInfo, now_ms: int) -> Iterator[str]:
    """Yield a line for each queue that a push consumer has not locked or does not process."""
    if info.properties.get("PROP_CONSUME_TYPE") != PUSH_TYPE:
        return
    is_ordered = info.properties.get("PROP_CONSUMEORDERLY") == "true"
    for queue, state in info.queues.items():
        name = f"{client_id} {java.format_queue(queue)}"
        idle_ms = now_ms - state.last_consume_ms
        if is_ordered and not state.locked:
            yield f"{name} can't lock for a while, {now_ms - state.last_lock_ms}ms"
        elif not is_ordered and idle_ms > _IDLE_MAX_MS and state.cached_count > 0:
            yield f"{name} can't consume for a while, maybe blocked, {idle_ms}ms"


def running_info_lines(info: bodies.RunningInfo) -> Iterator[str]:
    """Yield the lines of a member's state: properties, subscriptions, queues and rates."""
    yield "#Consumer Properties#"
    for key, value in info.properties.items():
        yield f"{key:<40}: {value}"
    yield "\n\n#Consumer Subscription#"
    for number, subscription in enumerate(info.subscriptions, start=1):
        yield (
            f"{number:03} Topic: {subscription.topic:<40} ClassFilter: {'false':<8} "
            f"SubExpression: {subscription.expression}"
        )
    row = "{:<{width}}  {:<32}  {:<4}  {:<20}".format
    for title, heading, width in (
        ("Offset", "#Consumer Offset", 32),
        ("MQ Detail", "#ProcessQueueInfo", 64),
        ("Pop Detail", "#ProcessQueueInfo", 32),
    ):
        yield f"\n\n#Consumer {title}#"
        heading_width = 32 if title == "Pop Detail" else 64
        yield row("#Topic", "#Broker Name", "#QID", heading, width=heading_width)
        for queue, state in info.queues.items() if title != "Pop Detail" else ():
            cell = state.commit_offset if title == "Offset" else java.format_queue_state(state)
            yield row(queue.topic, queue.broker, queue.queue_id, cell, width=width)
    yield "\n\n#Consumer RT&TPS#"
    yield (
        f"{'#Topic':<64}  {'#Pull RT':>14} {'#Pull TPS':>14} {'#Consume RT':>14} "
        f"{'#ConsumeOK TPS':>14} {'#ConsumeFailed TPS':>18} {'#ConsumeFailedMsgsInHour':>25}"
    )
    for topic, rates in info.rates.items():
        yield (
            f"{topic:<32}  {rates.pull_ms:14.2f} {rates.pulls_per_second:14.2f} "
            f"{rates.consume_ms:14.2f} {rates.done_per_second:14.2f} "
            f"{rates.failed_per_second:18.2f} {rates.failures:25}"
        )
    yield "\n\n#User Consume Info#"
    for key, value in info.notes.items():
        yield f"{key:<40}: {value}"
    if info.stack is not None:
        yield f"\n\n#Consumer jstack#\n{info.stack}"


def reset_offset(session: Session, values: FlagValues) -> None:
    """Run resetOffsetByTime: reset a group to a time, or one queue of a broker to an offset.

    The time is `now`, milliseconds since 1970, or local time as `java.parse_time` takes it.
    """
    group = values["group"]
    topic = values["topic"]
    timestamp = values["timestamp"]
    time_ms = session.admin.clock.now_ms() if timestamp == "now" else java.parse_time(timestamp)
    prefix = f"start reset consumer offset by specified, group[{group}], topic[{topic}], "
    suffix = f"timestamp(string)[{timestamp}], timestamp(long)[{time_ms}]"
    queue_id = values.get_int("queue", -1)
    if "broker" in values and queue_id >= 0:
        address = values["broker"]
        session.print_line(f"{prefix}queueId[{queue_id}], broker[{address}], {suffix}")
        if "offset" in values:
            offset = values.get_int("offset")
        else:
            offset = session.admin.offset_by_time_at(address, topic, queue_id, time_ms)
        session.print_line(f"reset consumer offset to {offset}")
        if offset > 0:
            session.admin.request_offset_reset(group, topic, time_ms, (address, queue_id, offset))
        return
    new_offsets = _reset_offsets(session, group, topic, time_ms)
    force = java.format_value(values.get_bool("force", True))
    session.print_line(f"{prefix}force[{force}], {suffix}")
    _print_offsets(session, new_offsets)


def skip_accumulated_messages(session: Session, values: FlagValues) -> None:
    """Run skipAccumulatedMessage: reset a group behind the last message of each queue."""
    _print_offsets(session, _reset_offsets(session, values["group"], values["topic"], -1))


def _reset_offsets(
    session: Session, group: str, topic: str, time_ms: int
) -> dict[MessageQueue, int]:
    """Reset a group to a time of a topic, -1 for its end. Return queue -> new offset.

    If the brokers leave the reset to consumers and none is online, the offsets are committed.
    """
    new_offsets = session.admin.request_offset_reset(group, topic, time_ms)
    if new_offsets:
        return new_offsets
    return {one.queue: one.new for one in session.admin.reset_offsets(group, topic, time_ms)}


def _print_offsets(session: Session, offsets: dict[MessageQueue, int]) -> None:
    """Print a table of queues and their new offsets."""
    session.print_line("{:<40}  {:<40}  {:<40}".format("#brokerName", "#queueId", "#offset"))
    for queue, offset in sorted(offsets.items()):
        session.print_line(f"{queue.broker[:32]:<40}  {queue.queue_id:<40}  {offset:<40}")


def clone_offsets(session: Session, values: FlagValues) -> None:
    """Run cloneGroupOffset: commit the offsets of one group for another group."""
    source = values["srcGroup"]
    target = values["destGroup"]
    topic = values["topic"]
    stats = session.admin.consume_stats(source)
    session.admin.current_route(topic)
    for queue, offsets in stats.queues.items():
        if offsets.consumer_offset >= 0:
            session.admin.commit_offset(target, queue, offsets.consumer_offset)
    session.write(
        f"clone group offset success. srcGroup[{source}], destGroup=[{target}], topic[{topic}]"
    )
