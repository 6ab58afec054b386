"""Drives our own client for the compatibility tests: `python_driver.py aio|sync`, same words as
java/Driver.java.

`aio` is the asyncio client with all its consumers. `sync` is the blocking shell: it sends, and
reads whole queues the way Spark does (`lite mode=bulk`).
"""

import asyncio
import json
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import unquote

from sluicemq.client.aio.received import ReceivedMessage
from sluicemq.client.aio.sluice import Sluice
from sluicemq.client.core.consuming import make_subscription
from sluicemq.client.core.requests import SendResult
from sluicemq.client.core.transactions import TransactionListener, TransactionState
from sluicemq.client.sync.admin import Admin
from sluicemq.client.sync.bulk import BulkReader
from sluicemq.client.sync.producer import Producer
from sluicemq.errors import RetryLaterError
from sluicemq.model.message import Message, StoredMessage
from sluicemq.record.codec import decode_records

SETTLE_S = 0.4
LEAVE_S = 0.5  # nothing tells when a one-way frame has been stored
BALANCE_S = 2.5

Options = dict[str, str]


def main() -> None:
    shell = {"aio": run_aio, "sync": run_sync}[sys.argv[1]]
    for line in sys.stdin:
        command, *words = line.split()
        options = {key: unquote(value) for key, _, value in (word.partition("=") for word in words)}
        try:
            shell(command, options)
        except Exception as error:
            emit("failed", error=f"{type(error).__name__}: {error}")
        else:
            emit("done")


def emit(event: str, **members: Any) -> None:
    print(json.dumps({"event": event, **members}), flush=True)


def messages(options: Options) -> Iterator[Message]:
    """Message i: body PREFIX-i, the i-th of `tags` in turn, key k-i, properties n and parity."""
    tags = options.get("tags", "A").split(",")
    for i in range(int(options.get("count", 1))):
        body = f"{options.get('prefix', 'm')}-{i}".ljust(int(options.get("size", 0)), ".")
        properties = {"n": str(i), "parity": ("even", "odd")[i % 2], "name": "h\u00e9\u4e2d"}
        yield Message(
            options["topic"],
            body.encode(),
            tag=tags[i % len(tags)],
            keys=(f"k-{i}",),
            properties=properties,
            sharding_key=f"key-{i % int(options['keyed'])}" if "keyed" in options else None,
        )


def sent(message: Message, result: SendResult | None) -> None:
    if result is None:
        emit("sent", body=message.body.decode())
        return
    emit(
        "sent",
        body=message.body.decode(),
        status=f"SEND_{result.status.name}",
        msg_id=result.message_id,
        offset_msg_id=result.offset_message_id,
        queue=result.queue.queue_id,
        offset=result.queue_offset,
    )


def got(consumer: int, record: StoredMessage, message: ReceivedMessage | None = None) -> None:
    emit(
        "got",
        consumer=consumer,
        topic=record.topic if message is None else message.topic,
        body=record.body.decode(),
        tag=record.tag,
        keys=" ".join(record.keys),
        properties=dict(record.properties),
        msg_id=record.message_id,
        queue=record.queue_id,
        offset=record.queue_offset,
        reconsumed=record.reconsume_times + (message.attempt - 1 if message else 0),
    )


def selection(options: Options) -> dict[str, Any]:
    if "sql" in options:
        return {"where": options["sql"]}
    tag = options.get("tag", "*")
    return {} if tag == "*" else {"tags": tag}


def tens(all_messages: Iterable[Message]) -> Iterator[list[Message]]:
    batch: list[Message] = []
    for message in all_messages:
        batch.append(message)
        if len(batch) == 10:
            yield batch
            batch = []
    if batch:
        yield batch


class Ledger(TransactionListener):
    """The local transaction of message i ends as the i-th of `outcomes` says, its check as the i-th
    of `checks`."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self.asked = threading.Semaphore(0)

    def _ending(self, name: str, number: str) -> TransactionState:
        words = self._options.get(name, "commit").split(",")
        return TransactionState[words[int(number) % len(words)].upper()]

    def execute_local(
        self, message: Message, transaction_id: str, argument: Any
    ) -> TransactionState:
        return self._ending("outcomes", message.properties["n"])

    def check(self, message: StoredMessage) -> TransactionState:
        body, identity = message.body.decode(), message.message_id
        emit("checked", body=body, topic=message.topic, msg_id=identity)
        self.asked.release()
        return self._ending("checks", message.properties["n"])

    def wait(self) -> None:
        for missing in range(int(self._options.get("expect", 0)), 0, -1):
            if not self.asked.acquire(timeout=float(self._options.get("timeout_s", 20))):
                emit("incomplete", missing=missing)
                break
        time.sleep(SETTLE_S)


# ---- the asyncio client


def run_aio(command: str, options: Options) -> None:
    commands = {"send": send, "push": push, "lite": lite, "transact": transact}
    asyncio.run(commands[command](options))


async def send(options: Options) -> None:
    async with Sluice(options["ns"]) as mq:
        await {
            "sync": send_one_by_one,
            "async": send_soon,
            "oneway": send_oneway,
            "batch": send_batches,
        }[options.get("mode", "sync")](mq, options)


async def send_one_by_one(mq: Sluice, options: Options) -> None:
    for message in messages(options):
        sent(message, await mq.send(message))
        await asyncio.sleep(int(options.get("pause_ms", 0)) / 1000)


async def send_soon(mq: Sluice, options: Options) -> None:
    answered: asyncio.Queue[tuple[Message, SendResult | None, Exception | None]] = asyncio.Queue()
    todo = list(messages(options))
    for message in todo:
        mq.send_soon(
            lambda result, error, message=message: answered.put_nowait((message, result, error)),
            message,
        )
    for _ in todo:
        message, result, error = await asyncio.wait_for(answered.get(), 20)
        if error is not None:
            emit("error", error=str(error))
        sent(message, result)


async def send_oneway(mq: Sluice, options: Options) -> None:
    for message in messages(options):
        await mq.send_oneway(message)
        sent(message, None)
    await asyncio.sleep(LEAVE_S)


async def send_batches(mq: Sluice, options: Options) -> None:
    for batch in tens(messages(options)):
        for message, result in zip(batch, await mq.send_batch(batch), strict=True):
            sent(message, result)


async def push(options: Options) -> None:
    left = int(options.get("expect", 1))
    seen: set[bytes] = set()
    complete = asyncio.Event()
    clients = [Sluice(options["ns"]) for _ in range(int(options.get("instances", 1)))]

    def handler_of(number: int) -> Any:
        async def handle(message: ReceivedMessage) -> None:
            nonlocal left
            got(number, message.record, message)
            left -= "distinct" not in options or message.body not in seen
            seen.add(message.body)
            if left <= 0:
                complete.set()
            if message.reconsume_times < int(options.get("fail", 0)):
                raise RetryLaterError(delay_level=int(options.get("level", 0)), suspend_s=0.05)

        return handle

    try:
        for number, client in enumerate(clients):
            times_max = int(options["max"]) if "max" in options else None
            consumer = client.consumer(
                options["group"],
                handler_of(number),
                ordered="orderly" in options,
                max_reconsume_times=times_max,
            )
            await consumer.subscribe(options["topic"], **selection(options)).start()
        emit("started")
        if "count" in options:
            await asyncio.sleep(BALANCE_S)
            await send(options)
        try:
            await asyncio.wait_for(complete.wait(), float(options.get("timeout_s", 20)))
        except TimeoutError:
            emit("incomplete", missing=left)
        await asyncio.sleep(SETTLE_S)
    finally:
        for client in clients:
            await client.close()


async def transact(options: Options) -> None:
    ledger = Ledger(options)
    async with Sluice(options["ns"]) as mq:
        producer = mq.producer(options["group"], listener=ledger)
        for message in messages(options):
            sent(message, (await producer.send_in_transaction(message)).send_result)
        await asyncio.to_thread(ledger.wait)


async def lite(options: Options) -> None:
    left = int(options.get("expect", 1))
    async with Sluice(options["ns"]) as mq:
        consumer = mq.lite_pull(options["group"], auto_commit=False)
        queues = []
        if options.get("mode") == "assign":
            queues = await consumer.queues(options["topic"])
            await consumer.assign(queues)
            for queue in queues:
                await consumer.seek_to_begin(queue)
        else:
            await consumer.subscribe(options["topic"], **selection(options))
        loop = asyncio.get_running_loop()
        end, settled = loop.time() + float(options.get("timeout_s", 20)), False
        while loop.time() < end:
            for message in await consumer.poll(0.1):
                got(0, message.record)
                left -= 1
            if left <= 0 and not settled:
                end, settled = loop.time() + SETTLE_S, True
        if left > 0:
            emit("incomplete", missing=left)
        await consumer.commit()
        for queue in queues:
            emit("committed", queue=queue.queue_id, offset=await consumer.committed(queue))


# ---- the blocking shell


def run_sync(command: str, options: Options) -> None:
    {"send": send_blocking, "lite": read_in_bulk, "transact": transact_blocking}[command](options)


def send_blocking(options: Options) -> None:
    mode = options.get("mode", "sync")
    with Producer(options["ns"]) as producer:
        if mode == "batch":
            for batch in tens(messages(options)):
                for message, result in zip(batch, producer.send_batch(batch), strict=True):
                    sent(message, result)
            return
        for message in messages(options):
            if mode == "oneway":
                producer.send_oneway(message)
                sent(message, None)
            else:
                sent(message, producer.send(message))
    if mode == "oneway":
        time.sleep(LEAVE_S)


def transact_blocking(options: Options) -> None:
    ledger = Ledger(options)
    with Producer(options["ns"], group=options["group"], listener=ledger) as producer:
        for message in messages(options):
            sent(message, producer.send_in_transaction(message).send_result)
        ledger.wait()


def read_in_bulk(options: Options) -> None:
    """Every queue from its first to its last offset, filtered at the broker."""
    wanted = selection(options)
    subscription = make_subscription(options["topic"], **wanted) if wanted else None
    with Admin(options["ns"]) as admin:
        for queue in admin.queues(options["topic"]):
            start, end = admin.offsets(queue)
            reader = BulkReader(
                admin.address(queue),
                queue.topic,
                queue.queue_id,
                start,
                end,
                subscription,
                broker=queue.broker,
            )
            with reader:
                for chunk in reader:
                    for record in decode_records(chunk):
                        got(0, record)


if __name__ == "__main__":
    main()
