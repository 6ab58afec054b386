"""A broker that is stepped by hand: no sockets, loop or threads, its own clock, files in memory.

    broker = SteppedBroker()
    client = broker.connect()
    client.call(310, {"b": "T", ...}, b"body")          # request, end of turn, answer

`feed` without `step` shows what has not left yet; under SYNC_FLUSH `finish_sync` is the moment at
which the fsync ends. Marks in `files.operations` say when an answer left, so that a test can ask
what came before it.
"""

import collections
import dataclasses
from collections.abc import Callable, Mapping

from sluicemq.broker.core import BrokerCore
from sluicemq.broker.settings import Settings
from sluicemq.config import BrokerConfig, StoreConfig
from sluicemq.model.ids import Host, UniqueIds, encode_host
from sluicemq.net.dispatch import Dispatcher
from sluicemq.net.peer import Peer
from sluicemq.protocol.codec import encode
from sluicemq.protocol.command import Command
from sluicemq.protocol.connection import FrameReader
from sluicemq.store.store import Store
from sluicemq.testing.files import CrashableFiles

START_MS = 1_700_000_000_000
SMALL = StoreConfig(root="/store", commit_log_file_bytes=1 << 20, consume_queue_file_bytes=20_000)


def send_fields(topic: str = "T", properties: str = "", **changes: object) -> dict[str, object]:
    """The letters of a send (310, 320) to queue 0; `changes` by letter."""
    fields: dict[str, object] = {
        "a": "P", "b": topic, "c": "TBW102", "d": 4, "e": 0, "f": 0, "g": START_MS, "h": 0,
        "i": properties or "UNIQ_KEY\x01AB12\x02", "j": 0, "k": "false", "m": "false",
    }  # fmt: skip
    return fields | changes


def pull_fields(topic: str = "T", offset: int = 0, **changes: object) -> dict[str, object]:
    """The fields of a pull (11) of queue 0 that names its subscription and does not wait."""
    fields: dict[str, object] = {
        "consumerGroup": "G", "topic": topic, "queueId": 0, "queueOffset": offset,
        "maxMsgNums": 32, "sysFlag": 4, "commitOffset": 0, "suspendTimeoutMillis": 15_000,
        "subscription": "*", "subVersion": 0, "expressionType": "TAG",
    }  # fmt: skip
    return fields | changes


class ManualClock:
    """Time that passes when it is told to."""

    def __init__(self, now_ms: int = START_MS) -> None:
        self._start_ms = now_ms
        self._passed_s = 0.0

    def now_ms(self) -> int:
        return self._start_ms + round(self._passed_s * 1000)

    def monotonic_s(self) -> float:
        return self._passed_s

    def advance(self, seconds: float) -> None:
        self._passed_s += seconds


class SteppedClient:
    """One connection to a stepped broker."""

    def __init__(self, broker: "SteppedBroker", remote: Host) -> None:
        self._broker = broker
        self._reader = FrameReader()
        self._opaque = 0
        self.peer = Peer(self, remote, broker.host)
        self.answers: dict[int, Command] = {}
        self.requests: list[Command] = []
        self.log: list[Command] = []
        self.writes = 0
        self.is_closed = False

    # what the peer writes to

    def write(self, data: bytes, /) -> None:
        self.writes += 1
        self._received(data)

    def close(self) -> None:
        self.is_closed = True

    def _received(self, data: bytes) -> None:
        for command in self._reader.feed(bytes(data)):
            self.log.append(command)
            if command.is_response:
                self.answers[command.opaque] = command
                self._broker.files.mark(f"answer {command.opaque}")
            else:
                self.requests.append(command)

    # what a test does

    def feed(self, *commands: Command) -> None:
        """Requests that arrive in one piece; answers that are ready leave, others are held."""
        self.feed_bytes(b"".join(encode(command) for command in commands))

    def feed_bytes(self, data: bytes) -> None:
        used, answers = self._broker.dispatcher.feed(data, self.peer)
        assert used == len(data)
        self._received(answers)

    def request(
        self,
        code: int,
        fields: Mapping[str, object] | None = None,
        body: bytes = b"",
        flag: int = 0,
        version: int = 479,
        language: str = "JAVA",
    ) -> Command:
        """A request with the next opaque; field values may be anything that `str` takes."""
        self._opaque += 1
        texts = None if fields is None else {name: str(value) for name, value in fields.items()}
        return Command(code, texts, body, self._opaque, flag, None, language, version)

    def call(
        self, code: int, fields: Mapping[str, object] | None = None, body: bytes = b"", **rest: int
    ) -> Command:
        """A request, the end of the turn, and its answer. KeyError when there is none."""
        command = self.request(code, fields, body, **rest)  # type: ignore[arg-type]
        self.feed(command)
        self._broker.step()
        return self.answers.pop(command.opaque)

    def disconnect(self) -> None:
        """The connection breaks."""
        self.peer.lost()
        self._broker.core.disconnected(self.peer)


class SteppedBroker:
    """A broker core over memory. `config` and `store_config` are fields to change."""

    def __init__(
        self,
        *,
        config: BrokerConfig | None = None,
        store_config: StoreConfig = SMALL,
        files: CrashableFiles | None = None,
        clock: ManualClock | None = None,
    ) -> None:
        self.files = files or CrashableFiles()
        self.clock = clock or ManualClock()
        self.host = Host("127.0.0.1", 10911)
        config = config or BrokerConfig(broker_name="broker-a", metrics_enable=False)
        self.settings = Settings(config, store_config)
        self._soon: collections.deque[Callable[[], None]] = collections.deque()
        self._syncs: collections.deque[Callable[[int | BaseException], None]] = collections.deque()
        self._ports = iter(range(50_000, 60_000))
        self.store = Store.open(store_config, files=self.files, clock=self.clock)
        self.core = BrokerCore(
            self.settings,
            self.store,
            files=self.files,
            clock=self.clock,
            host=self.host,
            unique_ids=UniqueIds(encode_host(self.host)[:-4], 1, 1),
            call_soon=self._soon.append,
            run_sync=self._syncs.append,
        )
        self.core.load()
        self.dispatcher = Dispatcher(
            self.core.handlers, quick=self.core.quick, deferred=self.core.deferred
        )

    def change(self, **fields: object) -> None:
        """Settings of the broker change while it runs."""
        broker = dataclasses.replace(self.settings.broker, **fields)  # type: ignore[arg-type]
        self.settings.replace(broker, self.settings.store)

    def connect(self, address: str = "127.0.0.1") -> SteppedClient:
        return SteppedClient(self, Host(address, next(self._ports)))

    def step(self) -> None:
        """The turn of the loop ends."""
        for _ in range(len(self._soon)):
            self._soon.popleft()()

    def advance(self, seconds: float) -> None:
        """Time passes, and the sweep comes by."""
        self.clock.advance(seconds)
        self.core.sweep()

    @property
    def syncs_waiting(self) -> int:
        """Fsyncs that were asked for and have not ended."""
        return len(self._syncs)

    def finish_sync(self, error: BaseException | None = None) -> None:
        """The oldest fsync happens now, or fails."""
        done = self._syncs.popleft()
        done(self.store.sync() if error is None else error)
