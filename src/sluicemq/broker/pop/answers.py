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
    pop: PendingPop, pop_result: PopResult, code: ResponseCode = ResponseCode.SUCCESS
) -> bytes | Durable:
    """Return the encoded response of `pop` with `code` and the messages in `pop_result`.

    If it contains messages of an unordered pop, it is returned as a `Durable`. It is then sent only
    when the record of the pop is on disk. Called for each pop: keep it cheap.
    """
    is_ordered = pop.header.order
    answer_header = PopMessageResponse(
        pop_ms=pop_result.pop_ms,
        invisible_ms=pop.header.invisible_ms,
        revive_queue=ORDERED if is_ordered else pop_result.revive_queue,
        rest_count=pop_result.rest_count,
        start_offset_info=encode_queue_info(pop_result.first_offsets),
        message_offset_info=encode_queue_info(pop_result.taken_offsets),
        order_count_info=encode_queue_info(pop_result.order_counts) if is_ordered else None,
    )
    remark = "FOUND" if pop_result.count else "NO_MESSAGE_IN_QUEUE"
    fields = encode_header(answer_header)
    answer = encode_response(pop.command, code, fields, b"".join(pop_result.data), remark)
    if is_ordered or not pop_result.count:
        return answer
    return Durable.for_command(pop.command, answer)


def encode_refusal(refusal: RequestError, header: object) -> Command:
    """Return the error response for `refusal`.

    `header` is the response header of the request with its default values: as in RocketMQ, all its
    fields are in the error response, as zeros.
    """
    return Command(refusal.code, encode_header(header), remark=refusal.remark)


def encode_notification(pop: PendingPop, header: NotificationResponse) -> bytes:
    """Return the encoded response of the notification `pop` with the fields of `header`."""
    return encode_response(pop.command, fields=encode_header(header), remark=UNSET_REMARK)
