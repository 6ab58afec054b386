"""Dead letters: causes, clusters, edits, ids that stay, and what is decided about each."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluicemq.client.admin.dead_letters import (
    INVALID,
    RETRY,
    UNCHECKED,
    DeadLetterEdit,
    ReplayJudge,
    cluster_dead_letters,
    cluster_key,
    failure_reason,
    known_subscriptions,
    origin_of,
    prepare_replay,
    replay_id,
)
from sluicemq.client.admin.subscriptions import GroupSubscriptions
from sluicemq.filter.subscriptions import parse_subscription
from sluicemq.model.ids import Host
from sluicemq.model.message import StoredMessage
from sluicemq.model.subscription import SQL92, Subscription
from stored_bodies import BAD

HERE = Host("10.0.0.1", 10911)
OWN = {"RETRY_TOPIC": "orders", "ORIGIN_MESSAGE_ID": "0A", "TAGS": "A", "KEYS": "k1 k2",
       "amount": "7"}  # fmt: skip
STORED_MS = 1_795_478_034_089


def letter(body: bytes = b"x", offset: int = 5, time_ms: int = STORED_MS, **own: str) -> Any:
    return StoredMessage(
        "%DLQ%billing", 0, offset, 0, 0, body, own, 3, 0, 0, HERE, time_ms, HERE, 16, 0, 0,
        "broker-a",
    )  # fmt: skip


def undecodable_letter() -> StoredMessage:
    return replace(letter(BAD["zlib, garbage"].raw, **OWN), sys_flag=BAD["zlib, garbage"].sys_flag)


def test_a_letter_whose_body_cannot_be_decoded_is_a_cluster_and_is_not_sent() -> None:
    bad = undecodable_letter()
    assert cluster_key(bad)[1].startswith("body: it is not valid zlib data")
    assert [len(one.examples) for one in cluster_dead_letters([bad, letter(b"x", **OWN)])] == [1, 1]
    judge = ReplayJudge({"orders": (parse_subscription("orders", None),)})
    verdict, reason = judge.verdict(
        prepare_replay(bad, DeadLetterEdit(find=b"not", replacement=b"now"), "billing").row
    )
    assert verdict == INVALID
    assert reason.startswith("its body cannot be sent. The body of message ")
    assert (
        judge.verdict(prepare_replay(letter(b"x", **OWN), DeadLetterEdit(), "billing").row)[0]
        != INVALID
    )


LETTERS = st.builds(
    letter,
    st.binary(max_size=8) | st.sampled_from([b"{", b" [1]", b'{"a": NaN}', "ü".encode()]),
    st.integers(0, 1 << 40),
    st.integers(0, STORED_MS),
    error=st.text(max_size=9),
    RETRY_TOPIC=st.sampled_from(["", "orders", "bills"]),
)


@pytest.mark.parametrize(
    ("own", "body", "cause"),
    [
        ({}, b"hello", "no hint in the message"),
        ({}, b"", "no hint in the message"),
        ({}, b' \n{"a": 1}', "no hint in the message"),
        ({}, b'{"a": NaN}', "the body is not JSON"),
        ({}, b"[1] tail", "the body is not JSON"),
        ({}, b"[" * 5_000, "the body is not JSON"),
        ({}, b"{\xff", "the body is not UTF-8"),
        ({"MyError": "at 0x1F of 12\nline"}, b"{", "MyError: at # of #"),
        ({"stack": "s", "cause": "id 0a1b2c3d-0a1b2c3d4e5f"}, b"x", "cause: id #"),
        ({"error": "", "reason": "why"}, b"x", "reason: why"),
        ({"failed": "y" * 200}, b"x", "failed: " + "y" * 100),
        ({"FAILURE": ""}, b"x", "no hint in the message"),
    ],
)
def test_the_cause_is_what_the_letter_tells(
    own: Mapping[str, str], body: bytes, cause: str
) -> None:
    assert failure_reason(own, body) == cause


@settings(max_examples=30)
@given(st.lists(LETTERS, max_size=12))
def test_every_letter_is_in_the_one_cluster_of_its_kind(letters: list[StoredMessage]) -> None:
    found = cluster_dead_letters(letters)
    assert {(one.origin, one.reason) for one in found} == {cluster_key(one) for one in letters}
    assert sum(one.messages for one in found) == len(letters)
    assert [one.messages for one in found] == sorted((o.messages for o in found), reverse=True)
    for one in found:
        own = [it for it in letters if cluster_key(it) == (one.origin, one.reason)]
        assert one.examples == own[:3]
        assert (one.first_ms, one.last_ms) == (
            min(it.store_time_ms for it in own), max(it.store_time_ms for it in own)
        )  # fmt: skip


def test_the_origin_is_said_by_either_way_of_dying() -> None:
    assert origin_of(letter(**OWN)) == "orders"
    assert origin_of(letter(DLQ_ORIGIN_TOPIC="bills", RETRY_TOPIC="")) == "bills"
    assert origin_of(letter()) == ""


def test_an_edit_changes_what_it_names_and_nothing_else() -> None:
    plain = prepare_replay(letter(b"a NaN b NaN", **OWN), DeadLetterEdit(), "billing")
    assert plain.message.topic == plain.read_as == "orders"
    assert (plain.message.tag, plain.message.keys, plain.message.flag) == ("A", ("k1", "k2"), 3)
    assert plain.message.properties == {"amount": "7"}
    assert not plain.system_properties
    changes = {"amount": None, "fixed": "yes", "TAGS": None, "KEYS": "k9", "__SHARDINGKEY": "s"}
    changed = prepare_replay(
        letter(b"a NaN b NaN", **OWN), DeadLetterEdit(b"NaN", b"null", changes, RETRY), "billing"
    )
    message = changed.message
    assert (message.topic, changed.read_as) == ("%RETRY%billing", "orders")
    assert message.body == b"a null b null"
    assert (message.tag, message.keys, message.sharding_key) == (None, ("k9",), "s")
    assert message.properties == {"fixed": "yes"}
    assert changed.system_properties == {"RETRY_TOPIC": "orders", "ORIGIN_MESSAGE_ID": "0A"}
    named = prepare_replay(letter(**OWN), DeadLetterEdit(to="bills"), "billing")
    assert named.message.topic == named.read_as == "bills"


@given(LETTERS, st.binary(max_size=3), st.binary(max_size=3), st.text(max_size=3))
def test_a_letter_has_one_id_whatever_is_edited(
    one: StoredMessage, find: bytes, put: bytes, text: str
) -> None:
    plain = prepare_replay(one, DeadLetterEdit(), "billing")
    other = prepare_replay(
        one, DeadLetterEdit(find, put, {text: text, "TAGS": text}, text), "billing"
    )
    assert plain.message_id == other.message_id
    assert len(bytes.fromhex(plain.message_id)) == 16
    assert plain.message_id == plain.message_id.upper()
    assert plain.message.body == one.body
    verdict, reason = ReplayJudge(None).verdict(other.row)
    assert verdict in (UNCHECKED, INVALID)
    assert reason


@given(st.sets(st.tuples(st.sampled_from("ab"), st.integers(0, 9), st.integers(0, 1 << 40))))
def test_ids_differ_by_place(places: set[tuple[str, int, int]]) -> None:
    ids = {replay_id("%DLQ%g", *place, STORED_MS + place[2]) for place in places}
    assert len(ids) == len(places)


def test_what_a_group_wants_is_what_anybody_says_or_is_not_known() -> None:
    a, b = parse_subscription("orders", "A"), Subscription("orders", "amount > 5", SQL92)
    known = GroupSubscriptions("g", {"one": {"orders": a}, "two": None}, {"orders": b})
    wanted = known_subscriptions(known, ["orders", "bills"])
    assert wanted is not None
    assert {one.expression for one in wanted["orders"]} == {"A", "amount > 5"}
    assert {one.tags for one in wanted["orders"]} == {frozenset({"A"}), frozenset()}
    assert wanted["bills"] == ()
    assert known_subscriptions(GroupSubscriptions("g"), ["orders"]) is None
    assert (
        known_subscriptions(GroupSubscriptions("g", remembered={"orders": b}), ["orders"])
        is not None
    )


def row(**changes: Any) -> Mapping[str, Any]:
    return {
        "target": "orders", "read_as": "orders", "tags": "A", "keys": "k1 k2", "new_id": "1F",
        "properties": {"amount": "7"}, "size": 10,
    } | changes  # fmt: skip


SELECTOR = {"orders": (parse_subscription("orders", "amount > 5 AND KEYS = 'k1 k2'", "SQL92"),)}


@pytest.mark.parametrize(
    ("changes", "verdict", "reason"),
    [
        ({}, "matches", ""),
        ({"properties": {"amount": "5"}}, "filtered", "amount > 5 is false (amount is '5'"),
        ({"properties": {}}, "filtered", "amount > 5 is null (amount is absent)"),
        ({"read_as": "other"}, "filtered", "does not subscribe to 'other'"),
        ({"target": None}, "invalid", "origin topic is unknown"),
        ({"target": "gone"}, "invalid", "'gone' does not exist"),
        ({"size": 0}, "invalid", "the body has 0 bytes"),
        ({"tags": "A||B"}, "invalid", "separates tags"),
        ({"properties": {"DELAY": "3"}}, "invalid", "'DELAY' is reserved"),
        ({"properties": {"x": "y" * 40_000}}, "invalid", "the properties have 40,003 bytes"),
    ],
)
def test_each_letter_gets_a_verdict_with_its_reason(
    changes: dict[str, Any], verdict: str, reason: str
) -> None:
    found = ReplayJudge(SELECTOR, frozenset({"gone"})).verdict(row(**changes))
    assert found[0] == verdict
    assert reason in found[1]


def test_all_expressions_of_a_group_have_to_let_a_letter_through() -> None:
    unequal = {"orders": (parse_subscription("orders", "A"), parse_subscription("orders", "B"))}
    assert ReplayJudge(unequal).verdict(row())[0] == "filtered"
    assert ReplayJudge(None).verdict(row())[0] == "unchecked"
