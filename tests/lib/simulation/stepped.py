"""A broker that is stepped by hand: no sockets, loop or threads, its own clock, files in memory.

    broker = SteppedBroker()
    client = broker.connect()
    client.call(310, {"b": "T", ...}, b"body")          # request, end of turn, answer

`feed` without `step` shows what has not left yet; under SYNC_FLUSH `finish_sync` is the moment at
which the fsync ends. Marks in `files.operations` say when an answer left, so that a test can ask
what came before it.
"""

import collections
import contextlib
import dataclasses
from collections.abc import Callable, Mapping

from sluicemq.broker.admin.readonly import prepare_settings
from sluicemq.broker.context import BrokerEnvironment
from sluicemq.broker.group_commit import encode_unconfirmed_answer
from sluicemq.broker.settings import Settings
from sluicemq.broker.state import BrokerState
from sluicemq.broker.table import make_dispatcher
from sluicemq.config import BrokerConfig, StoreConfig
from sluicemq.errors import SluiceError, StoreError
from sluicemq.files import Files
from sluicemq.files.overlay import overlay
from sluicemq.model.ids import Host, UniqueIds, encode_host
from sluicemq.net.dispatch import Peer
from sluicemq.store.store import Store
from sluicemq.testing.files import CrashableFiles
from sluicemq.wire.frames import Command, FrameReader, encode

START_MS = 1_700_000_000_000
SMALL = StoreConfig(
    root="/store", commit_log_file_bytes=1 << 20, consume_queue_file_bytes=20_000,
    timer_log_file_bytes=1 << 16,
)  # fmt: skip


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

    def set_wall_clock(self, seconds: float) -> None:
        """Set the wall clock forward by `seconds`, or back if negative; no time passes."""
        self._start_ms += round(seconds * 1000)


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
        used, answers = self._broker.dispatcher.handle_frames(data, self.peer)
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
        self.peer.connection_lost()
        self._broker.core.on_disconnect(self.peer)


class SteppedBroker:
    """A broker core over memory. `config` and `store_config` are fields to change."""

    def __init__(
        self,
        *,
        config: BrokerConfig | None = None,
        store_config: StoreConfig = SMALL,
        files: CrashableFiles | None = None,
        clock: ManualClock | None = None,
        read_only: bool = False,
        holds_announcements: bool = False,
        confirmed: int | None = None,
    ) -> None:
        """`read_only`: over what is in `files`, as `--read-only` does. `holds_announcements`:
        answers to changes of topics and groups wait for `finish_announcements`, as in a server.
        `confirmed`: what `files` hold is visible up to this position of the log, as on a new master
        whose slaves do not have the rest yet."""
        self.files = files or CrashableFiles()
        self.clock = self.files.clock = clock or ManualClock()
        self.host = Host("127.0.0.1", 10911)
        config = config or BrokerConfig(broker_name="broker-a", metrics_enable=False)
        self.settings = Settings(config, store_config, is_read_only=read_only)
        port: Files = overlay(self.files) if read_only else self.files
        if read_only:
            prepare_settings(self.settings, port)
        self._soon: collections.deque[Callable[[], None]] = collections.deque()
        self._syncs: collections.deque[Callable[[int | BaseException], None]] = collections.deque()
        self._announced: list[tuple[Peer, bytes]] = []
        self._ports = iter(range(50_000, 60_000))
        self.store = Store.open(
            self.settings.store, files=port, clock=self.clock, is_gated=confirmed is not None,
            confirmed=confirmed,
        )  # fmt: skip
        self.core = BrokerState(
            self.settings,
            self.store,
            BrokerEnvironment(
                files=port,
                clock=self.clock,
                host=self.host,
                unique_ids=UniqueIds(self.clock, encode_host(self.host)[:-4], 1, 1),
                call_soon=self._soon.append,
                run_sync=self._syncs.append,
                announce=self._hold if holds_announcements else Peer.write,
            ),
        )
        self.core.load()
        self.dispatcher = make_dispatcher(self.core)

    def change(self, **fields: object) -> None:
        """Settings of the broker change while it runs."""
        broker = dataclasses.replace(self.settings.broker, **fields)  # type: ignore[arg-type]
        self.settings.replace(broker, self.settings.store)

    def change_store(self, **fields: object) -> None:
        """Settings of its store change while it runs."""
        store = dataclasses.replace(self.settings.store, **fields)  # type: ignore[arg-type]
        self.settings.replace(self.settings.broker, store)

    def connect(self, address: str = "127.0.0.1") -> SteppedClient:
        return SteppedClient(self, Host(address, next(self._ports)))

    def step(self) -> None:
        """The turn of the loop ends."""
        for _ in range(len(self._soon)):
            self._soon.popleft()()

    def clean(self) -> None:
        """Run the jobs of retention that are due (`RetentionHandlers.run_due_jobs`)."""
        for step in self.core.retention.run_due_jobs():
            if callable(step):
                step()

    def advance(self, seconds: float) -> None:
        """Time passes, and the sweep comes by."""
        self.clock.advance(seconds)
        self.core.sweep()

    def settle(self) -> None:
        """Turns of the loop and fsyncs, until nothing is left to do at this moment."""
        while self._soon or self._syncs:
            self.step()
            while self._syncs:
                self.finish_sync()

    def pass_seconds(self, seconds: float) -> None:
        """Time passes at once, and the broker does what it does every second."""
        self.advance(seconds)
        self.core.run_every_second()
        self.settle()

    def run(self, seconds: float, step_s: float = 0.05) -> None:
        """Time passes in small steps, and the loop does what each brings."""
        for _ in range(round(seconds / step_s)):
            self.advance(step_s)
            self.settle()

    @property
    def syncs_waiting(self) -> int:
        """Fsyncs that were asked for and have not ended."""
        return len(self._syncs)

    def finish_sync(self, error: BaseException | None = None) -> None:
        """The oldest fsync happens now, or fails."""
        done = self._syncs.popleft()
        done(self.store.sync() if error is None else error)

    def _hold(self, peer: Peer, answer: bytes) -> None:
        self._announced.append((peer, answer))

    def finish_announcements(self) -> None:
        """Changes are synced, then the answers that waited for that leave, as in the server."""
        announced, self._announced = self._announced, []
        for sync in filter(
            None, [document.prepare_sync() for document in self.core.journaled_documents]
        ):
            try:
                sync()
            except StoreError as error:
                announced = [
                    (peer, a and encode_unconfirmed_answer(a, error)) for peer, a in announced
                ]
        for peer, answer in announced:
            peer.write(answer)

    def close(self) -> None:
        """Stop in order: answers leave, tables and store are on disk, as far as there is room."""
        self.core.group_commit.commit()
        while self._syncs:
            self.finish_sync()
        self.finish_announcements()
        self.core.delayed.stop()
        with contextlib.suppress(SluiceError, OSError):
            self.store.sync()
            self.core.transactions.stop()
            self.core.delayed.save()
        for document in self.core.documents:
            with contextlib.suppress(OSError):
                document.save()
        self.store.close()
