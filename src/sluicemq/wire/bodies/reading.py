"""Reading decoded JSON with Java's tolerance: absent and null mean the default.

Every function raises ProtocolError that names the field when its value is of another kind.
"""

from collections.abc import Mapping
from typing import Any

from sluicemq.errors import ProtocolError
from sluicemq.model.topic import MessageQueue
from sluicemq.wire import fastjson

Data = str | bytes | memoryview


def load_object(data: Data, what: str) -> dict[Any, Any]:
    """The body `what` as a JSON object."""
    if not data:
        raise ProtocolError(f"The {what} has no body.")
    value = fastjson.loads(data)
    if not isinstance(value, dict):
        raise ProtocolError(f"The {what} is not a JSON object.")
    return value


def take_object(values: Mapping[Any, Any], key: str) -> dict[Any, Any]:
    """An object field; {} when absent."""
    return as_object(values.get(key), key)


def as_object(value: Any, what: str) -> dict[Any, Any]:
    """`value` as an object; {} for null."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ProtocolError(f"{what} is not a JSON object.")
    return value


def take_list(values: Mapping[Any, Any], key: str) -> list[Any]:
    """A list field; [] when absent."""
    value = values.get(key)
    if value is None:
        return []
    if not isinstance(value, list):
        raise ProtocolError(f"{key} is not a JSON list.")
    return value


def take_texts(values: Mapping[Any, Any], key: str) -> tuple[str, ...]:
    """A list of texts, nulls left out."""
    return tuple(fastjson.text(item) for item in take_list(values, key) if item is not None)


def take_integer(values: Mapping[Any, Any], key: str, default: int = 0) -> int:
    """An integer field; text is parsed, as fastjson does."""
    return as_integer(values.get(key, default), key, default)


def as_integer(value: Any, what: str, default: int = 0) -> int:
    """`value` as an integer; `default` for null."""
    if value is None:
        return default
    try:
        return int(value)
    except (ValueError, TypeError, OverflowError) as error:
        raise ProtocolError(f"{what} is not an integer.") from error


def take_float(values: Mapping[Any, Any], key: str) -> float:
    """A number field; 0.0 when absent."""
    value = values.get(key)
    try:
        return float(value) if value is not None else 0.0
    except (ValueError, TypeError, OverflowError) as error:
        raise ProtocolError(f"{key} is not a number.") from error


def take_boolean(values: Mapping[Any, Any], key: str, default: bool = False) -> bool:
    """A field that is true or false."""
    value = values.get(key)
    if value is None:
        return default
    return value.lower() == "true" if isinstance(value, str) else bool(value)


def take_text(values: Mapping[Any, Any], key: str, default: str = "") -> str:
    """A text field; a number becomes text."""
    value = values.get(key)
    return default if value is None else fastjson.text(value)


def take_text_or_none(values: Mapping[Any, Any], key: str) -> str | None:
    """A text field; None when absent."""
    value = values.get(key)
    return None if value is None else fastjson.text(value)


def as_texts(values: Mapping[Any, Any]) -> dict[str, str]:
    """An object of texts, nulls left out."""
    return {
        fastjson.text(key): fastjson.text(value)
        for key, value in values.items()
        if value is not None
    }


def queue_from(value: Any) -> MessageQueue:
    """A queue: an object, an object that is a map's key, or a text that holds the object."""
    if isinstance(value, str):
        value = fastjson.loads(value)
    values = dict(value) if isinstance(value, tuple) else as_object(value, "The queue")
    if "topic" not in values or "brokerName" not in values:
        raise ProtocolError("A queue lacks its topic or brokerName.")
    return MessageQueue(
        take_text(values, "topic"), take_text(values, "brokerName"), take_integer(values, "queueId")
    )


def queue_object(queue: MessageQueue) -> dict[str, Any]:
    """A queue as a JSON object."""
    return {"brokerName": queue.broker, "queueId": queue.queue_id, "topic": queue.topic}


def queue_key(queue: MessageQueue) -> fastjson.ObjectKey:
    """A queue as the key of a map that `fastjson.dumps` writes."""
    return (("brokerName", queue.broker), ("queueId", queue.queue_id), ("topic", queue.topic))
