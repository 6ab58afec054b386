"""Key lookups shrink ranges only where the broker's answer is certain to be whole."""

from types import SimpleNamespace
from typing import Any

import pytest

from sluicemq.client.core.requests import QUERY_NOT_FOUND, SUCCESS, SYSTEM_ERROR
from sluicemq.errors import PermissionDeniedError
from sluicemq.model.ids import Host, encode_host
from sluicemq.model.topic import MessageQueue
from sluicemq.record.codec import encode_properties, encode_record
from sluicemq.spark.sources.offsets import CANDIDATE_GAP_MAX, QueueRange, narrow_ranges_by_keys
from sluicemq.wire.codes import RequestCode
from sluicemq.wire.frames import Command

HOST = encode_host(Host("127.0.0.1", 10911))
Q0, Q1 = MessageQueue("t", "a", 0), MessageQueue("t", "a", 1)
RANGES = [QueueRange(Q0, 0, 1_000_000), QueueRange(Q1, 0, 10)]


def record(queue_id: int, offset: int) -> bytes:
    return encode_record(
        topic="t", queue_id=queue_id, queue_offset=offset, physical_offset=offset, body=b"x",
        properties=encode_properties({"KEYS": "k"}), flag=0, sys_flag=0, born_time_ms=1,
        born_host=HOST, store_time_ms=2, store_host=HOST,
    )  # fmt: skip


class FakeAdmin:
    """One broker whose index answers with messages at (queue id, offset)."""

    def __init__(self, *places: tuple[int, int], code: int = SUCCESS, **changes: Any) -> None:
        self.body = b"".join(record(*place) for place in places)
        self.code = code
        self.changes = {"own": True, "limit": 64, "looked": True, "denied": False} | changes
        self.asked: list[str] = []

    def runtime(self, _: str) -> dict[str, str]:
        if self.changes["denied"]:
            raise PermissionDeniedError(16, "no", address="a:1")
        return {"sluiceVersion": "1"} if self.changes["own"] else {"brokerVersion": "1"}

    def call(self, _: str, command: Command) -> Any:
        if command.code == RequestCode.GET_BROKER_CONFIG:
            return SimpleNamespace(body=f"x=1\nmaxMsgsNumBatch={self.changes['limit']}\n".encode())
        self.asked.append(str((command.fields or {})["key"]))
        fields = {"indexLastUpdateTimestamp": "2"} if self.changes["looked"] else {}
        return SimpleNamespace(code=self.code, fields=fields, body=self.body)


def narrowed(admin: FakeAdmin, *keys: str) -> list[tuple[int, int, int]]:
    found = narrow_ranges_by_keys(admin, RANGES, frozenset(keys or ("k",)), {"a": "a:1"})  # type: ignore[arg-type]
    return [(one.queue.queue_id, one.start, one.end) for one in found]


ALL = [(0, 0, 1_000_000), (1, 0, 10)]


def test_ranges_shrink_to_the_candidates() -> None:
    admin = FakeAdmin((0, 7), (0, 9), (0, 9 + CANDIDATE_GAP_MAX + 1), (1, 3))
    assert narrowed(admin) == [
        (0, 7, 10),
        (0, 10 + CANDIDATE_GAP_MAX, 11 + CANDIDATE_GAP_MAX),
        (1, 3, 4),
    ]
    assert narrowed(FakeAdmin((1, 11), (2, 0))) == [], "outside of what is read"
    assert narrowed(FakeAdmin(code=QUERY_NOT_FOUND)) == []


def test_the_first_word_of_a_value_is_looked_up_once_a_broker() -> None:
    admin = FakeAdmin((0, 7))
    narrowed(admin, "k1 k2", "k1 k3", "k4")
    assert sorted(admin.asked) == ["k1", "k4"]


@pytest.mark.parametrize(
    "admin",
    [
        FakeAdmin((0, 7), own=False),
        FakeAdmin((0, 7), denied=True),
        FakeAdmin((0, 7), looked=False),
        FakeAdmin((0, 7), code=SYSTEM_ERROR),
        FakeAdmin((0, 7), (0, 8), limit=2),
    ],
    ids=["Java", "denied", "no index", "busy", "as many as fit"],
)
def test_an_answer_that_is_not_certain_shrinks_nothing(admin: FakeAdmin) -> None:
    assert narrowed(admin) == ALL


@pytest.mark.parametrize("keys", [(" k",), tuple(f"k{n}" for n in range(100))])
def test_what_no_index_can_answer_is_not_asked(keys: tuple[str, ...]) -> None:
    assert narrowed(FakeAdmin((0, 7)), *keys) == ALL
