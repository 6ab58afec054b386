"""ReceiveMessage, AckMessage, ChangeInvisibleDuration, ForwardMessageToDeadLetterQueue."""

from contextlib import suppress
from typing import Any

import pytest

pytest.importorskip("google.protobuf")

from hypothesis import given
from hypothesis import strategies as st

from consuming import (
    GROUP,
    TOPIC,
    ack,
    bodies,
    change_request,
    dead_letters,
    forward_request,
    handles_of,
    outcome,
    play,
    receive,
    receive_request,
    tagged,
)
from consuming import ack_request as ack_entries
from proxied import Proxied, Speaker
from sluicemq.broker.produce.intake import BatchFields
from sluicemq.config.proxying import ProxyLimits
from sluicemq.errors import ProtocolError
from sluicemq.model.ids import Host, encode_host
from sluicemq.model.topic import PERM_READ, PERM_WRITE, GroupConfig
from sluicemq.net.work.background import run_now
from sluicemq.proxy import messages as m
from sluicemq.proxy.convert import parse_handle, to_subscription
from sluicemq.proxy.limits import StatusError
from sluicemq.proxy.local import make_local_proxy
from sluicemq.proxy.messages import Code
from sluicemq.proxy.receiving import (
    ack_request,
    batch_ack_request,
    decode_popped,
    poll_timeout_ms,
    pop_request,
    split_acks,
)
from sluicemq.proxy.receiving import change_invisible_request as change_request_of
from sluicemq.record.codec import encode_batch, encode_properties, encode_record
from sluicemq.wire.declare import decode_header, encode_header
from sluicemq.wire.frames import Command
from sluicemq.wire.popping import (
    AckMessageRequest,
    ChangeInvisibleTimeRequest,
    PopMessageRequest,
    ReceiptHandle,
    decode_pop_acks,
)


def test_what_is_received_and_acknowledged_is_done() -> None:
    async def scene(proxy: Proxied, client: Speaker) -> None:
        for number in range(5):
            await proxy.mq.send(TOPIC, b"%d" % number, tag="a")
        messages = await receive(client)
        assert bodies(messages) == {b"0", b"1", b"2", b"3", b"4"}
        answer = await ack(client, *handles_of(messages))
        assert answer.status.code == Code.OK
        assert [entry.status.code for entry in answer.entries] == 5 * [Code.OK]
        await proxy.mq.clock.advance(minutes=2)
        assert await receive(client) == []

    play(scene)


def test_what_is_not_acknowledged_comes_again() -> None:
    async def scene(proxy: Proxied, client: Speaker) -> None:
        await proxy.mq.send(TOPIC, b"1")
        (first,) = await receive(client)
        await proxy.mq.clock.advance(seconds=31)
        (second,) = await receive(client)
        assert second.system_properties.delivery_attempt == 2
        assert second.topic.name == TOPIC
        old, new = handles_of([first, second])
        assert (await ack(client, old)).status.code == Code.INVALID_RECEIPT_HANDLE
        assert (await ack(client, new)).status.code == Code.OK
        await proxy.mq.clock.advance(minutes=2)
        assert await receive(client) == []

    play(scene)


@pytest.mark.parametrize("lies_in_store", [False, True])
def test_acknowledging_a_message_with_a_forged_handle_acknowledges_no_other(
    lies_in_store: bool,
) -> None:
    """The handle of another message in the property POP_CK: sent in a batch, or already stored by
    a release that kept it."""

    async def scene(proxy: Proxied, client: Speaker) -> None:
        await proxy.mq.send(TOPIC, b"victim")
        (stolen,) = handles_of(await receive(client))
        state = proxy.mq.servers.broker.core
        names = f"UNIQ_KEY\x01AA\x02POP_CK\x01{stolen}\x02".encode()
        if lies_in_store:
            host = state.settings.store_host
            state.store.writer.append(TOPIC, 0, b"evil", names, 0, 0, 0, 0, host, host)
        else:
            host = state.settings.store_host
            batch = encode_batch([(0, b"evil", names)])
            origin = BatchFields(0, 0, host, host)
            topic = state.topics.table[TOPIC]
            made = run_now(state.intake.prepare_batch(batch, origin, "a\x01b\x02"))
            state.intake.append_batch(topic, 0, made, origin, "")
        state.group_commit.commit_internal()
        (evil,) = await receive(client)
        assert evil.body == b"evil"
        answer = await ack(client, *handles_of([evil]))
        assert answer.status.code == Code.OK
        await proxy.mq.clock.advance(seconds=61)
        assert bodies(await receive(client)) == {b"victim"}

    play(scene)


def test_a_receive_waits_until_something_comes() -> None:
    async def scene(proxy: Proxied, client: Speaker) -> None:
        call = client.call("ReceiveMessage", receive_request())
        await proxy.mq.clock.advance(seconds=2)
        assert not call.is_closed
        await proxy.mq.send(TOPIC, b"1")
        await call.ended
        assert bodies(outcome(call.answers)[1]) == {b"1"}

    play(scene)


@pytest.mark.parametrize(
    ("polling_s", "timeout_s", "waited_ms"),
    [(7, 10.0, 7000), (1, 8.0, 5000), (60, 100.0, 20_000), (20, 7.0, 6500), (None, 10.0, 8500),
     (7, None, 7000), (None, None, 20_000), (9, 9.2, 8700)],
)  # fmt: skip
def test_a_receive_waits_as_long_as_it_is_told(
    polling_s: int | None, timeout_s: float | None, waited_ms: int
) -> None:
    async def scene(proxy: Proxied, speaker: Speaker) -> None:
        call = speaker.call("QueryRoute", m.QueryRouteRequest())
        client = proxy.dispatcher.clients.identify(call, "")  # type: ignore[arg-type]
        client.settings = m.Settings(request_timeout=m.Duration(seconds=3))
        request = receive_request()
        request.ClearField("long_polling_timeout")
        if polling_s is not None:
            request.long_polling_timeout.seconds = polling_s
        assert poll_timeout_ms(client, request, timeout_s, ProxyLimits()) == waited_ms

    play(scene)


def refused_with(
    code: Code, *, timeout_s: float = 8.0, headers: dict[str, str] | None = None, **fields: Any
) -> None:
    async def scene(proxy: Proxied, _client: Speaker) -> None:
        client = proxy.speaker("other", **(headers or {}))
        answers = await client.ask("ReceiveMessage", receive_request(**fields), timeout_s)
        assert [answer.status.code for answer in answers] == [code]
        assert answers[0].status.message

    play(scene)


def test_a_deadline_that_is_too_near_is_refused() -> None:
    version = {"x-mq-client-version": "5.0.3"}
    refused_with(Code.ILLEGAL_POLLING_TIME, timeout_s=4.0, headers=version)
    version = {"x-mq-client-version": "5.0.2"}
    refused_with(Code.BAD_REQUEST, timeout_s=4.0, headers=version)


@pytest.mark.parametrize("seconds", [9, 43_201])
def test_an_invisible_time_has_limits(seconds: int) -> None:
    refused_with(Code.ILLEGAL_INVISIBLE_TIME, invisible_duration=m.Duration(seconds=seconds))


@pytest.mark.parametrize(("expression", "kind"), [("||", 1), ("", 2), ("a = ", 2)])
def test_an_expression_that_does_not_parse_is_refused(expression: str, kind: int) -> None:
    refused_with(Code.ILLEGAL_FILTER_EXPRESSION, filter_expression=tagged(expression, kind))


def test_filters_give_exactly_what_matches() -> None:
    async def scene(proxy: Proxied, client: Speaker) -> None:
        for tag in ("a", "b", "Aa", "BB", None):  # Aa and BB have the same hash
            await proxy.mq.send(TOPIC, (tag or "none").encode(), tag=tag, properties={"n": "1"})
        assert bodies(await receive(client, filter_expression=tagged("a || Aa"))) == {b"a", b"Aa"}
        await proxy.mq.send(TOPIC, b"x", properties={"n": "7"})
        await proxy.mq.send(TOPIC, b"y", properties={"n": "8"})
        assert bodies(await receive(client, filter_expression=tagged("n > 7", 2))) == {b"y"}
        # What has only the hash of a tag is done with, and does not come again.
        await proxy.mq.clock.advance(minutes=1)
        found = await receive(client, filter_expression=tagged("*"))
        assert bodies(found) == {b"a", b"Aa", b"y"}

    play(scene)


def test_a_batch_is_of_32_at_most() -> None:
    async def scene(proxy: Proxied, client: Speaker) -> None:
        for number in range(40):
            await proxy.mq.send(TOPIC, b"%d" % number)
        assert len(await receive(client, batch_size=64)) == 32
        assert len(await receive(client, batch_size=5)) == 5

    play(scene)


def test_a_broker_that_is_not_there_is_any() -> None:
    async def scene(proxy: Proxied, client: Speaker) -> None:
        await proxy.mq.send(TOPIC, b"1")
        request = receive_request()
        request.message_queue.broker.name = "nowhere"
        request.message_queue.id = 7
        assert len(outcome(await client.ask("ReceiveMessage", request))[1]) == 1

    play(scene)


def test_handles_that_name_nothing_are_said_to() -> None:
    async def scene(proxy: Proxied, client: Speaker) -> None:
        await proxy.mq.send(TOPIC, b"1")
        (message,) = await receive(client)
        (good,) = handles_of([message])
        parts = good.split()
        bad = ["", "nonsense", " ".join([*parts[:5], "elsewhere", *parts[6:]]),
               " ".join([*parts[:6], "77", *parts[7:]]),
               " ".join([*parts[:7], "77", *parts[8:]])]  # fmt: skip
        for handle in bad:
            answer = await ack(client, handle)
            assert answer.status.code == Code.INVALID_RECEIPT_HANDLE, handle
        answer = await ack(client, good, "nonsense")
        assert answer.status.code == Code.MULTIPLE_RESULTS
        assert [it.status.code for it in answer.entries] == [Code.OK, Code.INVALID_RECEIPT_HANDLE]
        assert (await ack(client)).status.code == Code.INTERNAL_SERVER_ERROR
        many = await client.ask("AckMessage", ack_entries(*1025 * ["1"]))
        assert many.status.code == Code.BAD_REQUEST

    play(scene)


def test_a_change_gives_another_handle() -> None:
    async def scene(proxy: Proxied, client: Speaker) -> None:
        await proxy.mq.send(TOPIC, b"1")
        (old,) = handles_of(await receive(client))
        answer = await client.ask("ChangeInvisibleDuration", change_request(old, 3600))
        assert answer.status.code == Code.OK
        assert answer.receipt_handle.split()[-2:] == old.split()[-2:]
        again = await client.ask("ChangeInvisibleDuration", change_request(old, 3600))
        assert again.status.code == Code.INVALID_RECEIPT_HANDLE
        await proxy.mq.clock.advance(minutes=59)
        assert await receive(client) == []
        assert (await ack(client, answer.receipt_handle)).status.code == Code.OK
        await proxy.mq.clock.advance(minutes=59)
        assert await receive(client) == []

    play(scene)


def test_a_change_brings_a_message_back_soon() -> None:
    async def scene(proxy: Proxied, client: Speaker) -> None:
        await proxy.mq.send(TOPIC, b"1")
        (handle,) = handles_of(await receive(client))
        for seconds in (-1, 43_201):
            answer = await client.ask("ChangeInvisibleDuration", change_request(handle, seconds))
            assert answer.status.code == Code.ILLEGAL_INVISIBLE_TIME
        await client.ask("ChangeInvisibleDuration", change_request(handle, 0))
        assert bodies(await receive(client)) == {b"1"}

    play(scene)


def test_a_message_that_is_suspended_was_not_tried() -> None:
    async def scene(proxy: Proxied, client: Speaker) -> None:
        await proxy.mq.send(TOPIC, b"1")
        for suspend, attempt in ((True, 1), (False, 2)):
            (handle,) = handles_of(await receive(client))
            request = change_request(handle, 0, suspend=suspend)
            await client.ask("ChangeInvisibleDuration", request)
            (message,) = await receive(client)
            assert message.system_properties.delivery_attempt == attempt
            request = change_request(*handles_of([message]), 0, suspend=True)
            await client.ask("ChangeInvisibleDuration", request)

    play(scene)


def test_another_proxy_knows_what_to_do_with_a_handle() -> None:
    async def scene(proxy: Proxied, client: Speaker) -> None:
        other = Proxied(proxy.mq, make_local_proxy(proxy.mq.servers.broker)).speaker("other")
        for number in range(2):
            await proxy.mq.send(TOPIC, b"%d" % number)
        first, second = handles_of(await receive(client))
        assert (await ack(other, first)).status.code == Code.OK
        answer = await other.ask("ChangeInvisibleDuration", change_request(second, 3600))
        assert (await ack(client, answer.receipt_handle)).status.code == Code.OK
        await proxy.mq.clock.advance(hours=2)
        assert await receive(client) == []

    play(scene)


def test_a_message_that_is_given_up_is_a_dead_letter() -> None:
    async def scene(proxy: Proxied, client: Speaker) -> None:
        await proxy.mq.send(TOPIC, b"1")
        (handle,) = handles_of(await receive(client))
        short = " ".join(handle.split()[:8])
        answer = await client.ask("ForwardMessageToDeadLetterQueue", forward_request(short))
        assert answer.status.code == Code.INVALID_RECEIPT_HANDLE
        answer = await client.ask("ForwardMessageToDeadLetterQueue", forward_request(handle))
        assert answer.status.code == Code.OK
        assert await dead_letters(proxy) == 1
        await proxy.mq.clock.advance(minutes=1)
        assert await receive(client) == []

    play(scene)


def test_what_was_tried_too_often_is_a_dead_letter() -> None:
    async def scene(proxy: Proxied, client: Speaker) -> None:
        await proxy.mq.admin.create_group(GroupConfig(GROUP, retry_times_max=1))
        await proxy.mq.send(TOPIC, b"1")
        for attempt in (1, 2):
            (message,) = await receive(client)
            assert message.system_properties.delivery_attempt == attempt
            await proxy.mq.clock.advance(seconds=31)
        assert await receive(client) == []
        assert await dead_letters(proxy) == 1
        await proxy.mq.clock.advance(minutes=2)
        assert await receive(client) == []

    play(scene)


async def forbid_dead_letters(proxy: Proxied, *, forbidden: bool) -> None:
    """Let the broker refuse to store dead letters of GROUP, or allow it again."""
    perm = PERM_READ if forbidden else PERM_READ | PERM_WRITE
    await proxy.mq.admin.create_topic(f"%DLQ%{GROUP}", queues=1, perm=perm, force=True)


def test_a_dead_letter_that_the_broker_refuses_to_store_is_not_acknowledged() -> None:
    async def scene(proxy: Proxied, client: Speaker) -> None:
        await proxy.mq.admin.create_group(GroupConfig(GROUP, retry_times_max=0))
        await forbid_dead_letters(proxy, forbidden=True)
        await proxy.mq.send(TOPIC, b"1")
        assert len(await receive(client)) == 1
        await proxy.mq.clock.advance(seconds=31)
        assert await receive(client) == []
        assert await dead_letters(proxy) == 0
        await forbid_dead_letters(proxy, forbidden=False)
        await proxy.mq.clock.advance(seconds=31)
        assert await receive(client) == []
        assert await dead_letters(proxy) == 1

    play(scene)


def test_a_message_that_cannot_be_forwarded_to_the_dead_letters_comes_again() -> None:
    async def scene(proxy: Proxied, client: Speaker) -> None:
        await forbid_dead_letters(proxy, forbidden=True)
        await proxy.mq.send(TOPIC, b"1")
        (handle,) = handles_of(await receive(client))
        answer = await client.ask("ForwardMessageToDeadLetterQueue", forward_request(handle))
        assert answer.status.code != Code.OK
        await proxy.mq.clock.advance(seconds=31)
        assert bodies(await receive(client)) == {b"1"}

    play(scene)


def test_what_nobody_waits_for_is_given_back() -> None:
    async def scene(proxy: Proxied, client: Speaker) -> None:
        call = client.call("ReceiveMessage", receive_request())
        call.lose()
        await proxy.mq.send(TOPIC, b"1")
        begin_s = proxy.mq.clock.monotonic_s()
        assert bodies(await receive(client)) == {b"1"}
        assert proxy.mq.clock.monotonic_s() - begin_s < 1.5

    play(scene)


def test_a_client_that_is_gone_waits_no_more() -> None:
    async def scene(proxy: Proxied, client: Speaker) -> None:
        client.call("ReceiveMessage", receive_request())
        client.close()
        await proxy.mq.send(TOPIC, b"1")
        (message,) = await receive(proxy.speaker("other"))
        assert message.system_properties.delivery_attempt == 1

    play(scene)


def test_the_end_of_the_proxy_answers_who_waits() -> None:
    async def scene(proxy: Proxied, client: Speaker) -> None:
        call = client.call("ReceiveMessage", receive_request())
        proxy.proxy._call_each("drain")
        assert outcome(call.answers) == (Code.MESSAGE_NOT_FOUND, [])
        await proxy.mq.send(TOPIC, b"1")
        await proxy.mq.clock.advance(seconds=2)
        assert bodies(await receive(client)) == {b"1"}

    play(scene)


def test_in_order_one_at_a_time_of_a_queue() -> None:
    async def scene(proxy: Proxied, client: Speaker) -> None:
        await proxy.mq.admin.create_group(GroupConfig(GROUP, consume_message_orderly=True))
        for number in range(3):
            await proxy.mq.send(TOPIC, b"%d" % number, sharding_key="k")
        (first,) = await receive(client, batch_size=1, attempt_id="x")
        assert first.body == b"0"
        assert first.system_properties.message_group == "k"
        assert await receive(client) == []  # the queue is with somebody
        (again,) = await receive(client, batch_size=1, attempt_id="x")
        assert (again.body, again.system_properties.delivery_attempt) == (b"0", 1)
        await proxy.mq.clock.advance(seconds=31)
        found = await receive(client)
        assert [message.body for message in found] == [b"0", b"1", b"2"]
        assert [it.system_properties.delivery_attempt for it in found] == [2, 1, 1]
        assert (await ack(client, *handles_of(found))).status.code == Code.OK
        assert await receive(client) == []

    play(scene)


HANDLE = ReceiptHandle(1, 1_700_000_000_000, 60_000, 3, 1, "broker-a", 2, 7, 4711)


def test_requests_are_what_their_headers_say() -> None:
    pop = pop_request(
        GROUP, to_subscription(TOPIC, tagged("a")), "b", 3, 4, 5, "try", is_order=True
    )
    header = PopMessageRequest(
        group=GROUP, topic=TOPIC, queue_id=-1, broker="b", count_max=3, invisible_ms=4, poll_ms=5,
        init_mode=1, expression_kind="TAG", expression="a", order=True, attempt_id="try",
    )  # fmt: skip
    assert (pop.code, pop.fields) == (200050, encode_header(header))
    change = change_request_of(GROUP, TOPIC, HANDLE, 9, suspend=True)
    place: dict[str, Any] = {
        "group": GROUP, "topic": "%RETRY%g_orders", "queue_id": 2, "broker": "broker-a",
        "handle": HANDLE.encode(), "offset": 7,
    }  # fmt: skip
    changed = ChangeInvisibleTimeRequest(**place, invisible_ms=9, suspend=True)
    assert (change.code, change.fields) == (200053, encode_header(changed))
    ack = ack_request(GROUP, TOPIC, HANDLE)
    assert (ack.code, ack.fields) == (200051, encode_header(AckMessageRequest(**place)))


NUMBERS = st.lists(st.integers(-(1 << 70), 1 << 70).map(str), max_size=10)


@given(st.text(max_size=40) | NUMBERS.map(" ".join) | st.just("1 " * 400))
def test_any_text_is_a_handle_or_is_refused(text: str) -> None:
    with suppress(StatusError):
        handle = parse_handle(text)
        command = ack_request(GROUP, TOPIC, handle)
        assert decode_header(AckMessageRequest, command.fields).offset == handle.offset


def test_a_pop_tells_what_it_holds() -> None:
    def record(topic: str, offset: int, **properties: str) -> bytes:
        host = encode_host(Host("127.0.0.1", 1))
        return encode_record(
            topic=topic, queue_id=2, queue_offset=offset, physical_offset=4711, body=b"",
            properties=encode_properties(properties), flag=0, sys_flag=0, born_time_ms=0,
            born_host=host, store_time_ms=0, store_host=host, reconsume_times=1,
        )  # fmt: skip

    forged = HANDLE._replace(physical_offset=-1).encode()
    records = [
        record(TOPIC, 5), record(TOPIC, 7, POP_CK=forged), record(TOPIC, 8, POP_CK="forged"),
        record("%RETRY%g_orders", 9), record(TOPIC, 7, POP_CK=forged), record(TOPIC, 12),
    ]  # fmt: skip
    fields = {"popTime": "10", "invisibleTime": "20", "reviveQid": "3",
              "startOffsetInfo": "0 2 4;1 2 6", "orderCountInfo": "0 qo2%5 6;0 2 3",
              "msgOffsetInfo": "0 2 5,7,8;1 2 9,7;2 2 12"}  # fmt: skip
    found = list(decode_popped(Command(0, fields, b"".join(records)), "b"))
    assert [it.handle for it in found] == [
        ReceiptHandle(4, 10, 20, 3, 0, "b", 2, 5, 4711),
        ReceiptHandle(4, 10, 20, 3, 0, "b", 2, 7, 4711),
        ReceiptHandle(4, 10, 20, 3, 0, "b", 2, 8, 4711),
        ReceiptHandle(6, 10, 20, 3, 1, "b", 2, 9, 4711),
        ReceiptHandle(6, 10, 20, 3, 1, "b", 2, 7, 4711),
        ReceiptHandle(12, 10, 20, 3, 2, "b", 2, 12, 4711),
    ]  # fmt: skip
    assert [it.reconsume_times for it in found] == [6, 3, 3, 1, 1, 1]
    for info in ("x", "0 2"):
        for name in ("startOffsetInfo", "msgOffsetInfo"):
            with pytest.raises(ProtocolError):
                list(decode_popped(Command(0, {**fields, name: info + " x"}), "b"))


def test_many_of_one_pop_are_acknowledged_together() -> None:
    near = [HANDLE._replace(offset=it) for it in (1, 5, 7)]
    far, other = HANDLE._replace(offset=1 << 20), HANDLE._replace(broker="other")
    items = [(i, it.broker, it) for i, it in enumerate([*near, far, other])]
    single, batches = split_acks(items)
    assert {number for number, _, _ in single} == {3, 4}
    assert [number for number, _ in batches["broker-a", "broker-a"]] == [0, 1, 2]
    (pop,) = decode_pop_acks(batch_ack_request(GROUP, TOPIC, "broker-a", near).body)
    assert (pop.group, pop.topic, pop.offsets) == (GROUP, TOPIC, (1, 5, 7))
