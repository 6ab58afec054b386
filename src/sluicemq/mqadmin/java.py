"""Java's text forms of values and objects, in which mqadmin prints them (spec/admin.md).

RocketMQ's tool prints most objects by their `toString()`, and JSON by fastjson. The functions here
return the same texts, with the same field names, order and brackets.
"""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

from sluicemq.client.core.requests import SendResult
from sluicemq.errors import ConfigurationError
from sluicemq.model.message import StoredMessage
from sluicemq.model.topic import GroupConfig, MessageQueue, TopicConfig
from sluicemq.wire import tables
from sluicemq.wire.bodies import QueueState
from sluicemq.wire.codes import version_name


def format_value(value: object) -> str:
    """Return a value as Java prints it: None is `null`, True `true`, {"a": 1} `{a=1}`.

    A list becomes `[1, 2]`, and any other value its text.
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        members = [f"{key}={format_value(member)}" for key, member in value.items()]
        return "{" + ", ".join(members) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(format_value, value)) + "]"
    return str(value)


def format_object(name: str, fields: Mapping[str, object], brackets: str = " []") -> str:
    """Return an object as `NAME [field=value, field=value]`.

    The last character of `brackets` is written after the fields, all others between the name and
    the fields.
    """
    fields_text = ", ".join(f"{field}={format_value(value)}" for field, value in fields.items())
    return f"{name}{brackets[:-1]}{fields_text}{brackets[-1]}"


def format_json(value: Any) -> str:
    """Return a value as JSON in fastjson's layout.

    Levels are indented by tabs, keys that are integers have no quotes, and members that are None
    are left out.
    """
    marked = _mark_int_keys(value)
    marked_json = json.dumps(marked, indent="\t", separators=(",", ":"), ensure_ascii=False)
    # The marks are removed together with the quotes beside them.
    return marked_json.replace(f'"{_ESCAPED_MARK}', "").replace(f'{_ESCAPED_MARK}":', ":")


_DIGITS: Final = "%Y%m%d%H%M%S"
_ESCAPED_MARK: Final = "\\u0000"
"""The mark of `_mark_int_keys`, a NUL character, as `json.dumps` writes it."""


def _mark_int_keys(value: Any) -> Any:
    """Return a copy in which integer keys are strings between two NUL characters.

    So their quotes can be removed after the conversion to JSON. Members that are None are left out.
    """
    if isinstance(value, list | tuple):
        return [_mark_int_keys(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    marked = {}
    for key, member in value.items():
        if member is None:
            continue
        marked_key = f"\0{key}\0" if isinstance(key, int) else key
        marked[marked_key] = _mark_int_keys(member)
    return marked


def format_time(time_ms: int, pattern: str = "%Y-%m-%d %H:%M:%S,") -> str:
    """Return a time as local time with its milliseconds, such as `2026-11-23 19:52:59,812`.

    `time_ms` is in milliseconds since 1970. `pattern` formats all but the milliseconds, by the
    rules of `strftime`.
    """
    moment = datetime.fromtimestamp(time_ms / 1000, UTC).astimezone()
    return moment.strftime(pattern) + f"{time_ms % 1000:03}"


def format_time_seconds(time_ms: int) -> str:
    """Return a time in milliseconds since 1970 as local time, such as `2026-11-23 19:52:59`."""
    return format_time(time_ms)[:19]


def parse_time(time: str) -> int:
    """Return a time in milliseconds since 1970.

    `time` is such a number, which may be negative, or a local time such as
    `2026-11-23#19:52:59:812`. Raises ConfigurationError for any other text.
    """
    if time.removeprefix("-").isdigit():
        return int(time)
    try:
        local_time = datetime.strptime(time, "%Y-%m-%d#%H:%M:%S:%f").astimezone()
        return int(local_time.timestamp() * 1000)
    except ValueError:
        raise ConfigurationError(
            f"invalid time {time!r}.",
            fix="Use a Unix timestamp in milliseconds, or yyyy-MM-dd#HH:mm:ss:SSS.",
        ) from None


def format_permission(perm: int) -> str:
    """Return a topic's permission as letters: R for bit 4, W for 2, X for 1, such as `RW-`."""
    return "".join(name if perm & bit else "-" for bit, name in ((4, "R"), (2, "W"), (1, "X")))


def format_topic_config(config: TopicConfig, attributes: Mapping[str, str]) -> str:
    """Return the configuration of a topic as the text `TopicConfig [topicName=…, …]`.

    `attributes` are changes of attributes, with `+` or `-` before each name.
    """
    fields = tables.topic_object(config)
    fields["perm"] = format_permission(config.perm)
    fields["attributes"] = attributes
    names = (
        "topicName readQueueNums writeQueueNums perm topicFilterType topicSysFlag order attributes"
    )
    return format_object("TopicConfig", {name: fields[name] for name in names.split()})


def group_config_fields(config: GroupConfig) -> dict[str, object]:
    """Return the settings of a group by Java's names, in the order of Java's `toString()`.

    The retry policy is a text. A setting that is not set is None.
    """
    settings = tables.group_object(config)
    policy = settings["groupRetryPolicy"]
    policy_fields = {
        "type": policy.get("type", "CUSTOMIZED"),
        "exponentialRetryPolicy": _format_retry_policy(
            "Exponential", policy.get("exponentialRetryPolicy")
        ),
        "customizedRetryPolicy": _format_retry_policy(
            "Customized", policy.get("customizedRetryPolicy")
        ),
    }
    names = (
        "groupName consumeEnable consumeFromMinEnable consumeBroadcastEnable consumeMessageOrderly "
        "retryQueueNums retryMaxTimes groupRetryPolicy brokerId whichBrokerWhenConsumeSlowly "
        "notifyConsumerIdsChangedEnable groupSysFlag consumeTimeoutMinute subscriptionDataSet "
        "attributes"
    )
    settings["groupRetryPolicy"] = format_object("GroupRetryPolicy", policy_fields, "{}")
    return {name: settings.get(name) for name in names.split()}


def _format_retry_policy(class_prefix: str, policy: Mapping[str, object] | None) -> str | None:
    """Return a policy as an object of the class `class_prefix` + "RetryPolicy"; None for None."""
    return None if policy is None else format_object(f"{class_prefix}RetryPolicy", policy, "{}")


def format_queue(queue: MessageQueue) -> str:
    """Return a queue as `MessageQueue [topic=…, brokerName=…, queueId=…]`."""
    fields = {"topic": queue.topic, "brokerName": queue.broker, "queueId": queue.queue_id}
    return format_object("MessageQueue", fields)


def format_send_result(send_result: SendResult) -> str:
    """Return the result of a send as `SendResult [sendStatus=…, msgId=…, …]`."""
    fields = {
        "sendStatus": format_send_status(send_result),
        "msgId": send_result.message_id,
        "offsetMsgId": send_result.offset_message_id,
        "messageQueue": format_queue(send_result.queue),
        "queueOffset": send_result.queue_offset,
        "recallHandle": send_result.recall_handle,
    }
    return format_object("SendResult", fields)


def format_send_status(send_result: SendResult) -> str:
    """Return the status of a send: `SEND_OK`, or the name of another status."""
    return "SEND_OK" if send_result.status.name == "OK" else send_result.status.name


def message_properties(
    message: StoredMessage, bounds: tuple[int, int] | None = None
) -> dict[str, object]:
    """Return the properties of a message in the order in which Java's hash map would list them.

    `bounds`, the first and the next offset of the queue, are added as MIN_OFFSET and MAX_OFFSET, as
    Java's client does with a message that it has pulled. None adds nothing.
    """
    named: dict[str, object] = dict(message.properties)
    if bounds is not None:
        named |= dict(zip(("MIN_OFFSET", "MAX_OFFSET"), bounds, strict=True))
    return tables.sort_map_as_java(named, 128)


def format_message(message: StoredMessage, bounds: tuple[int, int]) -> str:
    """Return a message that was pulled, with all fields, as `MessageExt [brokerName=…, …]`.

    `bounds` are the first and the next offset of its queue. The body is printed as signed bytes:
    255 is -1.
    """
    signed_bytes = [byte - 256 if byte > 127 else byte for byte in message.body_or_raw]
    fields_of_base_class = {
        "topic": f"'{message.topic}'",
        "flag": message.flag,
        "properties": message_properties(message, bounds),
        "body": signed_bytes,
        "transactionId": "'null'",
    }
    fields = {
        "brokerName": message.broker,
        "queueId": message.queue_id,
        "storeSize": message.size_bytes,
        "queueOffset": message.queue_offset,
        "sysFlag": message.sys_flag,
        "bornTimestamp": message.born_time_ms,
        "bornHost": f"/{message.born_host}",
        "storeTimestamp": message.store_time_ms,
        "storeHost": f"/{message.store_host}",
        "msgId": message.offset_message_id,
        "commitLogOffset": message.physical_offset,
        "bodyCRC": message.body_crc,
        "reconsumeTimes": message.reconsume_times,
        "preparedTransactionOffset": message.prepared_offset,
        "toString()": format_object("Message", fields_of_base_class, "{}"),
    }
    return format_object("MessageExt", fields)


def format_version(version_number: int) -> str:
    """Return the name of a client version, such as `V5_3_3` for its number in the protocol."""
    return "V" + version_name(version_number).replace(".", "_").replace("-", "_")


def format_queue_state(state: QueueState) -> str:
    """Return the state of a queue at a consumer, as `ProcessQueueInfo [commitOffset=…, …]`."""
    fields = {
        "commitOffset": state.commit_offset,
        "cachedMsgMinOffset": state.cached_min,
        "cachedMsgMaxOffset": state.cached_max,
        "cachedMsgCount": state.cached_count,
        "cachedMsgSizeInMiB": state.cached_mib,
        "transactionMsgMinOffset": 0,
        "transactionMsgMaxOffset": 0,
        "transactionMsgCount": 0,
        "locked": state.locked,
        "tryUnlockTimes": 0,
        "lastLockTimestamp": format_time(state.last_lock_ms, _DIGITS),
        "droped": state.dropped,
        "lastPullTimestamp": format_time(state.last_pull_ms, _DIGITS),
        "lastConsumeTimestamp": format_time(state.last_consume_ms, _DIGITS),
    }
    return format_object("ProcessQueueInfo", fields)
