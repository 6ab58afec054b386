"""Words of others, and slips: each line that is marked is flagged by both checkers."""

import sluicemq
from sluicemq import Message, Slucie, Sluice, idempotent  # noqa: F401  # wrong: Slucie
from sluicemq.client.sync.admin import Admin
from sluicemq.client.sync.producer import Producer
from sluicemq.client.threaded import Consumer, LitePullConsumer, PushConsumer
from sluicemq.testing.embedded import EmbeddedSluice, embedded

Sluice(bootstrap_servers="a:9876")  # wrong: bootstrap_servers
Sluice("a:9876", ssl=True)  # wrong: ssl
Message("orders", b"7", tags="paid")  # wrong: tags
Producer("a:9876", retrys=3)  # wrong: retrys
Consumer("a:9876", "orders", group="g", filter="a > 3")  # wrong: filter
PushConsumer("a:9876", "g", print, workers=3)  # wrong: workers
LitePullConsumer("a:9876", "g", max_records=3)  # wrong: max_records
sluicemq.Client("a:9876")  # wrong: Client


async def main(mq: Sluice) -> None:
    await mq.send("orders", b"7", tags="paid")  # wrong: tags
    await mq.send("orders", b"7", key="7")  # wrong: key
    await mq.send("orders", b"7", headers={"a": "b"})  # wrong: headers
    await mq.send("orders", b"7", delay_ms=500)  # wrong: delay_ms
    await mq.send("orders", b"7", "paid")  # wrong: 3 positional
    await mq.send_oneway("orders", b"7", tags="paid")  # wrong: tags
    await mq.request("orders", b"7", timeout=3)  # wrong: timeout
    mq.transaction("orders", b"7", tags="paid")  # wrong: tags
    mq.send_soon(print, "orders", b"7", tags="paid")  # wrong: tags
    mq.subscribe("orders", group="g", tag="paid")  # wrong: tag
    mq.subscribe("orders", group="g", sql="a > 3")  # wrong: sql
    mq.subscribe("orders", group="g", broadcasting=True)  # wrong: broadcasting
    mq.consumer("g", print, max_retries=3)  # wrong: max_retries
    mq.lite_pull("g", enable_auto_commit=True)  # wrong: enable_auto_commit
    mq.producer("p", retry=3)  # wrong: retry
    await mq.publish("orders", b"7")  # wrong: publish
    await mq.admin.create_topic("orders", queue=4)  # wrong: queue
    async for message in mq.subscribe("orders", group="g"):
        print(message.value)  # wrong: value
        await message.nack()  # wrong: nack
    embedded(access_key="a")  # wrong: access_key


def blocking(producer: Producer, admin: Admin, mq: EmbeddedSluice) -> None:
    producer.send("orders", b"7", tags="paid")  # wrong: tags
    admin.queues(topics="orders")  # wrong: topics
    mq.servers.client(clientid="a")  # wrong: clientid


idempotent("orders.db", tabel="seen")  # wrong: tabel
