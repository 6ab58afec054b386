"""The members of a cluster: a name server, a broker, a client; each a process that may be killed.

A node survives its process: it has an address, files and a clock, and starts again from them.
"""

import asyncio
import random
import zlib
from collections.abc import Mapping
from typing import Any, Final

from simulation.cluster.ledger import Fate, Group, Ledger, place_of
from simulation.cluster.network import FaultyNetwork
from simulation.cluster.processes import NodeClock, Process
from sluicemq.broker.server import Broker
from sluicemq.client.aio.consumer import PushConsumer
from sluicemq.client.aio.received import ReceivedMessage
from sluicemq.client.aio.sluice import Sluice
from sluicemq.client.core.transactions import TransactionListener, TransactionState
from sluicemq.clock import Clock
from sluicemq.config import NameServerConfig, load_broker_config
from sluicemq.model.message import Message, StoredMessage
from sluicemq.nameserver.server import NameServer
from sluicemq.testing.embedded import IdlePauses, InlineExecutor
from sluicemq.testing.files import CrashableFiles

NAME_PORT: Final = 9876
BROKER_PORT: Final = 10911
HOST: Final = "127.0.0.1"
PAYERS: Final = "payers"
SMALL: Final = {
    "mappedFileSizeCommitLog": str(1 << 20),
    "mappedFileSizeConsumeQueue": "20000",
    "mappedFileSizeTimerLog": str(1 << 18),
    "maxMessageSize": "65536",
    "maxHashSlotNum": "1000",
    "maxIndexNum": "4000",
    "brokerIP1": HOST,
    "bindAddress": HOST,
    "metricsExporterType": "DISABLE",
}


class Node:
    """What all of them have. `process` is None while it does not run."""

    def __init__(self, name: str, clock: Clock, network: FaultyNetwork) -> None:
        self.name = name
        self.clock = NodeClock(clock)
        self.network = network
        self.process: Process | None = None

    @property
    def is_up(self) -> bool:
        return self.process is not None

    def begin(self) -> Process:
        """A new process for what starts now."""
        self.process = Process(self.name, self.clock)
        return self.process

    async def end(self, rng: random.Random, *, is_silent: bool = False) -> None:
        """The process is gone, however far it was."""
        process, self.process = self.process, None
        if process is not None:
            process.is_alive = False
            self.network.died(process, rng, is_silent=is_silent)
            await process.kill()


class NameServerNode(Node):
    """A name server; it keeps nothing, so a crash is a stop."""

    def __init__(self, index: int, clock: Clock, network: FaultyNetwork) -> None:
        super().__init__(f"names-{index}", clock, network)
        self._files = CrashableFiles()
        self.port = NAME_PORT + index

    async def start(self) -> None:
        config = NameServerConfig(
            bind_address=HOST,
            listen_port=self.port,
            kv_config_path="/names/kv.json",
            config_path="/names/names.properties",
        )
        process = self.begin()
        server = NameServer(
            config, clock=self.clock, files=self._files, network=self.network.of(process)
        )
        await process.run(server.start())


class BrokerNode(Node):
    """A broker and its disk."""

    def __init__(
        self, index: int, clock: Clock, network: FaultyNetwork, settings: Mapping[str, str]
    ) -> None:
        super().__init__(f"broker-{'ab'[index]}", clock, network)
        self.files = CrashableFiles()
        self.files.clock = self.clock
        self._settings = {
            **SMALL,
            "brokerName": self.name,
            "listenPort": str(BROKER_PORT + 100 * index),
            "storePathRootDir": "/store",
            **settings,
        }
        self.broker: Broker | None = None

    async def start(self) -> None:
        """Raises SluiceError when it cannot recover."""
        config, store, _ = load_broker_config("", overrides=self._settings, environment={})
        process = self.begin()
        calm = IdlePauses(self.clock)
        broker = Broker(
            config,
            store,
            clock=self.clock,
            files=self.files,
            network=self.network.of(process),
            executor=InlineExecutor(),
            stretch_pause=calm.stretch,
        )
        await process.run(broker.start())
        calm.attach(broker)
        self.broker = broker

    async def stop(self, rng: random.Random) -> None:
        """In order."""
        broker, self.broker = self.broker, None
        if broker is not None and self.process is not None:
            await self.process.run(broker.close())
            await self.end(rng)

    async def crash(self, rng: random.Random, *, power: bool) -> None:
        """Killed, or the power of its machine fails: what was not synced may be gone."""
        self.broker = None
        self.files = self.files.crash(rng) if power else self.files.kill()
        self.files.clock = self.clock
        await self.end(rng, is_silent=power)

    def committed(self, group: str) -> dict[tuple[str, str, int], int]:
        """What the group has committed here."""
        if self.broker is None:
            return {}
        table = self.broker.core.offsets.table
        return {
            (key.partition("@")[0], self.name, queue): offset
            for key, queues in table.items()
            if key.partition("@")[2] == group
            for queue, offset in queues.items()
        }

    def progress(self, group: str, topic: str, queue: int) -> tuple[int, int]:
        """(what the group has committed, the end of the queue)."""
        if self.broker is None:
            return -1, 0
        at = self.committed(group).get((topic, self.name, queue), 0)
        return at, self.broker.store.queue_offsets(topic, queue)[1]


class Decisions(TransactionListener):
    """How transactions end: the database of the programs that pay, so to speak."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def execute_local(
        self, message: Message, transaction_id: str, argument: Any
    ) -> TransactionState:
        """`argument` is what the step wants; UNKNOWN is decided at a check."""
        del transaction_id
        if argument is not TransactionState.UNKNOWN:
            self._decide(int(message.body), argument)
        return TransactionState(argument)

    def check(self, message: StoredMessage) -> TransactionState:
        """Of a transaction that never began, the local part is not done."""
        sent = self._ledger.sent[int(message.body)]
        if sent.fate is Fate.OPEN:
            if sent.runs:
                return TransactionState.UNKNOWN
            wanted = sent.sort == "decided later" and zlib.crc32(sent.body) % 2 == 0
            state = TransactionState.COMMIT if wanted else TransactionState.ROLLBACK
            self._decide(sent.number, state)
        is_stored = sent.fate is Fate.STORED
        return TransactionState.COMMIT if is_stored else TransactionState.ROLLBACK

    def _decide(self, number: int, state: TransactionState) -> None:
        is_commit = state is TransactionState.COMMIT
        self._ledger.sent[number].fate = Fate.STORED if is_commit else Fate.ROLLED_BACK


class ClientNode(Node):
    """A client with a producer of each sort, and perhaps a consumer of a group."""

    mq: Sluice
    consumer: PushConsumer

    def __init__(
        self,
        name: str,
        clock: Clock,
        network: FaultyNetwork,
        name_servers: list[str],
        ledger: Ledger,
    ) -> None:
        super().__init__(name, clock, network)
        self._name_servers = name_servers
        self.ledger = ledger
        self.group: Group | None = None
        self.tags: str | None = None
        """What it wants of its group's topics; None: everything."""
        self.is_member = False

    async def start(self) -> None:
        process = self.begin()
        self.mq = await process.run(self._make(process))

    async def _make(self, process: Process) -> Sluice:
        mq = Sluice(
            self._name_servers,
            client_id=f"{HOST}@{self.name}",
            clock=self.clock,
            network=self.network.of(process),
            heartbeat_thread=False,
        )
        self.payer = mq.producer(PAYERS, listener=Decisions(self.ledger))
        return mq

    async def consume(self, group: Group) -> None:
        """Joins a group. Raises SluiceError."""
        self.group = group
        assert self.process is not None
        await self.process.run(self._consume(group))
        self.is_member = True

    async def _consume(self, group: Group) -> None:
        consumer = self.consumer = self.mq.consumer(
            group.name, self.handle, ordered=group.is_ordered, concurrency=8
        )
        for topic in sorted(group.topics):
            consumer.subscribe(topic, tags=self.tags)
        await consumer.start()

    async def change(self, tags: str) -> None:
        """Wants other messages of its group's topics from now on. Raises SluiceError."""
        assert self.process is not None
        assert self.group is not None
        for topic in sorted(self.group.topics):
            await self.process.run(self.consumer.change(topic, tags=tags))

    async def leave(self, rng: random.Random) -> None:
        """Ends in order."""
        if self.process is not None:
            await self.process.run(self.mq.close())
            await self.end(rng)

    async def handle(self, message: ReceivedMessage) -> None:
        """The handler: takes its time, and sometimes fails, as the message's number says."""
        group, record = self.group, message.record
        assert group is not None
        now_s = self.network.now_s()
        self.ledger.note_given(group, record, place_of(record))
        sent = self.ledger.begins(group, self.name, record, now_s)
        luck = random.Random(f"{group.name} {record.body!r} {record.reconsume_times}")
        times = message.reconsume_times
        well = False
        try:
            await asyncio.sleep(luck.choice((0.0, 0.001, 0.05, luck.uniform(0, 3))))
            if luck.random() < 0.1 and times < 2 and sent is not None:
                raise RuntimeError("not today")
            well = True
        finally:
            self.ledger.ends(group, self.name, record, well=well)
