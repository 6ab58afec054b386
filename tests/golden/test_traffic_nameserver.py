"""What real clients, tools and a real broker asked a real name server, asked of ours.

Every frame that went to the name server in the 111 recorded scenarios is fed to our name server's
dispatcher, byte for byte, and the answer is compared with the recorded one: the body byte for byte
(topic lists as sets, which Java leaves unsorted), the header field by field.

A scenario begins in the middle of a run, so what was registered before it is rebuilt from what its
answers show: a topic that is answered with a route before anything in the scenario registers it
was there, and so was a key-value namespace that the answer of a registration carries.
"""

import base64
import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from sluicemq.config import NameServerConfig
from sluicemq.model.ids import Host
from sluicemq.model.topic import DataVersion, TopicConfig
from sluicemq.nameserver.reachable import Origin
from sluicemq.nameserver.routes import Registration
from sluicemq.nameserver.server import NameServer
from sluicemq.net.dispatch import Peer
from sluicemq.wire.bodies import decode_kv_table, decode_topic_route
from sluicemq.wire.frames import Command, decode

TRAFFIC = Path(__file__).parent / "traffic"
ROUTE, REGISTER, TOPIC_LIST = 105, 103, 206
TO_NAME_SERVER = 845
"""Requests to the name server in all scenarios (4,493 frames in total)."""


class Nowhere:
    def write(self, data: bytes, /) -> None:
        raise AssertionError("the name server writes of its own accord")

    def close(self) -> None:
        raise AssertionError("the name server closes a connection")


def exchanges(name: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """(request, answer) records of a scenario's connections to the name server, in order."""
    with gzip.open(TRAFFIC / name, "rt", encoding="utf-8") as lines:
        records = [json.loads(line) for line in lines]
    records = [record for record in records if record["peer"].endswith("→namesrv")]
    answers = {record["re"]: record for record in records if record["dir"] == "<"}
    return [(record, answers[record["n"]]) for record in records if record["dir"] == ">"]


ALL = {path.name: exchanges(path.name) for path in sorted(TRAFFIC.glob("*.jsonl.gz"))}
SCENARIOS = [name for name, found in ALL.items() if found]


def body_of(record: dict[str, Any]) -> bytes:
    return base64.b64decode(record.get("body_b64", ""))


def registered_by(request: dict[str, Any]) -> set[str]:
    wrapper = json.loads(body_of(request))["topicConfigSerializeWrapper"]
    return set(wrapper["topicConfigTable"])


def prepare(server: NameServer, name: str) -> None:
    """Rebuild what was there before the scenario began."""
    later: set[str] = set()
    routed: dict[str, TopicConfig] = {}
    listed: dict[str, TopicConfig] = {}
    for request, answer in ALL[name]:
        code = request["header"]["code"]
        if code == REGISTER:
            later |= registered_by(request)
            if body_of(answer):
                for topic, order in decode_kv_table(body_of(answer)).items():
                    server.requests.key_values.put("ORDER_TOPIC_CONFIG", topic, order)
        elif code == ROUTE and answer["header"]["code"] == 0:
            topic = request["header"]["extFields"]["topic"]
            (queue,) = decode_topic_route(body_of(answer)).queues
            if topic not in later | routed.keys():
                routed[topic] = TopicConfig(
                    topic,
                    queue.read_queues,
                    queue.write_queues,
                    queue.perm,
                    sys_flag=queue.sys_flag,
                )
        elif code == TOPIC_LIST:
            listed |= {name: TopicConfig(name) for name in json.loads(body_of(answer))["topicList"]}
    if name != "broker-registration.jsonl.gz":
        server.requests.table.register(
            Registration(
                cluster="DefaultCluster",
                broker="broker-g",
                broker_id=0,
                address="127.0.0.1:30911",
                acting_master_enable=False,
                topics=listed | routed,
                version=DataVersion(0, 1),
                origin=Origin("127.0.0.1", "127.0.0.1"),
            ),
            0,
        )


@pytest.fixture
def server(tmp_path: Path) -> NameServer:
    return NameServer(NameServerConfig(kv_config_path=str(tmp_path / "kvConfig.json")))


def answer_of(server: NameServer, peer: Peer, request: dict[str, Any]) -> Command:
    frame = base64.b64decode(request["frame_b64"])
    used, answer = server.dispatcher.handle_frames(frame, peer)
    assert used == len(frame)
    assert int.from_bytes(answer[:4], "big") == len(answer) - 4
    return decode(answer[4:])


def comparable(code: int, body: bytes) -> object:
    if code == TOPIC_LIST:
        document = json.loads(body)
        return {**document, "topicList": sorted(document["topicList"])}
    return body


@pytest.mark.parametrize("name", SCENARIOS)
def test_our_name_server_answers_as_the_real_one(server: NameServer, name: str) -> None:
    prepare(server, name)
    peer = Peer(Nowhere(), Host("127.0.0.1", 40000), Host("127.0.0.1", 39876))
    for request, recorded in ALL[name]:
        ours = answer_of(server, peer, request)
        theirs = recorded["header"]
        where = f"{name} frame {request['n']} code {request['header']['code']}"
        assert (ours.code, ours.opaque, ours.flag) == (
            theirs["code"],
            theirs["opaque"],
            theirs["flag"],
        ), where
        assert ours.fields == theirs.get("extFields"), where
        assert ours.remark == theirs.get("remark"), where
        assert (ours.language, ours.version) == (theirs["language"], theirs["version"]), where
        code = request["header"]["code"]
        assert comparable(code, bytes(ours.body)) == comparable(code, body_of(recorded)), where


def test_nothing_of_the_recording_is_left_out() -> None:
    codes = Counter(request["header"]["code"] for found in ALL.values() for request, _ in found)
    assert sum(codes.values()) == TO_NAME_SERVER
    assert set(codes) == {100, 102, 103, 104, 105, 106, 206, 216, 9999, 13, 301}
