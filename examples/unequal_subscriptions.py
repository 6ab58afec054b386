"""Two members of one group want different tags. RocketMQ loses messages; here each comes once.

    python examples/unequal_subscriptions.py

A name server and a broker start in this process, the two members in processes of their own.
"""

import asyncio
import sys
import time

from sluicemq import Sluice
from sluicemq.client.sync.admin import Admin
from sluicemq.testing.embedded import embedded

TAGS = ("tag1", "tag2", "tag3")


async def member(name_server: str, tags: str) -> None:
    """Consumes for ten seconds and says what it got."""
    got: dict[str, int] = {}
    async with Sluice(name_server) as mq:
        stream = mq.subscribe("orders", group="billing", tags=tags)
        end = time.monotonic() + 10
        while time.monotonic() < end:
            for message in await stream.receive_many(32, timeout_s=1):
                got[message.tag] = got.get(message.tag, 0) + 1
                await message.ack()
    print(f"member with {tags!r}: {got}")


def create(name_server: str) -> None:
    with Admin(name_server) as admin:
        admin.create_topic("orders", queues=4)


async def main() -> None:
    async with embedded(tcp=True) as mq:
        server = mq.cluster.name_servers[0]
        await asyncio.to_thread(create, server)
        members = [
            await asyncio.create_subprocess_exec(sys.executable, __file__, server, tags)
            for tags in ("tag1 || tag2", "tag3")
        ]
        await asyncio.sleep(5)
        for number in range(30):
            await mq.send("orders", f"{number}".encode(), tag=TAGS[number % 3])
        print("sent: 10 messages of each of", ", ".join(TAGS))
        for process in members:
            await process.wait()


if __name__ == "__main__":
    asyncio.run(member(*sys.argv[1:3]) if len(sys.argv) == 3 else main())
