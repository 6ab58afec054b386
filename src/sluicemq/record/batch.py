"""The body of a client batch (spec/store.md §2.5): messages in one request, one topic and queue.

Each message is `layout.BATCH_HEAD`, body, properties length, properties. The broker takes it apart
and stores ordinary records with consecutive queue offsets.
"""

import struct
from collections.abc import Iterable

from sluicemq.errors import ProtocolError
from sluicemq.record.codec import Buffer
from sluicemq.record.layout import BATCH_HEAD, PROPERTIES_BYTES_MAX

_SHORT = struct.Struct(">h")
FIXED_BYTES = BATCH_HEAD.size + _SHORT.size
COPIED_BYTES_MAX = 256 * 1024
_HEAD_BYTES = BATCH_HEAD.size
_pack_head, _unpack_head = BATCH_HEAD.struct.pack, BATCH_HEAD.struct.unpack_from


def encode_batch(messages: Iterable[tuple[int, bytes | memoryview, bytes]]) -> bytes:
    """(flag, body, encoded properties) of each -> the request's body."""
    parts: list[bytes | memoryview] = []
    for flag, body, properties in messages:
        if len(properties) > PROPERTIES_BYTES_MAX:
            raise ProtocolError(
                f"The properties of a message in the batch have {len(properties)} bytes,"
                f" the limit is {PROPERTIES_BYTES_MAX}."
            )
        size = FIXED_BYTES + len(body) + len(properties)
        parts += (_pack_head(size, 0, 0, flag, len(body)), body)
        parts += (_SHORT.pack(len(properties)), properties)
    return b"".join(parts)


def decode_batch(body: Buffer) -> list[tuple[int, bytes | memoryview, bytes]]:
    """The request's body -> (flag, body, encoded properties) of each. HOT.

    Bodies of a large request are views of it; those of a small one are copies, which cost less
    than views do. Raises ProtocolError when the lengths do not agree with each other or with the
    whole.
    """
    source = bytes(body) if len(body) <= COPIED_BYTES_MAX else memoryview(body)
    unpack_head, unpack_length = _unpack_head, _SHORT.unpack_from
    end = len(body)
    messages: list[tuple[int, bytes | memoryview, bytes]] = []
    at = 0
    while at < end:
        try:
            size, _, _, flag, body_length = unpack_head(source, at)
            start = at + _HEAD_BYTES
            body_end = start + body_length
            if body_length < 0:
                raise _bad(at)
            (properties_length,) = unpack_length(source, body_end)
        except struct.error:
            raise _bad(at) from None
        next_at = body_end + 2 + properties_length
        if properties_length < 0 or next_at - at != size or next_at > end:
            raise _bad(at)
        messages.append((flag, source[start:body_end], bytes(source[body_end + 2 : next_at])))
        at = next_at
    return messages


def _bad(at: int) -> ProtocolError:
    return ProtocolError(f"The message at byte {at} of the batch is cut off or its lengths differ.")
