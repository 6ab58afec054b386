"""What clients say of themselves, and what brokers ask of them."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

pytest.importorskip("google.protobuf")

from proxied import FakeCall, Proxied, Speaker, proxied
from sluicemq.config.proxying import ProxyLimits
from sluicemq.errors import RequestError
from sluicemq.model.topic import CONTRACT, GroupConfig
from sluicemq.net.grpc import StatusCode
from sluicemq.proxy import messages as m
from sluicemq.proxy.messages import ClientType, Code
from sluicemq.proxy.telemetry import merge_settings, to_retry_policy
from sluicemq.testing.virtual import VirtualClock
from sluicemq.wire.bodies import ConsumeResult
from sluicemq.wire.codes import RequestCode, ResponseCode
from sluicemq.wire.frames import Command

OK = m.Status(code=Code.OK, message="OK")


def publishing(*topics: str) -> m.Settings:
    return m.Settings(
        client_type=ClientType.PRODUCER,
        publishing=m.Publishing(topics=[m.Resource(name=it) for it in topics]),
        user_agent=m.UA(language=m.Language.NODE_JS, version="5.0.8"),
    )


def subscription(
    group: str, topic: str = "orders", tags: str = "*", kind: int = ClientType.PUSH_CONSUMER,
    filter_type: int = m.FilterType.TAG,
) -> m.Settings:  # fmt: skip
    entry = m.SubscriptionEntry(
        topic=m.Resource(name=topic),
        expression=m.FilterExpression(type=filter_type, expression=tags),
    )
    return m.Settings(
        client_type=kind,
        subscription=m.Subscription(group=m.Resource(name=group), subscriptions=[entry]),
    )


def tell(settings: m.Settings) -> m.TelemetryCommand:
    return m.TelemetryCommand(settings=settings)


async def answers(stream: FakeCall, count: int) -> list[Any]:
    """As many as came by then; fewer when the stream has ended."""
    while len(stream.answers) < count and not stream.is_closed:
        stream.arrived.clear()
        await stream.arrived.wait()
    return stream.answers


async def settled(client: Speaker, settings: m.Settings) -> FakeCall:
    """A stream whose settings were answered."""
    stream = client.call("Telemetry", tell(settings), None)
    (answer,) = await answers(stream, 1)
    assert answer.status == OK
    return stream


def run(
    scene: Callable[[Proxied], Awaitable[None]],
    clock: VirtualClock | None = None,
    kind: str = "NORMAL",
) -> None:
    async def play() -> None:
        async with proxied(clock) as proxy:
            attributes = {"message.type": kind}
            await proxy.mq.admin.create_topic("orders", queues=2, attributes=attributes)
            await scene(proxy)

    asyncio.run(play())


def members(proxy: Proxied, group: str) -> list[Any]:
    found = proxy.mq.servers.broker.core.consumers.groups.get(group)
    return [] if found is None else list(found.members.values())


def producers(proxy: Proxied, group: str) -> list[Any]:
    return list(proxy.mq.servers.broker.core.producers.groups.get(group, {}).values())


# ---------------------------------------------------------------------------------------- settings


def test_a_producer_is_told_how_to_try_again_and_is_a_member_at_once() -> None:
    async def scene(proxy: Proxied) -> None:
        client = proxy.speaker("p", **{"x-mq-client-version": "5.0.8"})
        stream = await settled(client, publishing("orders"))
        settings = stream.answers[0].settings
        assert [it.name for it in settings.publishing.topics] == ["orders"]
        assert settings.publishing.validate_message_type
        assert settings.publishing.max_body_size == 4 * 1024 * 1024
        assert settings.backoff_policy == m.RetryPolicy(
            max_attempts=3,
            exponential_backoff=m.ExponentialBackoff(
                initial=m.Duration(nanos=10_000_000), max=m.Duration(seconds=1), multiplier=2
            ),
        )
        assert settings.user_agent == publishing().user_agent
        assert settings.HasField("metric")
        (member,) = producers(proxy, "orders")
        assert (member.client_id, member.language, member.version) == ("p", "NODE_JS", 429)

    run(scene)


def test_a_consumer_is_told_what_its_group_says() -> None:
    async def scene(proxy: Proxied) -> None:
        await proxy.mq.admin.create_group(
            GroupConfig("g", consume_message_orderly=True, retry_times_max=4)
        )
        stream = await settled(proxy.speaker("c"), subscription("g", tags="a || b"))
        settings = stream.answers[0].settings
        assert settings.subscription.fifo
        assert settings.subscription.receive_batch_size == 32
        assert settings.subscription.long_polling_timeout == m.Duration(seconds=20)
        assert settings.backoff_policy.max_attempts == 5
        assert len(settings.backoff_policy.customized_backoff.next) == 18
        (member,) = members(proxy, "g")
        assert member.subscriptions["orders"].tags == {"a", "b"}

    run(scene)


def test_fields_that_are_newer_come_back() -> None:
    said = m.Settings.FromString(publishing("t").SerializeToString() + b"\xea\x3f\x03new")
    assert (
        merge_settings(said, None, ProxyLimits()).SerializeToString().endswith(b"\xea\x3f\x03new")
    )


@pytest.mark.parametrize(("times", "attempts"), [(16, 17), (0, 1), (-1, 1), (2**31 - 1, 2**31 - 1)])
def test_a_group_says_how_often_its_messages_come(times: int, attempts: int) -> None:
    assert to_retry_policy(GroupConfig("g", retry_times_max=times)).max_attempts == attempts


def test_a_policy_of_a_group_becomes_a_backoff() -> None:
    policy: dict[str, Any] = {
        "type": "EXPONENTIAL",
        "exponentialRetryPolicy": {"initial": 250, "max": 60_000, "multiplier": 3},
    }
    backoff = to_retry_policy(GroupConfig("g", retry_policy=policy)).exponential_backoff
    assert backoff.initial == m.Duration(nanos=250_000_000)
    assert (backoff.max.seconds, backoff.multiplier) == (60, 3)
    policy = {"type": "CUSTOMIZED", "customizedRetryPolicy": {"next": [1000, 1500]}}
    steps = to_retry_policy(GroupConfig("g", retry_policy=policy)).customized_backoff.next
    assert list(steps) == [m.Duration(seconds=1), m.Duration(seconds=1, nanos=500_000_000)]


@pytest.mark.parametrize(
    "policy", [{"type": "EXPONENTIAL", "exponentialRetryPolicy": {"initial": "x", "max": -1}},
               {"type": "EXPONENTIAL"}, {"type": "EXPONENTIAL", "exponentialRetryPolicy": 7}],
)  # fmt: skip
def test_a_policy_that_is_wrong_is_the_standard_one(policy: dict[str, Any]) -> None:
    backoff = to_retry_policy(GroupConfig("g", retry_policy=policy)).exponential_backoff
    assert (backoff.initial.seconds, backoff.max.seconds, backoff.multiplier) == (5, 7200, 2)
    for broken in ({"next": "x"}, {"next": []}, {}, None):
        config = GroupConfig("g", retry_policy={"customizedRetryPolicy": broken})
        assert len(to_retry_policy(config).customized_backoff.next) == 18


@pytest.mark.parametrize(
    ("settings", "text"),
    [(m.Settings(), "40000 BAD_REQUEST"),
     (publishing("a b"), "40002 ILLEGAL_TOPIC"),
     (subscription("g", "rmq_sys_x"), "40002 ILLEGAL_TOPIC"),
     (subscription("a b"), "40003 ILLEGAL_CONSUMER_GROUP"),
     (subscription("g", tags="||"), "40010 ILLEGAL_FILTER_EXPRESSION"),
     (subscription("g", kind=ClientType.LITE_PUSH_CONSUMER), "40015 UNRECOGNIZED_CLIENT_TYPE"),
     (subscription("g", kind=77), "77"),
     (publishing(*(f"t{it}" for it in range(5000))), "5000 topics, the limit is 4096")],
)  # fmt: skip
def test_settings_that_must_not_be_end_the_stream(settings: m.Settings, text: str) -> None:
    async def scene(proxy: Proxied) -> None:
        stream = proxy.speaker().call("Telemetry", tell(settings), None)
        code, why = await stream.ended
        assert code == StatusCode.INVALID_ARGUMENT
        assert text in why

    run(scene)


def test_a_stream_begins_with_settings() -> None:
    async def scene(proxy: Proxied) -> None:
        said = m.TelemetryCommand(thread_stack_trace=m.ThreadStackTrace(nonce="1"))
        stream = proxy.speaker().call("Telemetry", said, None)
        assert (await stream.ended)[0] == StatusCode.INVALID_ARGUMENT

    run(scene)


def test_every_settings_command_is_answered_and_the_end_of_the_client_is_the_end() -> None:
    async def scene(proxy: Proxied) -> None:
        client = proxy.speaker("p")
        stream = await settled(client, publishing())
        client.say(stream, tell(publishing("orders")))
        client.say(stream, m.TelemetryCommand())
        stream.half_close()
        assert await stream.ended == (StatusCode.OK, "")
        assert [len(it.settings.publishing.topics) for it in stream.answers] == [0, 1]
        assert proxy.dispatcher.clients.by_id["p"].command_stream is None

    run(scene)


def test_who_says_more_than_is_listened_to_is_sent_away() -> None:
    async def scene(proxy: Proxied) -> None:
        client = proxy.speaker("p")
        stream = client.call("Telemetry", tell(publishing("orders")), None)
        for _ in range(100):
            client.say(stream, tell(publishing("orders")))
        assert (await stream.ended)[0] == StatusCode.RESOURCE_EXHAUSTED

    run(scene)


def test_who_does_not_take_its_answers_is_sent_away() -> None:
    async def scene(proxy: Proxied) -> None:
        client = proxy.speaker("p")
        stream = await settled(client, publishing("orders"))
        stream.connection.queued_bytes = 2 << 20
        client.say(stream, tell(publishing("orders")))
        assert (await stream.ended)[0] == StatusCode.RESOURCE_EXHAUSTED

    run(scene)


# --------------------------------------------------------------------------------------- members


def test_a_heartbeat_needs_settings() -> None:
    async def scene(proxy: Proxied) -> None:
        client = proxy.speaker("c")
        for name in ("Heartbeat", "NotifyClientTermination"):
            answer = await client.ask(name, getattr(m, f"{name}Request")())
            assert answer.status.code == Code.UNRECOGNIZED_CLIENT_TYPE
        await settled(client, subscription("g"))
        answer = await client.ask("Heartbeat", m.HeartbeatRequest(group=m.Resource(name="g")))
        assert answer.status == OK

    run(scene)


def test_who_ends_leaves_its_groups() -> None:
    async def scene(proxy: Proxied) -> None:
        consumer, producer = proxy.speaker("c"), proxy.speaker("p")
        await settled(consumer, subscription("g", kind=ClientType.SIMPLE_CONSUMER))
        await settled(producer, publishing("orders"))
        assert len(members(proxy, "g")) == len(producers(proxy, "orders")) == 1
        for client in (consumer, producer):
            answer = await client.ask("NotifyClientTermination", m.NotifyClientTerminationRequest())
            assert answer.status == OK
            answer = await client.ask("Heartbeat", m.HeartbeatRequest())
            assert answer.status.code == Code.UNRECOGNIZED_CLIENT_TYPE
        assert members(proxy, "g") == producers(proxy, "orders") == []

    run(scene)


def test_a_strict_group_does_not_wait_for_who_said_that_it_leaves() -> None:
    async def scene(proxy: Proxied) -> None:
        await proxy.mq.admin.create_group(GroupConfig("g", attributes={f"+{CONTRACT}": "strict"}))
        first = proxy.speaker("first")
        await settled(first, subscription("g", tags="a"))
        await first.ask("NotifyClientTermination", m.NotifyClientTerminationRequest())
        first.close()
        await settled(proxy.speaker("second"), subscription("g", tags="b"))

    run(scene)


def test_whose_connection_is_gone_is_gone() -> None:
    async def scene(proxy: Proxied) -> None:
        gone: list[str] = []
        clients = proxy.dispatcher.clients
        clients.on_removed.append(lambda client: gone.append(client.id))
        first, second = proxy.speaker("c"), proxy.speaker("c")
        await settled(first, subscription("g"))
        await second.ask("Heartbeat", m.HeartbeatRequest())
        first.close()
        assert len(members(proxy, "g")) == 1
        second.close()
        assert (members(proxy, "g"), gone, clients.by_id) == ([], ["c"], {})

    run(scene)


def test_a_topic_that_is_not_published_any_more_is_left() -> None:
    async def scene(proxy: Proxied) -> None:
        await proxy.mq.admin.create_topic("bills", queues=1)
        client = proxy.speaker("p")
        stream = await settled(client, publishing("orders", "bills"))
        client.say(stream, tell(publishing("bills")))
        await answers(stream, 2)
        assert (len(producers(proxy, "orders")), len(producers(proxy, "bills"))) == (0, 1)

    run(scene)


def test_a_strict_group_refuses_another_subscription_with_both() -> None:
    async def scene(proxy: Proxied) -> None:
        await proxy.mq.admin.create_group(GroupConfig("g", attributes={f"+{CONTRACT}": "strict"}))
        await settled(proxy.speaker("first"), subscription("g", tags="a"))
        second = proxy.speaker("second")
        code, why = await second.call("Telemetry", tell(subscription("g", tags="b")), None).ended
        assert code == StatusCode.PERMISSION_DENIED
        answer = await second.ask("Heartbeat", m.HeartbeatRequest())
        for text in (why, answer.status.message):
            assert "'a'" in text
            assert "'b'" in text
        assert answer.status.code == Code.FORBIDDEN
        # It has been told; the stream that it opens again stays.
        stream = second.call("Telemetry", tell(subscription("g", tags="b")), None)
        (answer,) = await answers(stream, 1)
        assert answer.status.code == Code.FORBIDDEN
        assert not stream.is_closed

    run(scene)


def test_who_was_silent_for_too_long_comes_back_with_its_next_heartbeat() -> None:
    async def scene(proxy: Proxied) -> None:
        client = proxy.speaker("c")
        await settled(client, subscription("g"))
        await proxy.mq.clock.advance(seconds=200)
        assert members(proxy, "g") == []
        answer = await client.ask("Heartbeat", m.HeartbeatRequest())
        assert (answer.status, len(members(proxy, "g"))) == (OK, 1)
        client.close()
        assert members(proxy, "g") == []

    run(scene, VirtualClock())


# ------------------------------------------------------------------------------ what brokers ask


@pytest.mark.parametrize("knows", ["the check", "the send"])
def test_a_client_is_asked_how_its_transaction_ended_and_its_answer_counts(knows: str) -> None:
    """Whichever id it ends the transaction with: a client may commit while it is asked."""

    async def scene(proxy: Proxied) -> None:
        client = proxy.speaker("p")
        stream = await settled(client, publishing("orders"))
        message = m.Message(
            topic=m.Resource(name="orders"),
            body=b"half",
            user_properties={"n": "1"},
            system_properties=m.SystemProperties(
                message_id="01AB", message_type=m.MessageType.TRANSACTION, tag="a"
            ),
        )
        sent = await client.ask("SendMessage", m.SendMessageRequest(messages=[message]))
        assert sent.entries[0].status.code == Code.OK
        await proxy.mq.clock.advance(seconds=70)
        asked = (await answers(stream, 2))[-1].recover_orphaned_transaction_command
        checks = len(stream.answers)
        # The broker writes the message once more for each check, so the place is another one.
        assert asked.transaction_id.startswith("01AB broker-a ")
        assert asked.message.topic.name == "orders"
        assert asked.message.body == b"half"
        assert asked.message.user_properties["n"] == "1"
        assert asked.message.system_properties.message_id == "01AB"
        assert asked.message.system_properties.tag == "a"
        answer = await client.ask(
            "EndTransaction",
            m.EndTransactionRequest(
                topic=m.Resource(name="orders"),
                message_id="01AB",
                transaction_id=asked.transaction_id
                if knows == "the check"
                else sent.entries[0].transaction_id,
                resolution=m.TransactionResolution.COMMIT,
                source=m.TransactionSource.SOURCE_SERVER_CHECK,
            ),
        )
        assert answer.status.code == Code.OK
        await proxy.mq.clock.advance(seconds=120)
        assert proxy.mq.servers.broker.core.transactions.committed == {"orders": 1}
        assert len(stream.answers) == checks  # it is not asked again

    run(scene, VirtualClock(), "TRANSACTION")


def test_tools_see_the_stacks_of_a_client() -> None:
    async def scene(proxy: Proxied) -> None:
        client = proxy.speaker("c", **{"x-mq-client-version": "5.0.8"})
        stream = await settled(client, subscription("g", tags="a"))
        asked = asyncio.ensure_future(proxy.mq.admin.running_info("g", "c", stack=True))
        nonce = (await answers(stream, 2))[1].print_thread_stack_trace_command.nonce
        for wrong in ("", "7"):
            client.say(stream, stack_of(wrong, "wrong"))
        stranger = proxy.speaker("other")
        stranger.say(await settled(stranger, subscription("other")), stack_of(nonce, "wrong"))
        client.say(stream, stack_of(nonce, "at main"))
        info = await asked
        assert info.stack == "at main"
        assert info.properties["PROP_CONSUME_TYPE"] == "CONSUME_PASSIVELY"
        assert [it.expression for it in info.subscriptions] == ["a"]
        assert (await proxy.mq.admin.running_info("g", "c")).stack is None

    run(scene)


def stack_of(nonce: str, text: str) -> m.TelemetryCommand:
    trace = m.ThreadStackTrace(nonce=nonce, thread_stack_trace=text)
    return m.TelemetryCommand(status=OK, thread_stack_trace=trace)


@pytest.mark.parametrize(
    ("code", "result"),
    [(Code.OK, ConsumeResult.SUCCESS), (Code.FAILED_TO_CONSUME_MESSAGE, ConsumeResult.LATER),
     (Code.MESSAGE_CORRUPTED, ConsumeResult.NOTHING),
     (Code.VERIFY_FIFO_MESSAGE_UNSUPPORTED, ConsumeResult.EXCEPTION)],
)  # fmt: skip
def test_a_client_handles_a_message_on_request(code: Code, result: ConsumeResult) -> None:
    async def scene(proxy: Proxied) -> None:
        sent = await proxy.mq.send("orders", b"body", tag="a", properties={"n": "1"})
        client = proxy.speaker("c")
        stream = await settled(client, subscription("g"))
        admin = proxy.mq.admin
        asked = asyncio.ensure_future(admin.consume_directly(sent.message_id, "g", "c"))
        command = (await answers(stream, 2))[1].verify_message_command
        assert command.message.body == b"body"
        assert command.message.topic.name == "orders"
        assert command.message.user_properties == {"n": "1"}
        assert command.message.system_properties.message_id == sent.message_id
        client.say(
            stream,
            m.TelemetryCommand(
                status=m.Status(code=code, message="so"),
                verify_message_result=m.VerifyMessageResult(nonce=command.nonce),
            ),
        )
        _, found = await asked
        assert (found.result, found.remark) == (result, "so")

    run(scene)


def test_what_a_client_does_not_answer_is_answered_for_it() -> None:
    async def scene(proxy: Proxied) -> None:
        client = proxy.speaker("c")
        stream = await settled(client, subscription("g"))
        asked = asyncio.ensure_future(proxy.mq.admin.running_info("g", "c", stack=True))
        await answers(stream, 2)
        await proxy.mq.clock.advance(seconds=3)
        proxy.proxy.run()
        assert not asked.done()
        await proxy.mq.clock.advance(seconds=1.5)
        proxy.proxy.run()
        with pytest.raises(RequestError, match="did not reply within 4 s"):
            await asked
        # A stream that is full, and none at all.
        stream.connection.queued_bytes = 2 << 20
        for _ in range(2):
            with pytest.raises(RequestError, match="no telemetry stream"):
                await proxy.mq.admin.running_info("g", "c", stack=True)
            stream.lose()

    run(scene, VirtualClock(stands_still=True))


def test_what_is_not_asked_of_clients_of_grpc_is_answered_at_once() -> None:
    async def scene(proxy: Proxied) -> None:
        await settled(proxy.speaker("c"), subscription("g"))
        (member,) = members(proxy, "g")
        told = asyncio.get_running_loop().create_future()
        member.peer.send_request(
            Command(RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT, {}), told.set_result
        )
        assert (await told).code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED
        told = asyncio.get_running_loop().create_future()
        member.peer.send_request(
            Command(RequestCode.CONSUME_MESSAGE_DIRECTLY, {}, b"?"), told.set_result
        )
        assert (await told).code == ResponseCode.SYSTEM_ERROR

    run(scene)
