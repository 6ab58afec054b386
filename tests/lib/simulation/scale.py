"""What a large cluster costs: the figures of docs/design/0024-scale.md.

    python -m simulation.scale [--brokers 100] [--topics 50000] [--spread 4] [--clients 1000000]

Two parts. *One of each*: a registration, a route, a heartbeat, a list of members, a share of
queues, with the production code and the sizes of such a cluster; wall time on this machine, best of
several. *The whole*: so many real brokers, a name server and some clients in one process on virtual
time, whose requests are counted by code and bytes: at rest, when a member joins, when a broker goes
and comes again. The second part shows how often everything happens, the first what it costs.
"""

import argparse
import asyncio
import gc
import logging
import tracemalloc
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from simulation.stepped import SteppedBroker
from sluicemq.broker.registration import Registration
from sluicemq.client.core import requests
from sluicemq.clock import SYSTEM_CLOCK
from sluicemq.config import BrokerConfig, NameServerConfig
from sluicemq.model.ids import Host
from sluicemq.model.subscription import Subscription
from sluicemq.model.topic import MessageQueue, TopicConfig, allocate_average
from sluicemq.nameserver.requests import NameServerRequests
from sluicemq.nameserver.routes import RouteTable
from sluicemq.net.dispatch import Dispatcher, Peer
from sluicemq.net.limits import SERVER_LIMITS, ServerLimits
from sluicemq.net.network import MemoryListener, MemoryNetwork, OnPeer
from sluicemq.testing.embedded import EmbeddedSluice, Servers
from sluicemq.testing.files import CrashableFiles
from sluicemq.testing.virtual import VirtualClock
from sluicemq.wire.bodies import ConsumerData, Heartbeat, encode_consumer_list
from sluicemq.wire.codes import RequestCode
from sluicemq.wire.frames import Command, FrameBuffer, FrameReader, encode

PERIOD_S: Final = 30
"""Of registrations, routes and heartbeats alike."""
QUEUES: Final = 8
REPEATS: Final = 5
SMALL: Final = {"mappedFileSizeCommitLog": str(1 << 20), "maxMessageSize": "65536"}


class OneOfEach:
    """A name server with every broker's topics, and what each request costs it, in seconds."""

    def __init__(self, brokers: int, topics: int, spread: int) -> None:
        self.names = [f"broker-{number:03d}" for number in range(brokers)]
        self.topics = [f"orders-of-the-department-{number:06d}" for number in range(topics)]
        config = NameServerConfig(kv_config_path="/kv.json", config_path="/names.properties")
        tracemalloc.start()
        self.server = NameServerRequests(config, CrashableFiles(), RouteTable(), 0)
        self.registrations = [self._registration(number, spread) for number in range(brokers)]
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        for command in self.registrations:
            self.ask(command)
        gc.collect()
        self.memory_bytes = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()

    def ask(self, command: Command) -> Command:
        peer = Peer(_Nowhere(), Host("10.0.0.9", 1), Host("10.0.0.8", 9876))
        return self.server.handle_now(command, peer, 0)

    def _registration(self, number: int, spread: int) -> Command:
        """A broker has every topic whose number fits: each is on `spread` brokers."""
        count = len(self.names)
        config = BrokerConfig(broker_name=self.names[number], name_server_addresses=("n:9876",))
        broker = SteppedBroker(config=config)
        for index, name in enumerate(self.topics):
            if (number - index) % count < spread:
                broker.core.topics.table.setdefault(name, _topic(broker, name))
        address = f"10.0.{number // 250}.{number % 250 + 1}:10911"
        told = Registration(broker.settings, broker.core.topics, address, {})
        self.render = told.prepare_registration(told.name_servers[0])
        return self.render()

    def figures(self) -> dict[str, tuple[float, int]]:
        """What it is -> (seconds, bytes)."""
        register, name = self.registrations[-1], self.topics[len(self.topics) // 2]
        route = requests.route(name)
        found = {
            "registration, rendered by the broker": (best(self.render), len(register.body)),
            "registration, taken by the name server": (
                best(partial(self.ask, register)),
                len(register.body),
            ),
            "route": (best(partial(self.ask, route), 200), len(self.ask(route).body)),
        }
        broker = SteppedBroker()
        subscriptions = tuple(Subscription(topic) for topic in self.topics[:3])
        beat = encode(requests.heartbeat(
            Heartbeat("10.0.0.7@1#1", (), (ConsumerData("group", subscriptions=subscriptions),))
        ))  # fmt: skip
        peer = Peer(_Nowhere(), Host("10.0.0.7", 2), Host("10.0.0.1", 10911))
        found["heartbeat"] = (
            best(lambda: broker.dispatcher.handle_frames(beat, peer), 200),
            len(beat),
        )
        for members in (100, 1000):
            ids = sorted(f"10.0.{n // 250}.{n % 250}@{n}#17300000000{n}" for n in range(members))
            queues = [MessageQueue(name, one, q) for one in self.names for q in range(QUEUES)]
            found[f"list of {members} members"] = (
                best(partial(encode_consumer_list, ids)),
                len(encode_consumer_list(ids)),
            )
            share = partial(allocate_average, ids[members // 2], queues, ids)
            found[f"share of {len(queues)} queues among {members}"] = (best(share), 0)
        return found


class _Nowhere:
    """What is under a connection that only asks."""

    closed = False

    def write(self, data: bytes, /) -> None:
        pass

    def close(self) -> None:
        pass


def _topic(broker: SteppedBroker, name: str) -> Any:
    table = broker.core.topics
    kind = type(next(iter(table.table.values())))
    return kind(TopicConfig(name, QUEUES, QUEUES))


def best(work: Callable[[], object], times: int = 1) -> float:
    """Seconds of one, the best of some tries."""
    found = []
    for _ in range(REPEATS):
        began_s = SYSTEM_CLOCK.monotonic_s()
        for _ in range(times):
            work()
        found.append((SYSTEM_CLOCK.monotonic_s() - began_s) / times)
    return min(found)


class CountingNetwork(MemoryNetwork):
    """A network in memory that knows what was asked: (who serves, code) -> requests and bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: Counter[tuple[str, int]] = Counter()
        self.bytes: Counter[tuple[str, int]] = Counter()
        self._readers: dict[int, FrameReader] = {}

    def listener(
        self,
        dispatcher: Dispatcher,
        *,
        on_disconnect: OnPeer | None = None,
        limits: ServerLimits = SERVER_LIMITS,
    ) -> MemoryListener:
        serve = dispatcher.handle_data
        role = "broker" if RequestCode.PULL_MESSAGE in dispatcher.handlers else "name server"

        def counted(frame_buffer: FrameBuffer, peer: Peer, data: bytes) -> None:
            for command in self._readers.setdefault(id(peer), FrameReader()).feed(data):
                self.asked[role, command.code] += 1
                self.bytes[role, command.code] += len(encode(command))
            serve(frame_buffer, peer, data)

        dispatcher.handle_data = counted  # type: ignore[method-assign]
        return super().listener(dispatcher, on_disconnect=on_disconnect, limits=limits)


class Whole:
    """Brokers, clients, and what they asked in a while."""

    def __init__(self, mq: EmbeddedSluice, network: CountingNetwork) -> None:
        self.mq, self.network = mq, network
        self.got = 0

    async def counted(self, seconds: float) -> str:
        self.network.asked.clear()
        self.network.bytes.clear()
        await self.mq.clock.advance(seconds=seconds)
        return ", ".join(
            f"{code} to {role}s: {count} ({self.network.bytes[role, code] / 1000:.0f} kB)"
            for (role, code), count in sorted(self.network.asked.items())
        )

    async def join(self) -> None:
        async def note(_message: object) -> None:
            self.got += 1

        await self.mq.servers.client().consumer("group", note).subscribe("t").start()


async def whole(brokers: int, members: int, say: Callable[[str], None]) -> None:
    network, clock = CountingNetwork(), VirtualClock()
    servers = Servers(clock=clock, network=network, settings=SMALL)
    clock.drive()
    clock.stands_still = False
    await servers.start()
    for number in range(1, brokers):
        await servers.start_broker(f"broker-{number:03d}")
    clock.stands_still = True
    try:
        await _live(Whole(servers.client(), network), brokers, members, say)
    finally:
        clock.stands_still = False
        await servers.close()
        clock.release()


async def _live(world: Whole, brokers: int, members: int, say: Callable[[str], None]) -> None:
    mq, sends = world.mq, 2 * brokers * QUEUES
    await mq.admin.create_topic("t", queues=QUEUES)
    for _ in range(members):
        await world.join()
    await mq.clock.advance(seconds=60)
    say(f"a minute at rest: {await world.counted(60)}")
    joining = asyncio.create_task(world.join())
    say(f"a member joins: {await world.counted(5)}")
    await joining
    gone = f"broker-{brokers - 1:03d}"
    await mq.servers.stop_broker(gone)
    say(f"a broker goes: {await world.counted(35)}")
    used = {(await mq.send("t", b"x")).queue.broker for _ in range(sends)}
    await mq.clock.advance(seconds=30)
    say(f"{sends} sends use {len(used)} brokers, {gone} is one: {gone in used}")
    say(f"consumed: {world.got}")
    await mq.servers.start_broker(gone)
    say(f"it comes again: {await world.counted(35)}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="simulation.scale")
    parser.add_argument("--brokers", type=int, default=100)
    parser.add_argument("--topics", type=int, default=50_000)
    parser.add_argument("--spread", type=int, default=4, help="on how many brokers a topic is")
    parser.add_argument("--clients", type=int, default=1_000_000)
    parser.add_argument("--members", type=int, default=8, help="of the group in the second part")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)

    def say(text: str) -> None:
        print(text, flush=True)

    each = OneOfEach(options.brokers, options.topics, options.spread)
    figures = each.figures()
    for what, (seconds, size) in figures.items():
        say(f"{what:42} {seconds * 1e6:12,.1f} us {size:12,} bytes")
    say(f"{'memory of the name server':42} {each.memory_bytes / 1e6:12,.0f} MB")
    per_s = options.clients / PERIOD_S
    taken_s, size = figures["registration, taken by the name server"]
    say(
        f"a name server spends {taken_s * options.brokers / PERIOD_S:.1%} of its core on "
        f"{options.brokers} registrations ({size * options.brokers / PERIOD_S / 1e6:.1f} MB/s)"
    )
    route_s = figures["route"][0]
    routes = 3 * per_s
    say(
        f"{options.clients:,} clients of 3 topics: "
        f"{routes:,.0f} routes/s, {routes * route_s:.1f} cores"
    )
    beat_s = figures["heartbeat"][0]
    beats = per_s * options.spread / options.brokers
    say(f"a broker: {beats:,.0f} heartbeats/s, {beats * beat_s:.1%} of its core")
    asyncio.run(whole(options.brokers, options.members, say))


if __name__ == "__main__":
    main()
