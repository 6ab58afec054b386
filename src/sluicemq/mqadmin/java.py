"""How Java shows values: the forms that mqadmin's lines are made of (spec/admin.md)."""

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


def shown(value: object) -> str:
    """A value: `true`, `null`, `{a=b}`, `[1, 2]`."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}={shown(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(shown, value)) + "]"
    return str(value)


def record(name: str, fields: Mapping[str, object], brackets: str = " []") -> str:
    """An object: its name and its fields; the brackets with what is before them."""
    text = ", ".join(f"{key}={shown(value)}" for key, value in fields.items())
    return f"{name}{brackets[:-1]}{text}{brackets[-1]}"


def pretty(value: Any) -> str:
    """JSON with a tab a level, and numbers as keys without quotes."""
    text = json.dumps(_marked(value), indent="\t", separators=(",", ":"), ensure_ascii=False)
    return text.replace(f'"{_NUMBER}', "").replace(f'{_NUMBER}":', ":")


_DIGITS: Final = "%Y%m%d%H%M%S"
_NUMBER: Final = "\\u0000"


def _marked(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {
            f"\0{key}\0" if isinstance(key, int) else key: _marked(one)
            for key, one in value.items()
            if one is not None
        }
    return [_marked(one) for one in value] if isinstance(value, list | tuple) else value


def time_text(time_ms: int, pattern: str = "%Y-%m-%d %H:%M:%S,") -> str:
    """Local time with its milliseconds, `2026-11-23 19:52:59,812`."""
    moment = datetime.fromtimestamp(time_ms / 1000, UTC).astimezone()
    return moment.strftime(pattern) + f"{time_ms % 1000:03}"


def second_text(time_ms: int) -> str:
    """The same without them."""
    return time_text(time_ms)[:19]


def parse_time(text: str) -> int:
    """Milliseconds since 1970, given as such or as `2026-11-23#19:52:59:812` of local time. Raises
    ConfigurationError.
    """
    if text.removeprefix("-").isdigit():
        return int(text)
    try:
        return int(datetime.strptime(text, "%Y-%m-%d#%H:%M:%S:%f").astimezone().timestamp() * 1000)
    except ValueError:
        raise ConfigurationError(
            f"the time {text!r} cannot be read.",
            fix="Write milliseconds since 1970, or yyyy-MM-dd#HH:mm:ss:SSS.",
        ) from None


def permission(perm: int) -> str:
    """`RW-`."""
    return "".join(name if perm & bit else "-" for bit, name in ((4, "R"), (2, "W"), (1, "X")))


def topic_config(config: TopicConfig, attributes: Mapping[str, str]) -> str:
    """As it was asked for."""
    fields = tables.topic_object(config)
    order = ("topicName", "readQueueNums", "writeQueueNums", "perm", "topicFilterType")
    chosen = {name: fields[name] for name in order} | {"perm": permission(config.perm)}
    chosen |= {name: fields[name] for name in ("topicSysFlag", "order")}
    return record("TopicConfig", {**chosen, "attributes": attributes})


def group_fields(config: GroupConfig) -> dict[str, object]:
    """A group's settings, in the order of Java's object."""
    known = tables.group_object(config)
    policy = known["groupRetryPolicy"]
    given = {
        "type": policy.get("type", "CUSTOMIZED"),
        "exponentialRetryPolicy": _retries("Exponential", policy.get("exponentialRetryPolicy")),
        "customizedRetryPolicy": _retries("Customized", policy.get("customizedRetryPolicy")),
    }
    names = (
        "groupName consumeEnable consumeFromMinEnable consumeBroadcastEnable consumeMessageOrderly "
        "retryQueueNums retryMaxTimes groupRetryPolicy brokerId whichBrokerWhenConsumeSlowly "
        "notifyConsumerIdsChangedEnable groupSysFlag consumeTimeoutMinute subscriptionDataSet "
        "attributes"
    )
    known["groupRetryPolicy"] = record("GroupRetryPolicy", given, "{}")
    return {name: known.get(name) for name in names.split()}


def _retries(kind: str, policy: Mapping[str, object] | None) -> str | None:
    return None if policy is None else record(f"{kind}RetryPolicy", policy, "{}")


def message_queue(queue: MessageQueue) -> str:
    """A queue."""
    named = {"topic": queue.topic, "brokerName": queue.broker, "queueId": queue.queue_id}
    return record("MessageQueue", named)


def send_result(result: SendResult) -> str:
    """What became of a message."""
    fields = {
        "sendStatus": send_status(result), "msgId": result.message_id,
        "offsetMsgId": result.offset_message_id, "messageQueue": message_queue(result.queue),
        "queueOffset": result.queue_offset, "recallHandle": result.recall_handle,
    }  # fmt: skip
    return record("SendResult", fields)


def send_status(result: SendResult) -> str:
    """`SEND_OK`, or how far it got."""
    return "SEND_OK" if result.status.name == "OK" else result.status.name


def properties(message: StoredMessage, bounds: tuple[int, int] | None = None) -> dict[str, object]:
    """A message's properties as Java's client has them: with those of the pull that brought it, in
    the order of its map of 128 places.
    """
    found: dict[str, object] = dict(message.properties)
    if bounds is not None:
        found |= dict(zip(("MIN_OFFSET", "MAX_OFFSET"), bounds, strict=True))
    return tables.sort_map_as_java(found, 128)


def message_text(message: StoredMessage, bounds: tuple[int, int]) -> str:
    """All of a message that a pull brought."""
    inner = {
        "topic": f"'{message.topic}'", "flag": message.flag,
        "properties": properties(message, bounds),
        "body": [byte - 256 if byte > 127 else byte for byte in message.body_or_raw],
        "transactionId": "'null'",
    }  # fmt: skip
    fields = {
        "brokerName": message.broker, "queueId": message.queue_id, "storeSize": message.size_bytes,
        "queueOffset": message.queue_offset, "sysFlag": message.sys_flag,
        "bornTimestamp": message.born_time_ms, "bornHost": f"/{message.born_host}",
        "storeTimestamp": message.store_time_ms, "storeHost": f"/{message.store_host}",
        "msgId": message.offset_message_id, "commitLogOffset": message.physical_offset,
        "bodyCRC": message.body_crc, "reconsumeTimes": message.reconsume_times,
        "preparedTransactionOffset": message.prepared_offset,
        "toString()": record("Message", inner, "{}"),
    }  # fmt: skip
    return record("MessageExt", fields)


def version(number: int) -> str:
    """`V5_3_3`."""
    return "V" + version_name(number).replace(".", "_").replace("-", "_")


def process_queue(state: QueueState) -> str:
    """What a consumer holds of a queue."""
    fields = {
        "commitOffset": state.commit_offset, "cachedMsgMinOffset": state.cached_min,
        "cachedMsgMaxOffset": state.cached_max, "cachedMsgCount": state.cached_count,
        "cachedMsgSizeInMiB": state.cached_mib, "transactionMsgMinOffset": 0,
        "transactionMsgMaxOffset": 0, "transactionMsgCount": 0, "locked": state.locked,
        "tryUnlockTimes": 0, "lastLockTimestamp": time_text(state.last_lock_ms, _DIGITS),
        "droped": state.dropped, "lastPullTimestamp": time_text(state.last_pull_ms, _DIGITS),
        "lastConsumeTimestamp": time_text(state.last_consume_ms, _DIGITS),
    }  # fmt: skip
    return record("ProcessQueueInfo", fields)
