"""What the broker passes on to clients: 223 as 221, 307, 309; replies (324, 325) as 326."""

import pytest

from simulation.stepped import SteppedBroker, SteppedClient, send_fields
from sluicemq.model.ids import encode_host, offset_message_id
from sluicemq.model.subscription import Subscription
from sluicemq.model.topic import MessageQueue
from sluicemq.record.codec import decode_records
from sluicemq.wire import bodies
from sluicemq.wire.frames import FLAG_RESPONSE, Command

BEAT, SEND, UNREGISTER, RUNNING, DIRECT, STATUS, ASK_STATUS = 34, 310, 35, 307, 309, 223, 221
REPLY, REPLY_LONG, PUSH, MAX = 325, 324, 326, 30
TIMED_OUT, OFFLINE, NO_TOPIC = 207, 206, 17
REPLIES = "DefaultCluster_REPLY_TOPIC"


def join(client: SteppedClient, client_id: str = "c", group: str = "G") -> None:
    data = bodies.ConsumerData(group, subscriptions=(Subscription("T"),))
    beat = bodies.Heartbeat(client_id, ("P",), (data,))
    client.call(BEAT, {}, bodies.encode_heartbeat(beat))
    client.requests.clear()


@pytest.fixture
def member(broker: SteppedBroker) -> SteppedClient:
    connected = broker.connect()
    join(connected)
    return connected


def ask(client: SteppedClient, code: int, fields: dict[str, object], body: bytes = b"") -> int:
    command = client.request(code, fields, body)
    client.feed(command)
    return command.opaque


def answer(
    member: SteppedClient, request: Command, body: bytes = b"", code: int = 0, remark: str = ""
) -> None:
    member.feed(Command(code, None, body, request.opaque, FLAG_RESPONSE, remark or None))


WHO: dict[str, object] = {"consumerGroup": "G", "clientId": "c"}


def test_running_information_travels_untouched(
    client: SteppedClient, member: SteppedClient
) -> None:
    opaque = ask(client, RUNNING, WHO | {"jstackEnable": "true"})
    (request,) = member.requests
    assert request.code == RUNNING
    assert not request.is_oneway
    assert request.fields == {"consumerGroup": "G", "clientId": "c", "jstackEnable": "true"}
    assert not client.answers
    body = b'{"mqTable":{{"$ref":"$.x"}:{}},"odd":1}'
    answer(member, request, body, remark="not set any response code")
    found = client.answers[opaque]
    assert (found.code, bytes(found.body), found.remark) == (0, body, "not set any response code")


def test_who_does_not_answer_is_a_time_out(
    broker: SteppedBroker, client: SteppedClient, member: SteppedClient
) -> None:
    opaque = ask(client, RUNNING, WHO)
    broker.advance(9.9)
    assert not client.answers
    broker.advance(0.2)
    assert client.answers[opaque].code == TIMED_OUT
    answer(member, member.requests[0], b"too late")
    assert len(client.answers) == 1
    assert len(broker.core.client_requests) == 0


def test_a_client_that_leaves_meanwhile_ends_the_waiting(
    broker: SteppedBroker, client: SteppedClient, member: SteppedClient
) -> None:
    opaque = ask(client, RUNNING, WHO)
    member.disconnect()
    assert client.answers[opaque].code == TIMED_OUT


@pytest.mark.parametrize("code", [RUNNING, DIRECT])
def test_nobody_there_is_said_at_once(client: SteppedClient, code: int) -> None:
    found = client.call(code, WHO)
    assert (found.code, found.remark) == (1, "The Consumer <G> <c> not online")


def test_a_message_is_consumed_directly(
    broker: SteppedBroker, client: SteppedClient, member: SteppedClient
) -> None:
    message_id = (client.call(SEND, send_fields(), b"again").fields or {})["msgId"]
    opaque = ask(client, DIRECT, WHO | {"msgId": message_id, "topic": "T"})
    (request,) = member.requests
    assert [record.body for record in decode_records(request.body)] == [b"again"]
    fields = request.fields or {}
    assert [fields[name] for name in ("brokerName", "topicSysFlag", "groupSysFlag")] == [
        "broker-a", "0", "0",
    ]  # fmt: skip
    body = bodies.encode_direct_result(bodies.DirectResult("CR_LATER", "no", 5))
    answer(member, request, body)
    result = bodies.decode_direct_result(client.answers[opaque].body)
    assert result == bodies.DirectResult("CR_LATER", "no", 5)


def test_any_member_will_do_when_none_is_named(
    client: SteppedClient, member: SteppedClient
) -> None:
    ask(client, DIRECT, {"consumerGroup": "G"}, b"a record of its own")
    assert bytes(member.requests[0].body) == b"a record of its own"


def test_a_message_that_is_not_here_is_refused(
    broker: SteppedBroker, client: SteppedClient, member: SteppedClient
) -> None:
    message_id = offset_message_id(encode_host(broker.host), 99_999)
    for wrong in (message_id, "AB12"):
        assert client.call(DIRECT, WHO | {"msgId": wrong}).code == 1
    assert not member.requests


def test_the_status_is_asked_of_every_member(broker: SteppedBroker, client: SteppedClient) -> None:
    members = [broker.connect(), broker.connect()]
    for number, one in enumerate(members):
        join(one, f"c{number}")
    for one in members:
        one.requests.clear()
    opaque = ask(client, STATUS, {"topic": "T", "group": "G"})
    queue = MessageQueue("T", "broker-a", 0)
    assert [one.requests[0].code for one in members] == [ASK_STATUS] * 2
    answer(members[0], members[0].requests[0], bodies.encode_client_offsets({queue: 7}))
    assert not client.answers
    members[1].disconnect()
    found = bodies.decode_offsets_by_client(client.answers[opaque].body)
    assert found == {"c0": {queue: 7}}


def test_the_status_of_a_group_that_is_away_is_refused(client: SteppedClient) -> None:
    assert client.call(STATUS, {"topic": "T", "group": "G"}).code == OFFLINE


# --- replies


def reply_fields(to: str = "c", **changes: object) -> dict[str, object]:
    properties = f"CORRELATION_ID\x0142\x02REPLY_TO_CLIENT\x01{to}\x02MSG_TYPE\x01reply\x02"
    return send_fields(REPLIES, properties, **changes)


def test_a_reply_is_pushed_to_who_asked(
    broker: SteppedBroker, client: SteppedClient, member: SteppedClient
) -> None:
    opaque = ask(client, REPLY, reply_fields(), b"pong")
    (request,) = member.requests
    fields = request.fields or {}
    assert (request.code, bytes(request.body)) == (PUSH, b"pong")
    assert fields["topic"] == REPLIES
    assert fields["bornHost"] == str(client.peer.remote)
    assert fields["storeHost"] == str(broker.host)
    assert fields["storeTimestamp"] == str(broker.clock.now_ms())
    assert "CORRELATION_ID\x0142\x02" in fields["properties"]
    assert "PUSH_REPLY_TIME\x01" in fields["properties"]
    assert not client.answers, "the push decides"
    answer(member, request)
    found = client.answers[opaque]
    assert found.code == 0
    assert {"msgId", "queueId", "queueOffset", "MSG_REGION", "TRACE_ON"} == set(found.fields or {})


def test_replies_are_stored_unless_that_is_off(
    broker: SteppedBroker, client: SteppedClient, member: SteppedClient
) -> None:
    def stored() -> str:
        return (client.call(MAX, {"topic": REPLIES, "queueId": 0}).fields or {})["offset"]

    ask(client, REPLY, reply_fields())
    broker.settle()
    assert stored() == "1"
    broker.change(store_replies=False)
    ask(client, REPLY, reply_fields())
    broker.settle()
    assert stored() == "1"
    assert len(member.requests) == 2


def test_an_absent_requester_is_named(client: SteppedClient) -> None:
    found = client.call(REPLY, reply_fields("gone"), b"pong")
    assert (found.code, found.remark) == (
        1, "push reply message fail, channel of <gone> not found.",
    )  # fmt: skip
    assert "msgId" in (found.fields or {})


def test_a_requester_that_has_left_is_absent(
    broker: SteppedBroker, client: SteppedClient, member: SteppedClient
) -> None:
    member.call(UNREGISTER, {"clientID": "c", "producerGroup": "P"})
    assert client.call(REPLY, reply_fields()).code == 1
    join(member)
    member.disconnect()
    assert client.call(REPLY, reply_fields()).code == 1


def test_a_requester_that_does_not_take_it_is_a_failure(
    broker: SteppedBroker, client: SteppedClient, member: SteppedClient
) -> None:
    opaque = ask(client, REPLY, reply_fields())
    answer(member, member.requests[0], code=1, remark="no room")
    assert client.answers[opaque].code == 1
    assert "no room" in (client.answers[opaque].remark or "")


def test_long_names_and_no_body_are_a_reply_as_well(
    client: SteppedClient, member: SteppedClient
) -> None:
    """As the Go client sends it."""
    fields = {
        "producerGroup": "P", "topic": REPLIES, "defaultTopic": "TBW102",
        "defaultTopicQueueNums": 4, "queueId": 0, "sysFlag": 0, "bornTimestamp": 1, "flag": 0,
        "properties": "REPLY_TO_CLIENT\x01c\x02",
    }  # fmt: skip
    ask(client, REPLY_LONG, fields)
    assert bytes(member.requests[0].body) == b""


def test_a_reply_to_another_topic_is_refused(client: SteppedClient) -> None:
    assert client.call(REPLY, send_fields("none_REPLY_TOPIC")).code == NO_TOPIC
