"""One line that says which it is: no bodies, no secrets."""

import re

from sluicemq import CloseReport, Message, Sluice
from sluicemq.client.sync.admin import Admin
from sluicemq.testing.embedded import embedded

ID = r"[0-9A-F]{32}"


async def test_what_a_client_makes_says_what_it_is() -> None:
    async with embedded(producer_group="orders-p") as mq:
        sent = await mq.send(
            "t", "x" * 4000, tag="A", keys=["a", "b"], properties={"key": "s3cret"}
        )
        stream = mq.subscribe("t", group="g", tags="A||B")
        unread = repr(stream)
        message = await stream.receive()
        consumer = mq.consumer("h", lambda message: None).subscribe("t", where="a > 3")
        poller = mq.lite_pull("i")
        idle = repr(poller), repr(consumer)
        await poller.subscribe("t")
        await consumer.start()
        pulled = await mq.pull_consumer().pull(sent.queue, 0)
        shown = {
            repr(sent): rf"<SendResult OK {ID} in t queue \d of broker-a offset 0>",
            unread: r"<MessageStream of g: <Subscription to t: tags='A\|\|B'>, not running>",
            repr(stream): r"<MessageStream of g: <Subscription to t: tags='A\|\|B'>, 0 prefetched>",
            repr(message): (
                rf"<ReceivedMessage {ID} of t queue \d of broker-a offset 0 tag A keys a b "
                "b'x{24}'… 4,000 B>"
            ),
            str(message): rf"message {ID} of t/broker-a/\d at offset 0",
            repr(message.record): (
                rf"<StoredMessage {ID} in t queue \d of broker-a offset 0 tag A keys a b "
                "b'x{24}'… 4,000 B>"
            ),
            repr(pulled): r"<PullResult FOUND: 1 messages, next offset 1 of 0 to 1>",
            repr(mq.pull_consumer()): r"<PullConsumer of TOOLS_CONSUMER at <Cluster \S+:\d+>>",
            idle[0]: "<LitePullConsumer of i: -, reads nothing>",
            repr(poller): "<LitePullConsumer of i: t, 4 queues>",
            idle[1]: "<PushConsumer of h: t, not running>",
            repr(consumer): "<PushConsumer of h: t, 0 of 20 busy>",
            repr(mq.default_producer): r"<Producer of orders-p at <Cluster \S+>, 0 sends open>",
            repr(mq.transaction("t", b"x")): f"<Transaction {ID} to t, not begun>",
            repr(mq.admin): r"<Admin at <Cluster \S+:\d+>>",
            repr(mq): r"<Sluice \S+:\d+ as \S+>",
            repr(mq.subscribe("t", group="j")): "<MessageStream of j: .* everything>, not running>",
        }
        report = repr(await mq.close())
        shown |= {
            report: "<CloseReport: 0 settled, 0 unknown>",
            repr(mq): r"<Sluice \S+:\d+ as \S+, closed>",
        }
    for text, pattern in shown.items():
        assert re.fullmatch(pattern, text), text
        assert "s3cret" not in text


def test_values_show_themselves_whatever_is_in_them() -> None:
    assert repr(Message("t", b"x", "A", ("k",))) == "<Message to t tag A keys k b'x' 1 B>"
    assert repr(Message("t", b"")) == "<Message to t b'' 0 B>"
    assert len(repr(Message("t", bytes(10**6), keys=("k" * 10**5,)))) < 300
    many = CloseReport(3, tuple(f"id{number}" for number in range(1000)))
    assert repr(many) == "<CloseReport: 3 settled, 1000 unknown: id0, id1, id2, id3, id4 …>"


def test_credentials_are_not_shown() -> None:
    keys = ("access", "s3cret")
    with Admin("127.0.0.1:1", credentials=keys) as admin:
        assert repr(admin) == "<Admin 127.0.0.1:1>"
    assert "s3cret" not in repr(Sluice("127.0.0.1:1", credentials=keys))
    assert "s3cret" not in repr(Sluice("127.0.0.1:1", credentials=keys).cluster.credentials)
