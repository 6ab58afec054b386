"""Values of another type than what is meant."""

from collections.abc import Sequence
from datetime import timedelta

from sluicemq import (
    GroupConfig,
    Message,
    MessageQueue,
    RetryLaterError,
    Sluice,
    StoredMessage,
    Tls,
    TransactionListener,
    TransactionState,
)
from sluicemq.client.threaded import PushConsumer
from sluicemq.testing.embedded import embedded

Sluice(9876)  # wrong: name_servers
Sluice(credentials="key:secret")  # wrong: credentials
Sluice(on_moved=lambda: None)  # wrong: on_moved
Message("orders", 7)  # wrong: bytes
Message("orders", b"7", keys=7)  # wrong: keys
Tls(verify="no")  # wrong: verify
GroupConfig("g", retry_times_max="3")  # wrong: retry_times_max
RetryLaterError(delay_level=timedelta(seconds=3))  # wrong: delay_level


def two(message: object, context: object) -> None:
    print(message, context)


def first(queues: Sequence[MessageQueue]) -> MessageQueue:
    return queues[0]


PushConsumer("a:9876", "g", two)  # wrong: two


class Books(TransactionListener):
    def check(self, message: StoredMessage) -> str:  # wrong: check
        return "commit"


async def main(mq: Sluice) -> None:
    await mq.send("orders", 7)  # wrong: body
    await mq.send("orders", {"id": 7})  # wrong: body
    await mq.send("orders", b"7", keys=[7])  # wrong: keys
    await mq.send("orders", b"7", properties={"amount": 12})  # wrong: properties
    await mq.send("orders", b"7", delay="5s")  # wrong: delay
    await mq.send("orders", b"7", deliver_at="2030-01-01")  # wrong: deliver_at
    await mq.send("orders", b"7", tag=["paid"])  # wrong: tag
    await mq.send("orders", b"7", queue=3)  # wrong: queue
    await mq.send("orders", b"7", timeout_ms="3000")  # wrong: timeout_ms
    await mq.send("orders", b"7", selector=first)  # wrong: selector
    await mq.send_batch([b"7", b"8"])  # wrong: messages
    await mq.send_batch(Message("orders", b"7"))  # wrong: messages
    mq.send_soon(lambda result: None, "orders", b"7")  # wrong: on_done
    await mq.request("prices", b"7", delay="1s")  # wrong: delay
    mq.subscribe("orders")  # wrong: group
    mq.subscribe("orders", group="g", tags=["paid", "sent"])  # wrong: tags
    mq.subscribe("orders", group="g", start="begin")  # wrong: start
    mq.subscribe("orders", group="g", span_max="many")  # wrong: span_max
    mq.consumer("g", two)  # wrong: two
    mq.consumer("g")  # wrong: handler
    mq.consumer("g", print, concurrency="8")  # wrong: concurrency
    mq.producer("p", listener=TransactionState.COMMIT)  # wrong: listener
    await mq.lite_pull("g").poll("5")  # wrong: timeout_s
    await mq.lite_pull("g").assign("orders")  # wrong: queues
    await mq.pull_consumer().pull("orders", 0)  # wrong: queue
    await mq.admin.queues(["orders"])  # wrong: topic
    embedded(clock=0)  # wrong: clock
