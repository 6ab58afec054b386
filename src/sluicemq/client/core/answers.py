"""Answers into values or exceptions.

One table says which code of a broker becomes which exception and what the user can do about it
(codes: spec/remoting.md §19). Both shells read answers only through this module.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

from sluicemq.errors import (
    GroupNotFoundError,
    PermissionDeniedError,
    ProtocolError,
    RequestError,
    TopicNotFoundError,
)
from sluicemq.model.topic import MessageQueue
from sluicemq.wire.frames import Command

SUCCESS: Final = 0
MESSAGE_ILLEGAL: Final = 13
SYSTEM_ERROR: Final = 1
TOPIC_NOT_EXIST: Final = 17
PULL_NOT_FOUND: Final = 19
PULL_RETRY_IMMEDIATELY: Final = 20
PULL_OFFSET_MOVED: Final = 21
QUERY_NOT_FOUND: Final = 22
SUBSCRIPTION_PARSE_FAILED: Final = 23
SUBSCRIPTION_NOT_EXIST: Final = 24
SUBSCRIPTION_NOT_LATEST: Final = 25
GROUP_NOT_EXIST: Final = 26
FILTER_DATA_NOT_EXIST: Final = 27
FILTER_DATA_NOT_LATEST: Final = 28
FLOW_CONTROL: Final = 215

SUBSCRIPTION_PENDING = frozenset({
    SUBSCRIPTION_NOT_EXIST, SUBSCRIPTION_NOT_LATEST, FILTER_DATA_NOT_EXIST, FILTER_DATA_NOT_LATEST,
})  # fmt: skip
"""Normal just after a subscription changed: the heartbeat has not arrived everywhere yet."""

_ERRORS: dict[int, tuple[type[RequestError], str]] = {
    2: (RequestError, "The broker is overloaded: send more slowly, or add a broker."),
    3: (RequestError, "The server is older than this feature: upgrade it."),
    MESSAGE_ILLEGAL: (
        RequestError,
        "Make the message smaller (body 4 MiB, properties 32 KiB by default).",
    ),
    14: (RequestError, "The broker cannot write: look at its disk space and its log."),
    16: (
        PermissionDeniedError,
        "Check the permission of topic, group and broker, and the credentials.",
    ),
    TOPIC_NOT_EXIST: (
        TopicNotFoundError,
        "Create it: sluice topic create TOPIC, or set autoCreateTopicEnable=true on the broker.",
    ),
    SUBSCRIPTION_PARSE_FAILED: (
        RequestError,
        "Check the expression: sluice filter check 'EXPRESSION'.",
    ),
    GROUP_NOT_EXIST: (
        GroupNotFoundError,
        "Create the group on the broker, or set autoCreateSubscriptionGroup=true there.",
    ),
}


_ACCESS_CURE: Final = (
    "Check access key and secret key, and what plain_acl.yml of the server allows them:"
    " sluice acl check says which rule decides."
)


def is_refused(answer: Command) -> bool:
    """Whether access control refuses: code 1 and the name of RocketMQ's exception."""
    return answer.code == SYSTEM_ERROR and "AclException" in (answer.remark or "")


def request_error(answer: Command, address: str = "") -> RequestError:
    """The exception for an answer that is not success."""
    kind, cure = _ERRORS.get(answer.code, (RequestError, ""))
    if is_refused(answer):
        kind, cure = PermissionDeniedError, _ACCESS_CURE
    if "sluiceProtectedMode" in (answer.remark or ""):
        cure = ""  # the remark names it
    if answer.code == MESSAGE_ILLEGAL and "delay" in (answer.remark or ""):
        cure = "Deliver it sooner, or raise timerMaxDelaySec on the brokers (3 days by default)."
    return kind(answer.code, (answer.remark or "").strip(), address=address, cure=cure)


def expect_success(answer: Command, address: str = "") -> Command:
    """The answer itself when it is success; else raises `request_error`."""
    if answer.code != SUCCESS:
        raise request_error(answer, address)
    return answer


def number(answer: Command, name: str) -> int:
    """A number of the answer's header. Raises ProtocolError when it is not there."""
    text = (answer.fields or {}).get(name)
    try:
        return int(text)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise ProtocolError(f"the answer's field {name} is {text!r}, not a number.") from None


class SendStatus(Enum):
    """How far a stored message got. Every value means: it is stored on the broker that answered."""

    OK = 0
    FLUSH_DISK_TIMEOUT = 10
    SLAVE_NOT_AVAILABLE = 11
    FLUSH_SLAVE_TIMEOUT = 12


_SEND_STATUS = {status.value: status for status in SendStatus}


@dataclass(frozen=True, slots=True)
class SendResult:
    """What became of a sent message.

    `message_id` is the id made by this client (UNIQ_KEY), `offset_message_id` says where the
    message lies, `queue_offset` is its position in `queue`; of a delayed message both are where it
    waits. `recall_handle` takes a timed message back. A one-way send has no result.
    """

    status: SendStatus
    message_id: str
    offset_message_id: str
    queue: MessageQueue
    queue_offset: int
    recall_handle: str | None = None


def send_results(
    answer: Command, queue: MessageQueue, message_ids: tuple[str, ...], address: str
) -> list[SendResult]:
    """One result a message; a batch's ids come joined by commas (spec/remoting.md §9)."""
    status = _SEND_STATUS.get(answer.code)
    if status is None:
        raise request_error(answer, address)
    fields = answer.fields or {}
    places = fields.get("msgId", "").split(",", len(message_ids))
    queue_id = int(fields.get("queueId") or queue.queue_id)
    stored = queue if queue_id == queue.queue_id else queue._replace(queue_id=queue_id)
    first = number(answer, "queueOffset")
    handle = fields.get("recallHandle")
    return [
        SendResult(
            status,
            message_id,
            places[index] if index < len(places) else "",
            stored,
            first + index,
            handle,
        )
        for index, message_id in enumerate(message_ids)
    ]


class PullStatus(Enum):
    """RocketMQ's four outcomes of a pull."""

    FOUND = SUCCESS
    NO_NEW_MSG = PULL_NOT_FOUND
    NO_MATCHED_MSG = PULL_RETRY_IMMEDIATELY
    OFFSET_ILLEGAL = PULL_OFFSET_MOVED


_PULL_STATUS = {status.value: status for status in PullStatus}


@dataclass(frozen=True, slots=True)
class PullAnswer:
    """A pull's outcome: where to go on, what the queue holds, and the records as they travelled."""

    status: PullStatus
    next_offset: int
    offset_min: int
    offset_max: int
    data: bytes | memoryview
    remark: str


def pull_answer(answer: Command, address: str) -> PullAnswer:
    """Raises the request's error for every code that is not one of the four outcomes."""
    status = _PULL_STATUS.get(answer.code)
    if status is None:
        raise request_error(answer, address)
    return PullAnswer(
        status,
        number(answer, "nextBeginOffset"),
        number(answer, "minOffset"),
        number(answer, "maxOffset"),
        answer.body if status is PullStatus.FOUND else b"",
        answer.remark or "",
    )


def fields_of(answer: Command) -> Mapping[str, str]:
    """The header fields, never None."""
    return answer.fields or {}
