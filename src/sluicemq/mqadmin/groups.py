"""Commands for consumer groups, their members and offsets, and for connected producers."""

import contextlib
from collections.abc import Iterator
from typing import Final

from sluicemq.errors import RequestError, SluiceError
from sluicemq.model.system_names import is_retry_topic
from sluicemq.model.topic import DLQ_PREFIX, RETRY_PREFIX, GroupConfig, MessageQueue
from sluicemq.mqadmin import java
from sluicemq.mqadmin.commands import FlagValues, Session
from sluicemq.mqadmin.topics import parse_attributes, read_json_list, sign_attributes
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
    """Run `mqadmin updateSubGroup`: create or change a group on a broker or a cluster.

    In a cluster, this is done on all masters.
    """
    changes = parse_attributes(values.get("attributes", ""))
    policy_json = values.get("groupRetryPolicy")
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
        attributes=sign_attributes(changes),
        retry_policy=None if policy_json is None else fastjson.loads(policy_json),
    )
    for address in session.target_addresses(values):
        session.admin.put_groups(address, [config])
        session.print_line(f"create subscription group to {address} success.")
    session.write(
        java.format_object("SubscriptionGroupConfig", java.group_config_fields(config), "{}")
    )


def update_group_list(session: Session, values: FlagValues) -> None:
    """Run `mqadmin updateSubGroupList`: create or change the groups of a JSON file."""
    group_objects = read_json_list(session, values)
    if not group_objects:
        return
    configs = [tables.group_from(group_object, "group") for group_object in group_objects]
    group_kind = "group" if "brokerAddr" in values else "subscription group"
    for address in session.target_addresses(values):
        session.admin.put_groups(address, configs)
        session.print_line(
            f"submit batch of {group_kind} config to {address} success, please check the "
            "result later."
        )


def set_consume_mode(session: Session, values: FlagValues) -> None:
    """Run `mqadmin setConsumeMode`: let a group consume a topic by PULL or by POP."""
    topic = values["topicName"]
    group = values["groupName"]
    mode = values["mode"]
    share = values.get_int("popShareQueueNum")
    for address in session.target_addresses(values):
        session.admin.set_request_mode(address, tables.RequestMode(topic, group, mode, share))
        session.print_line(f"set consume mode to {address} success.")
    session.write(f"topic[{topic}] group[{group}] consume mode[{mode}] popShareQueueNum[{share}]")


def delete_group(session: Session, values: FlagValues) -> None:
    """Run `mqadmin deleteSubGroup`: delete a group from a broker or from the masters of a cluster.

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
    """Run `mqadmin getConsumerConfig`: print the settings of a group at each broker that has it."""
    for name, broker in session.admin.cluster_info().brokers.items():
        address = next(iter(broker.addresses.values()))
        config = session.admin.group_table(address).groups.get(values["groupName"])
        if config is None:
            continue
        bar = "=" * 29
        session.print_line(f"{bar}{broker.cluster}:{name}{bar}")
        for key, setting in java.group_config_fields(config).items():
            setting_text = "" if setting is None else java.format_value(setting)
            session.print_line(f"{key:<40}=  {setting_text}")


def show_members(session: Session, values: FlagValues) -> None:
    """Run `mqadmin consumerConnection`: print the members and subscriptions of a group."""
    group_info = session.admin.group_connections(values["consumerGroup"], values.get("brokerAddr"))
    format_row = "{:<36} {:<22} {:<10} {}".format
    session.print_line(format_row("#ClientId", "#ClientAddr", "#Language", "#Version"))
    for member in group_info.connections:
        session.print_line(
            format_row(
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
    """Run `mqadmin producerConnection`: print the producers of a group."""
    producers = session.admin.producer_connections(values["producerGroup"], values["topic"])
    for index, producer in enumerate(producers, start=1):
        version = java.format_version(producer.version)
        session.print_line(
            f"{index:04}  {producer.client_id:<32} {producer.address:<22} "
            f"{producer.language:<8} {version}"
        )


def show_broker_producers(session: Session, values: FlagValues) -> None:
    """Run `mqadmin producer`: print all producers that a broker knows."""
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
    """Run `mqadmin consumerProgress`: print the progress of one group or of all.

    Of one group, each queue has a line. Of all, each group has one.
    """
    if "groupName" in values:
        _print_group_progress(session, values)
    else:
        _print_all_groups(session)


def _print_group_progress(session: Session, values: FlagValues) -> None:
    """Print a line for each queue of the group in flag `groupName`, and then the sums.

    With flag `showClientIP`, each line has the address of the member that reads the queue.
    """
    group = values["groupName"]
    stats = _fetch_consume_stats(session, group, values.get("topicName"))
    show_client = values.get_bool("showClientIP")
    reader_by_queue = _fetch_reader_addresses(session, group) if show_client else {}

    session.print_line(
        _PROGRESS_ROW.format(
            "#Topic",
            "#Broker Name",
            "#QID",
            "#Broker Offset",
            "#Consumer Offset",
            f"{'#Client IP':<20} " if show_client else "",
            "#Diff",
            "#Inflight",
            "#LastTime",
        )
    )
    total_lag = 0
    total_in_flight = 0
    for queue, offsets in stats.queues.items():
        total_lag += offsets.broker_offset - offsets.consumer_offset
        total_in_flight += offsets.pull_offset - offsets.consumer_offset
        client_cell = f"{reader_by_queue.get(queue, 'N/A'):<20} " if show_client else ""
        session.print_line(_format_progress(queue, offsets, client_cell))
    session.print_line()
    session.print_line(f"Consume TPS: {stats.consumes_per_second:.2f}")
    session.print_line(f"Consume Diff Total: {total_lag}")
    session.print_line(f"Consume Inflight Total: {total_in_flight}")


def _format_progress(queue: MessageQueue, offsets: bodies.QueueProgress, client_cell: str) -> str:
    """Return the line of one queue, with its offsets and its lag.

    `client_cell` is the address of the member that reads the queue, "" to leave it out.
    """
    last_time = "N/A"
    if offsets.last_time_ms:
        last_time = java.format_time_seconds(offsets.last_time_ms)
    return _PROGRESS_ROW.format(
        queue.topic[:64],
        queue.broker[:32],
        queue.queue_id,
        offsets.broker_offset,
        offsets.consumer_offset,
        client_cell,
        offsets.broker_offset - offsets.consumer_offset,
        offsets.pull_offset - offsets.consumer_offset,
        f" {last_time}",
    )


def _fetch_consume_stats(session: Session, group: str, topic: str | None) -> bodies.ConsumeStats:
    """Return the offsets of a group, in one topic or in all topics if `topic` is None.

    If there are none, RequestError is raised like in RocketMQ's tool: with the code 206 if the
    group has no member, or 2002 if it broadcasts, because its members then keep their offsets
    themselves.
    """
    stats = session.admin.consume_stats(group, topic)
    if stats.queues:
        return stats
    fact = "Not found the consumer group consume stats, because return offset table is empty, "
    try:
        connections = session.admin.group_connections(group)
    except SluiceError as error:
        remark = f"{fact}maybe the consumer not online"
        raise RequestError(ResponseCode.CONSUMER_NOT_ONLINE, remark) from error
    if connections.message_model == bodies.BROADCASTING:
        raise RequestError(2002, f"{fact}the consumer is under the broadcast mode")
    return stats


def _fetch_reader_addresses(session: Session, group: str) -> dict[MessageQueue, str]:
    """Return queue -> IP address of the member of a group that reads it.

    The address is the part of the client id before `@`. Members that do not answer are left out.
    """
    reader_by_queue: dict[MessageQueue, str] = {}
    for member in session.admin.group_connections(group).connections:
        address, _, _ = member.client_id.partition("@")
        with contextlib.suppress(SluiceError):
            running_info = session.admin.running_info(group, member.client_id)
            reader_by_queue |= dict.fromkeys(running_info.queues, address)
    return reader_by_queue


def _print_all_groups(session: Session) -> None:
    """Print a line for each group that has a retry topic: members, rate and lag.

    What brokers do not report is printed as 0 or OFFLINE.
    """
    session.print_line(
        _GROUP_ROW.format("#Group", "#Count", "#Version", "#Type", "#Model", "#TPS", "#Diff Total")
    )
    for topic in tables.sort_keys_as_java(session.admin.topics()):
        if not is_retry_topic(topic):
            continue
        group = topic.removeprefix(RETRY_PREFIX)
        rate = 0
        lag = 0
        with contextlib.suppress(SluiceError):
            stats = session.admin.consume_stats(group)
            rate = int(stats.consumes_per_second)
            lag = sum(
                offsets.broker_offset - offsets.consumer_offset for offsets in stats.queues.values()
            )
        member_cells: tuple[object, ...] = (0, "OFFLINE", "", "")
        with contextlib.suppress(SluiceError):
            member_cells = _format_members(session.admin.group_connections(group))
        session.print_line(_GROUP_ROW.format(group[:64], *member_cells, rate, lag))


def _format_members(group_info: bodies.ConsumerConnections) -> tuple[int, str, str, str]:
    """Return (number of members, lowest version, "PUSH" or "PULL", message model).

    The message model is "" for PULL.
    """
    version = java.format_version(min(member.version for member in group_info.connections))
    if group_info.consume_type == PUSH_TYPE:
        return len(group_info.connections), version, "PUSH", group_info.message_model
    return len(group_info.connections), version, "PULL", ""


def show_consumer_status(session: Session, values: FlagValues) -> None:
    """Run `mqadmin consumerStatus`: report the state of members of a group.

    The state of the member in flag `clientId` is printed. Without the flag, the state of each
    member is written into a file of a directory named after the current time in milliseconds, and
    their subscriptions are compared.
    """
    group = values["consumerGroup"]
    with_stacks = "jstack" in values
    group_info = session.admin.group_connections(group, values.get("brokerAddr"))
    if (client_id := values.get("clientId")) is not None:
        state = session.admin.running_info(group, client_id, stack=with_stacks)
        session.write("".join(f"{line}\n" for line in running_info_lines(state)))
        return

    now_ms = session.admin.clock.now_ms()
    format_row = "{:<10} {:<40} {:<20} {}".format
    session.print_line(format_row("#Index", "#ClientId", "#Version", "#ConsumerRunningInfoFile"))
    states: dict[str, bodies.RunningInfo] = {}  # by client id
    for member in group_info.connections:
        state = session.admin.running_info(group, member.client_id, stack=with_stacks)
        states[member.client_id] = state
        state_text = "".join(f"{line}\n" for line in running_info_lines(state))
        path = session.save_file(str(now_ms), member.client_id, state_text.encode())
        version = java.format_version(member.version)
        session.print_line(format_row(len(states), member.client_id, version, path))
    if states:
        _compare_members(session, states, now_ms)


def _compare_members(session: Session, states: dict[str, bodies.RunningInfo], now_ms: int) -> None:
    """Print a warning if members of a group have different subscriptions, else their problems.

    `states` maps client ids to what the members report; there is at least one.
    """
    if _has_different_subscriptions(states, now_ms):
        session.write("\n\nWARN: Different subscription in the same group of consumer!!!")
        return
    session.write("\n\nSame subscription in the same group of consumer\n\nRebalance OK\n")
    for client_id, state in sorted(states.items()):
        for line in _find_problems(client_id, state, now_ms):
            session.print_line(line)


def _has_different_subscriptions(states: dict[str, bodies.RunningInfo], now_ms: int) -> bool:
    """Return whether the members of a group of push consumers have different subscriptions.

    The first member by client id decides whether they are compared: it must be a push consumer that
    has run for more than `_SETTLED_MS`. Otherwise the result is False.
    """
    first_member = states[min(states)].properties
    is_push = first_member.get("PROP_CONSUME_TYPE") == PUSH_TYPE
    start_ms = int(first_member.get("PROP_CONSUMER_START_TIMESTAMP", "0"))
    is_settled = now_ms - start_ms > _SETTLED_MS
    if not is_push or not is_settled:
        return False

    distinct_subscriptions = set()
    for state in states.values():
        subscriptions = frozenset(
            (subscription.topic, subscription.expression, subscription.kind)
            for subscription in state.subscriptions
        )
        distinct_subscriptions.add(subscriptions)
    return len(distinct_subscriptions) > 1


def _find_problems(client_id: str, member: bodies.RunningInfo, now_ms: int) -> Iterator[str]:
    """Yield a line for each queue that a push consumer cannot lock, or has stopped processing.

    `member` is what the consumer `client_id` reports. A consumer that is not ordered has stopped if
    it has messages and has processed none for `_IDLE_MAX_MS`.
    """
    if member.properties.get("PROP_CONSUME_TYPE") != PUSH_TYPE:
        return
    is_ordered = member.properties.get("PROP_CONSUMEORDERLY") == "true"
    for queue, state in member.queues.items():
        name = f"{client_id} {java.format_queue(queue)}"
        idle_ms = now_ms - state.last_consume_ms
        if is_ordered and not state.locked:
            yield f"{name} can't lock for a while, {now_ms - state.last_lock_ms}ms"
        elif not is_ordered and idle_ms > _IDLE_MAX_MS and state.cached_count > 0:
            yield f"{name} can't consume for a while, maybe blocked, {idle_ms}ms"


def running_info_lines(info: bodies.RunningInfo) -> Iterator[str]:
    """Yield the lines about a member: its properties, subscriptions, queues, rates, and stacks."""
    yield "#Consumer Properties#"
    for name, property_text in info.properties.items():
        yield f"{name:<40}: {property_text}"
    yield "\n\n#Consumer Subscription#"
    for number, subscription in enumerate(info.subscriptions, start=1):
        yield (
            f"{number:03} Topic: {subscription.topic:<40} ClassFilter: {'false':<8} "
            f"SubExpression: {subscription.expression}"
        )
    yield from _format_queues(info)
    yield from _format_rates(info)
    yield "\n\n#User Consume Info#"
    for name, note in info.notes.items():
        yield f"{name:<40}: {note}"
    if info.stack is not None:
        yield f"\n\n#Consumer jstack#\n{info.stack}"


def _format_queues(info: bodies.RunningInfo) -> Iterator[str]:
    """Yield three tables of the queues of a member: offsets, states, and popped queues.

    The third one is only a heading, because members do not report popped queues.
    """
    format_row = "{:<{width}}  {:<32}  {:<4}  {:<20}".format
    headings = ("#Topic", "#Broker Name", "#QID")
    yield "\n\n#Consumer Offset#"
    yield format_row(*headings, "#Consumer Offset", width=64)
    for queue, state in info.queues.items():
        yield format_row(queue.topic, queue.broker, queue.queue_id, state.commit_offset, width=32)

    yield "\n\n#Consumer MQ Detail#"
    yield format_row(*headings, "#ProcessQueueInfo", width=64)
    for queue, state in info.queues.items():
        state_text = java.format_queue_state(state)
        yield format_row(queue.topic, queue.broker, queue.queue_id, state_text, width=64)

    yield "\n\n#Consumer Pop Detail#"
    yield format_row(*headings, "#ProcessQueueInfo", width=32)


def _format_rates(info: bodies.RunningInfo) -> Iterator[str]:
    """Yield a table of the rates and durations of a member, with a line for each topic."""
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


def reset_offset(session: Session, values: FlagValues) -> None:
    """Run `mqadmin resetOffsetByTime`: reset a group in a topic or in one queue.

    Flag `timestamp` is `now`, milliseconds since 1970, or a local time. One queue, given by a
    broker and a queue id, may also be reset to flag `offset`.
    """
    group = values["group"]
    topic = values["topic"]
    timestamp = values["timestamp"]
    time_ms = session.admin.clock.now_ms() if timestamp == "now" else java.parse_time(timestamp)
    intro = f"start reset consumer offset by specified, group[{group}], topic[{topic}]"
    time_text = f"timestamp(string)[{timestamp}], timestamp(long)[{time_ms}]"
    queue_id = values.get_int("queue", -1)
    is_one_queue = "broker" in values and queue_id >= 0
    if is_one_queue:
        broker = values["broker"]
        session.print_line(f"{intro}, queueId[{queue_id}], broker[{broker}], {time_text}")
        _reset_queue(session, values, queue_id, time_ms)
        return

    new_offsets = _reset_offsets(session, group, topic, time_ms)
    force = java.format_value(values.get_bool("force", True))
    session.print_line(f"{intro}, force[{force}], {time_text}")
    _print_offsets(session, new_offsets)


def _reset_queue(session: Session, values: FlagValues, queue_id: int, time_ms: int) -> None:
    """Reset a group in one queue: to the offset in flag `offset`, else to the time `time_ms`.

    Nothing is reset if the offset is 0.
    """
    topic = values["topic"]
    address = values["broker"]
    if "offset" in values:
        offset = values.get_int("offset")
    else:
        offset = session.admin.offset_by_time_at(address, topic, queue_id, time_ms)
    session.print_line(f"reset consumer offset to {offset}")
    if offset > 0:
        one_queue = (address, queue_id, offset)
        session.admin.request_offset_reset(values["group"], topic, time_ms, one_queue)


def skip_accumulated_messages(session: Session, values: FlagValues) -> None:
    """Run `mqadmin skipAccumulatedMessage`: reset a group behind the last message of each queue."""
    _print_offsets(session, _reset_offsets(session, values["group"], values["topic"], -1))


def _reset_offsets(
    session: Session, group: str, topic: str, time_ms: int
) -> dict[MessageQueue, int]:
    """Reset a group to a time of a topic, and return queue -> new offset.

    `time_ms` -1 means the end of the topic. If the brokers leave the reset to consumers and none is
    online, the new offsets are committed instead.
    """
    new_offsets = session.admin.request_offset_reset(group, topic, time_ms)
    if new_offsets:
        return new_offsets
    changes = session.admin.reset_offsets(group, topic, time_ms)
    return {change.queue: change.new for change in changes}


def _print_offsets(session: Session, offsets: dict[MessageQueue, int]) -> None:
    """Print a table of queues and their new offsets."""
    session.print_line("{:<40}  {:<40}  {:<40}".format("#brokerName", "#queueId", "#offset"))
    for queue, offset in sorted(offsets.items()):
        session.print_line(f"{queue.broker[:32]:<40}  {queue.queue_id:<40}  {offset:<40}")


def clone_offsets(session: Session, values: FlagValues) -> None:
    """Run `mqadmin cloneGroupOffset`: commit the offsets of one group for another group."""
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
