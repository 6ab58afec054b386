"""Administration, by asyncio."""

import asyncio

from sluicemq import Admin, GroupConfig, MessageQueue, RequestError, Sluice, TopicNotFoundError


async def main() -> None:
    async with Sluice("127.0.0.1:9876") as mq:
        admin: Admin = mq.admin
        brokers: list[str] = await admin.create_topic("orders", queues=8, order=True)
        topics = await admin.topics()
        await admin.create_group(GroupConfig("billing", retry_times_max=3))
        queues: list[MessageQueue] = await admin.queues("orders")
        first, end = await admin.offsets(queues[0])
        print(brokers, topics, end - first)
        report = await admin.group("billing")
        print(report.lag, [lag.lost for lag in await admin.lag()])
        for message in await admin.messages_by_key("orders", "7"):
            print(message.message_id, message.body, message.keys)
        for change in await admin.plan_reset("billing", "orders", 0):
            print(change)
        try:
            await admin.delete_topic("orders")
        except TopicNotFoundError as error:
            print(error.code, error.address)
        except RequestError as error:
            print(error.remark)


asyncio.run(main())
