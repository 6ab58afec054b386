"""Programs without a loop: producer, administration, consumers on threads."""

from sluicemq import Message, MessageQueue, ReceivedMessage, SendResult, StoredMessage, Tls
from sluicemq.client.sync.admin import Admin
from sluicemq.client.sync.producer import Producer
from sluicemq.client.threaded import (
    BlockingMessage,
    Consumer,
    LitePullConsumer,
    PushConsumer,
)

TLS = Tls(ca="ca.pem", certificate="client.pem", verify="ca")

with Producer("127.0.0.1:9876", group="p", retries=1, timeout_ms=3000, tls=TLS) as producer:
    result: SendResult = producer.send("orders", "7", tag="paid", keys="7", delay=5)
    producer.send_oneway("orders", b"log")
    print(result.queue.topic, [one.status for one in producer.send_batch([Message("a", b"b")])])
    answer: StoredMessage = producer.request("prices", b"7", timeout_s=2.0, tag="quote")
    with producer.transaction("orders", b"8", properties={"a": "b"}) as transaction:
        transaction.commit()

with Admin("127.0.0.1:9876", credentials=("key", "secret")) as admin:
    queues: list[MessageQueue] = admin.queues("orders")
    created: list[str] = admin.create_topic("orders", queues=4, type="fifo")
    print(created, [admin.offsets(queue) for queue in queues])
    for lag in admin.lag("billing"):
        print(lag.queue.broker, lag.lag, lag.lost)
    print(admin.messages_by_key("orders", "7")[0].body)

with Consumer(
    "127.0.0.1:9876",
    "orders",
    group="audit",
    where="amount > 3",
    max_reconsume_times=2,
    prefetch_count=10,
    broadcast=True,
) as messages:
    first: BlockingMessage | None = messages.receive(timeout_s=1.0)
    for message in messages:
        print(message.body, message.tag)
        message.ack()
        message.reject(2)
        message.reply(b"done")
        break
    messages.change(tags="paid")


def book(message: ReceivedMessage) -> None:
    print(message.body)


push = PushConsumer(None, "billing", book, concurrency=4, suspend_s=2.0, tls=True)
with push.subscribe("orders", tags="paid").subscribe("bills"):
    push.change("orders", where="amount > 3")

with LitePullConsumer(["a:9876"], "report", auto_commit=False, count_max=100) as poller:
    poller.subscribe("orders", tags="paid")
    for polled in poller.poll(1.0, count_max=10):
        print(polled.message_id)
    poller.commit()
    poller.commit_soon(dict.fromkeys(poller.assignment, 3))
    poller.seek(poller.assignment[0], 7)
    offset: int | None = poller.committed(poller.assignment[0])
