"""The encoded responses of the requests in `pop.py`."""

from sluicemq.broker.group_commit import Durable
from sluicemq.broker.pop.pending import PendingPop, PopResult
from sluicemq.errors import RequestError
from sluicemq.wire.codes import ResponseCode
from sluicemq.wire.declare import encode_header
from sluicemq.wire.frames import Command, encode_response
from sluicemq.wire.popping import (
    ORDERED,
    UNSET_REMARK,
    NotificationResponse,
    PopMessageResponse,
    encode_queue_info,
)


def encode_pop_answer(
    pop: PendingPop, result: PopResult, code: ResponseCode = ResponseCode.SUCCESS
) -> bytes | Durable:
    """Return the encoded response of a pop with `code`. Called for each pop: keep it cheap.

    It is `Durable` if it contains messages of an unordered pop, because their checkpoints must
    be on disk before it is sent.
    """
    header = pop.header
    command = pop.command
    is_ordered = header.order
    fields = encode_header(
        PopMessageResponse(
            pop_ms=result.pop_ms,
            invisible_ms=header.invisible_ms,
            revive_queue=ORDERED if is_ordered else result.revive_queue,
            rest_count=result.rest_count,
            start_offset_info=encode_queue_info(result.first_offsets),
            message_offset_info=encode_queue_info(result.taken_offsets),
            order_count_info=encode_queue_info(result.order_counts) if is_ordered else None,
        )
    )
    remark = "FOUND" if result.count else "NO_MESSAGE_IN_QUEUE"
    answer = encode_response(command, code, fields, b"".join(result.data), remark)
    if is_ordered or not result.count:
        return answer
    return Durable.for_command(command, answer)


def encode_refusal(refusal: RequestError, header: object) -> Command:
    """Return the error response for `refusal`.

    `header` is the response header of the request with its default values: as in RocketMQ, all its
    fields are in the error response, as zeros.
    """
    return Command(refusal.code, encode_header(header), remark=refusal.remark)


def encode_notification(pop: PendingPop, header: NotificationResponse) -> bytes:
    """Return the encoded response of the notification `pop` with the fields of `header`."""
    return encode_response(pop.command, fields=encode_header(header), remark=UNSET_REMARK)
