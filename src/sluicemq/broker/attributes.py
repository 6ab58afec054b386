"""Attributes of topics and groups: which there are, and how a tool changes them (17, 18, 200, 225).

What is not known is refused with RocketMQ's words, and so is what a broker cannot keep: an
attribute that is taken is a promise. Those of a table that another broker wrote stay as they are.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple

from sluicemq.errors import RequestError
from sluicemq.model.topic import (
    CLEANUP_POLICY,
    COMPACTION,
    CONTRACT,
    CONTRACTS,
    MESSAGE_TYPE,
    QUEUE_TYPE,
)
from sluicemq.wire.codes import ResponseCode

_INT64_MAX: Final = 2**63 - 1
_UNSUPPORTED: Final = {
    (MESSAGE_TYPE, "MIXED"): "MIXED message type is not supported.",
    (CLEANUP_POLICY, COMPACTION): (
        f"Compaction topics ({CLEANUP_POLICY}={COMPACTION}) are not supported: SluiceMQ does not "
        f"write the folder compaction. Leave the attribute out, or write {CLEANUP_POLICY}=DELETE; "
        "to keep the latest message of a key, keep it in a table."
    ),
    (QUEUE_TYPE, "BatchCQ"): (
        f"Queues of batches ({QUEUE_TYPE}=BatchCQ) are not supported: leave the attribute out, or "
        f"write {QUEUE_TYPE}=SimpleCQ."
    ),
}
"""RocketMQ's values that cannot be had here."""


class Attribute(NamedTuple):
    """`fault_of` says what is wrong with a value, "" if nothing is."""

    fault_of: Callable[[str], str]
    is_changeable: bool = True


def _one_of(*values: str) -> Callable[[str], str]:
    text = f"value is not in set: [{', '.join(values)}]"
    return lambda value: "" if value in values else text


def _from_minus_one(value: str) -> str:
    try:
        number = int(value)
    except ValueError:
        return f'For input string: "{value}"'
    return "" if -1 <= number <= _INT64_MAX else f"value is not in range(-1, {_INT64_MAX})"


OF_TOPICS: Final = {
    MESSAGE_TYPE: Attribute(
        _one_of("UNSPECIFIED", "TRANSACTION", "FIFO", "MIXED", "DELAY", "NORMAL")
    ),
    QUEUE_TYPE: Attribute(_one_of("SimpleCQ", "BatchCQ"), is_changeable=False),
    CLEANUP_POLICY: Attribute(_one_of("DELETE", COMPACTION), is_changeable=False),
    "reserve.time": Attribute(_from_minus_one),
}
OF_GROUPS: Final = {CONTRACT: Attribute(_one_of(*CONTRACTS))}


def parsed_changes(text: str) -> Iterable[tuple[str, str | None]]:
    """`+key=value,-key` -> ("+key", "value"), ("-key", None). Raises RequestError."""
    for change in filter(None, (part.strip() for part in text.split(","))):
        key, separator, value = change.partition("=")
        if separator and not key.startswith("+"):
            raise _refusal(f"add/alter attribute format is wrong: {key}: write +key=value.")
        if not separator and not key.startswith("-"):
            raise _refusal(f"delete attribute format is wrong: {key}: write -key, or +key=value.")
        yield key, value if separator else None


def changed_attributes(
    old: Mapping[str, str] | None,
    changes: Iterable[tuple[str, str | None]],
    known: Mapping[str, Attribute],
) -> dict[str, str]:
    """Attributes after the changes of a tool, +key and value or -key; `old` None: of what is new.

    Raises RequestError with RocketMQ's words and, where it differs, code.
    """
    attributes = dict(old or {})
    seen: set[str] = set()
    for change, value in changes:
        sign, key = change[:1], change[1:]
        if not key or "+" in key or "-" in key:
            raise _refusal(f"kv string format wrong: {change!r} is neither +key=value nor -key.")
        if key in seen:
            raise _refusal(f"key duplication: {change}")
        seen.add(key)
        if sign not in "+-":
            raise _refusal(f"wrong format key: {change}: write +key=value or -key.")
        if sign == "-" and old is None:
            raise _refusal(f"only add attribute is supported while creating topic. key: {key}")
        if sign == "-" and key not in attributes:
            raise _refusal(f"attempt to delete a nonexistent key: {key}")
        attribute = known.get(key)
        if attribute is None:
            names = ", ".join(sorted(known))
            raise _refusal(f"unsupported key: {key}. The attributes are {names}.")
        if old is not None and not attribute.is_changeable:
            raise _refusal(f"attempt to update an unchangeable attribute. key: {key}")
        if sign == "-":
            del attributes[key]
        else:
            attributes[key] = _checked(attribute, key, value or "")
    return attributes


def _checked(attribute: Attribute, key: str, value: str) -> str:
    fault = attribute.fault_of(value)
    if fault:
        raise _refusal(f"{fault} ({key}={value})")
    if (key, value) in _UNSUPPORTED:
        raise RequestError(ResponseCode.INVALID_PARAMETER, _UNSUPPORTED[key, value])
    return value


def _refusal(remark: str) -> RequestError:
    return RequestError(ResponseCode.SYSTEM_ERROR, remark)
