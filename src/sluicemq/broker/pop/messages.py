"""The messages in the response of a pop: records as they are stored, or copies of them.

Clients build the receipt handle of a message from the response header, unless the message has the
property POP_CK. Messages of a retry topic are returned under the name of the topic to which they
were sent, and with their receipt handle as POP_CK.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

from sluicemq.errors import ProtocolError
from sluicemq.model.message import POP_CK
from sluicemq.record.codec import (
    decode_properties,
    encode_record,
    format_property_text,
    parse_head,
    properties_slice,
)
from sluicemq.wire.popping import (
    ReceiptHandle,
)

_HANDLE_START: Final = f"{POP_CK}\x01".encode()
_NO_PROPERTIES: Final[Mapping[str, str]] = MappingProxyType({})


def without_handles(
    records: Sequence[tuple[int, memoryview]], data: Sequence[bytes | memoryview]
) -> Sequence[bytes | memoryview]:
    """Return the messages in `data` without the property POP_CK.

    Clients take this property for the receipt handle of the message. A producer may have written
    one, in a store of an earlier release. `records` are (offset, record) of each message in `data`.
    If no record has the property, `data` itself is returned, otherwise a list of copies. Called for
    each pop: keep it cheap.
    """
    for _, record in records:
        if _HANDLE_START in bytes(record[properties_slice(record)]):
            return [_encode_copy(record_to_copy) for _, record_to_copy in records]
    return data


def with_handle(record: memoryview, topic: str, handle: ReceiptHandle) -> bytes | memoryview:
    """Return a copy of a message of a retry topic with the name `topic` and its receipt handle.

    Return `record` itself, with neither, if the copy would be too long for a record.
    """
    return _encode_copy(record, topic, {POP_CK: handle.encode()})


def _encode_copy(
    record: memoryview, topic: str = "", added_properties: Mapping[str, str] = _NO_PROPERTIES
) -> bytes | memoryview:
    """Return a copy of a record with the name of `topic` and with `added_properties`.

    An empty `topic` means that of the record. A stored property POP_CK is removed. Return `record`
    itself if the copy would be too long for a record.
    """
    head = parse_head(record)
    properties = decode_properties(record[head.properties])
    properties.pop(POP_CK, None)
    properties |= added_properties
    try:
        return encode_record(
            topic=topic or bytes(record[head.topic]).decode("utf-8", "replace"),
            queue_id=head.queue_id,
            queue_offset=head.queue_offset,
            physical_offset=head.physical_offset,
            body=record[head.body],
            properties=format_property_text(properties).encode(),
            flag=head.flag,
            sys_flag=head.sys_flag,
            born_time_ms=head.born_time_ms,
            born_host=record[head.born_host],
            store_time_ms=head.store_time_ms,
            store_host=record[head.store_host],
            reconsume_times=head.reconsume_times,
            prepared_offset=head.prepared_offset,
        )
    except ProtocolError:
        return record
