"""Consumers that ask."""

import asyncio

from sluicemq import LitePullConsumer, MessageQueue, PullConsumer, PullResult, PullStatus, Sluice


def shared(topic: str, queues: list[MessageQueue], own: list[MessageQueue]) -> None:
    print(topic, len(own), "of", len(queues))


async def main() -> None:
    async with Sluice() as mq:
        poller: LitePullConsumer = mq.lite_pull(
            "report", start=1_700_000_000_000, auto_commit=False, count_max=500, bytes_max=1 << 20
        )
        async with poller:
            poller.on_assignment_change = shared
            await poller.subscribe("orders", where="amount > 10")
            for message in await poller.poll(2.0, count_max=100):
                print(message.body)
            await poller.commit()
            poller.commit_soon()
            poller.pause(poller.assignment)
            poller.resume(poller.paused)
            for queue in poller.assignment:
                offset: int | None = await poller.committed(queue)
                await poller.seek(queue, offset or 0)
                await poller.seek_to_end(queue)
                await poller.seek_to_begin(queue)
                await poller.seek_to_time(queue, await poller.offset_for_time(queue, 0))
            await poller.commit(dict.fromkeys(poller.assignment, 7))
            await poller.unsubscribe("orders")

        chosen = mq.lite_pull("report-2", broadcast=True)
        chosen.watch_queues("orders", lambda topic, queues: print(topic, len(queues)), period_s=5.0)
        await chosen.assign(await chosen.queues("orders"), tags="paid")

        puller: PullConsumer = mq.pull_consumer("by-hand")
        for queue in await puller.queues("orders"):
            first, end = await puller.offsets(queue)
            result: PullResult = await puller.pull(queue, first, tags="paid", wait_s=1.0)
            if result.status is PullStatus.FOUND:
                print([record.body for record in result.messages], result.next_offset, end)
            await puller.commit(queue, result.next_offset)
            for record in result.messages:
                await puller.send_back(record, delay_level=2)


asyncio.run(main())
