"""The compiled engine against its reference: two brokers are fed the same bytes, one of them
without the compiled part. Log, queues, answers and counters have to be equal, byte by byte.

What is fed: sends and batches, plain and odd in every field, as Java and others write their JSON,
cut and damaged at random. SLUICEMQ_EXAMPLES sets the number of chunks of frames.
"""

import json
import os
import random
import struct
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from simulation.stepped import START_MS, SteppedBroker, SteppedClient, pull_fields, send_fields
from sluicemq import engine
from sluicemq.config import BrokerConfig
from sluicemq.errors import ProtocolError
from sluicemq.model.subscription import SQL92, Subscription
from sluicemq.model.topic import GroupConfig, TopicConfig
from sluicemq.record.codec import encode_batch
from sluicemq.testing.files import CrashableFiles
from sluicemq.wire import bodies
from sluicemq.wire.frames import Command, encode

EXAMPLES = int(os.environ.get("SLUICEMQ_EXAMPLES", "300"))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        engine.sends is None and (engine.PURE or os.environ.get("CI") != "true"),
        reason="the engine is not compiled: make native",
    ),
]

ID = "UNIQ_KEY\x01C000020203F34E0E2F2A67BA16000000\x02"
PROPERTIES = st.lists(
    st.sampled_from([
        ID, ID.lower(), "UNIQ_KEY\x01\x02", "UNIQ_KEY\x01not one\x02", "MYUNIQ_KEY\x01AB\x02",
        "TAGS\x01A\x02", "TAGS\x01\x02", "TAGS\x01ÄÖ中😀\x02", "MYTAGS\x01B\x02", "KEYS\x01k 1\x02",
        "WAIT\x01true\x02", "WAIT\x01false\x02", "WAIT\x01trueish\x02", "DELAY\x013\x02",
        "DELAYED\x01x\x02", "notDELAY\x01x\x02", "TRAN_MSG\x01true\x02", "TIMER_DELAY_SEC\x015\x02",
        "TRACE_ON\x01false\x02", "TRACE\x01x\x02", "MSG_REGION\x01r\x02", "CLUSTER\x01c\x02",
        "INNER_MULTI_QUEUE_OFFSET\x013\x02", "__CRC32#\x010123456789\x02", "SLUICE_LANE\x01x\x02",
        "SLUICE_LANES\x01x\x02", "XPOP_CK\x01x\x02",
        "value\x01CLUSTER\x02", "POP_CK\x01x\x02", "__SHARDINGKEY\x01s\x02",
        "a\x01\"\\/\t\n\x02",
        "\x02", "\x01\x02", "no value", "b\x01" + "v" * 300 + "\x02", "c\x01\x00\x02",
        "d\x01\x7f\x02", "UNIQ_KEY", "\x02\x02TAGS\x01C\x02",
    ]),
    max_size=7,
).map("".join) | st.text(max_size=20)  # fmt: skip
NUMBERS = st.sampled_from([
    "0", "1", "3", "4", "-1", "-0", "00", "007", "+1", " 1", "1 ", "1_0", "", "1.0", "1e3", "x",
    "2147483647", "2147483648", "-2147483649", "9223372036854775807", "9223372036854775808",
    "99999999999999999999", "16", "32", "128", "2", "769",
])  # fmt: skip
BODIES = st.binary(max_size=80) | st.just(b"x" * 5000)


@st.composite
def headers(draw: st.DrawFn, code: int) -> dict[str, Any]:
    def mostly(usual: Any, others: st.SearchStrategy[Any]) -> Any:
        return draw(others) if draw(st.integers(0, 9)) == 0 else usual

    fields = {
        "a": mostly("P", st.text(max_size=5)),
        "b": mostly("T", st.sampled_from(["other", "", "%RETRY%G", "ordered", "Ä", "T\x01"])),
        "c": "TBW102", "d": "4",
        "e": mostly(str(draw(st.integers(0, 3))), NUMBERS),
        "f": mostly(draw(st.sampled_from(["0", "1", "3"])), NUMBERS),
        "g": mostly(str(START_MS), NUMBERS),
        "h": mostly("0", NUMBERS),
        "i": draw(PROPERTIES) + mostly(ID if code == 310 else "", st.just("")),
        "j": mostly("0", NUMBERS),
        "k": "false",
        "m": mostly("false" if code == 310 else "true", st.sampled_from(["true", "TRUE", "", "0"])),
    }  # fmt: skip
    for name in draw(st.lists(st.sampled_from(sorted(fields)), max_size=1)):
        if draw(st.integers(0, 4)) == 0:
            del fields[name]
    if draw(st.integers(0, 9)) == 0:
        fields[draw(st.sampled_from(["n", "sluiceBrief", "zz", "traceparent"]))] = "true"
    values: dict[str, Any] = {
        "code": code, "extFields": fields,
        "flag": mostly(draw(st.sampled_from([0, 2])), st.sampled_from([1, 3, -1, "0", None, 1.0])),
        "language": mostly("JAVA", st.sampled_from(["GO", "Ä", 3, None])),
        "opaque": mostly(draw(st.integers(0, 1 << 31)), st.sampled_from([-1, 1 << 40, "7"])),
        "serializeTypeCurrentRPC": "JSON", "version": 479,
    }  # fmt: skip
    if draw(st.integers(0, 9)) == 0:
        values["remark"] = draw(st.sampled_from(["", "text", None]))
    names = draw(st.permutations(sorted(values))) if draw(st.booleans()) else sorted(values)
    return {name: values[name] for name in names}


@st.composite
def frames(draw: st.DrawFn) -> bytes:
    code = draw(st.sampled_from([310, 310, 310, 320, 320, 10, 34, 999]))
    header = draw(headers(code))
    if code == 320:
        parts = draw(st.lists(st.tuples(st.just(0), BODIES, PROPERTIES), max_size=6))
        ended = draw(st.booleans())
        body = encode_batch([
            (flag, body, (own + "\x02" * ended).encode("utf-8", "replace"))
            for flag, body, own in parts
        ])  # fmt: skip
    else:
        body = draw(BODIES)
    styles: list[dict[str, Any]] = [{"separators": (",", ":")}, {}, {"ensure_ascii": False}]
    text = json.dumps(header, **draw(st.sampled_from(styles))).encode()
    frame = bytearray(struct.pack(">II", 4 + len(text) + len(body), len(text)) + text + body)
    if draw(st.integers(0, 7)) == 0:  # a byte of header or body is another one
        frame[draw(st.integers(8, len(frame) - 1))] = draw(st.integers(0, 255))
    return bytes(frame)


class Side:
    """One of the two brokers, and what it has done."""

    def __init__(self, *, is_compiled: bool) -> None:
        self.broker = SteppedBroker(config=BrokerConfig(broker_name="b", metrics_enable=False))
        self.broker.core.topics.put(
            TopicConfig("T", 4, 4), TopicConfig("ordered", 4, 4, order=True)
        )
        if not is_compiled:
            self.broker.dispatcher.run_engine = None
            self.broker.core.pull.compiled = None
            self.broker.core.send.compiled = None
        self.client = self.connect()

    def connect(self) -> SteppedClient:
        self.client = self.broker.connect()
        return self.client

    def take(self, data: bytes) -> list[Any]:
        """What the chunk has changed."""
        begin, told = self.broker.store.written_offset, len(self.client.log)
        trouble = ""
        try:
            self.client.feed_bytes(data)
            self.broker.step()
        except (ProtocolError, AssertionError) as error:
            trouble = type(error).__name__
            self.broker.step()
        end = self.broker.store.written_offset
        answers = [
            (one.code, one.fields, one.remark, one.opaque, one.flag, bytes(one.body))
            for one in self.client.log[told:]
        ]
        if trouble:
            self.connect()
        writer, topics = self.broker.store.writer, self.broker.core.topics.table
        return [
            trouble, sorted(answers, key=repr), end - begin, self._log(begin, end),
            [(key, q.next_offset, q.committed_offset, bytes(q.tail[-160:]))
             for key, q in sorted(writer.by_key.items()) if q.next_offset],
            [(name, t.messages_in, t.bytes_in) for name, t in topics.items() if t.messages_in],
            self.broker.core.send.body_size_counts[:20],
        ]  # fmt: skip

    def _log(self, begin: int, end: int) -> bytes:
        log = self.broker.store.writer._log
        found = b""
        while begin < end:
            segment = log.segments.at(begin)
            assert segment is not None
            stop = min(end, segment.end)
            found += bytes(segment.view()[begin - segment.base : stop - segment.base])
            begin = stop
        return found


@pytest.fixture(scope="module")
def sides() -> tuple[Side, Side]:
    assert engine.sends is not None, "CI builds the compiled engine"
    return Side(is_compiled=True), Side(is_compiled=False)


@settings(
    max_examples=EXAMPLES, deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
@given(chunk=st.lists(frames(), min_size=1, max_size=8).map(b"".join))
def test_both_engines_do_the_same(sides: tuple[Side, Side], chunk: bytes) -> None:
    compiled, reference = (side.take(chunk) for side in sides)
    assert compiled == reference


def test_the_compiled_engine_takes_plain_sends_and_batches() -> None:
    """Else the test above would compare the reference with itself."""
    side, taken = Side(is_compiled=True), 0
    rng = random.Random(1)
    for number in range(50):
        fields = {
            "a": "P", "b": "T", "c": "TBW102", "d": "4", "e": str(rng.randrange(4)), "f": "0",
            "g": str(START_MS), "h": "0", "i": f"KEYS\x01{number}\x02{ID}TAGS\x01A\x02", "j": "0",
            "k": "false", "m": "false",
        }  # fmt: skip
        header = {"code": 310, "extFields": fields, "flag": 0, "opaque": number, "version": 479}
        text = json.dumps(header).encode()
        frame = struct.pack(">II", 4 + len(text) + 4, len(text)) + text + b"body"
        compiled = side.broker.core.send.compiled
        if compiled.run(frame, 0, side.client.peer) == len(frame):
            taken += 1
        else:
            side.client.feed_bytes(frame)
    side.broker.step()
    assert taken >= 46  # the first message of a queue is not plain


TAGS = ["", "A", "B", "C", "Ä"]
EXPRESSIONS = ["*", "A", "A || B", "Ä", "nobody's", "n > 20"]


class Reading:
    """One of two brokers with the same messages, and its consumers."""

    def __init__(self, *, is_compiled: bool) -> None:
        self.is_compiled = is_compiled
        self.files = CrashableFiles()
        self.opaque = 0
        self.answers: list[Any] = []
        self.start()

    def start(self) -> None:
        self.broker = SteppedBroker(files=self.files)
        self.broker.core.topics.put(TopicConfig("T", 2, 2))
        if not self.is_compiled:
            self.broker.dispatcher.run_engine = self.broker.core.pull.compiled = None
        self.clients = [self.broker.connect() for _ in range(2)]

    def ask(self, client: int, code: int, fields: dict[str, Any], body: bytes = b"") -> None:
        answer = self.clients[client].call(code, fields, body)
        if code != 310:  # the places of messages are compared by reading them
            self.answers.append((answer.code, answer.fields, answer.remark, bytes(answer.body)))

    def do(self, step: tuple[Any, ...]) -> None:
        what, *more = step
        if what == "send":
            queue, tag, size = more
            own = f"{ID}TAGS\x01{tag}\x02n\x01{size}\x02"
            self.ask(0, 310, send_fields(properties=own, e=queue), b"x" * size)
        elif what == "pull":
            client, fields = more
            self.ask(client, 11, pull_fields(**fields))
        elif what == "beat":
            (expression,) = more
            kind = SQL92 if ">" in expression else "TAG"
            wanted = Subscription("T", expression, kind, version=1)
            data = bodies.ConsumerData("G", subscriptions=(wanted,))
            beat = bodies.Heartbeat("client", consumers=(data,))
            self.ask(0, 34, {}, bodies.encode_heartbeat(beat))
        elif what == "group":
            (changes,) = more
            self.broker.core.groups.put(GroupConfig("G", **changes))
        elif what == "topic":
            (perm,) = more
            self.broker.core.topics.put(TopicConfig("T", 2, 2, perm))
        elif what == "restart":
            self.broker.close()
            self.start()
        self.broker.advance(0.03)

    def state(self) -> list[Any]:
        core = self.broker.core
        given = {
            key: (
                one.messages_out,
                one.bytes_out,
                one.filtered_count,
                sorted(one.fetched_offsets.items()),
            )
            for key, one in core.delivered.items()
        }
        return [
            self.answers,
            given,
            core.offsets.table,
            core.pull.found_count,
            core.pull.missed_count,
        ]


PULLS = st.fixed_dictionaries({
    "queueId": st.integers(0, 1), "offset": st.integers(0, 60), "commitOffset": st.integers(0, 40),
    "maxMsgNums": st.sampled_from([1, 5, 32, 100]), "sysFlag": st.sampled_from([0, 1, 4, 5]),
    "subscription": st.sampled_from(EXPRESSIONS[:-1]), "subVersion": st.sampled_from([0, 0, 2]),
    "consumerGroup": st.sampled_from(["G", "G", "other"]),
}, optional={"sluiceAnySpan": st.just("true")})  # fmt: skip
STEPS = (
    st.tuples(
        st.just("send"), st.integers(0, 1), st.sampled_from(TAGS), st.sampled_from([1, 50, 70_000])
    )
    | st.tuples(st.just("pull"), st.integers(0, 1), PULLS)
    | st.tuples(st.just("beat"), st.sampled_from(EXPRESSIONS))
    | st.tuples(
        st.just("group"),
        st.sampled_from([{}, {"consume_enable": False}, {"broker_id_when_slow": 2}]),
    )
    | st.tuples(st.just("topic"), st.sampled_from([6, 6, 2]))
    | st.tuples(st.just("restart"))
)


@settings(max_examples=max(EXAMPLES // 6, 10), deadline=None)
@given(steps=st.lists(STEPS, max_size=40), repeats=st.integers(1, 3))
def test_both_engines_give_the_same(steps: list[tuple[Any, ...]], repeats: int) -> None:
    """Pulls are repeated, so that the later ones have a plan."""
    compiled, reference = Reading(is_compiled=True), Reading(is_compiled=False)
    sends = [("send", number % 2, TAGS[number % 5], 30) for number in range(40)]
    for step in [*sends, *(step for step in steps for _ in range(repeats))]:
        for side in (compiled, reference):
            side.do(step)
    for ours, expected in zip(compiled.state(), reference.state(), strict=True):
        assert ours == expected


SCANS = st.fixed_dictionaries({
    "queueId": st.just(0), "offset": st.integers(0, 399), "commitOffset": st.integers(0, 399),
    "maxMsgNums": st.sampled_from([2, 2, 32, 100]), "sysFlag": st.sampled_from([0, 1, 4, 5]),
    "subscription": st.sampled_from(["n > 40", "n = 7 AND TAGS = 'A'"]),
    "expressionType": st.just(SQL92),
}, optional={"sluiceAnySpan": st.just("true")})  # fmt: skip


@settings(max_examples=max(EXAMPLES // 15, 10), deadline=None)
@given(pulls=st.lists(SCANS, min_size=1, max_size=12), more=st.integers(0, 300))
def test_both_engines_give_the_same_through_columns(pulls: list[dict[str, Any]], more: int) -> None:
    sides = Reading(is_compiled=True), Reading(is_compiled=False)
    for side in sides:
        for number in range(400):
            side.do(("send", 0, TAGS[number % 5], number % 50))
        side.do(("beat", "n > 40"))
        for fields in pulls:
            for _ in range(3):
                side.do(("pull", 0, fields))
        for number in range(more):
            side.do(("send", 0, "A", number % 50))
        side.do(("pull", 0, pulls[0]))
    ours, expected = (side.state() for side in sides)
    assert ours == expected


def test_the_compiled_engine_takes_pulls_through_columns() -> None:
    side, taken = Reading(is_compiled=True), 0
    for number in range(400):
        side.do(("send", 0, "A", number % 50))
    side.do(("beat", "n > 20"))
    for offset in range(0, 200, 10):
        fields = pull_fields(offset=offset, sysFlag=0)
        texts = {name: str(value) for name, value in fields.items()}
        command = Command(11, texts, b"", offset + 1)
        run = side.broker.dispatcher.run_engine
        assert run is not None
        if run(encode(command), 0, side.clients[0].peer, side.broker.dispatcher.scheduler):
            taken += 1
        else:
            side.clients[0].feed(command)
    assert taken == 19


def test_the_compiled_engine_takes_repeated_pulls() -> None:
    side = Reading(is_compiled=True)
    for number in range(40):
        side.do(("send", 0, "A" if number % 3 else "B", 30))
    side.do(("beat", "A"))
    for expression in ("*", "A"):
        for begin in (0, 3, 7):
            fields = pull_fields(offset=begin, subscription=expression, maxMsgNums=4)
            texts = {name: str(value) for name, value in fields.items()}
            command = Command(11, texts, b"", begin + 1)
            frame = encode(command)
            run = side.broker.dispatcher.run_engine
            assert run is not None
            used = run(frame, 0, side.clients[0].peer, side.broker.dispatcher.scheduler)
            assert used == (len(frame) if begin else 0)
            if not begin:
                side.clients[0].feed(command)
    assert not side.answers[:-1]
