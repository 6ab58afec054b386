"""The recorded traffic of real clients and servers through our codec.

`traffic/*.jsonl.gz` were recorded between Java 5.3.3, Java 4.9.8, Go 2.1.2 clients, mqadmin 5.3.3
and the real 5.3.3 servers: 111 scenarios, 4,493 frames. `header` and `body_b64` are the recorder's
own decoding, `frame_b64` the bytes.
"""

import base64
import functools
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from sluicemq.wire import bodies, fastjson, registration, tables
from sluicemq.wire.codes import RequestCode as Code
from sluicemq.wire.declare import decode_header, encode_header
from sluicemq.wire.frames import BINARY, JSON, Command, FrameReader, decode, encode
from sluicemq.wire.headers import REQUEST_HEADERS, RESPONSE_HEADERS, PullMessageResponse

TRAFFIC = Path(__file__).parent / "traffic"
SCENARIOS = sorted(path.name for path in TRAFFIC.glob("*.jsonl.gz"))
FRAMES = 4493

COMMON_FIELDS = {"bname", "ReqT", "lo", "ns", "nsd", "oway"}
"""Fields that any request may have and no header has to declare (spec/remoting.md §6)."""


class Frame(NamedTuple):
    scenario: str
    number: int
    record: dict[str, Any]
    data: bytes
    command: Command

    @property
    def code(self) -> int | None:
        """The request's code, for answers too; None when the recording lacks the request."""
        code = self.record.get("req_code") if self.command.is_response else self.command.code
        return None if code is None else int(code)


@functools.cache
def frames_of(scenario: str) -> tuple[Frame, ...]:
    with gzip.open(TRAFFIC / scenario, "rt", encoding="utf-8") as lines:
        records = [json.loads(line) for line in lines]
    frames = []
    for record in records:
        data = base64.b64decode(record["frame_b64"])
        frames.append(Frame(scenario, record["n"], record, data, decode(data[4:])))
    return tuple(frames)


def all_frames() -> list[Frame]:
    return [frame for scenario in SCENARIOS for frame in frames_of(scenario)]


def content(command: Command) -> tuple[object, ...]:
    return (
        command.code,
        command.fields,
        bytes(command.body),
        command.opaque,
        command.flag,
        command.remark,
        command.language,
        command.version,
    )


def is_java(frame: Frame) -> bool:
    return "serializeTypeCurrentRPC" in frame.record["header"] and not frame.scenario.endswith(
        "binary.jsonl.gz"
    )


def test_all_frames_are_there() -> None:
    assert len(SCENARIOS) == 111
    assert len(all_frames()) == FRAMES


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_frames_decode_to_what_was_recorded(scenario: str) -> None:
    for frame in frames_of(scenario):
        header = frame.record["header"]
        binary = header.get("serializeTypeCurrentRPC") == "ROCKETMQ" and frame.data[4] == 1
        assert content(frame.command) == (
            header["code"],
            header.get("extFields"),
            base64.b64decode(frame.record.get("body_b64", "")),
            header["opaque"],
            header["flag"],
            header.get("remark"),
            header["language"],
            header["version"],
        ), frame.number
        assert frame.command.serialization == (BINARY if binary else JSON)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_frames_survive_encoding_and_decoding(scenario: str) -> None:
    for frame in frames_of(scenario):
        again = decode(encode(frame.command)[4:])
        assert content(again) == content(frame.command)
        assert again.serialization == frame.command.serialization


def test_headers_of_java_are_written_with_the_same_keys_in_the_same_order() -> None:
    seen = 0
    for frame in all_frames():
        if not is_java(frame):
            continue
        size = int.from_bytes(frame.data[5:8], "big")
        theirs = json.loads(frame.data[8 : 8 + size])
        ours_frame = encode(frame.command)
        ours_size = int.from_bytes(ours_frame[5:8], "big")
        ours = json.loads(ours_frame[8 : 8 + ours_size])
        assert ours == theirs
        assert list(ours) == list(theirs)
        seen += 1
    assert seen > 3000


def test_binary_headers_are_written_byte_for_byte() -> None:
    seen = 0
    for frame in all_frames():
        if frame.command.serialization == BINARY:
            assert encode(frame.command) == frame.data
            seen += 1
    assert seen > 20


def test_any_connection_reads_the_same_in_one_piece_and_byte_by_byte() -> None:
    stream = b"".join(frame.data for frame in frames_of("java53-send-illegal-topic-raw.jsonl.gz"))
    whole = FrameReader().feed(stream)
    reader = FrameReader()
    bytewise = [
        command
        for index in range(len(stream))
        for command in reader.feed(stream[index : index + 1])
    ]
    assert [content(command) for command in bytewise] == [content(command) for command in whole]
    assert len(reader) == 0


def test_declared_headers_read_every_recorded_request() -> None:
    seen: set[int] = set()
    for frame in all_frames():
        command = frame.command
        declared = REQUEST_HEADERS.get(command.code)
        if command.is_response or declared is None:
            continue
        header = decode_header(declared, command.fields)
        given = {
            name: value
            for name, value in (command.fields or {}).items()
            if name not in COMMON_FIELDS
        }
        written = encode_header(header)
        for name, value in given.items():
            assert written.get(name) == value or value == "", (frame.scenario, frame.number, name)
        seen.add(command.code)
    assert len(seen) >= 35


def test_declared_headers_read_every_recorded_answer() -> None:
    seen: set[int] = set()
    for frame in all_frames():
        code = frame.code
        if not frame.command.is_response or code not in RESPONSE_HEADERS:
            continue
        declared = RESPONSE_HEADERS[code]
        if declared is PullMessageResponse and frame.command.code not in (0, 19, 20, 21):
            assert frame.command.fields == {}
            continue
        if frame.command.code == 0 or frame.command.fields:
            written = encode_header(decode_header(declared, frame.command.fields))
            fields = frame.command.fields or {}
            assert {name: fields[name] for name in fields} == {
                name: written[name] for name in fields
            }
            seen.add(code)
    assert seen >= {10, 310, 320, 11, 361, 14, 29, 30, 31, 32, 34, 12, 26, 103}


# ------------------------------------------------------------------------------------- bodies


def same(encoded: bytes, recorded: bytes) -> None:
    """Equal as JSON, keys and order of sets aside."""
    assert plain(fastjson.loads(encoded)) == plain(fastjson.loads(recorded))


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return sorted((plain(item) for item in value), key=repr)
    return value


def without(data: bytes, *keys: str) -> bytes:
    """The JSON object without those keys, which only one side writes."""
    values = fastjson.loads(data)
    return fastjson.dumps({key: item for key, item in values.items() if key not in keys})


def frames_with_body(code: int, *, answers: bool) -> list[tuple[Frame, bytes]]:
    return [
        (frame, bytes(frame.command.body))
        for frame in all_frames()
        if frame.code == code and frame.command.is_response is answers and frame.command.body
    ]


def test_routes_are_read_and_written_as_java_does() -> None:
    forms = set()
    for _, body in frames_with_body(Code.GET_ROUTEINFO_BY_TOPIC, answers=True):
        route = bodies.decode_topic_route(body)
        assert route.brokers
        assert route.queues
        standard = b'{"0":' in body
        forms.add(standard)
        assert bodies.encode_topic_route(route, standard=standard) == body
    assert forms == {True, False}


def test_cluster_info_is_written_byte_for_byte() -> None:
    for _, body in frames_with_body(Code.GET_BROKER_CLUSTER_INFO, answers=True):
        assert bodies.encode_cluster_info(bodies.decode_cluster_info(body)) == body


def test_registrations_are_read_and_written_as_java_does() -> None:
    sizes = set()
    for frame, body in frames_with_body(Code.REGISTER_BROKER, answers=False):
        register = registration.decode_register_body(body, version=frame.command.version)
        sizes.add(len(register.table.topics))
        theirs = fastjson.loads(body)
        ours = fastjson.loads(registration.encode_register_body(register))
        theirs["topicConfigSerializeWrapper"].pop("mappingDataVersion")
        ours["topicConfigSerializeWrapper"].pop("mappingDataVersion")
        assert ours == theirs
        assert (
            registration.decode_register_body(
                registration.encode_register_body(register, compressed=True), compressed=True
            ).table.topics.keys()
            == register.table.topics.keys()
        )
    assert 1 in sizes
    assert max(sizes) > 10


def test_heartbeats_are_read_and_written_as_java_does() -> None:
    seen = 0
    for frame, body in frames_with_body(Code.HEART_BEAT, answers=False):
        heartbeat = bodies.decode_heartbeat(body)
        assert heartbeat.client_id
        ours = bodies.encode_heartbeat(heartbeat)
        assert bodies.decode_heartbeat(ours) == heartbeat
        if frame.command.language == "JAVA" and frame.command.version == 479:
            same(ours, body)
            seen += 1
    assert seen > 50


def test_the_other_bodies_of_clients_are_read_and_written() -> None:
    for _, body in frames_with_body(Code.GET_CONSUMER_LIST_BY_GROUP, answers=True):
        assert bodies.encode_consumer_list(bodies.decode_consumer_list(body)) == body
    for code in (Code.LOCK_BATCH_MQ, Code.UNLOCK_BATCH_MQ):
        for _, body in frames_with_body(code, answers=False):
            batch = bodies.decode_lock_batch(body)
            same(
                without(bodies.encode_lock_batch(batch), "onlyThisBroker"),
                without(body, "onlyThisBroker"),
            )
    for _, body in frames_with_body(Code.LOCK_BATCH_MQ, answers=True):
        assert bodies.encode_locked_queues(bodies.decode_locked_queues(body)) == body
    for _, body in frames_with_body(Code.CHECK_CLIENT_CONFIG, answers=False):
        same(bodies.encode_check_client_config(bodies.decode_check_client_config(body)), body)


@pytest.mark.parametrize(
    ("code", "answers", "decode_body", "encode_body"),
    [
        (Code.GET_TOPIC_CONFIG, True, tables.decode_topic_config, tables.encode_topic_config),
        (
            Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP,
            False,
            tables.decode_group_config,
            tables.encode_group_config,
        ),
        (
            Code.GET_ALL_SUBSCRIPTIONGROUP_CONFIG,
            True,
            tables.decode_group_table,
            tables.encode_group_table,
        ),
        (Code.GET_TOPIC_STATS_INFO, True, bodies.decode_topic_stats, bodies.encode_topic_stats),
        (Code.GET_CONSUME_STATS, True, bodies.decode_consume_stats, bodies.encode_consume_stats),
        (Code.GET_BROKER_RUNTIME_INFO, True, bodies.decode_kv_table, bodies.encode_kv_table),
        (
            Code.GET_ALL_TOPIC_LIST_FROM_NAMESERVER,
            True,
            bodies.decode_topic_list,
            bodies.encode_topic_list,
        ),
        (Code.QUERY_TOPIC_CONSUME_BY_WHO, True, bodies.decode_group_list, bodies.encode_group_list),
        (
            Code.GET_CONSUMER_CONNECTION_LIST,
            True,
            bodies.decode_consumer_connections,
            bodies.encode_consumer_connections,
        ),
        (
            Code.INVOKE_BROKER_TO_RESET_OFFSET,
            True,
            bodies.decode_queue_offsets,
            bodies.encode_queue_offsets,
        ),
        (
            Code.RESET_CONSUMER_CLIENT_OFFSET,
            False,
            bodies.decode_queue_offsets,
            bodies.encode_queue_offsets,
        ),
    ],
)
def test_the_bodies_of_the_tools_are_read_and_written(
    code: int,
    answers: bool,
    decode_body: Callable[[bytes], Any],
    encode_body: Callable[[Any], bytes],
) -> None:
    found = frames_with_body(code, answers=answers)
    assert found
    for _, body in found:
        same(encode_body(decode_body(body)), body)


def test_running_info_of_a_client_is_readable_although_its_keys_are_objects() -> None:
    answers = frames_with_body(Code.GET_CONSUMER_RUNNING_INFO, answers=True)
    assert answers
    for _, body in answers:
        info = fastjson.loads(body)
        assert all(isinstance(key, tuple) for key in info["mqTable"])


def test_every_recorded_body_that_is_json_is_readable() -> None:
    seen = 0
    for frame in all_frames():
        body = bytes(frame.command.body)
        if body[:1] in (b"{", b"["):
            fastjson.loads(body)
            seen += 1
    assert seen > 1000
