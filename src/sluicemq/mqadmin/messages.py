"""Messages: find, show, read through, send."""

from collections import Counter
from collections.abc import Iterator
from typing import Final

from sluicemq.errors import ConfigurationError, RequestError, SluiceError, TopicNotFoundError
from sluicemq.filter.subscriptions import subscribe, tag_matches
from sluicemq.model.message import KEYS, StoredMessage
from sluicemq.model.system_names import TRACE_TOPIC
from sluicemq.model.topic import MessageQueue
from sluicemq.model.trace_records import ConsumeTrace, SendTrace, decode_trace_records
from sluicemq.mqadmin import java
from sluicemq.mqadmin.commands import TEMPORARY, Given, Session
from sluicemq.mqadmin.groups import PUSH
from sluicemq.wire import bodies, tables
from sluicemq.wire.codes import ResponseCode

BODIES: Final = f"{TEMPORARY}/rocketmq/msgbodys"
TIME_MAX_MS: Final = (1 << 63) - 1
_HOUR_MS: Final = 3_600_000
_SENT: Final = "{:<32}  {:<4}  {:<20}    {}"
_TRACE: Final = "{:<10} {:<20} {:<20} {:<20} {:<10} {:<10}"


def show_message(
    session: Session,
    message: StoredMessage,
    *,
    by_place: bool = True,
    charset: str | None = None,
    bounds: tuple[int, int] | None = None,
) -> None:
    """All of one, where its body was put, and what became of it in each group."""
    path = session.save(BODIES, message.message_id, message.body_or_raw)
    fields = {
        "OffsetID": message.offset_message_id, "Topic": message.topic,
        "Tags": f"[{java.shown(message.tag)}]",
        "Keys": f"[{java.shown(message.properties.get(KEYS))}]", "Queue ID": message.queue_id,
        "Queue Offset": message.queue_offset, "CommitLog Offset": message.physical_offset,
        "Reconsume Times": message.reconsume_times,
        "Born Timestamp": java.time_text(message.born_time_ms),
        "Store Timestamp": java.time_text(message.store_time_ms), "Born Host": message.born_host,
        "Store Host": message.store_host, "System Flag": message.sys_flag,
        "Properties": java.shown(java.properties(message, bounds)), "Message Body Path": path,
    }  # fmt: skip
    if charset is not None:
        fields["Message Body"] = message.body_or_raw.decode(charset, "replace")
    if not by_place:
        del fields["OffsetID"]
    for name, value in fields.items():
        session.say(f"{name + ':':<20} {value}")
    tracks = list(_tracks(session, message))
    session.write("\n\n" + ("".join(tracks) if tracks else "WARN: No Consumer"))
    if tracks and by_place:
        session.say()


def _tracks(session: Session, message: StoredMessage) -> Iterator[str]:
    """What became of it in each group of its topic."""
    for group in tables.sort_keys_as_java(session.admin.groups_of_topic(message.topic)):
        kind, why = "UNKNOWN", None
        try:
            kind = _track(session, message, group)
        except TopicNotFoundError as error:
            why = f"org.apache.rocketmq.client.exception.MQClientException: CODE: {error.code}  "
            why += f"DESC: {error.remark}"
        except RequestError as error:
            kind = "NOT_ONLINE" if error.code == ResponseCode.CONSUMER_NOT_ONLINE else kind
            why = f"CODE:{error.code} DESC:{error.remark}"
        fields = {"consumerGroup": group, "trackType": kind, "exceptionDesc": why}
        yield java.record("MessageTrack", fields)


def _track(session: Session, message: StoredMessage, group: str) -> str:
    found = session.admin.group_connections(group)
    if found.consume_type != PUSH:
        return "PULL"
    if found.message_model == bodies.BROADCASTING:
        return "CONSUME_BROADCASTING"
    queue = MessageQueue(message.topic, message.broker, message.queue_id)
    reached = session.admin.consume_stats(group).queues.get(queue)
    if reached is None or reached.consumer_offset <= message.queue_offset:
        return "NOT_CONSUME_YET"
    wanted = found.subscriptions.get(message.topic)
    if wanted is None or not wanted.tags or tag_matches(wanted, message.tag):
        return "CONSUMED"
    return "CONSUMED_BUT_FILTERED"


def query_by_id(session: Session, given: Given) -> None:
    """By the ids of their brokers or of their producers; consumed by a client that is named, or
    sent again.
    """
    for message_id in filter(None, map(str.strip, given["msgId"].split(","))):
        if "consumerGroup" in given and "clientId" in given:
            _consume(session, given, message_id)
            continue
        message = session.admin.message_by_id(message_id, topic=given["topic"])
        if given.truth("sendMessage"):
            session.write(f"prepare resend msg. originalMsgId={message_id}")
            with session.make_producer() as producer:
                again = producer.send(
                    message.topic, message.body, tag=message.tag, keys=message.keys
                )
            session.write(java.send_result(again))
        else:
            show_message(session, message, charset=given.get("bodyFormat"))


def _consume(session: Session, given: Given, message_id: str) -> None:
    group, client_id = given["consumerGroup"], given["clientId"]
    info = session.admin.running_info(group, client_id)
    if info.properties.get("PROP_CONSUME_TYPE") != PUSH:
        session.say(f"this {client_id} client is not push consumer ,not support direct push ")
        return
    _, result = session.admin.consume_directly(message_id, group, client_id, topic=given["topic"])
    fields = {
        "order": result.is_ordered, "autoCommit": result.auto_commit,
        "consumeResult": result.result, "remark": result.remark,
        "spentTimeMills": result.spent_ms,
    }  # fmt: skip
    session.write(java.record("ConsumeMessageDirectlyResult", fields))


def query_by_key(session: Session, given: Given) -> None:
    """Those that bear a key."""
    topic, key = given["topic"], given["msgKey"]
    if given.get("keyType", "K") != "K":
        raise ConfigurationError(
            "tags have an index at brokers that keep it in RocksDB.",
            fix=f"Ask: sluice sql \"SELECT * FROM {topic} WHERE tags = '{key}'\".",
        )
    found = session.admin.messages_by_key(
        topic, key, begin_ms=given.number("beginTimestamp"),
        end_ms=given.number("endTimestamp", TIME_MAX_MS), count_max=given.number("maxNum", 64),
    )  # fmt: skip
    if not found:
        raise RequestError(
            ResponseCode.NO_MESSAGE, "query message by key finished, but no message."
        )
    row = "{:<50} {:>4} {:>40} {:<200}".format
    session.say(row("#Message ID", "#QID", "#Offset", "#IndexKey"))
    for message in found:
        hour_ms = message.store_time_ms // _HOUR_MS * _HOUR_MS
        index = f"{hour_ms}@{topic}@K@{key}@{message.message_id}@{message.physical_offset}"
        session.say(row(message.message_id, message.queue_id, message.queue_offset, index))


def query_by_unique_key(session: Session, given: Given) -> None:
    """By the id of its producer."""
    if "consumerGroup" in given and "clientId" in given:
        _consume(session, given, given["msgId"])
        return
    begin_ms, end_ms = given.number("startTime"), given.number("endTime", TIME_MAX_MS)
    found = session.admin.messages_with_id(given["topic"], given["msgId"])
    found = [one for one in found if begin_ms <= one.store_time_ms <= end_ms]
    found.sort(key=lambda message: message.store_time_ms)
    for message in found if "showAll" in given else found[:1]:
        show_message(session, message, by_place=False)


def query_by_offset(session: Session, given: Given) -> None:
    """The one at a place of a queue."""
    queue = MessageQueue(given["topic"], given["brokerName"], given.number("queueId"))
    offset = given.number("offset")
    for message in _read(session, queue, offset, offset + 1):
        bounds = session.admin.offsets(queue)
        show_message(session, message, charset=given.get("bodyFormat"), bounds=bounds)


def _read(session: Session, queue: MessageQueue, low: int, high: int) -> list[StoredMessage]:
    found: list[StoredMessage] = []

    def take(page: list[StoredMessage]) -> bool:
        found.extend(page)
        return True

    session.admin.read_range(queue, low, high, take)
    return found


def _bounds(session: Session, given: Given, queue: MessageQueue) -> tuple[int, int]:
    """First and next offset of what is asked for."""
    first, end = session.admin.offsets(queue)
    if "beginTimestamp" in given:
        time_ms = java.parse_time(given["beginTimestamp"])
        first = session.admin.offset_by_time(queue, time_ms)
    if "endTimestamp" in given:
        end = session.admin.offset_by_time(queue, java.parse_time(given["endTimestamp"]))
    return first, end


def _matching(
    session: Session, given: Given, queue: MessageQueue, low: int, high: int
) -> Iterator[StoredMessage]:
    wanted = subscribe(queue.topic, given.get("subExpression", "*"))
    for message in _read(session, queue, low, high):
        if wanted.is_everything or tag_matches(wanted, message.tag):
            yield message


def _line(session: Session, message: StoredMessage, given: Given, *, with_body: bool) -> None:
    body = message.body_or_raw.decode(given.get("charsetName", "UTF-8"), "replace")
    bounds = session.admin.offsets(MessageQueue(message.topic, message.broker, message.queue_id))
    text = java.message_text(message, bounds)
    shown = body if with_body else "NOT PRINT BODY"
    session.say(f"MSGID: {message.message_id} {text} BODY: {shown}")


def print_messages(session: Session, given: Given) -> None:
    """All of a topic."""
    for queue in session.admin.queues(given["topic"]):
        low, high = _bounds(session, given, queue)
        session.say(f"minOffset={low}, maxOffset={high}, {java.message_queue(queue)}")
        found = 0
        for message in _matching(session, given, queue, low, high):
            found += 1
            _line(session, message, given, with_body=given.truth("printBody", True))
        if low < high and not found:
            session.say(
                f"{java.message_queue(queue)} no matched msg. status=NO_MATCHED_MSG, offset={high}"
            )
        session.say("-" * 56)


def print_by_queue(session: Session, given: Given) -> None:
    """All of a queue, or how many of each tag."""
    queue = MessageQueue(given["topic"], given["brokerName"], given.number("queueId"))
    counts: Counter[str] = Counter()
    for message in _matching(session, given, queue, *_bounds(session, given, queue)):
        if message.tag:
            counts[message.tag] += 1
        if given.truth("print_msg"):
            _line(session, message, given, with_body=given.truth("printBody"))
    if given.truth("calculate"):
        for tag, count in counts.most_common():
            session.say(f"Tag: {tag:<30} Count: {count}")


def consume(session: Session, given: Given) -> None:
    """The oldest of a topic or of a queue, without a trace in offsets."""
    if "queueId" in given:
        if "brokerName" not in given:
            session.write("Please set the brokerName before queueId!")
            return
        queue = MessageQueue(given["topic"], given["brokerName"], given.number("queueId"))
        queues = [queue]
    else:
        queues = session.admin.queues(given["topic"])
    left = given.number("MessageNumber", 128)
    if left <= 0:
        session.write("Please input a positive messageNumber!")
    for queue in queues:
        if left > 0:
            left -= _consume_queue(session, given, queue, left)


def _consume_queue(session: Session, given: Given, queue: MessageQueue, left: int) -> int:
    """Prints so many of the oldest of a queue; how many they were."""
    low, high = _bounds(session, given, queue)
    low, name = max(low, given.number("offset")), java.message_queue(queue)
    if low > high:
        session.say(f"{name} no matched msg, offset={low}")
        return 0
    is_end = high - low <= left
    if not is_end:
        high = low + left
        older = f"The older {left} message of the {queue.queue_id} queue will be provided"
        of_one = f"The oldler {left} message will be provided"
        session.say(of_one if "queueId" in given else older)
    if low < high:
        session.say("Consume ok")
    for message in _read(session, queue, low, high):
        _line(session, message, given, with_body=True)
    if is_end:
        session.say(f"{name} print msg finished. status=NO_NEW_MSG, offset={high}")
    return high - low


def query_trace(session: Session, given: Given) -> None:
    """What clients have traced of a message."""
    wanted = given["msgId"]
    found = session.admin.messages_by_key(
        given.get("traceTopic", TRACE_TOPIC), wanted,
        begin_ms=given.number("beginTimestamp"),
        end_ms=given.number("endTimestamp", TIME_MAX_MS), count_max=given.number("maxNum", 64),
    )  # fmt: skip
    taken: dict[str, list[str]] = {}
    for message in found:
        host = str(message.born_host).rpartition(":")[0]
        for one in decode_trace_records(message.body_or_raw)[0]:
            if one.message_id != wanted or not isinstance(one, SendTrace | ConsumeTrace):
                continue
            kind = "Pub" if isinstance(one, SendTrace) else "Sub"
            status = "success" if one.success else "failed"
            time = java.second_text(one.time_ms or message.store_time_ms)
            line = _TRACE.format(kind, one.group or "", host, time, f"{one.cost_ms}ms", status)
            if kind == "Sub":
                taken.setdefault(one.group or "", []).append(line)
                continue
            session.say(_heading("#ProducerGroup", "#SendTime"))
            session.say(f"{line}\n")
    for lines in taken.values():
        session.say(_heading("#ConsumerGroup", "#ConsumerTime"))
        session.say("\n".join(lines) + "\n")


def _heading(group: str, time: str) -> str:
    return _TRACE.format("#Type", group, "#ClientHost", time, "#CostTimes", "#Status")


def query_queue(session: Session, given: Given) -> None:
    """Entries of a queue, and what a group's filter says to them."""
    topic = given["topic"]
    address = given.get("broker") or session.admin.current_route(topic).brokers[0].addresses[0]
    index = given.number("index")
    found = session.admin.queue_units(
        address, topic, given.number("queue"), index, given.number("count", 10),
        given.get("consumer"),
    )  # fmt: skip
    line = "=" * 38
    if found.subscription is not None:
        text = java.pretty(dict(sorted(bodies.subscription_object(found.subscription).items())))
        session.say(f"Subscription data: \n{text}\n{line}")
    if found.filter_text is not None:
        session.say(f"Filter data: \n{found.filter_text}\n{line}")
    session.say(f"Queue data: \nmax: {found.offset_max}, min: {found.offset_min}\n{line}")
    for number, unit in enumerate(found.units, start=index):
        fields = {
            "physicOffset": unit.physical_offset, "physicSize": unit.size_bytes,
            "tagsCode": unit.tag_code, "extendDataJson": "'null'", "bitMap": "'null'",
            "eval": unit.is_wanted, "msg": f"'{java.shown(unit.remark)}'",
        }  # fmt: skip
        record = java.record("ConsumeQueueData", fields, "{}")
        session.say(f"idx: {number}\n{record}\n{line}")


def send(session: Session, given: Given) -> None:
    """One."""
    queue = None
    if "qid" in given:
        if "broker" not in given:
            session.write("Broker name must be set if the queue is chosen!")
            return
        queue = MessageQueue(given["topic"], given["broker"], given.number("qid"))
    with session.make_producer() as producer:
        result = producer.send(
            given["topic"], given["body"], tag=given.get("tags"), keys=given.get("key", ()),
            queue=queue,
        )  # fmt: skip
    session.say(_SENT.format("#Broker Name", "#QID", "#Send Result", "#MsgId"))
    where = result.queue
    session.say(
        _SENT.format(where.broker, where.queue_id, java.send_status(result), result.message_id)
    )


def check_send_time(session: Session, given: Given) -> None:
    """How long a send to each queue in turn takes."""
    count, topic = given.number("amount", 100), given["topic"]
    body, total_ms, row = b"a" * given.number("size", 128), 0, _SENT
    session.say(row.format("#Broker Name", "#QID", "#Send Result", "#RT"))
    with session.make_producer() as producer:
        for index in range(count):
            queues = producer.write_queues(topic)
            queue = queues[index % len(queues)]
            begin_ms = producer.clock.now_ms()
            try:
                producer.send(topic, body, queue=queue)
                is_sent = True
            except SluiceError:
                is_sent = False
            spent_ms = producer.clock.now_ms() - begin_ms
            total_ms += spent_ms if index else 0
            session.say(row.format(queue.broker, queue.queue_id, java.shown(is_sent), spent_ms))
    session.say(f"Avg RT: {total_ms / max(count - 1, 1):.2f}")


def send_status(session: Session, given: Given) -> None:
    """How long sends to a broker's own topic take."""
    topic, body = given["brokerName"], b"hello jodie" * (given.number("messageSize", 128) // 11 + 1)
    with session.make_producer() as producer:
        producer.send(topic, body[:16])
        for _ in range(given.number("count", 50)):
            begin_ms = producer.clock.now_ms()
            result = producer.send(topic, body)
            spent_ms = producer.clock.now_ms() - begin_ms
            session.say(f"rt={spent_ms}ms, SendResult={java.send_result(result)}")


def cluster_send_time(session: Session, given: Given) -> None:
    """The same for every broker, again and again until somebody stops it."""
    count, body = given.number("amount", 100), b"a" * given.number("size", 128)
    as_log, room = given.truth("print_log"), given.get("machine_room", "noname")
    row = "{:<24}  {:<24}  {:<8}  {:<16}  {:<16}".format
    if not as_log:
        session.say(
            "{:<24}  {:<24}  {:<4}  {:<8}  {:<8}".format(
                "#Cluster Name", "#Broker Name", "#RT", "#successCount", "#failCount"
            )
        )
    with session.make_producer() as producer:
        while True:
            known = session.admin.cluster_info().clusters
            wanted = given.get("cluster")
            if wanted is not None and wanted not in known:
                session.write(f"cluster [{wanted}] not exist")
                return
            for cluster in [wanted] if wanted is not None else known:
                for broker in known[cluster]:
                    spent_ms, good = 0, 0
                    for index in range(count):
                        begin_ms = producer.clock.now_ms()
                        try:
                            producer.send(broker, body)
                            good += 1
                        except SluiceError:
                            pass  # counted
                        spent_ms += producer.clock.now_ms() - begin_ms if index else 0
                    mean = spent_ms / max(count - 1, 1)
                    now = java.second_text(producer.clock.now_ms())
                    session.say(
                        f"{now}|{room}|{cluster}|{broker}|{mean:.0f}"
                        if as_log
                        else row(cluster, broker, f"{mean:.2f}", good, count - good)
                    )
            producer.sleep(given.number("interval", 10))
