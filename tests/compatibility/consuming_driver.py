"""Drives our asyncio client with consumers that stay open from command to command.

java/Consuming.java and go/consuming.go (there each word begins with `s-`) understand the same:

    send    ns topic count prefix tags mode=batch; levels=1,2 delays_ms=… times_ms=… in turn
            -> `sent` with handle and at_ms, or `refused`
    recall  ns topic handle                     -> `recalled` or `refused`
    query   ns topic key expect                 -> `found`
    open    ns name topic group tag|sql from=first|last|MS model=broadcasting instance
            batch pull_count count_max size_max_mib topic_count_max span_max hold_ms
            kind=lite: assign=1 (all queues of the topic) auto=1 (commits every second)
    pull    ns topic group tag offsets=0,3 of queue 0     -> `pulled` with status, next, bodies
    take    names expect timeout_s settle_ms    -> `got` with consumer, call, at_ms, …
    change  name topic tag        close name        commit name
    seek queue offset, begin, end, pause, resume, committed, at time_ms   (lite; name topic)
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from sluicemq import Sluice
from sluicemq.client.aio.consumer import PushConsumer
from sluicemq.client.aio.pull import LitePullConsumer
from sluicemq.client.aio.received import ReceivedMessage
from sluicemq.errors import SluiceError
from sluicemq.model.message import Message
from sluicemq.model.topic import MessageQueue

Options = dict[str, str]


@dataclass
class Session:
    """One open consumer; `got` has what its handler took."""

    mq: Sluice
    push: PushConsumer | None = None
    lite: LitePullConsumer | None = None
    got: list[dict[str, Any]] = field(default_factory=list)
    calls: int = 0

    def take(self, name: str, messages: list[ReceivedMessage]) -> None:
        self.calls += 1
        for message in messages:
            record = message.record
            self.got.append(
                {
                    "consumer": name, "call": self.calls, "at_ms": time.time_ns() // 1_000_000,
                    "topic": message.topic, "body": record.body.decode(), "tag": record.tag,
                    "properties": dict(record.properties), "msg_id": record.message_id,
                    "queue": record.queue_id, "offset": record.queue_offset,
                }
            )  # fmt: skip


SESSIONS: dict[str, Session] = {}
PRODUCERS: dict[str, Sluice] = {}


async def main() -> None:
    while line := await asyncio.to_thread(sys.stdin.readline):
        command, *words = line.split()
        options = {key: unquote(value) for key, _, value in (word.partition("=") for word in words)}
        try:
            await COMMANDS.get(command, lite(command))(options)
        except Exception as error:
            emit("failed", error=f"{type(error).__name__}: {error}")
        else:
            emit("done")
    for mq in PRODUCERS.values():
        await mq.close()


def emit(event: str, **members: Any) -> None:
    print(json.dumps({"event": event, **members}), flush=True)


# ---- producing


def producer(options: Options) -> Sluice:
    return PRODUCERS.setdefault(options["ns"], Sluice(options["ns"]))


def messages(options: Options) -> Iterator[Message]:
    tags = options.get("tags", "A").split(",")
    prefix = options.get("prefix", "m")
    for i in range(int(options.get("count", 1))):
        times = {
            name: int(values[i % len(values)])
            for key, name in _TIMES.items()
            if (values := options.get(key, "").split(",")) != [""]
        }
        yield Message(
            options["topic"], f"{prefix}-{i}".encode(), tag=tags[i % len(tags)],
            keys=(f"{prefix}-k-{i}",), properties={"n": str(i)}, **times,
        )  # fmt: skip


_TIMES = {"levels": "delay_level", "delays_ms": "delay_ms", "times_ms": "deliver_at_ms"}


async def send(options: Options) -> None:
    mq = producer(options)
    try:
        if options.get("mode") == "batch":
            await mq.send_batch(list(messages(options)))
            emit("sent", body=f"{options.get('prefix', 'm')}-0")
            return
        for message in messages(options):
            now_ms = time.time_ns() // 1_000_000
            result = await mq.send(message)
            emit(
                "sent", body=message.body.decode(), msg_id=result.message_id, at_ms=now_ms,
                queue=result.queue.queue_id, offset=result.queue_offset,
                handle=result.recall_handle,
            )  # fmt: skip
    except SluiceError as error:
        emit("refused", error=str(error))


async def recall(options: Options) -> None:
    try:
        emit("recalled", msg_id=await producer(options).recall(options["handle"]))
    except SluiceError as error:
        emit("refused", error=str(error))


async def query(options: Options) -> None:
    """The index may lag, so it is asked until `expect` are there."""
    end = time.monotonic() + float(options.get("timeout_s", 10))
    admin = producer(options).admin
    while True:
        found = await admin.messages_by_key(options["topic"], options["key"])
        if len(found) >= int(options.get("expect", 1)) or time.monotonic() > end:
            break
        await asyncio.sleep(0.1)
    for message in found:
        emit("found", body=message.body.decode(), topic=message.topic)


# ---- consumers


async def open_(options: Options) -> None:
    instance = options.get("instance", f"consuming-{time.time_ns()}")
    mq = Sluice(options["ns"], instance=instance, offsets_directory=os.environ["OFFSETS_DIRECTORY"])
    session = SESSIONS[options["name"]] = Session(mq)
    if options.get("kind") == "lite":
        session.lite = await open_lite(mq, options)
    else:
        session.push = await open_push(session, options)


_LIMITS = {
    "count_max": "prefetch_count", "span_max": "span_max", "pull_count": "pull_count",
    "topic_count_max": "topic_count_max",
}  # fmt: skip


async def open_push(session: Session, options: Options) -> PushConsumer:
    name, batch = options["name"], int(options.get("batch", 1))
    hold_s = int(options.get("hold_ms", 0)) / 1000

    async def handle(given: Any) -> None:
        session.take(name, given if isinstance(given, list) else [given])
        if hold_s:
            await asyncio.sleep(hold_s)

    where = options.get("from", "first")
    limits: dict[str, Any] = {_LIMITS[key]: int(options[key]) for key in _LIMITS.keys() & options}
    if "size_max_mib" in options:
        limits["prefetch_bytes"] = int(options["size_max_mib"]) << 20
    consumer = session.mq.consumer(
        options["group"], handle, start=int(where) if where.isdigit() else where,  # type: ignore[arg-type]
        concurrency=2, broadcast=options.get("model") == "broadcasting",
        batch_max=batch if batch > 1 else None, **limits,
    )  # fmt: skip
    await consumer.subscribe(options["topic"], **expression(options)).start()
    return consumer


async def open_lite(mq: Sluice, options: Options) -> LitePullConsumer:
    consumer = mq.lite_pull(options["group"], auto_commit="auto" in options, commit_period_s=1.0)
    if "assign" in options:
        await consumer.assign(await consumer.queues(options["topic"]))
    else:
        await consumer.subscribe(options["topic"], **expression(options))
    return consumer


def expression(options: Options) -> dict[str, str]:
    if "sql" in options:
        return {"where": options["sql"]}
    tag = options.get("tag", "*")
    return {} if tag == "*" else {"tags": tag}


async def take(options: Options) -> None:
    missing, settle_s = int(options.get("expect", 0)), int(options.get("settle_ms", 400)) / 1000
    end = time.monotonic() + float(options.get("timeout_s", 20))
    settled = missing <= 0
    if settled:
        end = time.monotonic() + settle_s
    while time.monotonic() < end:
        for name in options["names"].split(","):
            missing -= await taken(name, SESSIONS[name])
        if missing <= 0 and not settled:
            settled, end = True, time.monotonic() + settle_s
    if missing > 0:
        emit("incomplete", missing=missing)


async def taken(name: str, session: Session) -> int:
    if session.lite is not None:
        polled = await session.lite.poll(0.05)
        if polled:
            session.take(name, polled)
    else:
        await asyncio.sleep(0.01)
    found, session.got[:] = list(session.got), []
    for event in found:
        emit("got", **event)
    return len(found)


async def pull(options: Options) -> None:
    """One pull of queue 0 at each of `offsets`."""
    consumer = producer(options).pull_consumer(options["group"])
    queue = next(one for one in await consumer.queues(options["topic"]) if one.queue_id == 0)
    for offset in options["offsets"].split(","):
        result = await consumer.pull(queue, int(offset), **expression(options))
        bodies = ",".join(message.body.decode() for message in result.messages)
        emit("pulled", status=result.status.name, next=result.next_offset, bodies=bodies)


async def change(options: Options) -> None:
    push = SESSIONS[options["name"]].push
    assert push is not None
    await push.change(options["topic"], **expression(options))


async def close(options: Options) -> None:
    await SESSIONS.pop(options["name"]).mq.close()


async def commit(options: Options) -> None:
    session = SESSIONS[options["name"]]
    if session.lite is not None:
        await session.lite.commit()
        return
    assert session.push is not None
    member = session.mq.member_of(session.push.group)
    assert member is not None
    await member.readers.commit()


def lite(command: str) -> Callable[[Options], Awaitable[None]]:
    """The commands of a lite pull consumer, for all queues of the topic or `queue` alone."""

    async def run(options: Options) -> None:
        consumer = SESSIONS[options["name"]].lite
        assert consumer is not None
        wanted = int(options.get("queue", -1))
        queues = [
            queue
            for queue in await consumer.queues(options["topic"])
            if wanted in (-1, queue.queue_id)
        ]
        if command in ("pause", "resume"):
            getattr(consumer, command)(queues)
            return
        for queue in queues:
            offset = await queue_command(command, consumer, queue, options)
            if offset is not None:
                emit("offset", queue=queue.queue_id, offset=offset)

    return run


async def queue_command(
    command: str, consumer: LitePullConsumer, queue: MessageQueue, options: Options
) -> int | None:
    if command == "committed":
        return await consumer.committed(queue)
    if command == "at":
        return await consumer.offset_for_time(queue, int(options["time_ms"]))
    if command == "seek":
        await consumer.seek(queue, int(options["offset"]))
    elif command == "begin":
        await consumer.seek_to_begin(queue)
    elif command == "end":
        await consumer.seek_to_end(queue)
    else:
        raise ValueError(command)
    return None


COMMANDS: dict[str, Callable[[Options], Awaitable[None]]] = {
    "send": send, "recall": recall, "query": query, "open": open_, "take": take,
    "change": change, "close": close, "pull": pull, "commit": commit,
}  # fmt: skip

if __name__ == "__main__":
    asyncio.run(main())
