"""Every way to send, of the asyncio client."""

import asyncio
import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from sluicemq import (
    CloseReport,
    Message,
    MessageQueue,
    SendError,
    SendResult,
    SendStatus,
    SendUnknownError,
    Sluice,
    SluiceError,
)


def by_customer(queues: Sequence[MessageQueue], message: Message) -> MessageQueue:
    return queues[hash(message.properties["customer"]) % len(queues)]


def done(result: SendResult | None, error: SluiceError | None) -> None:
    print(result.message_id if result is not None else error)


async def main() -> None:
    async with Sluice("127.0.0.1:9876") as mq:
        result = await mq.send(
            "orders",
            json.dumps({"id": 7}),
            tag="paid",
            keys=["7", "customer-3"],
            properties={"customer": "3", "amount": "12"},
            sharding_key="3",
            timeout_ms=3000,
            flag=1,
            wait_store_ok=False,
        )
        place: MessageQueue = result.queue
        offset: int = result.queue_offset
        print(result.status is SendStatus.OK, result.message_id.lower(), place.broker, offset + 1)

        await mq.send("orders", b"plain")
        await mq.send("orders", bytearray(b"bytes that change"), keys="7")
        await mq.send("orders", memoryview(b"a view"))
        await mq.send(Message("orders", b"whole", tag="paid", keys=("7",)))
        late = Message("orders", "text", keys=["7"], delay=timedelta(minutes=2))
        await mq.send(Message("orders", late.body + b"!", keys="7", deliver_at=1_900_000_000_000))
        await mq.send("orders", b"one second", delay_level=1)
        await mq.send("orders", b"ninety seconds", delay=90)
        await mq.send("orders", b"five hours", delay=timedelta(hours=5))
        await mq.send("orders", b"a millisecond", delay=0.001)
        timed = await mq.send("orders", b"at noon", deliver_at=datetime(2030, 1, 1, 12, tzinfo=UTC))
        if timed.recall_handle is not None:
            name: str = await mq.recall(timed.recall_handle)
            print(name)

        await mq.send("orders", b"there", queue=(await mq.queues("orders"))[0])
        await mq.send("orders", b"chosen", properties={"customer": "3"}, selector=by_customer)
        await mq.send("orders", b"chosen too", selector=lambda queues, message: queues[0])
        await mq.send_oneway("orders", b"may get lost", tag="log", properties={"a": "b"})
        stored = await mq.send_batch([Message("orders", str(n).encode()) for n in range(9)])
        print([one.queue_offset for one in stored])
        mq.send_soon(done, "orders", b"later", tag="paid", delay=3)
        mq.send_soon(lambda result, error: print(error or result), Message("orders", b"later"))

        answer = await mq.request("prices", b"7", timeout_s=3, tag="quote")
        print(answer.body.decode(), answer.properties.get("currency"))

        many = await asyncio.gather(*(mq.send("orders", f"{n}") for n in range(100)))
        print(len({one.message_id for one in many}))
        try:
            await mq.send("orders", "once")
        except SendUnknownError as error:
            print("look for it first", error.fix)
        except SendError as error:
            print("not stored", error)

        careful = mq.producer("billing", timeout_ms=5000, retries=0, compress_from_bytes=0)
        await careful.send("bills", b"1", tag="new")
        report: CloseReport = await careful.close(timeout_s=2.0)
        print(report.settled, report.unknown)


asyncio.run(main())
