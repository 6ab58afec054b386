"""Consumer groups and who is connected: make, change, list, show; how far they are."""

import contextlib
from collections.abc import Iterator
from typing import Final

from sluicemq.errors import RequestError, SluiceError
from sluicemq.model.system_names import is_retry_topic
from sluicemq.model.topic import DLQ_PREFIX, RETRY_PREFIX, GroupConfig, MessageQueue
from sluicemq.mqadmin import java
from sluicemq.mqadmin.commands import Given, Session
from sluicemq.mqadmin.topics import parse_attributes, read_list
from sluicemq.wire import bodies, fastjson, tables
from sluicemq.wire.codes import ResponseCode

PUSH: Final = "CONSUME_PASSIVELY"
_PROGRESS: Final = "{:<64}  {:<32}  {:<4}  {:<20}  {:<20}  {}{:<20} {:<20}{}"
_GROUPS: Final = "{:<64}  {:<6}  {:<24} {:<5}  {:<14}  {:<7}  {}"
_BLOCKED_MS: Final = 60_000
_SETTLED_MS: Final = 120_000


def update_group(session: Session, given: Given) -> None:
    """One, on a broker or on all masters of a cluster."""
    changes = parse_attributes(given.get("attributes", ""))
    policy = given.get("groupRetryPolicy")
    config = GroupConfig(
        given["groupName"],
        given.truth("consumeEnable", True),
        given.truth("consumeFromMinEnable"),
        given.truth("consumeBroadcastEnable"),
        given.truth("consumeMessageOrderly"),
        given.number("retryQueueNums", 1),
        given.number("retryMaxTimes", 16),
        given.number("brokerId"),
        given.number("whichBrokerWhenConsumeSlowly", 1),
        given.truth("notifyConsumerIdsChanged", True),
        attributes={f"-{k}" if v is None else f"+{k}": v or "" for k, v in changes.items()},
        retry_policy=None if policy is None else fastjson.loads(policy),
    )
    for address in session.addresses(given):
        session.admin.put_groups(address, [config])
        session.say(f"create subscription group to {address} success.")
    session.write(java.record("SubscriptionGroupConfig", java.group_fields(config), "{}"))


def update_group_list(session: Session, given: Given) -> None:
    """Those of a file."""
    values = read_list(session, given)
    configs = [tables.group_from(value, "group") for value in values or ()]
    of_cluster = "" if "brokerAddr" in given else "subscription "
    for address in session.addresses(given) if configs else ():
        session.admin.put_groups(address, configs)
        session.say(
            f"submit batch of {of_cluster}group config to {address} success, please check the "
            "result later."
        )


def set_consume_mode(session: Session, given: Given) -> None:
    """PULL or POP."""
    topic, group, mode = given["topicName"], given["groupName"], given["mode"]
    share = given.number("popShareQueueNum")
    for address in session.addresses(given):
        session.admin.set_request_mode(address, tables.RequestMode(topic, group, mode, share))
        session.say(f"set consume mode to {address} success.")
    session.write(f"topic[{topic}] group[{group}] consume mode[{mode}] popShareQueueNum[{share}]")


def delete_group(session: Session, given: Given) -> None:
    """From a broker; from a cluster with its retry and dead-letter topics."""
    group = given["groupName"]
    cluster = f" in cluster [{given.get('clusterName')}]" if "brokerAddr" not in given else ""
    for address in session.addresses(given):
        clean = given.truth("removeOffset")
        session.admin.delete_group(address, group, clean_offset=clean)
        session.say(
            f"delete subscription group [{group}] from broker [{address}]{cluster} success."
        )
    if cluster:
        for prefix in (RETRY_PREFIX, DLQ_PREFIX):
            session.admin.delete_topic(prefix + group, cluster=given["clusterName"])


def group_settings(session: Session, given: Given) -> None:
    """As each broker keeps them."""
    for name, data in session.admin.cluster_info().brokers.items():
        address = next(iter(data.addresses.values()))
        config = session.admin.group_table(address).groups.get(given["groupName"])
        if config is None:
            continue
        line = "=" * 29
        session.say(f"{line}{data.cluster}:{name}{line}")
        for key, value in java.group_fields(config).items():
            session.say(f"{key:<40}=  {'' if value is None else java.shown(value)}")


def consumer_connection(session: Session, given: Given) -> None:
    """Members and subscriptions."""
    found = session.admin.group_connections(given["consumerGroup"], given.get("brokerAddr"))
    row = "{:<36} {:<22} {:<10} {}".format
    session.say(row("#ClientId", "#ClientAddr", "#Language", "#Version"))
    for one in found.connections:
        session.say(row(one.client_id, one.address, one.language, java.version(one.version)))
    session.say("\nBelow is subscription:")
    session.say(f"{'#Topic':<20} #SubExpression")
    for subscription in found.subscriptions.values():
        session.say(f"{subscription.topic:<20} {subscription.expression}")
    session.say(f"\nConsumeType: {found.consume_type}")
    session.say(f"MessageModel: {found.message_model}")
    session.say(f"ConsumeFromWhere: {found.consume_from_where}")


def producer_connection(session: Session, given: Given) -> None:
    """The producers of a group."""
    found = session.admin.producer_connections(given["producerGroup"], given["topic"])
    for index, one in enumerate(found, start=1):
        version = java.version(one.version)
        session.say(
            f"{index:04}  {one.client_id:<32} {one.address:<22} {one.language:<8} {version}"
        )


def producers(session: Session, given: Given) -> None:
    """All that a broker knows."""
    for group, ones in tables.sort_map_as_java(session.admin.producers(given["broker"])).items():
        for one in ones:
            text = ", ".join(f"{key}={one[key]}" for key in ("language", "version"))
            session.say(
                f"producer group ({group}) instance : clientId={one['clientId']},"
                f"remoteIP={one['remoteIP']}, {text}, lastUpdateTimestamp="
                f"{one['lastUpdateTimestamp']}"
            )


def consumer_progress(session: Session, given: Given) -> None:
    """Of all groups, or each queue of one."""
    if "groupName" not in given:
        _all_groups(session)
        return
    group = given["groupName"]
    stats = consume_stats(session, group, given.get("topicName"))
    show_client = given.truth("showClientIP")
    readers = _readers(session, group) if show_client else {}

    def client(text: str) -> str:
        return f"{text:<20} " if show_client else ""

    session.say(
        _PROGRESS.format(
            "#Topic", "#Broker Name", "#QID", "#Broker Offset", "#Consumer Offset",
            client("#Client IP"), "#Diff", "#Inflight", "#LastTime",
        )
    )  # fmt: skip
    total = in_flight = 0
    for queue, own in stats.queues.items():
        diff, flying = (
            own.broker_offset - own.consumer_offset,
            own.pull_offset - own.consumer_offset,
        )
        total, in_flight = total + diff, in_flight + flying
        session.say(
            _PROGRESS.format(
                queue.topic[:64], queue.broker[:32], queue.queue_id, own.broker_offset,
                own.consumer_offset, client(readers.get(queue, "N/A")), diff, flying,
                f" {java.second_text(own.last_time_ms) if own.last_time_ms else 'N/A'}",
            )
        )  # fmt: skip
    session.say()
    session.say(f"Consume TPS: {stats.consumes_per_second:.2f}")
    session.say(f"Consume Diff Total: {total}")
    session.say(f"Consume Inflight Total: {in_flight}")


def consume_stats(session: Session, group: str, topic: str | None) -> bodies.ConsumeStats:
    """How far a group is. Raises RequestError with code 206 where nothing is known and nobody is
    online.
    """
    stats = session.admin.consume_stats(group, topic)
    if not stats.queues:
        what = "Not found the consumer group consume stats, because return offset table is empty, "
        with contextlib.suppress(SluiceError):
            connections = session.admin.group_connections(group)
            if connections.message_model == bodies.BROADCASTING:
                raise RequestError(2002, f"{what}the consumer is under the broadcast mode")
            return stats
        raise RequestError(ResponseCode.CONSUMER_NOT_ONLINE, f"{what}maybe the consumer not online")
    return stats


def _readers(session: Session, group: str) -> dict[MessageQueue, str]:
    """Queue -> address of the member that reads it."""
    found: dict[MessageQueue, str] = {}
    for one in session.admin.group_connections(group).connections:
        with contextlib.suppress(SluiceError):
            for queue in session.admin.running_info(group, one.client_id).queues:
                found[queue] = one.client_id.partition("@")[0]
    return found


def _all_groups(session: Session) -> None:
    session.say(
        _GROUPS.format("#Group", "#Count", "#Version", "#Type", "#Model", "#TPS", "#Diff Total")
    )
    for topic in tables.sort_keys_as_java(session.admin.topics()):
        if not is_retry_topic(topic):
            continue
        group = topic.removeprefix(RETRY_PREFIX)
        rate, diff, cells = 0, 0, [0, "OFFLINE", "", ""]
        with contextlib.suppress(SluiceError):
            stats = session.admin.consume_stats(group)
            rate = int(stats.consumes_per_second)
            diff = sum(o.broker_offset - o.consumer_offset for o in stats.queues.values())
        with contextlib.suppress(SluiceError):
            found = session.admin.group_connections(group)
            is_push = found.consume_type == PUSH
            cells = [
                len(found.connections),
                java.version(min(one.version for one in found.connections)),
                "PUSH" if is_push else "PULL",
                found.message_model if is_push else "",
            ]
        session.say(_GROUPS.format(group[:64], *cells, rate, diff))


def consumer_status(session: Session, given: Given) -> None:
    """What members are and do: of each a file, of one on the screen."""
    group, stack = given["consumerGroup"], "jstack" in given
    found = session.admin.group_connections(group, given.get("brokerAddr"))
    if (client_id := given.get("clientId")) is not None:
        info = session.admin.running_info(group, client_id, stack=stack)
        session.write("".join(f"{line}\n" for line in running_lines(info)))
        return
    now_ms = session.admin.clock.now_ms()
    row = "{:<10} {:<40} {:<20} {}".format
    session.say(row("#Index", "#ClientId", "#Version", "#ConsumerRunningInfoFile"))
    known: dict[str, bodies.RunningInfo] = {}
    for one in found.connections:
        info = session.admin.running_info(group, one.client_id, stack=stack)
        text = "".join(f"{line}\n" for line in running_lines(info))
        path = session.save(str(now_ms), one.client_id, text.encode())
        known[one.client_id] = info
        session.say(row(len(known), one.client_id, java.version(one.version), path))
    if not known:
        return
    if _is_unequal(known, now_ms):
        session.write("\n\nWARN: Different subscription in the same group of consumer!!!")
        return
    session.write("\n\nSame subscription in the same group of consumer\n\nRebalance OK\n")
    for client_id, info in sorted(known.items()):
        for line in _troubles(client_id, info, now_ms):
            session.say(line)


def _is_unequal(known: dict[str, bodies.RunningInfo], now_ms: int) -> bool:
    """Whether members that push and have run for a while want different things."""
    first = known[min(known)]
    began_ms = int(first.properties.get("PROP_CONSUMER_START_TIMESTAMP", "0"))
    is_settled = now_ms - began_ms > _SETTLED_MS
    wanted = {
        frozenset((one.topic, one.expression, one.kind) for one in info.subscriptions)
        for info in known.values()
    }
    return first.properties.get("PROP_CONSUME_TYPE") == PUSH and is_settled and len(wanted) > 1


def _troubles(client_id: str, info: bodies.RunningInfo, now_ms: int) -> Iterator[str]:
    """Queues that a member has and does not get on with."""
    if info.properties.get("PROP_CONSUME_TYPE") != PUSH:
        return
    is_ordered = info.properties.get("PROP_CONSUMEORDERLY") == "true"
    for queue, state in info.queues.items():
        who, idle_ms = f"{client_id} {java.message_queue(queue)}", now_ms - state.last_consume_ms
        if is_ordered and not state.locked:
            yield f"{who} can't lock for a while, {now_ms - state.last_lock_ms}ms"
        elif not is_ordered and idle_ms > _BLOCKED_MS and state.cached_count > 0:
            yield f"{who} can't consume for a while, maybe blocked, {idle_ms}ms"


def running_lines(info: bodies.RunningInfo) -> Iterator[str]:
    """A member's own word of itself."""
    yield "#Consumer Properties#"
    for key, value in info.properties.items():
        yield f"{key:<40}: {value}"
    yield "\n\n#Consumer Subscription#"
    for number, one in enumerate(info.subscriptions, start=1):
        yield (
            f"{number:03} Topic: {one.topic:<40} ClassFilter: {'false':<8} "
            f"SubExpression: {one.expression}"
        )
    row = "{:<{width}}  {:<32}  {:<4}  {:<20}".format
    for title, heading, width in (
        ("Offset", "#Consumer Offset", 32), ("MQ Detail", "#ProcessQueueInfo", 64),
        ("Pop Detail", "#ProcessQueueInfo", 32),
    ):  # fmt: skip
        yield f"\n\n#Consumer {title}#"
        wide = 32 if title == "Pop Detail" else 64
        yield row("#Topic", "#Broker Name", "#QID", heading, width=wide)
        for queue, state in info.queues.items() if title != "Pop Detail" else ():
            shown = state.commit_offset if title == "Offset" else java.process_queue(state)
            yield row(queue.topic, queue.broker, queue.queue_id, shown, width=width)
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


def reset_offset(session: Session, given: Given) -> None:
    """To a time; one queue of a broker to an offset."""
    group, topic, text = given["group"], given["topic"], given["timestamp"]
    time_ms = session.admin.clock.now_ms() if text == "now" else java.parse_time(text)
    begin = f"start reset consumer offset by specified, group[{group}], topic[{topic}], "
    end = f"timestamp(string)[{text}], timestamp(long)[{time_ms}]"
    queue_id = given.number("queue", -1)
    if "broker" in given and queue_id >= 0:
        address = given["broker"]
        session.say(f"{begin}queueId[{queue_id}], broker[{address}], {end}")
        if "offset" in given:
            offset = given.number("offset")
        else:
            offset = session.admin.offset_by_time_at(address, topic, queue_id, time_ms)
        session.say(f"reset consumer offset to {offset}")
        if offset > 0:
            session.admin.request_offset_reset(group, topic, time_ms, (address, queue_id, offset))
        return
    moved = _moved(session, group, topic, time_ms)
    force = java.shown(given.truth("force", True))
    session.say(f"{begin}force[{force}], {end}")
    _say_moved(session, moved)


def skip_accumulated(session: Session, given: Given) -> None:
    """Behind the last message."""
    _say_moved(session, _moved(session, given["group"], given["topic"], -1))


def _moved(session: Session, group: str, topic: str, time_ms: int) -> dict[MessageQueue, int]:
    moved = session.admin.request_offset_reset(group, topic, time_ms)
    if moved:
        return moved
    return {one.queue: one.new for one in session.admin.reset_offsets(group, topic, time_ms)}


def _say_moved(session: Session, moved: dict[MessageQueue, int]) -> None:
    session.say("{:<40}  {:<40}  {:<40}".format("#brokerName", "#queueId", "#offset"))
    for queue, offset in sorted(moved.items()):
        session.say(f"{queue.broker[:32]:<40}  {queue.queue_id:<40}  {offset:<40}")


def clone_offset(session: Session, given: Given) -> None:
    """The offsets of one group for another."""
    source, target, topic = given["srcGroup"], given["destGroup"], given["topic"]
    stats = session.admin.consume_stats(source)
    session.admin.current_route(topic)
    for queue, own in stats.queues.items():
        if own.consumer_offset >= 0:
            session.admin.commit_offset(target, queue, own.consumer_offset)
    session.write(
        f"clone group offset success. srcGroup[{source}], destGroup=[{target}], topic[{topic}]"
    )
