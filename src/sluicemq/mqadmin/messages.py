"""Commands that find, print, consume and send messages, and that measure sends."""

from collections import Counter
from collections.abc import Iterator
from typing import Final

from sluicemq.client.sync.producer import Producer
from sluicemq.errors import ConfigurationError, RequestError, SluiceError, TopicNotFoundError
from sluicemq.filter.subscriptions import parse_subscription, tag_matches
from sluicemq.model.message import KEYS, StoredMessage
from sluicemq.model.system_names import TRACE_TOPIC
from sluicemq.model.topic import MessageQueue
from sluicemq.model.trace_records import ConsumeTrace, SendTrace, decode_trace_records
from sluicemq.mqadmin import java
from sluicemq.mqadmin.commands import TEMPORARY_DIRECTORY, FlagValues, Session
from sluicemq.mqadmin.groups import PUSH_TYPE
from sluicemq.wire import bodies, tables
from sluicemq.wire.codes import ResponseCode

BODY_DIRECTORY: Final = f"{TEMPORARY_DIRECTORY}/rocketmq/msgbodys"
"""Where the body of each printed message is written."""

TIME_MAX_MS: Final = (1 << 63) - 1
"""The end of a range of times without flag: the largest 64-bit integer, as in RocketMQ's tool."""

_BAR: Final = "=" * 38
_HOUR_MS: Final = 3_600_000
_SEND_ROW: Final = "{:<32}  {:<4}  {:<20}    {}"
_TRACE_ROW: Final = "{:<10} {:<20} {:<20} {:<20} {:<10} {:<10}"


def print_message(
    session: Session,
    message: StoredMessage,
    *,
    with_offset_id: bool = True,
    charset: str | None = None,
    bounds: tuple[int, int] | None = None,
) -> None:
    """Print all fields of a message, and what each group of its topic has done with it.

    The body is written to a file in `BODY_DIRECTORY`. It is also printed, decoded by `charset`,
    unless that is None. `with_offset_id` False leaves out the id that the broker made. `bounds` are
    the first and the next offset of the queue, which are printed as properties; None leaves them
    out.
    """
    path = session.save_file(BODY_DIRECTORY, message.message_id, message.body_or_raw)
    fields = _label_fields(message, bounds)
    fields["Message Body Path"] = path
    if charset is not None:
        fields["Message Body"] = message.body_or_raw.decode(charset, "replace")
    if not with_offset_id:
        del fields["OffsetID"]
    for label, field in fields.items():
        session.print_line(f"{label + ':':<20} {field}")

    tracks = "".join(_format_tracks(session, message))
    session.write("\n\n" + (tracks or "WARN: No Consumer"))
    if tracks and with_offset_id:
        session.print_line()


def _label_fields(message: StoredMessage, bounds: tuple[int, int] | None) -> dict[str, object]:
    """Return label -> field of a message, with the labels of RocketMQ's tool, in its order.

    `bounds`, the first and the next offset of the queue, are added to the properties; None adds
    nothing.
    """
    return {
        "OffsetID": message.offset_message_id,
        "Topic": message.topic,
        "Tags": f"[{java.format_value(message.tag)}]",
        "Keys": f"[{java.format_value(message.properties.get(KEYS))}]",
        "Queue ID": message.queue_id,
        "Queue Offset": message.queue_offset,
        "CommitLog Offset": message.physical_offset,
        "Reconsume Times": message.reconsume_times,
        "Born Timestamp": java.format_time(message.born_time_ms),
        "Store Timestamp": java.format_time(message.store_time_ms),
        "Born Host": message.born_host,
        "Store Host": message.store_host,
        "System Flag": message.sys_flag,
        "Properties": java.format_value(java.message_properties(message, bounds)),
    }


def _format_tracks(session: Session, message: StoredMessage) -> Iterator[str]:
    """Yield a text `MessageTrack [...]` for each group: whether it has consumed the message."""
    for group in tables.sort_keys_as_java(session.admin.groups_of_topic(message.topic)):
        track_type = "UNKNOWN"
        reason = None
        try:
            track_type = _find_track_type(session, message, group)
        except TopicNotFoundError as error:
            reason = f"org.apache.rocketmq.client.exception.MQClientException: CODE: {error.code}  "
            reason += f"DESC: {error.remark}"
        except RequestError as error:
            if error.code == ResponseCode.CONSUMER_NOT_ONLINE:
                track_type = "NOT_ONLINE"
            reason = f"CODE:{error.code} DESC:{error.remark}"
        fields = {"consumerGroup": group, "trackType": track_type, "exceptionDesc": reason}
        yield java.format_object("MessageTrack", fields)


def _find_track_type(session: Session, message: StoredMessage, group: str) -> str:
    """Return how far a group is with a message: CONSUMED, NOT_CONSUME_YET or another word.

    The words are those of RocketMQ's `TrackType`. Raises TopicNotFoundError if the group has no
    retry topic, RequestError if it has no members.
    """
    connections = session.admin.group_connections(group)
    if connections.consume_type != PUSH_TYPE:
        return "PULL"
    if connections.message_model == bodies.BROADCASTING:
        return "CONSUME_BROADCASTING"
    queue = MessageQueue(message.topic, message.broker, message.queue_id)
    offsets = session.admin.consume_stats(group).queues.get(queue)
    if offsets is None or offsets.consumer_offset <= message.queue_offset:
        return "NOT_CONSUME_YET"

    subscription = connections.subscriptions.get(message.topic)
    if subscription is None or not subscription.tags:
        return "CONSUMED"
    is_delivered = tag_matches(subscription, message.tag)
    return "CONSUMED" if is_delivered else "CONSUMED_BUT_FILTERED"


def query_by_id(session: Session, values: FlagValues) -> None:
    """Run `mqadmin queryMsgById`: print messages by their message ids or offset message ids.

    With the flags `consumerGroup` and `clientId`, that client processes each message instead. With
    `sendMessage`, each message is sent again instead.
    """
    for message_id in filter(None, map(str.strip, values["msgId"].split(","))):
        if "consumerGroup" in values and "clientId" in values:
            _consume_directly(session, values, message_id)
            continue
        message = session.admin.message_by_id(message_id, topic=values["topic"])
        if values.get_bool("sendMessage"):
            session.write(f"prepare resend msg. originalMsgId={message_id}")
            with session.make_producer() as producer:
                send_result = producer.send(
                    message.topic, message.body, tag=message.tag, keys=message.keys
                )
            session.write(java.format_send_result(send_result))
        else:
            print_message(session, message, charset=values.get("bodyFormat"))


def _consume_directly(session: Session, values: FlagValues, message_id: str) -> None:
    """Let the client in flag `clientId` process a message now, and print the result.

    If it is not a push consumer, only that is printed.
    """
    group = values["consumerGroup"]
    client_id = values["clientId"]
    running_info = session.admin.running_info(group, client_id)
    if running_info.properties.get("PROP_CONSUME_TYPE") != PUSH_TYPE:
        session.print_line(
            f"this {client_id} client is not push consumer ,not support direct push "
        )
        return
    _, handler_result = session.admin.consume_directly(
        message_id, group, client_id, topic=values["topic"]
    )
    fields = {
        "order": handler_result.is_ordered,
        "autoCommit": handler_result.auto_commit,
        "consumeResult": handler_result.result,
        "remark": handler_result.remark,
        "spentTimeMills": handler_result.spent_ms,
    }
    session.write(java.format_object("ConsumeMessageDirectlyResult", fields))


def query_by_key(session: Session, values: FlagValues) -> None:
    """Run `mqadmin queryMsgByKey`: print a line for each message of a topic with a key.

    Raises ConfigurationError for a key type other than `K`, RequestError if there is no message.
    """
    topic = values["topic"]
    key = values["msgKey"]
    if values.get("keyType", "K") != "K":
        raise ConfigurationError(
            "messages can be queried by keys only; brokers that use RocksDB also index tags.",
            fix=f"Run: sluice sql \"SELECT * FROM {topic} WHERE tags = '{key}'\".",
        )
    messages = session.admin.messages_by_key(
        topic,
        key,
        begin_ms=values.get_int("beginTimestamp"),
        end_ms=values.get_int("endTimestamp", TIME_MAX_MS),
        count_max=values.get_int("maxNum", 64),
    )
    if not messages:
        raise RequestError(
            ResponseCode.NO_MESSAGE, "query message by key finished, but no message."
        )
    format_row = "{:<50} {:>4} {:>40} {:<200}".format
    session.print_line(format_row("#Message ID", "#QID", "#Offset", "#IndexKey"))
    for message in messages:
        hour_ms = message.store_time_ms // _HOUR_MS * _HOUR_MS
        index_key = f"{hour_ms}@{topic}@K@{key}@{message.message_id}@{message.physical_offset}"
        session.print_line(
            format_row(message.message_id, message.queue_id, message.queue_offset, index_key)
        )


def query_by_unique_key(session: Session, values: FlagValues) -> None:
    """Run `mqadmin queryMsgByUniqueKey`: print the oldest message with a producer's message id.

    Only messages stored from flag `startTime` to flag `endTime` count (milliseconds since 1970,
    both included); the defaults are 0 and `TIME_MAX_MS`. With flag `showAll` (`-a`), all of these
    messages are printed, the oldest first. If there is none, nothing is printed.

    With the flags `consumerGroup` and `clientId`, nothing of this happens: that client processes
    the message, and the result is printed.
    """
    message_id = values["msgId"]
    if "consumerGroup" in values and "clientId" in values:
        _consume_directly(session, values, message_id)
        return

    begin_ms = values.get_int("startTime")
    end_ms = values.get_int("endTime", TIME_MAX_MS)
    messages_in_range = [
        message
        for message in session.admin.messages_with_id(values["topic"], message_id)
        if begin_ms <= message.store_time_ms <= end_ms
    ]
    messages_in_range.sort(key=lambda message: message.store_time_ms)

    show_all = "showAll" in values
    messages_to_print = messages_in_range if show_all else messages_in_range[:1]
    for message in messages_to_print:
        print_message(session, message, with_offset_id=False)


def query_by_offset(session: Session, values: FlagValues) -> None:
    """Run `mqadmin queryMsgByOffset`: print the message at an offset of a queue."""
    queue = MessageQueue(values["topic"], values["brokerName"], values.get_int("queueId"))
    offset = values.get_int("offset")
    for message in _read_range(session, queue, offset, offset + 1):
        bounds = session.admin.offsets(queue)
        print_message(session, message, charset=values.get("bodyFormat"), bounds=bounds)


def _read_range(session: Session, queue: MessageQueue, low: int, high: int) -> list[StoredMessage]:
    """Return the messages of a queue from offset `low` to `high` (exclusive)."""
    messages: list[StoredMessage] = []

    def add_page(page: list[StoredMessage]) -> bool:
        messages.extend(page)
        return True  # read the next page

    session.admin.read_range(queue, low, high, add_page)
    return messages


def _find_requested_range(
    session: Session, values: FlagValues, queue: MessageQueue
) -> tuple[int, int]:
    """Return (first offset, offset after the last) of the messages that the flags select by time.

    The flags are `beginTimestamp` and `endTimestamp`. Without them, the range is the whole queue.
    """
    low, high = session.admin.offsets(queue)
    if "beginTimestamp" in values:
        begin_ms = java.parse_time(values["beginTimestamp"])
        low = session.admin.offset_by_time(queue, begin_ms)
    if "endTimestamp" in values:
        end_ms = java.parse_time(values["endTimestamp"])
        high = session.admin.offset_by_time(queue, end_ms)
    return low, high


def _read_matching_messages(
    session: Session, values: FlagValues, queue: MessageQueue, low: int, high: int
) -> Iterator[StoredMessage]:
    """Yield the messages from offset `low` to `high` (exclusive) with a tag that matches.

    The tags are in flag `subExpression`; by default all messages match.
    """
    subscription = parse_subscription(queue.topic, values.get("subExpression", "*"))
    for message in _read_range(session, queue, low, high):
        if subscription.is_everything or tag_matches(subscription, message.tag):
            yield message


def _print_message_line(
    session: Session, message: StoredMessage, values: FlagValues, *, with_body: bool
) -> None:
    """Print a message with all fields on one line, with or without its body.

    The body is decoded by the charset in flag `charsetName`, by default UTF-8.
    """
    body = message.body_or_raw.decode(values.get("charsetName", "UTF-8"), "replace")
    bounds = session.admin.offsets(MessageQueue(message.topic, message.broker, message.queue_id))
    message_text = java.format_message(message, bounds)
    body_text = body if with_body else "NOT PRINT BODY"
    session.print_line(f"MSGID: {message.message_id} {message_text} BODY: {body_text}")


def print_messages(session: Session, values: FlagValues) -> None:
    """Run `mqadmin printMsg`: print the messages of a topic, queue by queue."""
    for queue in session.admin.queues(values["topic"]):
        low, high = _find_requested_range(session, values, queue)
        session.print_line(f"minOffset={low}, maxOffset={high}, {java.format_queue(queue)}")
        count = 0
        for message in _read_matching_messages(session, values, queue, low, high):
            count += 1
            _print_message_line(
                session, message, values, with_body=values.get_bool("printBody", True)
            )
        if low < high and not count:
            session.print_line(
                f"{java.format_queue(queue)} no matched msg. status=NO_MATCHED_MSG, offset={high}"
            )
        session.print_line("-" * 56)


def print_queue_messages(session: Session, values: FlagValues) -> None:
    """Run `mqadmin printMsgByQueue`: print the messages of a queue, or count their tags.

    Flag `print_msg` prints messages, and flag `calculate` the number of messages with each tag.
    """
    queue = MessageQueue(values["topic"], values["brokerName"], values.get_int("queueId"))
    counts: Counter[str] = Counter()
    low, high = _find_requested_range(session, values, queue)
    for message in _read_matching_messages(session, values, queue, low, high):
        if message.tag:
            counts[message.tag] += 1
        if values.get_bool("print_msg"):
            _print_message_line(session, message, values, with_body=values.get_bool("printBody"))
    if values.get_bool("calculate"):
        for tag, count in counts.most_common():
            session.print_line(f"Tag: {tag:<30} Count: {count}")


def consume_messages(session: Session, values: FlagValues) -> None:
    """Run `mqadmin consumeMessage`: print the oldest messages of a topic or a queue.

    No offsets are committed.
    """
    if "queueId" in values:
        if "brokerName" not in values:
            session.write("Please set the brokerName before queueId!")
            return
        queue = MessageQueue(values["topic"], values["brokerName"], values.get_int("queueId"))
        queues = [queue]
    else:
        queues = session.admin.queues(values["topic"])
    count_max = values.get_int("MessageNumber", 128)
    if count_max <= 0:
        session.write("Please input a positive messageNumber!")
    for queue in queues:
        if count_max > 0:
            count_max -= _print_oldest(session, values, queue, count_max)


def _print_oldest(session: Session, values: FlagValues, queue: MessageQueue, count_max: int) -> int:
    """Print up to `count_max` messages of a queue, from its beginning or from flag `offset`.

    Returns the number of offsets that were read.
    """
    low, high = _find_requested_range(session, values, queue)
    low = max(low, values.get_int("offset"))
    name = java.format_queue(queue)
    if low > high:
        session.print_line(f"{name} no matched msg, offset={low}")
        return 0

    reaches_end = high - low <= count_max
    if not reaches_end:
        high = low + count_max
        if "queueId" in values:  # "oldler" as RocketMQ spells it
            session.print_line(f"The oldler {count_max} message will be provided")
        else:
            session.print_line(
                f"The older {count_max} message of the {queue.queue_id} queue will be provided"
            )
    if low < high:
        session.print_line("Consume ok")
    for message in _read_range(session, queue, low, high):
        _print_message_line(session, message, values, with_body=True)
    if reaches_end:
        session.print_line(f"{name} print msg finished. status=NO_NEW_MSG, offset={high}")
    return high - low


def query_trace(session: Session, values: FlagValues) -> None:
    """Run `mqadmin queryMsgTraceById`: print the trace records of a message.

    Records of its producers come first, then those of its consumers, group by group.
    """
    message_id = values["msgId"]
    trace_messages = session.admin.messages_by_key(
        values.get("traceTopic", TRACE_TOPIC),
        message_id,
        begin_ms=values.get_int("beginTimestamp"),
        end_ms=values.get_int("endTimestamp", TIME_MAX_MS),
        count_max=values.get_int("maxNum", 64),
    )
    consumer_lines_by_group: dict[str, list[str]] = {}
    for trace_message in trace_messages:
        records, _unreadable_count = decode_trace_records(trace_message.body_or_raw)
        for record in records:
            if record.message_id != message_id:
                continue
            if isinstance(record, SendTrace):
                session.print_line(_format_trace_heading("#ProducerGroup", "#SendTime"))
                session.print_line(f"{_format_trace_record('Pub', record, trace_message)}\n")
            elif isinstance(record, ConsumeTrace):
                line = _format_trace_record("Sub", record, trace_message)
                consumer_lines_by_group.setdefault(record.group or "", []).append(line)
    for lines in consumer_lines_by_group.values():
        session.print_line(_format_trace_heading("#ConsumerGroup", "#ConsumerTime"))
        session.print_line("\n".join(lines) + "\n")


def _format_trace_record(
    record_type: str, record: SendTrace | ConsumeTrace, trace_message: StoredMessage
) -> str:
    """Return the line of a trace record.

    `record_type` is "Pub" for a producer's record and "Sub" for a consumer's. `trace_message` is
    the message with the record; its store time is used if the record has no time.
    """
    host, _, _ = str(trace_message.born_host).rpartition(":")
    time = java.format_time_seconds(record.time_ms or trace_message.store_time_ms)
    status = "success" if record.success else "failed"
    duration = f"{record.cost_ms}ms"
    return _TRACE_ROW.format(record_type, record.group or "", host, time, duration, status)


def _format_trace_heading(group: str, time: str) -> str:
    """Return the heading of a table of trace records, with the headings of two columns."""
    return _TRACE_ROW.format("#Type", group, "#ClientHost", time, "#CostTimes", "#Status")


def query_consume_queue(session: Session, values: FlagValues) -> None:
    """Run `mqadmin queryCq`: print units of a consume queue.

    With flag `consumer`, also print the subscription of that group, and whether each unit matches
    it.
    """
    topic = values["topic"]
    address = values.get("broker") or session.admin.current_route(topic).brokers[0].addresses[0]
    first_offset = values.get_int("index")
    queue_data = session.admin.queue_units(
        address,
        topic,
        values.get_int("queue"),
        first_offset,
        values.get_int("count", 10),
        values.get("consumer"),
    )
    if queue_data.subscription is not None:
        subscription = bodies.subscription_object(queue_data.subscription)
        subscription_json = java.format_json(dict(sorted(subscription.items())))
        session.print_line(f"Subscription data: \n{subscription_json}\n{_BAR}")
    if queue_data.filter_text is not None:
        session.print_line(f"Filter data: \n{queue_data.filter_text}\n{_BAR}")
    session.print_line(
        f"Queue data: \nmax: {queue_data.offset_max}, min: {queue_data.offset_min}\n{_BAR}"
    )
    for offset, unit in enumerate(queue_data.units, start=first_offset):
        session.print_line(f"idx: {offset}\n{_format_unit(unit)}\n{_BAR}")


def _format_unit(unit: bodies.QueueUnit) -> str:
    """Return an entry of a consume queue as `ConsumeQueueData{…}`.

    An entry has 20 bytes: position, size and tag code of a message.
    """
    fields = {
        "physicOffset": unit.physical_offset,
        "physicSize": unit.size_bytes,
        "tagsCode": unit.tag_code,
        "extendDataJson": "'null'",
        "bitMap": "'null'",
        "eval": unit.is_wanted,
        "msg": f"'{java.format_value(unit.remark)}'",
    }
    return java.format_object("ConsumeQueueData", fields, "{}")


def send_message(session: Session, values: FlagValues) -> None:
    """Run `mqadmin sendMessage`: send a message, and print its queue and message id."""
    queue = None
    if "qid" in values:
        if "broker" not in values:
            session.write("Broker name must be set if the queue is chosen!")
            return
        queue = MessageQueue(values["topic"], values["broker"], values.get_int("qid"))
    with session.make_producer() as producer:
        send_result = producer.send(
            values["topic"],
            values["body"],
            tag=values.get("tags"),
            keys=values.get("key", ()),
            queue=queue,
        )
    session.print_line(_SEND_ROW.format("#Broker Name", "#QID", "#Send Result", "#MsgId"))
    session.print_line(
        _SEND_ROW.format(
            send_result.queue.broker,
            send_result.queue.queue_id,
            java.format_send_status(send_result),
            send_result.message_id,
        )
    )


def measure_queue_send_times(session: Session, values: FlagValues) -> None:
    """Run `mqadmin checkMsgSendRT`: send to each queue in turn, and print how long it took.

    The first send, which also connects, does not count in the mean.
    """
    send_count = values.get_int("amount", 100)
    topic = values["topic"]
    body = b"a" * values.get_int("size", 128)
    total_ms = 0
    session.print_line(_SEND_ROW.format("#Broker Name", "#QID", "#Send Result", "#RT"))
    with session.make_producer() as producer:
        for index in range(send_count):
            queues = producer.write_queues(topic)
            queue = queues[index % len(queues)]
            is_sent, spent_ms = _measure_send(producer, topic, body, queue)
            if index > 0:
                total_ms += spent_ms
            status = java.format_value(is_sent)
            session.print_line(_SEND_ROW.format(queue.broker, queue.queue_id, status, spent_ms))
    session.print_line(f"Avg RT: {total_ms / max(send_count - 1, 1):.2f}")


def _measure_send(
    producer: Producer, topic: str, body: bytes, queue: MessageQueue | None = None
) -> tuple[bool, int]:
    """Send `body` to `topic`, and return (whether it was sent, duration in ms).

    `queue` None means that the producer chooses the queue.
    """
    begin_ms = producer.clock.now_ms()
    try:
        producer.send(topic, body, queue=queue)
        is_sent = True
    except SluiceError:
        is_sent = False
    return is_sent, producer.clock.now_ms() - begin_ms


def measure_broker_send_times(session: Session, values: FlagValues) -> None:
    """Run `mqadmin sendMsgStatus`: send messages to one broker, and print how long each took.

    The topic is the system topic with the name of the broker.
    """
    topic = values["brokerName"]
    body = b"hello jodie" * (values.get_int("messageSize", 128) // 11 + 1)
    with session.make_producer() as producer:
        producer.send(topic, body[:16])
        for _ in range(values.get_int("count", 50)):
            begin_ms = producer.clock.now_ms()
            send_result = producer.send(topic, body)
            spent_ms = producer.clock.now_ms() - begin_ms
            session.print_line(
                f"rt={spent_ms}ms, SendResult={java.format_send_result(send_result)}"
            )


def measure_cluster_send_times(session: Session, values: FlagValues) -> None:
    """Run `mqadmin clusterRT`: send messages to each broker, and print the mean duration.

    The topic is the system topic with the name of the broker. This is repeated every `interval`
    seconds until it is interrupted.
    """
    send_count = values.get_int("amount", 100)
    body = b"a" * values.get_int("size", 128)
    as_log = values.get_bool("print_log")
    machine_room = values.get("machine_room", "noname")
    format_row = "{:<24}  {:<24}  {:<8}  {:<16}  {:<16}".format
    if not as_log:
        session.print_line(
            "{:<24}  {:<24}  {:<4}  {:<8}  {:<8}".format(
                "#Cluster Name", "#Broker Name", "#RT", "#successCount", "#failCount"
            )
        )
    with session.make_producer() as producer:
        while True:
            clusters = session.admin.cluster_info().clusters
            only_cluster = values.get("cluster")
            if only_cluster is not None and only_cluster not in clusters:
                session.write(f"cluster [{only_cluster}] not exist")
                return
            shown_clusters = clusters if only_cluster is None else [only_cluster]
            for cluster in shown_clusters:
                for broker in clusters[cluster]:
                    # The name of a broker is also that of a system topic on it.
                    sent_count, mean_ms = _measure_sends(producer, broker, body, send_count)
                    if as_log:
                        now = java.format_time_seconds(producer.clock.now_ms())
                        line = f"{now}|{machine_room}|{cluster}|{broker}|{mean_ms:.0f}"
                    else:
                        failed_count = send_count - sent_count
                        line = format_row(
                            cluster, broker, f"{mean_ms:.2f}", sent_count, failed_count
                        )
                    session.print_line(line)
            producer.sleep(values.get_int("interval", 10))


def _measure_sends(
    producer: Producer, topic: str, body: bytes, send_count: int
) -> tuple[int, float]:
    """Send messages to a topic, and return (number that were sent, mean duration in ms).

    The first send also connects, so it does not count in the mean.
    """
    sent_count = 0
    total_ms = 0
    for index in range(send_count):
        is_sent, spent_ms = _measure_send(producer, topic, body)
        sent_count += is_sent
        if index > 0:
            total_ms += spent_ms
    return sent_count, total_ms / max(send_count - 1, 1)
