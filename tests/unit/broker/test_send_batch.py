"""Batches as columns and message by message are stored and answered alike."""

import itertools
import struct
import zlib
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from metered import RunningClock
from simulation.stepped import SMALL, START_MS, SteppedBroker, SteppedClient, send_fields
from sluicemq.broker.produce import intake
from sluicemq.broker.produce.intake import MESSAGES_PER_STEP_MAX
from sluicemq.model.system_names import STAGING_TOPIC
from sluicemq.record import batch_columns
from sluicemq.record.codec import encode_batch
from sluicemq.store.index import columns as index_columns
from sluicemq.wire.codes import RequestCode, ResponseCode
from sluicemq.wire.staging import Owner, Stage, StagedRange
from sluicemq.wire.staging import encode_staged_ranges as ranges_of

pytestmark = pytest.mark.slow

Entry = tuple[int, bytes, bytes]
MANY = batch_columns.COUNT_MIN

LARGE = replace(SMALL, commit_log_file_bytes=4 << 20, consume_queue_file_bytes=400_000)
PROPERTY = st.sampled_from((
    b"TAGS\x01UA\x02", b"TAGS\x01\x02", b"TAGS\x01" + b"t" * 40 + b"\x02", b"KEYS\x01k 1\x02",
    b"WAIT\x01true\x02", b"a\x01b\x02", b"XTAGS\x01UA\x02", b"DELAY\x010\x02", b"DELAY\x013\x02",
    b"DELAY\x02", b"TIMER_DELAY_MS\x015\x02", b"TRAN_MSG\x01true\x02", b"TRAN_MSG\x01no\x02",
    b"TIMER_DEL_UNIQKEY\x01x\x02", b"no end", b"\x02", b"\x01", b"z\x01" + bytes(16) + b"\x02",
    b"POP_CK\x01x\x02", b"XPOP_CK\x01x\x02", b"CLUSTER\x01c\x02", b"TRACE_ON\x01false\x02",
    b"MSG_REGION\x01r\x02", b"__CRC32#\x01x\x02", b"INNER_MULTI_QUEUE_OFFSET\x011\x02",
    b"SLUICE_LANE\x01x\x02", b"SLUICE_NEXT\x01x\x02", b"SLUICE_FIRST_HALF\x01x\x02",
    b"UNIQ_KEY\x01AB\x02", "ü\x01ö\x02".encode(), b"\xff\x01\xfe\x02",
))  # fmt: skip
PLAIN = st.sampled_from((b"k\x01v\x02", b"price\x0110\x02", b"price\x01100\x02"))
BODY = st.sampled_from((
    b"", b"b", b"body" * 32, bytes(20), b"\x02TAGS\x01no\x02", b"DELAY\x013\x02", b"x" * 3000,
    b"TAGS\x01", b"\x01\x02" * 9,
))  # fmt: skip
FLAG = st.sampled_from((0, 1, -1, 0x7FFFFFFF))


@st.composite
def batches(draw: st.DrawFn) -> list[Entry]:
    """Mostly alike, now and then with something odd in the middle."""
    count = draw(st.integers(MANY - 1, MANY + 12))
    begin = draw(
        st.sampled_from((b"U\x01AB\x02TAGS\x01UA\x02", b"TAGS\x01UA\x02", b"WAIT\x011\x02"))
    )
    bodies = draw(st.lists(BODY, min_size=1, max_size=4))
    own = draw(st.lists(PLAIN, min_size=1, max_size=3))
    entries = [
        (0, bodies[index % len(bodies)], begin + own[index % len(own)]) for index in range(count)
    ]
    for _ in range(draw(st.integers(0, 2))):
        odd = (draw(FLAG), draw(BODY), b"".join(draw(st.lists(PROPERTY, max_size=4))))
        entries[draw(st.integers(0, count - 1))] = odd
    return entries


def broker_with(*, columns: bool) -> tuple[SteppedBroker, SteppedClient]:
    broker = SteppedBroker(store_config=LARGE)
    broker.store.writer.can_append_columns = columns
    return broker, broker.connect()


def sent(body: bytes, *, columns: bool, **fields: object) -> list[object]:
    """All that can be seen of a batch: the answer, the log, the queue, the counters."""
    broker, client = broker_with(columns=columns)
    client.call(310, send_fields())
    answer = client.call(320, send_fields(properties="UNIQ_KEY\x01B\x02", **fields), body)
    return [answer.code, answer.fields, answer.remark, *seen(broker)]


def seen(broker: SteppedBroker, topic: str = "T") -> list[object]:
    store = broker.store
    log, at = [], 0
    while (view := store.reader.view_at(at)) is not None:
        log.append(bytes(view))
        at += len(view)
    _, high = store.queue_offsets(topic, 0)
    known = broker.core.topics.get(topic)
    assert known is not None
    units = bytes(store.reader.units(topic, 0, 0, high))
    return [
        log, units, broker.core.send.body_size_counts, known.messages_in,
        known.bytes_in, indexed(broker),
    ]  # fmt: skip


def indexed(broker: SteppedBroker) -> list[bytes]:
    """The entries of the key index, which reads the log or has been told."""
    index = broker.store.keys
    while not index.catch_up():
        pass
    return [
        bytes(file._segment.view()[file._entry_at(1) : file._entry_at(file.next_number)])
        for file in index._index_files
    ]


@settings(max_examples=25, deadline=None)
@given(batches(), st.binary(max_size=3), st.integers(0, 60))
@example([(0, b"body", b"U\x01AB\x02TAGS\x01UA\x02")] * MANY, b"", 0)
@example([(0, b"body", b"")] * MANY, b"", 0)
@example([(0, b"", b"a\x01b\x02")] * MANY, b"", 0)
def test_both_ways_store_answer_and_count_alike(
    entries: Sequence[Entry], more: bytes, cut: int
) -> None:
    body = encode_batch(entries) + more
    body = body[: len(body) - cut] if cut > 50 else body
    body = body.ljust(4096, b"\0") if len(body) < 100 else body
    assert sent(body, columns=True) == sent(body, columns=False)


@settings(max_examples=6, deadline=None)
@given(
    st.lists(
        st.tuples(FLAG, st.sampled_from((b"", b"b", b"x" * 70)), st.lists(PROPERTY, max_size=3)),
        min_size=1, max_size=6,
    ),
    st.integers(MESSAGES_PER_STEP_MAX - 1, MESSAGES_PER_STEP_MAX + 2),
    st.binary(max_size=2),
)  # fmt: skip
@example([(0, b"", [])], MESSAGES_PER_STEP_MAX + 1, b"")
def test_a_batch_that_is_taken_apart_in_steps_is_stored_and_answered_alike(
    kinds: Sequence[tuple[int, bytes, list[bytes]]], count: int, more: bytes
) -> None:
    entries = [
        (flag, body, b"".join(own))
        for flag, body, own in itertools.islice(itertools.cycle(kinds), count)
    ]
    body = encode_batch(entries) + more
    one, other = sent(body, columns=True), sent(body, columns=False)
    if more or one[0] != ResponseCode.SUCCESS:  # of two faults, either one may be named
        del one[2], other[2]
    assert one == other


def test_a_batch_of_too_many_messages_is_refused_by_both_engines() -> None:
    for entry in ((0, b"", b""), (0, b"b", b"U\x01AB\x02"), (0, b"", b"DELAY\x010\x02")):
        fits, more = (encode_batch([entry] * count) for count in (16_384, 16_385))
        assert sent(fits, columns=True)[0] == ResponseCode.SUCCESS
        code, _, remark, *_ = sent(more, columns=True)
        assert code == ResponseCode.MESSAGE_ILLEGAL
        assert "more than 16384 messages" in str(remark)


def test_other_requests_are_served_between_the_steps_of_a_long_batch() -> None:
    broker = SteppedBroker(clock=RunningClock())
    client = broker.connect()
    client.call(310, send_fields())
    body = encode_batch([(0, b"b", b"DELAY\x010\x02")] * 5000)
    long, short = client.request(320, send_fields(), body), client.request(310, send_fields())
    client.feed(long)
    client.feed(short)
    broker.settle()
    both = [client.answers[one.opaque].fields["queueOffset"] for one in (short, long)]
    assert both == ["1", "2"]


def test_a_topic_deleted_between_the_steps_of_a_batch_is_not_brought_back() -> None:
    broker = SteppedBroker(clock=RunningClock())
    client = broker.connect()
    client.call(310, send_fields())
    body = encode_batch([(0, b"b", b"DELAY\x010\x02")] * 5000)
    long = client.request(320, send_fields(c="none"), body)
    client.feed(long)
    client.feed(client.request(RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": "T"}))
    broker.settle()
    answer = client.answers[long.opaque]
    assert answer.code == ResponseCode.TOPIC_NOT_EXIST, answer


ALIKE: list[list[Entry]] = [
    [(number % 3, body * (number % 5 + 1), head % number + rest) for number in range(3 * MANY)]
    for body in (b"b", b"body" * 30, b"B" * 2000)
    for head in (b"UNIQ_KEY\x01%032X\x02", b"UNIQ_KEY\x017F%d\x02", b"n%d\x01v\x02")
    for rest in (
        b"TAGS\x01UA\x02a name of more than eight\x01v\x02", b"TAGS\x01a longer tag\x02x\x01y\x02",
        b"KEYS\x01k1\x02", b"KEYS\x01k1 k2  k3\x02TAGS\x01\x02", b"KEYS\x01\x02",
        b"UNIQ_KEY\x01z\x02",
        b"KEYS\x01" + "k\u00fc".encode() + b"\x02", b"x\x01y\x02" * 300,
        b"TAGS\x01A\x02TAGS\x01B\x02",
    )
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(ALIKE)))
def test_messages_with_the_same_names_are_stored_and_indexed_alike(number: int) -> None:
    body = encode_batch(ALIKE[number])
    assert sent(body, columns=True) == sent(body, columns=False)


def test_the_index_need_not_read_what_was_appended_as_columns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broker, client = broker_with(columns=True)
    client.call(310, send_fields())
    indexed(broker)
    monkeypatch.setattr(index_columns, "key_columns_at", None)
    for body in (b"b" * 200, b"b" * 3000):
        entries = [(0, body, b"UNIQ_KEY\x01%d\x02KEYS\x01k %d\x02" % (n, n)) for n in range(MANY)]
        client.call(320, send_fields(), encode_batch(entries))
    (entries_bytes,) = indexed(broker)
    assert len(entries_bytes) == 20 * (1 + 2 * 3 * MANY), "the first message has an id, too"
    found = broker.store.keys.find("T", "7", 64, 0, 1 << 60, is_unique=True)
    assert found is not None
    assert len(found.records) == 2


def test_a_large_plain_batch_goes_through_as_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [(0, b"b" * 200, b"U\x01%d\x02TAGS\x01UA\x02" % number) for number in range(MANY)]
    broker, client = broker_with(columns=True)
    monkeypatch.setattr(intake, "decode_batch", None)
    client.call(320, send_fields(), encode_batch(entries))
    assert broker.store.queue_offsets("T", 0)[1] == MANY


def test_whoever_wants_only_the_first_id_gets_it() -> None:
    for count in (MANY - 1, 3 * MANY):
        body = encode_batch([(0, b"b" * 200, b"U\x01AB\x02")] * count)
        whole = sent(body, columns=True)[1]
        for columns in (True, False):
            brief = sent(body, columns=columns, sluiceBrief="true")[1]
            assert isinstance(whole, dict)
            assert brief == whole | {"msgId": whole["msgId"].split(",")[0]}
        assert whole["msgId"].count(",") == count - 1


@pytest.mark.parametrize("field", ["g", "f"])
def test_numbers_that_do_not_fit_are_refused_alike(field: str) -> None:
    body = encode_batch([(0, b"b" * 200, b"U\x01AB\x02")] * MANY)
    for value in (1 << 63, -1, 1 << 31, 3, 0x10):
        assert sent(body, columns=True, **{field: value}) == sent(
            body, columns=False, **{field: value}
        )


def test_a_limit_of_properties_holds_both_ways() -> None:
    own = b"a\x01" + b"v" * 32_000 + b"\x02"
    for size in (32_600, 32_700, 32_766):
        entries = [(0, b"b", b"a\x01b\x02")] * MANY
        entries[5] = (0, b"b", b"a\x01" + own[2 : size - 1] + b"\x02")
        body = encode_batch(entries)
        assert sent(body, columns=True) == sent(body, columns=False)


def test_random_damage_is_answered_alike() -> None:
    good = encode_batch([(0, b"b" * 100, b"U\x01AB\x02TAGS\x01UA\x02")] * MANY)
    for at in range(0, 170, 13):
        for value in (1, 0xFF):
            bad = bytearray(good)
            bad[at] = value
            assert sent(bytes(bad), columns=True) == sent(bytes(bad), columns=False)
    for size in (-1, 0, 21, 1 << 30):
        bad = bytearray(good)
        bad[:4] = struct.pack(">i", size)
        assert sent(bytes(bad), columns=True) == sent(bytes(bad), columns=False)


# ------------------------------------------------------------------------------------- epochs

STAGES = st.sampled_from((
    Stage(Owner("q", 1, 0, 0), "T", 0), Stage(Owner("q", 1, 0, 0), "T", 0, "L3"),
    Stage(Owner("q", 1, 0, 0), "U", 0), Stage(Owner("q", 1, 0, 1), "T", 0),
))  # fmt: skip


def published(groups: Sequence[tuple[Stage, int, int, bytes]], *, columns: bool) -> list[object]:
    """What an epoch of these groups (stage, count, born time, body) leaves behind."""
    broker, client = broker_with(columns=columns)
    for topic in ("T", "U"):
        client.call(310, send_fields(topic))
    client.call(int(RequestCode.SLUICE_COMMIT_EPOCH), {"query": "p", "epoch": 0, "step": "prepare"})
    total, checksum = 0, 0
    for stage, count, born_ms, body in groups:
        begin = f"SLUICE_STAGE\x01{stage.encode()}\x02SLUICE_ID\x01".encode()
        entries = [
            (number % 2, body + b"%d" % number, begin + b"I%d\x02TAGS\x01UA\x02" % number)
            for number in range(count)
        ]
        client.call(320, send_fields(STAGING_TOPIC, g=START_MS + born_ms), encode_batch(entries))
        total += count
        checksum = _crc(entries, checksum)
    one = StagedRange("broker-a", 0, 0, total, checksum, 0, 0)
    fields = {"query": "q", "epoch": 1, "step": "commit", "topics": "T,U"}
    answers = []
    for _ in range(12):
        answers.append(client.call(int(RequestCode.SLUICE_COMMIT_EPOCH), fields, ranges_of((one,))))
        broker.settle()
    return [[(one.code, one.remark) for one in answers], answers[-1].fields, seen(broker),
            seen(broker, "U"), broker.core.epochs.published_count]  # fmt: skip


def _crc(entries: Sequence[Entry], checksum: int) -> int:
    return zlib.crc32(b"".join(body for _, body, _ in entries), checksum)


@settings(max_examples=12, deadline=None)
@given(
    st.lists(
        st.tuples(
            STAGES, st.integers(1, 2 * MANY), st.integers(0, 1),
            st.sampled_from((b"x", b"y" * 300)),
        ),
        min_size=1,
        max_size=5,
    )
)  # fmt: skip
def test_both_ways_publish_alike(groups: Sequence[tuple[Stage, int, int, bytes]]) -> None:
    assert published(groups, columns=True) == published(groups, columns=False)


def test_a_large_epoch_is_published_alike_over_chunks_and_files() -> None:
    groups = [(Stage(Owner("q", 1, 0, 0), "T", 0), 700, number, b"z" * 500) for number in range(6)]
    assert published(groups, columns=True)[3:] == published(groups, columns=False)[3:]
