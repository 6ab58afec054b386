"""A small store over files in memory, a clock that a test moves, and ways to write and read it."""

import struct
from dataclasses import replace
from typing import Any

import pytest

from sluicemq.config import StoreConfig
from sluicemq.model.ids import tag_code
from sluicemq.model.message import StoredMessage
from sluicemq.record.codec import decode_records, encode_properties
from sluicemq.store.store import Store
from sluicemq.testing.files import CrashableFiles

HOST = bytes([127, 0, 0, 1]) + struct.pack(">i", 10911)


class HandClock:
    """Moves when a test says so."""

    def __init__(self) -> None:
        self.ms = 1_700_000_000_000

    def now_ms(self) -> int:
        return self.ms

    def monotonic_s(self) -> float:
        return self.ms / 1000


class Bench:
    """One store directory in memory, opened again and again."""

    def __init__(self) -> None:
        self.files = CrashableFiles()
        self.clock = HandClock()
        self.config = StoreConfig(
            root="/store", commit_log_file_bytes=4096, consume_queue_file_bytes=400,
            consume_queue_flush_pages_min=0,
        )  # fmt: skip
        self.store: Store | None = None

    def open(
        self, *, is_gated: bool = False, confirmed: int | None = None, **changes: Any
    ) -> Store:
        self.config = replace(self.config, **changes)
        self.store = Store.open(
            self.config, files=self.files, clock=self.clock, is_gated=is_gated, confirmed=confirmed
        )
        return self.store

    def reopen(self, *, kill: bool = False, **changes: Any) -> Store:
        """After an orderly stop, or after kill -9."""
        assert self.store is not None
        if kill:
            self.files = self.files.kill()
        else:
            self.store.close()
        return self.open(**changes)

    def append(
        self,
        body: bytes = b"body",
        *,
        topic: str = "T",
        queue_id: int = 0,
        tag: str = "",
        properties: dict[str, str] | None = None,
        sys_flag: int = 0,
        host: bytes = HOST,
    ) -> tuple[int, int]:
        assert self.store is not None
        encoded = encode_properties({**({"TAGS": tag} if tag else {}), **(properties or {})})
        return self.store.writer.append(
            topic, queue_id, body, encoded, tag_code(tag), 0, sys_flag, 1, host, host
        )

    def send(self, *bodies: bytes, **options: Any) -> list[tuple[int, int]]:
        """One turn."""
        assert self.store is not None
        places = [self.append(body, **options) for body in bodies]
        self.store.commit()
        return places

    def expire(self, topic: str) -> None:
        """A closed store in which a topic had ten messages, and all of them have expired."""
        self.open()
        self.send(*(b"old" * 100 for _ in range(10)), topic=topic)
        self.send(*(b"x" * 300 for _ in range(40)))
        assert self.store is not None
        self.store.close()
        for name in self.files.names("/store/commitlog")[:2]:
            self.files.remove(f"/store/commitlog/{name}")
        self.files.remove("/store/checkpoint")

    def messages(self, topic: str = "T", queue_id: int = 0) -> list[StoredMessage]:
        """All that a reader sees of a queue."""
        assert self.store is not None
        low, high = self.store.queue_offsets(topic, queue_id)
        found: list[StoredMessage] = []
        while low + len(found) < high:
            result = self.store.reader.read(topic, queue_id, low + len(found), 1000, 1 << 20)
            assert result.count > 0, result
            found += decode_records(b"".join(result.data))
        assert [message.queue_offset for message in found] == list(range(low, high))
        return found

    def bodies(self, topic: str = "T", queue_id: int = 0) -> list[bytes]:
        return [message.body for message in self.messages(topic, queue_id)]


@pytest.fixture
def bench() -> Bench:
    return Bench()
