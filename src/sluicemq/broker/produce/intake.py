"""How a message that is no plain send enters the store: as a draft, rewritten, appended.

    a send that is not plain, a message sent back, the commit of a transaction, a delayed message
    whose time has come   ->   Draft   ->   rewrites, in order   ->   Store.append

A rewrite looks at a draft and leaves it alone, changes where it goes (a prepared message, a delayed
one), or refuses it. Plain sends do without all this: `send.Send.send_quick`.

What the broker stores on its own has no request whose answer ends a turn: `put` asks for the end.
Such a message is visible, and safe, by the same rules as any other; whoever keeps an offset of what
is put must not persist it before `Store.synced_offset` has passed the message's end.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from sluicemq.broker.settings import Settings
from sluicemq.broker.turns import Turns
from sluicemq.errors import MessageIllegalError, RequestError, StoreFullError
from sluicemq.model.ids import tag_code
from sluicemq.model.message import TAGS
from sluicemq.record import codec as text
from sluicemq.store.store import Store
from sluicemq.wire.codes import ResponseCode

ILLEGAL: Final = (
    "the message is illegal, maybe msg body or properties length not matched. "
    "msg body length limit {}B, msg properties length limit 32KB."
)


def code_of(error: Exception) -> int:
    """The code of an answer that says why a message was not stored."""
    if isinstance(error, RequestError):
        return error.code
    if isinstance(error, MessageIllegalError):
        return ResponseCode.MESSAGE_ILLEGAL
    is_full = isinstance(error, StoreFullError)
    return ResponseCode.SERVICE_NOT_AVAILABLE if is_full else ResponseCode.SYSTEM_ERROR


@dataclass(slots=True)
class Draft:
    """A message on its way into the store. Hosts are encoded (`model.ids.encode_host`).

    With `delay_ms` the queue's unit says when the message is due, so long after its store time,
    instead of the hash of its tag. `answer_fields` are added to the answer of a send.
    """

    topic: str
    queue_id: int
    body: bytes | memoryview
    properties: dict[str, str]
    born_time_ms: int
    born_host: bytes
    store_host: bytes
    flag: int = 0
    sys_flag: int = 0
    reconsume_times: int = 0
    prepared_offset: int = 0
    delay_ms: int | None = None
    answer_fields: dict[str, str] = field(default_factory=dict)


class Stored(NamedTuple):
    """Where a draft went, and the size of its encoded properties."""

    physical_offset: int
    queue_offset: int
    properties_bytes: int


Rewrite = Callable[[Draft], None]
"""Raises RequestError."""


class Intake:
    """The one way into the store for everything that is not a plain send."""

    def __init__(self, settings: Settings, store: Store, turns: Turns) -> None:
        self._settings = settings
        self._append = store.writer.append
        self._delay_last = store.writer.delay_last
        self._turns = turns
        self.rewrites: list[Rewrite] = []

    def accept(self, draft: Draft) -> Stored:
        """Rewrite and append; the caller's answer ends the turn.

        Raises RequestError, MessageIllegalError, StoreError.
        """
        for rewrite in self.rewrites:
            rewrite(draft)
        return self.append(draft)

    def put(self, draft: Draft) -> Stored:
        """`accept` for what the broker stores on its own: the turn is ended as well."""
        stored = self.accept(draft)
        self._turns.own()
        return stored

    def append(self, draft: Draft) -> Stored:
        """As it is. Raises RequestError, MessageIllegalError, StoreError."""
        stored = text.as_text(draft.properties).encode("utf-8", "replace")
        self.check_properties(len(stored))
        physical_offset, queue_offset = self._append(
            draft.topic, draft.queue_id, draft.body, stored,
            tag_code(draft.properties.get(TAGS, "")), draft.flag, draft.sys_flag,
            draft.born_time_ms, draft.born_host, draft.store_host, draft.reconsume_times,
            draft.prepared_offset,
        )  # fmt: skip
        if draft.delay_ms is not None:
            self._delay_last(draft.topic, draft.queue_id, draft.delay_ms)
        return Stored(physical_offset, queue_offset, len(stored))

    def check_properties(self, size: int) -> None:
        """Raises RequestError when encoded properties are larger than a record may hold."""
        limit = self._settings.broker.properties_length_max
        if size > limit:
            body_limit = self._settings.store.message_bytes_max
            raise RequestError(
                ResponseCode.MESSAGE_ILLEGAL,
                f"{ILLEGAL.format(body_limit)} The properties have {size} bytes, the limit is "
                f"{limit}. Put large values into the body.",
            )
