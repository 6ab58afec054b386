"""The messages of a batch (320): checked, made complete and appended.

A large batch of plain messages goes through as columns (`record.batch_columns`), without an object
for each; any other, and one that cannot be, is taken apart message by message, which says what is
wrong with it. tests/unit/broker/test_send_batch.py holds the two equal.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from sluicemq.broker.produce.intake import ILLEGAL, Intake
from sluicemq.broker.settings import Settings
from sluicemq.broker.topics import Topic
from sluicemq.errors import ProtocolError, RequestError
from sluicemq.model.ids import HOST_BYTES_IPV4
from sluicemq.model.message import TIMER_PROPERTIES, TRAN_MSG
from sluicemq.record import codec as text
from sluicemq.record.codec import Buffer, decode_batch
from sluicemq.store.store import Store
from sluicemq.store.writer import Part
from sluicemq.wire.codes import ResponseCode
from sluicemq.wire.staging import STAGING_TOPIC

if TYPE_CHECKING:
    from sluicemq.record.batch_columns import Spans

# As long as can be: the longer what is searched for, the faster. Names of TIMER_DEL… are four.
_NOT_IN_BATCH: Final = (b"DELAY\x01", b"TIMER_DEL", b"TRAN_MSG\x01")
COLUMNS_BYTES_MIN: Final = 4096
"""A smaller batch has too few messages for columns."""
FLAGS_MAX: Final = 0x3
"""Compressed, or with several tags; other flags need care."""
TIME_MAX: Final = 1 << 62

OnStaged = Callable[[int, int, "Sequence[bytes] | Spans", "Sequence[Buffer] | Spans"], None]


class Origin(NamedTuple):
    """What all messages of a batch have in common; the hosts are encoded."""

    sys_flag: int
    born_time_ms: int
    born_host: bytes
    store_host: bytes

    @property
    def is_plain(self) -> bool:
        """Nothing that columns do not know, or that does not fit its field."""
        return (
            0 <= self.sys_flag <= FLAGS_MAX
            and 0 <= self.born_time_ms < TIME_MAX
            and len(self.born_host) == len(self.store_host) == HOST_BYTES_IPV4
        )


class BatchIntake:
    """Appends batches. `sizes` counts messages by the number of bits of (body size - 1)."""

    def __init__(self, settings: Settings, store: Store, intake: Intake, sizes: list[int]) -> None:
        self._settings = settings
        self._append_batch = store.writer.append_batch
        self._append_columns = store.writer.append_columns
        self._takes_columns = store.writer.takes_columns
        self._intake = intake
        self._sizes = sizes
        self.suffix = b""
        """The broker's own properties, behind those of each message."""
        self.on_staged: OnStaged = lambda *_: None
        """Told of each batch for the staging topic: queue, offset, stored properties, bodies."""

    def append(
        self, topic: Topic, queue_id: int, body: Buffer, origin: Origin, id_prefix: str,
        *, is_brief: bool = False,
    ) -> tuple[str, int]:  # fmt: skip
        """All messages or none; their ids, or only the first one's, and the first queue offset.

        Raises RequestError, MessageIllegalError, StoreError.
        """
        limit = self._settings.store.message_bytes_max
        ids_max = 1 if is_brief else None
        if len(body) > limit:
            raise RequestError(
                ResponseCode.MESSAGE_ILLEGAL,
                f"{ILLEGAL.format(limit)} The batch has {len(body)} bytes.",
            )
        if self._takes_columns and len(body) >= COLUMNS_BYTES_MIN and origin.is_plain:
            done = self._columns(topic, queue_id, bytes(body), origin, id_prefix, ids_max)
            if done is not None:
                return done
        parts = self._parts(body)
        positions, offset = self._append_batch(topic.name, queue_id, parts, *origin)
        bodies = [part[1] for part in parts]
        stored = [part[2] for part in parts]
        self._count(topic, Counter(map(len, bodies)), sum(map(len, stored)))
        if topic.name == STAGING_TOPIC:
            self.on_staged(queue_id, offset, stored, bodies)
        return ",".join(map((id_prefix + "%016X").__mod__, positions[:ids_max])), offset

    # ----------------------------------------------------------------------------- as columns

    def _columns(
        self, topic: Topic, queue_id: int, body: bytes, origin: Origin, id_prefix: str,
        ids_max: int | None,
    ) -> tuple[str, int] | None:  # fmt: skip
        """HOT. None when it has to be taken apart; nothing has changed then."""
        from sluicemq.record import batch_columns  # noqa: PLC0415 - NumPy for large batches only

        columns = batch_columns.split(body, self.suffix, text.tag_code_of_value)
        if columns is None or (
            int(columns.property_sizes.max()) > self._settings.broker.properties_length_max
        ):
            return None
        heads = columns.heads
        heads["sys_flag"], heads["born_time"] = origin.sys_flag, origin.born_time_ms
        heads["born_host"], heads["store_host"] = origin.born_host, origin.store_host
        positions, offset = self._append_columns(topic.name, queue_id, columns)
        self._count(topic, columns.body_sizes(), int(columns.property_sizes.sum()))
        if topic.name == STAGING_TOPIC:
            self.on_staged(queue_id, offset, columns.properties, columns.bodies)
        ids = batch_columns.ids_of(id_prefix.encode(), positions[:ids_max])
        return ids.decode(), offset

    def _count(self, topic: Topic, sizes: Mapping[int, int], properties_bytes: int) -> None:
        """`sizes`: how many bodies have which size."""
        for size, count in sizes.items():
            self._sizes[(size - 1).bit_length()] += count
            topic.messages_in += count
            topic.bytes_in += count * (size + topic.record_bytes)
        topic.bytes_in += properties_bytes

    # ---------------------------------------------------------------------- message by message

    def _parts(self, body: Buffer) -> list[Part]:
        try:
            messages = decode_batch(body)
        except ProtocolError as error:
            raise RequestError(ResponseCode.MESSAGE_ILLEGAL, str(error)) from error
        if not messages:
            raise RequestError(ResponseCode.MESSAGE_ILLEGAL, "The batch has no messages.")
        if any(name in body for name in _NOT_IN_BATCH):
            refuse_names(own for _, _, own in messages)
        suffix, open_suffix = self.suffix, b"\x02" + self.suffix
        tag_code_of = text.tag_code_of
        parts = [
            (
                flag,
                body,
                own + (suffix if own[-1:] == b"\x02" or not own else open_suffix),
                tag_code_of(own),
            )
            for flag, body, own in messages
        ]
        self._intake.check_properties(max([len(stored) for _, _, stored, _ in parts]))
        return parts


def refuse_names(encoded: Iterable[bytes]) -> None:
    """Raises RequestError when one of these properties has what no message of a batch can have."""
    for own in encoded:
        refuse_in_batch(text.as_dict(own.decode("utf-8", "replace")))


def refuse_in_batch(properties: dict[str, str]) -> None:
    """Raises RequestError for what no message of a batch can be (spec/store.md §2.5)."""
    if properties.get(TRAN_MSG, "").lower() == "true":
        raise RequestError(
            ResponseCode.MESSAGE_ILLEGAL,
            "a batch cannot be part of a transaction (property TRAN_MSG=true). The batch was not "
            "stored. Send messages of transactions one by one.",
        )
    for name in ("DELAY", *TIMER_PROPERTIES, "TIMER_DEL_UNIQKEY"):
        if properties.get(name, "0") != "0":
            raise RequestError(
                ResponseCode.MESSAGE_ILLEGAL,
                f"a message of a batch cannot be delayed (property {name}={properties[name]}). "
                "The batch was not stored. Send delayed messages one by one.",
            )
