"""Each public coroutine of the client, cancelled at each of its awaits, leaves nothing behind.

A scene prepares objects of a client and names the call that is cancelled. After the cancellation

- no task is left, and where the call had begun something, no member, no queue and no lock: another
  member of the group reads the whole topic at once;
- a second call works;
- when the client is closed nothing at all is left, and another member gets every message that was
  not acknowledged.

The cluster and the clock are those of `sluicemq.testing`: a point costs milliseconds. The way of
cancelling rotates from point to point; SLUICEMQ_EXAMPLES set means all ways at all points.
"""

import asyncio
import os
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

import sluicemq
from cancelling import WAYS, coroutines_of, inject, settled
from sluicemq.client.aio.producer import Transaction
from sluicemq.client.core.transactions import TransactionListener, TransactionState
from sluicemq.model.message import Message
from sluicemq.model.topic import GroupConfig, MessageQueue
from sluicemq.testing.embedded import EmbeddedSluice, embedded
from sluicemq.testing.virtual import VirtualClock

pytestmark = pytest.mark.slow

EVERY_WAY = "SLUICEMQ_EXAMPLES" in os.environ
QUEUES, MESSAGES = 4, 8
BODIES = {b"%d" % number for number in range(MESSAGES)}
AT_ONCE_S = 3.0
"""The time in which another member must get all queues.

A member that leaves does so at once. A broker keeps the queues of a member that disappears for
120 s, and its locks for 60 s.
"""
LATE_S = 15.0
KEPT_TASKS = {"sluicemq heartbeats", "sluicemq trace"}
"""The background tasks of a client that run until it is closed."""


@dataclass
class Stage:
    """One client with a group of its own, and what it did with the topic."""

    mq: EmbeddedSluice
    client: EmbeddedSluice
    group: str
    topic: str = "t"
    acknowledged: set[bytes] = field(default_factory=set)
    late: set[bytes] = field(default_factory=set)
    """Messages that are redelivered after a delay."""
    options: dict[str, Any] = field(default_factory=dict)
    things: dict[str, Any] = field(default_factory=dict)

    @property
    def queues(self) -> list[MessageQueue]:
        return [MessageQueue(self.topic, "broker-a", number) for number in range(QUEUES)]

    def members(self) -> list[str]:
        group = self.mq.servers.broker.core.consumers.groups.get(self.group)
        return [] if group is None else group.client_ids

    def locks(self) -> dict[MessageQueue, Any]:
        return self.mq.servers.broker.core.locks._groups.get(self.group, {})

    def is_free(self) -> bool:
        """Return whether nothing of the group is left, in the client or at the broker."""
        has_members = bool(self.members()) or self.client._members.get(self.group) is not None
        return not has_members and not self.locks()

    def is_whole(self) -> bool:
        """Return whether the client is a complete member, which reads all queues of its topics."""
        member = self.client._members.get(self.group)
        if member is None:
            return self.things.get("lite", False) and not self.members()
        own = {topic: len(member.readers.queues_of_topic(topic)) for topic in member.topics}
        return self.members() == [self.client.client_id] and set(own.values()) == {QUEUES}


def tasks_now() -> Counter[str]:
    return Counter(
        task.get_name()
        for task in asyncio.all_tasks()
        if task is not asyncio.current_task() and not task.done()
    )


async def other_member_gets(stage: Stage, bodies: set[bytes]) -> None:
    """Check that another client of the group gets the messages `bodies` from all queues.

    It must not have to wait until a lock or a membership expires.
    """
    if stage.options.get("ordered"):  # one message of each queue at a time
        firsts = {min((b for b in bodies if int(b) % QUEUES == n), default=b"") for n in range(4)}
        bodies = firsts - {b""}
    clock, other = stage.mq.clock, stage.mq.servers.client()
    began_s = clock.monotonic_s()
    got: set[bytes] = set()
    if stage.things.get("lite"):
        consumer: Any = other.lite_pull(stage.group, auto_commit=False)
        await consumer.subscribe(stage.topic)

        async def take() -> None:
            got.update(message.body for message in await consumer.poll(1.0))

        count = lambda: len(consumer.assignment)  # noqa: E731
    else:
        consumer = other.subscribe(stage.topic, group=stage.group, **stage.options)
        await consumer.start()

        async def take() -> None:
            got.update(message.body for message in await consumer.receive_many(timeout_s=1.0))

        member = other._members[stage.group]
        count = lambda: len(member.readers.queues_of_topic(stage.topic))  # noqa: E731
    while not (bodies <= got and count() == QUEUES):
        limit_s = AT_ONCE_S if bodies - stage.late - got else LATE_S
        assert clock.monotonic_s() - began_s < limit_s, (
            f"another member reads {count()} of {QUEUES} queues and got {sorted(got)}, not "
            f"{sorted(bodies)}"
        )
        await take()
        await asyncio.sleep(0.01)
    await other.close()


# ---------------------------------------------------------------------------------- scenes


@dataclass(frozen=True)
class Scene:
    """A call that is cancelled: `act`, after `prepare`.

    `frees` says that the group has no members after a cancelled call, as before a start and after a
    close. `starts` says that the call joins the group and then does something else, which may be
    cancelled.
    """

    act: Callable[[Stage], Awaitable[Any]]
    prepare: Callable[[Stage], Awaitable[Any]] | None = None
    frees: bool = False
    starts: bool = False
    is_repeatable: bool = True
    uses_group: bool = True


async def stream_made(stage: Stage) -> None:
    stage.things["it"] = stage.client.subscribe(stage.topic, group=stage.group, **stage.options)


async def stream_read(stage: Stage) -> None:
    """A stream that has all messages and has acknowledged half of them."""
    await stream_made(stage)
    stream, held = stage.things["it"], []
    await stream.start()
    for _ in range(MESSAGES):
        message = await stream.receive()
        if len(stage.acknowledged) < MESSAGES // 2 or stage.options.get("ordered"):
            await message.ack()
            stage.acknowledged.add(message.body)
        else:
            held.append(message)
    stage.things["held"] = held


async def stream_started(stage: Stage) -> None:
    await stream_made(stage)
    await stage.things["it"].start()


def handler_of(stage: Stage) -> Callable[[Any], Awaitable[None]]:
    async def handle(message: Any) -> None:
        stage.acknowledged.add(message.body)

    return handle


async def handler_made(stage: Stage) -> None:
    consumer = stage.client.consumer(stage.group, handler_of(stage), **stage.options)
    stage.things["it"] = consumer.subscribe(stage.topic)


async def handler_started(stage: Stage) -> None:
    await handler_made(stage)
    await stage.things["it"].start()
    assert await settled(lambda: stage.acknowledged == BODIES, 500)


async def handler_stuck(stage: Stage) -> None:
    """A handler that never returns: close() must wait for it or cancel it."""

    async def hang(_message: Any) -> None:
        await asyncio.Event().wait()

    consumer = stage.client.consumer(stage.group, hang, **stage.options)
    stage.things["it"] = consumer.subscribe(stage.topic)
    await consumer.start()
    await settled(lambda: False)


async def lite_made(stage: Stage) -> None:
    stage.things["it"] = stage.client.lite_pull(stage.group, **stage.options)
    stage.things["lite"] = True


async def lite_subscribed(stage: Stage) -> None:
    """A polled consumer that has acknowledged half of the messages."""
    await lite_made(stage)
    await stage.things["it"].subscribe(stage.topic)
    await polled(stage)
    await polled(stage)


async def polled(stage: Stage) -> None:
    """Poll. The next poll may acknowledge the messages of this one if it was not cancelled."""
    found = await stage.things["it"].poll(1.0, count_max=MESSAGES // 4)
    stage.acknowledged.update(message.body for message in found)


async def to_end(stage: Stage) -> None:
    await stage.things["it"].seek_to_end(stage.queues[0])
    stage.acknowledged.update({b"0", b"4"})


async def lite_assigned(stage: Stage) -> None:
    await lite_made(stage)
    await stage.things["it"].assign(stage.queues)


async def second_topic_known(stage: Stage) -> None:
    """A consumer that is in the group for another topic already."""
    await handler_started(stage)


async def pull_made(stage: Stage) -> None:
    await stage.mq.admin.create_group(GroupConfig(stage.group))
    stage.things["it"] = stage.client.pull_consumer(stage.group)


async def record_pulled(stage: Stage) -> None:
    await pull_made(stage)
    for queue in stage.queues:
        result = await stage.things["it"].pull(queue, 0)
        if result.messages:
            stage.things["record"] = result.messages[0]


class Commits(TransactionListener):
    async def execute_local(self, message: Message, transaction_id: str, argument: Any) -> Any:
        await asyncio.sleep(0)
        return TransactionState.COMMIT

    async def check(self, message: Any) -> Any:
        return TransactionState.COMMIT


async def producer_made(stage: Stage) -> None:
    stage.things["it"] = stage.client.producer("p", listener=Commits())


async def producer_sending(stage: Stage) -> None:
    """A producer with sends in progress."""
    await producer_made(stage)
    for number in range(3):
        stage.things["it"].send_soon(lambda _result, _error: None, "out", b"%d" % number)


async def request_received(stage: Stage) -> None:
    await stream_made(stage)
    stream = stage.client.subscribe("other", group=stage.group)
    stage.things["request"] = asyncio.get_running_loop().create_task(
        stage.mq.request("other", b"?", timeout_s=600.0), name="asking"
    )
    message = await stream.receive()
    stage.things["message"] = message
    stage.things["stream"] = stream


async def timed_sent(stage: Stage) -> None:
    sent = await stage.client.send("out", b"later", delay=600)
    stage.things["handle"] = sent.recall_handle


async def transaction_entered(stage: Stage) -> None:
    await producer_made(stage)
    transaction = stage.things["it"].transaction("out", b"x")
    stage.things["transaction"] = await transaction.__aenter__()


async def in_block(stage: Stage) -> None:
    async with stage.things["it"].transaction("out", b"x"):
        await asyncio.sleep(0)


async def in_client(stage: Stage) -> None:
    async with stage.client as client:
        await client.queues(stage.topic)


async def in_loop(stage: Stage) -> None:
    """Reads all messages by `async for` and leaves the loop."""
    if stage.acknowledged == BODIES:
        return
    stream, count = stage.client.subscribe(stage.topic, group=stage.group, **stage.options), 0
    async for message in stream:
        count += 1
        if stage.options.get("ordered"):
            await message.ack()
            stage.acknowledged.add(message.body)
        if count == MESSAGES or stage.acknowledged == BODIES:
            break
    await stream.close()


async def in_block_of(stage: Stage) -> None:
    async with stage.things["it"]:
        await asyncio.sleep(0.5)


async def run_for_a_second(stage: Stage) -> None:
    async with asyncio.timeout(1.0):
        await stage.things["it"].run()


def of_it(name: str, *arguments: Any, **named: Any) -> Callable[[Stage], Awaitable[Any]]:
    async def act(stage: Stage) -> Any:
        return await getattr(stage.things["it"], name)(*arguments, **named)

    return act


def of_client(name: str, *arguments: Any, **named: Any) -> Callable[[Stage], Awaitable[Any]]:
    async def act(stage: Stage) -> Any:
        return await getattr(stage.client, name)(*arguments, **named)

    return act


def of_queue(name: str, *arguments: Any) -> Callable[[Stage], Awaitable[Any]]:
    async def act(stage: Stage) -> Any:
        return await getattr(stage.things["it"], name)(stage.queues[0], *arguments)

    return act


async def assign(stage: Stage) -> None:
    await stage.things["it"].assign(stage.queues)


async def reassign(stage: Stage) -> None:
    await stage.things["it"].assign(stage.queues[:2])


async def receive_all(stage: Stage) -> None:
    """No message is lost by a `receive` that was cancelled."""
    wanted = BODIES if not stage.options.get("ordered") else {b"0", b"1", b"2", b"3"}
    got = stage.things.setdefault("got", set())
    while got != wanted:
        got.add((await stage.things["it"].receive()).body)


async def rejected(stage: Stage) -> None:
    if stage.things["held"]:
        stage.late.add(stage.things["held"][0].body)
        await stage.things["held"][0].reject()
        del stage.things["held"][0]


async def commit(stage: Stage) -> None:
    await stage.things["it"].commit()


async def called(stage: Stage) -> None:
    await stage.things["it"].call_handler(stage.things["one"])


async def handler_and_message(stage: Stage) -> None:
    await handler_started(stage)
    stream = stage.client.subscribe(stage.topic, group=f"{stage.group}x")
    stage.things["one"] = await stream.receive()


async def left_block(stage: Stage) -> None:
    transaction = stage.things.pop("transaction", None)
    if transaction is not None:
        await transaction.__aexit__(None, None, None)


async def answered(stage: Stage) -> None:
    message = stage.things["message"]
    if not stage.things["request"].done():
        await message.reply(b"!")


async def sent_back(stage: Stage) -> None:
    await stage.things["it"].send_back(stage.things["record"])


def one(topic: str = "out") -> Message:
    return Message(topic, b"x")


SCENES: dict[str, Scene] = {
    # -- streams
    "MessageStream.start": Scene(of_it("start"), stream_made, frees=True),
    "MessageStream.__aenter__": Scene(of_it("__aenter__"), stream_made, frees=True),
    "MessageStream.receive": Scene(receive_all, stream_made, starts=True),
    "MessageStream.receive, started": Scene(receive_all, stream_started),
    "MessageStream.receive_many": Scene(
        of_it("receive_many", timeout_s=5.0), stream_made, starts=True
    ),
    "MessageStream.__aiter__": Scene(in_loop, frees=True),
    "MessageStream.change": Scene(of_it("change", tags="A||B"), stream_started),
    "MessageStream.close": Scene(of_it("close"), stream_read, frees=True),
    "MessageStream.__aexit__": Scene(of_it("__aexit__", None, None, None), stream_read, frees=True),
    "ReceivedMessage.ack": Scene(lambda stage: asyncio.sleep(0), stream_read),
    "ReceivedMessage.reject": Scene(rejected, stream_read),
    "ReceivedMessage.reply": Scene(answered, request_received, uses_group=False),
    # -- handlers
    "PushConsumer.start": Scene(of_it("start"), handler_made, frees=True),
    "PushConsumer.__aenter__": Scene(of_it("__aenter__"), handler_made, frees=True),
    "PushConsumer.run": Scene(run_for_a_second, handler_made, frees=True, is_repeatable=False),
    "PushConsumer.change": Scene(of_it("change", "t", tags="A||B"), handler_started),
    "PushConsumer.change, one more topic": Scene(of_it("change", "other"), handler_started),
    "PushConsumer.unsubscribe": Scene(of_it("unsubscribe", "t"), handler_started, frees=True),
    "PushConsumer.call_handler": Scene(called, handler_and_message),
    "PushConsumer.close": Scene(of_it("close"), handler_started, frees=True),
    "PushConsumer.close, stuck": Scene(of_it("close"), handler_stuck, frees=True),
    "PushConsumer.__aexit__": Scene(
        of_it("__aexit__", None, None, None), handler_started, frees=True
    ),
    "PushConsumer, block": Scene(in_block_of, handler_made, frees=True, is_repeatable=False),
    # -- polled consumers
    "LitePullConsumer.__aenter__": Scene(of_it("__aenter__"), lite_made, frees=True),
    "LitePullConsumer.subscribe": Scene(of_it("subscribe", "t"), lite_made, frees=True),
    "LitePullConsumer.subscribe, again": Scene(
        of_it("subscribe", "t", tags="A||B"), lite_subscribed
    ),
    "LitePullConsumer.subscribe, one more topic": Scene(
        of_it("subscribe", "other"), lite_subscribed
    ),
    "LitePullConsumer.unsubscribe": Scene(of_it("unsubscribe", "t"), lite_subscribed, frees=True),
    "LitePullConsumer.assign": Scene(assign, lite_made, frees=True),
    "LitePullConsumer.assign, fewer": Scene(reassign, lite_assigned),
    "LitePullConsumer.poll": Scene(polled, lite_subscribed),
    "LitePullConsumer.commit": Scene(commit, lite_subscribed),
    "LitePullConsumer.committed": Scene(of_queue("committed"), lite_subscribed),
    "LitePullConsumer.offset_for_time": Scene(of_queue("offset_for_time", 0), lite_subscribed),
    "LitePullConsumer.queues": Scene(of_it("queues", "t"), lite_subscribed),
    "LitePullConsumer.seek": Scene(of_queue("seek", 0), lite_subscribed),
    "LitePullConsumer.seek_to_begin": Scene(of_queue("seek_to_begin"), lite_subscribed),
    "LitePullConsumer.seek_to_end": Scene(to_end, lite_assigned),
    "LitePullConsumer.seek_to_time": Scene(of_queue("seek_to_time", 0), lite_subscribed),
    "LitePullConsumer.close": Scene(of_it("close"), lite_subscribed, frees=True),
    "LitePullConsumer.close, assigned": Scene(of_it("close"), lite_assigned, frees=True),
    "LitePullConsumer.__aexit__": Scene(
        of_it("__aexit__", None, None, None), lite_subscribed, frees=True
    ),
    # -- raw pulls
    "PullConsumer.pull": Scene(of_queue("pull", 0), pull_made),
    "PullConsumer.queues": Scene(of_it("queues", "t"), pull_made),
    "PullConsumer.offsets": Scene(of_queue("offsets"), pull_made),
    "PullConsumer.offset_for_time": Scene(of_queue("offset_for_time", 0), pull_made),
    "PullConsumer.committed": Scene(of_queue("committed"), pull_made),
    "PullConsumer.commit": Scene(of_queue("commit", 0), pull_made),
    "PullConsumer.send_back": Scene(sent_back, record_pulled),
    # -- producers
    "Producer.send": Scene(of_it("send", "out", b"x"), producer_made),
    "Producer.send_oneway": Scene(of_it("send_oneway", "out", b"x"), producer_made),
    "Producer.send_batch": Scene(of_it("send_batch", [one(), one()]), producer_made),
    "Producer.recall": Scene(lambda stage: stage.things["it"].recall(stage.things["handle"]), None),
    "Producer.request": Scene(of_it("request", "asked", b"?", timeout_s=2.0), producer_made),
    "Producer.send_in_transaction": Scene(of_it("send_in_transaction", one()), producer_made),
    "Producer.answer_checks": Scene(of_it("answer_checks", "out"), producer_made),
    "Producer.queues": Scene(of_it("queues", "out"), producer_made),
    "Producer.close": Scene(of_it("close"), producer_sending),
    "Transaction.__aenter__": Scene(in_block, producer_made),
    "Transaction.__aexit__": Scene(left_block, transaction_entered),
    # -- clients
    "Sluice.__aenter__": Scene(in_client, None, frees=True, is_repeatable=False),
    "Sluice.__aexit__": Scene(of_client("__aexit__", None, None, None), stream_read, frees=True),
    "Sluice.close": Scene(of_client("close"), stream_read, frees=True),
    "Sluice.close, handlers": Scene(of_client("close"), handler_stuck, frees=True),
    "Sluice.close, polled": Scene(of_client("close"), lite_subscribed, frees=True),
    "Sluice.queues": Scene(of_client("queues", "t")),
    "Sluice.send": Scene(of_client("send", "out", b"x")),
    "Sluice.send_oneway": Scene(of_client("send_oneway", "out", b"x")),
    "Sluice.send_batch": Scene(of_client("send_batch", [one(), one()])),
    "Sluice.request": Scene(of_client("request", "asked", b"?", timeout_s=2.0)),
    "Sluice.recall": Scene(lambda stage: stage.client.recall(stage.things["handle"]), timed_sent),
}


async def producer_and_timed(stage: Stage) -> None:
    await producer_made(stage)
    await timed_sent(stage)


SCENES["Producer.recall"] = Scene(SCENES["Producer.recall"].act, producer_and_timed)
NOT_CALLED = {
    "Transaction.enter": "a conversation of __aenter__",
    "Transaction.leave": "a conversation of __aexit__",
}
PUBLIC = (
    sluicemq.Sluice, sluicemq.Producer, sluicemq.MessageStream, sluicemq.PushConsumer,
    sluicemq.LitePullConsumer, sluicemq.PullConsumer, sluicemq.ReceivedMessage, Transaction,
)  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "": {},
    "ordered": {"ordered": True},
    "broadcast": {"broadcast": True},
    "traced": {},
}


def cases() -> list[Any]:
    found = []
    for name, scene in SCENES.items():
        kinds = [""]
        if name.startswith(("MessageStream.", "PushConsumer.")):
            kinds.append("ordered")
            if "change" not in name and "reject" not in name:
                kinds.append("broadcast")
        if name.startswith(("Producer.send", "Producer.close", "Sluice.close")):
            kinds.append("traced")
        found += [pytest.param(scene, kind, id=f"{name} {kind}".strip()) for kind in kinds]
    return found


def test_every_public_coroutine_has_a_scene() -> None:
    public = {f"{owner}.{method}" for owner, method in coroutines_of(*PUBLIC)}
    assert public - NOT_CALLED.keys() == {name.partition(",")[0] for name in SCENES} - {
        "PushConsumer"
    }


@pytest.mark.parametrize(("scene", "kind"), cases())
async def test_a_cancelled_call_leaves_nothing_behind(
    scene: Scene, kind: str, tmp_path: Any
) -> None:
    async with embedded(clock=VirtualClock(), settings={"recallMessageEnable": "true"}) as mq:
        for topic in ("t", "other", "out", "asked"):
            await mq.admin.create_topic(topic, queues=QUEUES)
        queues = await mq.queues("t")
        for number, body in enumerate(sorted(BODIES)):
            await mq.send("t", body, queue=queues[number % QUEUES], tag="A")
        await mq.send("out", b"known")
        replier = mq.consumer("replier", lambda message: message.reply(b"!"), concurrency=1)
        await replier.subscribe("asked").start()
        number, is_over = 0, False
        at = 0
        while not is_over:
            at += 1
            turn = at + list(VARIANTS).index(kind)
            for way in WAYS if EVERY_WAY else (WAYS[turn % len(WAYS)],):
                number += 1
                client = mq.servers.client(
                    offsets_directory=str(tmp_path / f"{number}"), trace=kind == "traced"
                )
                stage = Stage(mq, client, f"g{number}", options=dict(VARIANTS[kind]))
                is_over = not await one_point(stage, scene, at, way)


async def check_cancelled(stage: Stage, scene: Scene, prepared: Counter[str], where: str) -> None:
    """Check that no task is left, and that the client is a complete member or none."""

    def is_clean() -> bool:
        left = +(tasks_now() - prepared)
        is_quiet = not [name for name in left if name not in KEPT_TASKS]
        if scene.frees or stage.is_free():
            return is_quiet and stage.is_free()
        return stage.is_whole() and (is_quiet or scene.starts)

    assert await settled(is_clean), (
        f"{where}: left are {+(tasks_now() - prepared)}, members {stage.members()}, "
        f"locks {stage.locks()}"
    )


async def one_point(stage: Stage, scene: Scene, at: int, way: str) -> bool:
    """Cancel the call at one await. Return False if it has fewer awaits."""
    before = tasks_now()
    if scene.prepare is not None:
        await scene.prepare(stage)
    await settled(lambda: False)
    prepared = tasks_now()
    where = f"cancelled at await {at} while {way}"
    outcome = await inject(_coroutine(scene.act(stage)), at, way)
    if isinstance(outcome.error, Exception) and not isinstance(outcome.error, TimeoutError):
        raise outcome.error
    is_broadcast = bool(stage.options.get("broadcast"))
    if outcome.was_hit and outcome.was_cancelled:
        await check_cancelled(stage, scene, prepared, where)
        if scene.frees and scene.uses_group and not is_broadcast:
            await other_member_gets(stage, BODIES - stage.acknowledged)
        if scene.is_repeatable:
            again = await inject(_coroutine(scene.act(stage)), 0, way)
            if again.error is not None and not isinstance(again.error, TimeoutError):
                raise AssertionError(f"{where}: a second call raised") from again.error
    asking = stage.things.get("request")
    if asking is not None:
        asking.cancel()
    await stage.client.close()
    assert await settled(lambda: not +(tasks_now() - before) and stage.is_free()), (
        f"{where}, then closed: left are {+(tasks_now() - before)}, members {stage.members()}, "
        f"locks {stage.locks()}"
    )
    if scene.uses_group and not is_broadcast and stage.things.get("it") is not None:
        await other_member_gets(stage, BODIES - stage.acknowledged)
    return outcome.was_hit


async def _coroutine(awaitable: Awaitable[Any]) -> Any:
    return await awaitable
