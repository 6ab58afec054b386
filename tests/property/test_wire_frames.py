"""Whatever the bytes: the same commands from any cut, round trips, and only ProtocolErrors."""

import base64
import contextlib
import gzip
import json
import struct
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluicemq.errors import ProtocolError
from sluicemq.model.ids import Host
from sluicemq.net.dispatch import Dispatcher, Peer
from sluicemq.wire import bodies, fastjson, registration, tables
from sluicemq.wire.declare import HeaderError, decode_header, wire_names
from sluicemq.wire.frames import (
    BINARY,
    JSON,
    LANGUAGES,
    Command,
    FrameBuffer,
    FrameReader,
    decode,
    encode,
)
from sluicemq.wire.headers import REQUEST_HEADERS

pytestmark = pytest.mark.slow

TRAFFIC = Path(__file__).parents[1] / "golden" / "traffic"
SCENARIOS = ("java53-binary", "go-push-tag", "java53-send-illegal-topic-raw", "java53-pull-errors")
EXAMPLES = settings(max_examples=100, deadline=None)

texts = st.text(max_size=20)
utf8_texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
int32 = st.integers(-(2**31), 2**31 - 1)


def recorded(name: str) -> list[bytes]:
    with gzip.open(TRAFFIC / f"{name}.jsonl.gz", "rt", encoding="utf-8") as lines:
        return [base64.b64decode(json.loads(line)["frame_b64"]) for line in lines]


STREAMS = [b"".join(recorded(name)) for name in SCENARIOS]


def content(command: Command) -> tuple[object, ...]:
    return tuple(getattr(command, name) for name in Command.__slots__)


def pieces_of(stream: bytes, cuts: list[int]) -> Iterator[bytes]:
    edges = [0, *sorted(cut % (len(stream) + 1) for cut in cuts), len(stream)]
    return (stream[start:end] for start, end in pairwise(edges))


class Carrier:
    def __init__(self) -> None:
        self.written: list[bytes] = []

    def write(self, data: bytes, /) -> None:
        self.written.append(data)

    def close(self) -> None:
        pass


def make_peer() -> Peer:
    return Peer(Carrier(), Host("127.0.0.1", 1), Host("127.0.0.1", 2))


@EXAMPLES
@given(st.sampled_from(STREAMS), st.lists(st.integers(0, 2**20), max_size=30))
def test_any_cut_of_a_recorded_stream_gives_the_same_commands(
    stream: bytes, cuts: list[int]
) -> None:
    reader = FrameReader()
    commands = [command for piece in pieces_of(stream, cuts) for command in reader.feed(piece)]
    whole = FrameReader().feed(stream)
    assert [content(command) for command in commands] == [content(command) for command in whole]
    assert len(whole) > 10


@EXAMPLES
@given(st.sampled_from(STREAMS), st.lists(st.integers(0, 2**20), max_size=30))
def test_any_cut_of_a_recorded_stream_calls_the_same_handlers(
    stream: bytes, cuts: list[int]
) -> None:
    def run(parts: Iterator[bytes]) -> tuple[list[tuple[object, ...]], bytes]:
        seen: list[tuple[object, ...]] = []
        codes = range(10, 402)
        dispatcher = Dispatcher({code: lambda c, _: seen.append(content(c)) for code in codes})
        pieces, peer, answers = FrameBuffer(), make_peer(), b""
        for part in parts:
            data = pieces.join(part)
            while data:
                used, answer = dispatcher.handle_frames(data, peer)
                answers += answer
                data = pieces.keep_rest(data[used:]) if used < len(data) else None
        return seen, answers

    assert run(pieces_of(stream, cuts)) == run(iter([stream]))


commands = st.builds(
    Command,
    code=st.integers(-(2**15), 2**15 - 1),
    fields=st.none() | st.dictionaries(texts, texts, max_size=6),
    body=st.binary(max_size=50),
    opaque=int32,
    flag=st.integers(0, 3),
    remark=st.none() | texts,
    language=st.sampled_from(LANGUAGES),
    version=st.integers(0, 612),
    serialization=st.just(JSON),
)


@EXAMPLES
@given(commands)
def test_commands_survive_json(command: Command) -> None:
    assert content(decode(encode(command)[4:])) == content(command)


@EXAMPLES
@given(commands, st.dictionaries(utf8_texts, utf8_texts, max_size=6), utf8_texts)
def test_commands_survive_binary_but_for_empty_texts(
    command: Command, fields: dict[str, str], remark: str
) -> None:
    command.serialization, command.fields, command.remark = BINARY, fields, remark
    again = decode(encode(command)[4:])
    kept = {name: value for name, value in fields.items() if name and value}
    command.fields, command.remark = kept or None, remark or None
    assert content(again) == content(command)


@st.composite
def damaged_frames(draw: st.DrawFn) -> bytes:
    """Recorded frames with some bytes replaced, inserted or cut off; or plain noise."""
    if draw(st.booleans()):
        return draw(st.binary(max_size=60))
    data = bytearray(draw(st.sampled_from(STREAMS))[:2000])
    for _ in range(draw(st.integers(1, 5))):
        position = draw(st.integers(0, len(data) - 1))
        data[position : position + draw(st.integers(0, 3))] = draw(st.binary(max_size=3))
    return bytes(data[: draw(st.integers(1, 2000))])


@EXAMPLES
@given(damaged_frames())
def test_damaged_streams_raise_nothing_but_protocol_errors(data: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        FrameReader().feed(data)
    with contextlib.suppress(ProtocolError):
        Dispatcher({}).handle_frames(data, make_peer())


@EXAMPLES
@given(st.binary(max_size=80), st.integers(0, 3))
def test_any_header_bytes_decode_or_raise_a_protocol_error(
    header: bytes, serialization: int
) -> None:
    try:
        command = decode(struct.pack(">I", serialization << 24 | len(header)) + header)
    except ProtocolError:
        return
    encode(command)


json_keys = st.text(max_size=5) | st.just("$ref")
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | texts | st.just("$.a"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(json_keys, inner, max_size=3),
    max_leaves=8,
)


@EXAMPLES
@given(st.dictionaries(st.sampled_from(["code", "extFields", "flag", "opaque", "remark",
                                        "language", "version"]), json_values))  # fmt: skip
def test_any_json_object_as_header_decodes_or_raises_a_protocol_error(
    values: dict[str, object],
) -> None:
    header = json.dumps(values).encode()
    try:
        command = decode(struct.pack(">I", len(header)) + header)
    except ProtocolError:
        return
    assert all(isinstance(value, str) for value in (command.fields or {}).values())
    assert content(decode(encode(command)[4:])) == content(command)


@EXAMPLES
@given(st.sampled_from(sorted(REQUEST_HEADERS)), st.data())
def test_any_fields_decode_to_a_header_or_raise_a_header_error(
    code: int, data: st.DataObject
) -> None:
    declared = REQUEST_HEADERS[code]
    names = st.sampled_from(wire_names(declared))
    values = texts | st.integers(-(2**70), 2**70).map(str)
    fields = data.draw(st.dictionaries(names, values))
    with contextlib.suppress(HeaderError):
        assert isinstance(decode_header(declared, fields), declared)


# ------------------------------------------------------------------------------------ fastjson

object_keys = st.dictionaries(
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=4),
    st.integers(0, 9) | utf8_texts,
    min_size=1,
    max_size=3,
).map(fastjson.make_object_key)
scalars = st.booleans() | st.integers(-(2**53), 2**53) | utf8_texts.filter(lambda t: "$" not in t)
fastjson_values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(utf8_texts.filter(lambda t: "$" not in t), inner, max_size=3)
        | st.dictionaries(st.integers(0, 2**40), inner, max_size=3)
        | st.dictionaries(object_keys, inner, max_size=3)
    ),
    max_leaves=10,
)


@EXAMPLES
@given(fastjson_values)
def test_fastjson_values_survive(value: object) -> None:
    assert fastjson.loads(fastjson.dumps(value)) == value


@EXAMPLES
@given(st.text(st.sampled_from('{}[]:,"0a\\-.1tnu$ \n'), max_size=40) | st.binary(max_size=40))
def test_any_text_is_read_or_refused(data: str | bytes) -> None:
    with contextlib.suppress(ProtocolError):
        fastjson.loads(data)


DECODERS = [
    bodies.decode_topic_route, bodies.decode_cluster_info, bodies.decode_heartbeat,
    tables.decode_topic_table, tables.decode_group_table, tables.decode_consumer_offsets,
    bodies.decode_lock_batch, bodies.decode_queue_offsets, bodies.decode_topic_stats,
    bodies.decode_consume_stats, bodies.decode_kv_table, bodies.decode_topic_list,
    bodies.decode_check_client_config, registration.decode_register_body,
    bodies.decode_consumer_connections, bodies.decode_broker_member_group,
]  # fmt: skip
BODY_KEYS = st.sampled_from([
    "brokerDatas", "brokerAddrs", "queueDatas", "consumerDataSet", "subscriptionDataSet", "table",
    "topicConfigTable", "subscriptionGroupTable", "offsetTable", "mqSet", "codeSet", "tagsSet",
    "clusterAddrTable", "brokerAddrTable", "dataVersion", "perm", "topicConfigSerializeWrapper",
    "subscriptionData", "forbiddenTable", "connectionSet", "brokerMemberGroup", "0",
])  # fmt: skip
body_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(BODY_KEYS, inner, max_size=3),
    max_leaves=10,
)


@pytest.mark.parametrize("decode_body", DECODERS, ids=lambda function: function.__name__)
@settings(max_examples=40, deadline=None)
@given(body_values)
def test_any_json_is_a_body_or_a_protocol_error(decode_body, value) -> None:  # type: ignore[no-untyped-def]
    with contextlib.suppress(ProtocolError):
        decode_body(json.dumps(value).encode())
