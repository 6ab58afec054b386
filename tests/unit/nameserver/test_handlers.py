"""Requests of the name server: codes, remarks, headers and bodies (spec/namesrv.md)."""

import dataclasses
import json
import logging
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from sluicemq.model.addresses import FIXED_FIELD, INTERFACES_FIELD
from sluicemq.model.ids import Host
from sluicemq.model.topic import DataVersion, TopicConfig
from sluicemq.nameserver.requests import NameServerRequests
from sluicemq.wire.frames import Command
from sluicemq.wire.registration import RegisterBody, encode_register_body
from sluicemq.wire.tables import TopicTable

Ask = Callable[..., Command]
EDITION = DataVersion(1, 100)
OFFICE = {"remote": Host("192.168.1.77", 5), "local": Host("192.168.1.5", 9876)}


def body_of(*names: str, version: DataVersion = EDITION, sys_flag: int = 0) -> bytes:
    topics = {name: TopicConfig(name, 4, 4, 6, sys_flag=sys_flag) for name in names}
    return encode_register_body(RegisterBody(TopicTable(topics, version)))


def fields_of(broker: str = "a", **changes: str) -> dict[str, str]:
    return {
        "brokerName": broker,
        "brokerAddr": "127.0.0.1:10911",
        "clusterName": "c",
        "haServerAddr": "127.0.0.1:10912",
        "brokerId": "0",
    } | changes


def register(ask: Ask, *names: str, **changes: str) -> Command:
    return ask(103, fields_of(**changes), body_of(*(names or ("T", "U"))))


def addresses_in(answer: Command) -> dict[str, str]:
    document = json.loads(answer.body)
    return {data["brokerName"]: data["brokerAddrs"].get("0") for data in document["brokerDatas"]}


# ------------------------------------------------------------------------------------- 103


def test_a_registration_is_answered_with_an_empty_typed_header(ask: Ask) -> None:
    answer = register(ask)
    assert (answer.code, answer.fields, answer.body, answer.remark) == (0, {}, b"", None)


def test_a_checksum_that_does_not_match_refuses_the_registration(ask: Ask) -> None:
    body = body_of("T", "U")
    right = str(zlib.crc32(body) & 0x7FFFFFFF)
    assert ask(103, fields_of(bodyCrc32=right), body).code == 0
    answer = ask(103, fields_of("b", bodyCrc32=right), body + b" ")
    assert (answer.code, answer.remark) == (1, "crc32 not match")
    assert "b" not in json.loads(ask(106).body.replace(b"{0:", b'{"0":'))["brokerAddrTable"]


@pytest.mark.parametrize("said", ["true", "false"])
def test_a_compressed_body_is_read_even_when_the_header_denies_it(ask: Ask, said: str) -> None:
    topics = {name: TopicConfig(name, 3, 2, 6) for name in ("T", "U")}
    body = encode_register_body(RegisterBody(TopicTable(topics, DataVersion())), compressed=True)
    assert ask(103, fields_of(compressed=said), body).code == 0
    assert b'"readQueueNums":3' in ask(105, {"topic": "T"}).body


def test_an_old_broker_sends_the_bare_table(ask: Ask) -> None:
    table = (
        b'{"dataVersion":{"counter":1,"timestamp":2},"topicConfigTable":{"T":{"topicName":"T"}}}'
    )
    assert ask(103, fields_of(), table, version=36).code == 0
    assert ask(105, {"topic": "T"}).code == 0


def test_a_registration_without_a_body_has_no_topics(ask: Ask) -> None:
    assert ask(103, fields_of()).code == 0
    assert ask(206).body == b'{"topicList":[]}'


def test_a_body_that_is_no_json_is_an_answer(ask: Ask) -> None:
    answer = ask(103, fields_of(), b"{nonsense")
    assert answer.code == 1
    assert answer.remark


def test_a_missing_field_is_named(ask: Ask) -> None:
    answer = ask(103, {})
    assert (answer.code, answer.remark) == (1, "the custom field <brokerName> is null")


def test_a_slave_is_told_where_its_master_is(ask: Ask) -> None:
    register(ask)
    answer = register(ask, brokerId="1", brokerAddr="10.0.0.2:10911", haServerAddr="")
    assert answer.fields == {"haServerAddr": "127.0.0.1:10912", "masterAddr": "127.0.0.1:10911"}


def test_brokers_learn_the_order_topics_unless_that_is_off(
    ask: Ask, parts: NameServerRequests
) -> None:
    ask(100, {"namespace": "ORDER_TOPIC_CONFIG", "key": "T", "value": "a:4"})
    assert register(ask).body == b'{"table":{"T":"a:4"}}'
    parts.config = dataclasses.replace(parts.config, return_order_config_to_broker=False)
    assert register(ask).body == b""


def test_missing_topics_go_when_the_switch_says_so(ask: Ask, parts: NameServerRequests) -> None:
    register(ask, "T", "U")
    ask(103, fields_of(), body_of("T"))
    assert ask(206).body == b'{"topicList":["T","U"]}'
    parts.config = dataclasses.replace(parts.config, delete_topic_with_registration=True)
    ask(103, fields_of(), body_of("T"))
    assert ask(206).body == b'{"topicList":["T"]}'


def test_unregistering_removes_the_broker(ask: Ask) -> None:
    register(ask)
    assert ask(104, fields_of()).code == 0
    assert ask(105, {"topic": "T"}).code == 17


# --------------------------------------------------------------------------- 322, 904, 901


def test_a_broker_may_skip_a_registration_that_changes_nothing(ask: Ask) -> None:
    same = b'{"counter":1,"stateVersion":0,"timestamp":100}'
    unknown = ask(322, fields_of(), same)
    assert (unknown.fields, unknown.body) == ({"changed": "true"}, b"")
    register(ask)
    assert ask(322, fields_of(), same).fields == {"changed": "false"}
    newer = ask(322, fields_of(), b'{"counter":2,"stateVersion":0,"timestamp":100}')
    assert newer.fields == {"changed": "true"}
    assert json.loads(newer.body) == {"counter": 1, "stateVersion": 0, "timestamp": 100}


@pytest.mark.parametrize("code", [322, 904])
def test_a_sign_of_life_refreshes_a_broker(ask: Ask, parts: NameServerRequests, code: int) -> None:
    ask(103, fields_of(heartbeatTimeoutMillis="1000"), body_of("T", "U"))
    ask(code, fields_of(), b"{}" if code == 322 else b"", now_ms=1000)
    assert parts.table.find_expired(2000) == []
    assert len(parts.table.find_expired(2001)) == 1


def test_a_member_group_is_empty_when_unknown(ask: Ask) -> None:
    asked = {"clusterName": "c", "brokerName": "a"}
    assert (
        ask(901, asked).body
        == b'{"brokerMemberGroup":{"brokerAddrs":{},"brokerName":"a","cluster":"c"}}'
    )
    register(ask)
    assert b'"brokerAddrs":{0:"127.0.0.1:10911"}' in ask(901, asked).body


# ------------------------------------------------------------------------------------- 105


def test_a_route_has_quoted_ids_for_new_clients_and_bare_ones_for_old(ask: Ask) -> None:
    register(ask)
    expected = (
        b'{"brokerDatas":[{"brokerAddrs":{"0":"127.0.0.1:10911"},"brokerName":"a",'
        b'"cluster":"c","enableActingMaster":false}],"filterServerTable":{},"queueDatas":['
        b'{"brokerName":"a","perm":6,"readQueueNums":4,"topicSysFlag":0,"writeQueueNums":4}]}'
    )
    asked = {"topic": "T"}
    assert ask(105, asked, version=401).body == expected
    assert ask(105, asked, version=400).body == expected.replace(b'{"0":', b"{0:")
    assert ask(105, asked | {"acceptStandardJsonOnly": "true"}, version=0).body == expected


def test_an_unknown_topic_is_answered_as_the_real_one_does(ask: Ask) -> None:
    answer = ask(105, {"topic": "nope"})
    assert answer.code == 17
    assert answer.fields is None
    assert answer.remark == (
        "No topic route info in name server for the topic: nope\n"
        "See https://rocketmq.apache.org/docs/bestPractice/06FAQ for further details."
    )


def test_a_name_server_may_wait_before_it_gives_routes(ask: Ask, parts: NameServerRequests) -> None:
    register(ask)
    parts.config = dataclasses.replace(parts.config, wait_for_service=True)
    early = ask(105, {"topic": "T"}, now_ms=44_999)
    assert (early.code, early.remark) == (1, "name server not ready")
    assert ask(105, {"topic": "T"}, now_ms=45_000).code == 0


def test_strict_order_is_in_the_route_only_when_the_switch_is_on(
    ask: Ask, parts: NameServerRequests
) -> None:
    register(ask)
    ask(100, {"namespace": "ORDER_TOPIC_CONFIG", "key": "T", "value": "a:4"})
    assert b"orderTopicConf" not in ask(105, {"topic": "T"}).body
    parts.config = dataclasses.replace(parts.config, order_message_enable=True)
    assert b'"orderTopicConf":"a:4"' in ask(105, {"topic": "T"}).body
    assert b"orderTopicConf" not in ask(105, {"topic": "U"}).body


def test_zone_mode_leaves_the_brokers_of_other_zones_out(ask: Ask) -> None:
    register(ask, broker="a", brokerAddr="10.0.0.1:1", __ZONE_NAME="north")
    register(ask, broker="b", brokerAddr="10.0.0.2:1", __ZONE_NAME="south")
    both = ask(105, {"topic": "T", "__ZONE_MODE": "false", "__ZONE_NAME": "north"})
    one = ask(105, {"topic": "T", "__ZONE_MODE": "true", "__ZONE_NAME": "North"})
    assert sorted(addresses_in(both)) == ["a", "b"]
    assert sorted(addresses_in(one)) == ["a"]


def test_an_acting_master_shows_only_where_the_name_server_supports_it(
    ask: Ask, parts: NameServerRequests
) -> None:
    register(ask, brokerId="1", enableActingMaster="true")
    assert addresses_in(ask(105, {"topic": "T"})) == {"a": None}
    parts.config = dataclasses.replace(parts.config, acting_master_support=True)
    assert addresses_in(ask(105, {"topic": "T"})) == {"a": "127.0.0.1:10911"}


# -------------------------------------------------------------------- reachable addresses


def test_route_cluster_member_and_system_lists_tell_an_address_the_client_reaches(
    ask: Ask, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    register(ask)
    peer = type("Peer", (), OFFICE)()
    assert addresses_in(ask(105, {"topic": "T"}, peer=peer)) == {"a": "192.168.1.5:10911"}
    for answer in (
        ask(106, peer=peer),
        ask(901, {"clusterName": "c", "brokerName": "a"}, peer=peer),
        ask(304, peer=peer),
    ):
        assert b"192.168.1.5:10911" in answer.body
        assert b"127.0.0.1" not in answer.body
    told = [r.getMessage() for r in caplog.records if "are told" in r.getMessage()]
    assert len(told) == 1
    assert "127.0.0.1:10911" in told[0]
    assert "brokerIP1" in told[0]


def test_our_broker_s_extra_fields_decide(ask: Ask) -> None:
    peer = type("Peer", (), OFFICE)()
    register(ask, **{FIXED_FIELD: "true"})
    assert addresses_in(ask(105, {"topic": "T"}, peer=peer)) == {"a": "127.0.0.1:10911"}
    register(ask, **{FIXED_FIELD: "false", INTERFACES_FIELD: "127.0.0.1"})
    assert addresses_in(ask(105, {"topic": "T"}, peer=peer)) == {"a": "127.0.0.1:10911"}
    register(ask, **{INTERFACES_FIELD: "127.0.0.1, 192.168.1.5"})
    assert addresses_in(ask(105, {"topic": "T"}, peer=peer)) == {"a": "192.168.1.5:10911"}


def test_the_replacement_can_be_turned_off(ask: Ask, parts: NameServerRequests) -> None:
    parts.config = dataclasses.replace(parts.config, reachable_addresses=False)
    register(ask)
    peer = type("Peer", (), OFFICE)()
    assert addresses_in(ask(105, {"topic": "T"}, peer=peer)) == {"a": "127.0.0.1:10911"}


# ------------------------------------------------------------------------------ for tools


def test_cluster_info_has_bare_ids_for_every_version(ask: Ask) -> None:
    register(ask)
    assert ask(106).body == (
        b'{"brokerAddrTable":{"a":{"brokerAddrs":{0:"127.0.0.1:10911"},"brokerName":"a",'
        b'"cluster":"c","enableActingMaster":false}},"clusterAddrTable":{"c":["a"]}}'
    )


def test_topic_lists(ask: Ask, parts: NameServerRequests) -> None:
    register(ask)
    ask(103, fields_of("b", clusterName="d", brokerAddr="10.0.0.2:1"), body_of("V", sys_flag=1))
    ask(103, fields_of("e", clusterName="d", brokerAddr="10.0.0.3:1"), body_of("W", sys_flag=2))
    ask(103, fields_of("f", clusterName="d", brokerAddr="10.0.0.4:1"), body_of("X", sys_flag=3))

    def listed(code: int, **fields: str) -> list[str]:
        return list(json.loads(ask(code, fields).body)["topicList"])

    assert listed(206) == ["T", "U", "V", "W", "X"]
    assert listed(224, cluster="c") == ["T", "U"]
    assert listed(224, cluster="nope") == []
    assert listed(311) == ["V", "X"]
    assert listed(312) == ["W", "X"]
    assert listed(313) == ["W"]
    assert listed(304) == ["a", "b", "c", "d", "e", "f"]
    assert json.loads(ask(304).body)["brokerAddr"] == "127.0.0.1:10911"
    parts.config = dataclasses.replace(
        parts.config, all_topic_list_enable=False, topic_list_enable=False
    )
    for code in (206, 224, 311, 312, 313):
        answer = ask(code, {"cluster": "c"})
        assert (answer.code, answer.remark) == (1, "disable")


def test_system_topics_without_a_broker_have_no_address(ask: Ask) -> None:
    assert ask(304).body == b'{"topicList":[]}'


def test_write_permission_is_counted(ask: Ask) -> None:
    register(ask)
    assert ask(205, {"brokerName": "a"}).fields == {"wipeTopicCount": "2"}
    assert b'"perm":4' in ask(105, {"topic": "T"}).body
    assert ask(327, {"brokerName": "a"}).fields == {"addTopicCount": "2"}
    assert b'"perm":6' in ask(105, {"topic": "T"}).body
    assert ask(205, {"brokerName": "nobody"}).fields == {"wipeTopicCount": "0"}


def test_a_topic_is_registered_and_deleted(ask: Ask) -> None:
    register(ask)
    route = (
        b'{"queueDatas":[{"brokerName":"a","perm":6,"readQueueNums":1,"topicSysFlag":0,'
        b'"writeQueueNums":2}]}'
    )
    assert ask(217, {"topic": "N"}, route).code == 0
    assert ask(217, {"topic": "M"}).code == 0
    assert b'"writeQueueNums":2' in ask(105, {"topic": "N"}).body
    assert ask(216, {"topic": "N", "clusterName": "other"}).code == 0
    assert ask(105, {"topic": "N"}).code == 0
    assert ask(216, {"topic": "N", "clusterName": "c"}).code == 0
    assert ask(105, {"topic": "N"}).code == 17
    assert ask(216, {"topic": "T"}).code == 0
    assert ask(105, {"topic": "T"}).code == 17


# ------------------------------------------------------------------ key-values and config


def test_key_values_come_back_and_survive_a_restart(ask: Ask, parts: NameServerRequests) -> None:
    key = {"namespace": "n", "key": "k"}
    absent = ask(101, key)
    assert (absent.code, absent.fields) == (22, {})
    assert absent.remark
    assert ask(219, {"namespace": "n"}).code == 22
    assert ask(100, key | {"value": "v"}).code == 0
    assert ask(101, key).fields == {"value": "v"}
    assert ask(219, {"namespace": "n"}).body == b'{"table":{"k":"v"}}'
    stored = Path(parts.config.kv_config_path).read_text()
    assert json.loads(stored) == {"configTable": {"n": {"k": "v"}}}
    assert ask(102, key).code == 0
    assert ask(102, key).code == 0
    assert ask(101, key).code == 22


def test_a_disk_that_does_not_write_is_an_answer_and_changes_nothing(
    ask: Ask, parts: NameServerRequests, tmp_path: Path
) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    parts.key_values._path = str(blocker / "kvConfig.json")
    answer = ask(100, {"namespace": "n", "key": "k", "value": "v"})
    assert answer.code == 1
    assert answer.remark
    assert ask(101, {"namespace": "n", "key": "k"}).code == 22


def test_the_configuration_is_shown_changed_and_written(
    ask: Ask, parts: NameServerRequests
) -> None:
    path = Path(parts.config.config_path)
    path.write_text("# mine\norderMessageEnable = false\n")
    assert ask(318, None, b"orderMessageEnable=true\nnope=1\n").code == 0
    assert parts.config.order_message_enable is True
    assert b"orderMessageEnable=true\n" in ask(319).body
    assert path.read_text() == "# mine\norderMessageEnable=true\n"
    assert path.with_suffix(".properties.bak").exists()


def test_a_change_for_the_next_start_is_pending_until_then(
    ask: Ask, parts: NameServerRequests
) -> None:
    port = parts.config.listen_port
    assert ask(318, None, b"listenPort=1\n").remark == "in effect at the next start: listenPort"
    assert parts.config.listen_port == port
    body = ask(319).body
    assert f"\nlistenPort={port}\n".encode() in body
    assert b"\nsluicePending.listenPort=1\n" in body
    refused = ask(318, None, b"tls.server.certPath=${PATH}")
    assert refused.code == 1
    assert "must not use variables" in (refused.remark or "")
    assert b"PATH" not in ask(319).body


def test_a_refused_change_changes_nothing(ask: Ask, parts: NameServerRequests) -> None:
    before = parts.config
    black = ask(318, None, b"orderMessageEnable=true\nkvConfigPath=/x")
    assert (black.code, black.remark) == (16, "Can not update config in black list.")
    bad = ask(318, None, b"orderMessageEnable=maybe")
    assert bad.code == 1
    assert bad.remark is not None
    assert "orderMessageEnable = maybe" in bad.remark
    assert ask(318, None, b"\xff\xfe").code == 1
    assert parts.config is before
    assert not Path(parts.config.config_path).exists()
