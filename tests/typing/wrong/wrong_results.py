"""Results that are something else."""

from sluicemq import Admin, PullResult, SendResult, SendStatus, Sluice
from sluicemq.client.sync.producer import Producer


async def main(mq: Sluice, admin: Admin, pulled: PullResult) -> None:
    print(mq.send("orders", b"7").message_id)  # wrong: message_id
    result = await mq.send("orders", b"7")
    print(result.offset)  # wrong: offset
    result.message_id = "7"  # wrong: message_id
    number: int = result.message_id  # wrong: int
    print(number, SendStatus.GOOD, pulled.message)  # wrong: GOOD
    with mq.transaction("orders", b"7"):  # wrong: transaction
        pass
    for _ in mq.subscribe("orders", group="g"):  # wrong: iter
        pass
    async for message in mq.subscribe("orders", group="g"):
        text: str = message.body  # wrong: str
        key: str = message.keys  # wrong: str
        print(text, key, message.properties["a"] + 1)  # wrong: +
    for _ in admin.queues("orders"):  # wrong: iter
        pass
    print((await admin.queues("orders"))[0].broker_name)  # wrong: broker_name


def blocking(producer: Producer) -> SendResult:
    ids: list[str] = producer.send_batch([])  # wrong: str
    print(ids)
    return producer.send_oneway("orders", b"7")  # wrong: None
