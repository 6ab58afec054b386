"""All parts of a broker but its sockets and its waiting: what `server.py` serves and a test or a
simulator steps.

`handlers` and `deferred` go to a Dispatcher. The loop is handed in as two callables: `call_soon`
for the end of a turn and `run_sync` for an fsync elsewhere.
"""

from collections.abc import Callable

from sluicemq.acl.guard import Guard
from sluicemq.broker.access import Access
from sluicemq.broker.admin import readonly
from sluicemq.broker.admin.access import AccessAdmin
from sluicemq.broker.admin.metadata import Metadata
from sluicemq.broker.admin.queries import Queries
from sluicemq.broker.admin.retention import Cleaning, GroupWatch
from sluicemq.broker.admin.status import Admin
from sluicemq.broker.background import Background, Elsewhere, in_place
from sluicemq.broker.consume.clients import Consumers, Producers
from sluicemq.broker.consume.contract import Contracts
from sluicemq.broker.consume.filter_admin import ContractAdmin, FilterAdmin
from sluicemq.broker.consume.filter_watch import FilterWatch
from sluicemq.broker.consume.filters import ConsumerFilters
from sluicemq.broker.consume.heartbeat import Heartbeats
from sluicemq.broker.consume.locks import QueueLocks
from sluicemq.broker.consume.longpoll import LongPolls
from sluicemq.broker.consume.offset_admin import OffsetAdmin
from sluicemq.broker.consume.pull import Pull
from sluicemq.broker.documents import Document
from sluicemq.broker.epochs.epochs import Epochs
from sluicemq.broker.groups import Groups
from sluicemq.broker.lanes.table import Lanes
from sluicemq.broker.metrics import BrokerCollector, Parts
from sluicemq.broker.offsets import Offsets
from sluicemq.broker.produce.intake import Intake
from sluicemq.broker.produce.relays import Questions, Relays, Replies
from sluicemq.broker.produce.retries import Retries
from sluicemq.broker.produce.send import Send
from sluicemq.broker.produce.sendback import SendBack
from sluicemq.broker.runtime import Days, Rates, RuntimeInfo
from sluicemq.broker.settings import Settings
from sluicemq.broker.topics import HALF_TOPIC, OP_TOPIC, Topics
from sluicemq.broker.transactions.checkback import CheckBack
from sluicemq.broker.transactions.checks import TransactionChecks
from sluicemq.broker.transactions.requests import TransactionRequests
from sluicemq.broker.transactions.transactions import Transactions
from sluicemq.broker.turns import Announced, Durable, Parked, Postponed, RunSync, Turns
from sluicemq.broker.waiting.delivery import WAITING_TOPICS, Delayed
from sluicemq.broker.waiting.requests import Pending
from sluicemq.clock import Clock
from sluicemq.files import Files
from sluicemq.model.ids import Host, UniqueIds
from sluicemq.net.dispatch import Dispatcher, Handler, finish_answer
from sluicemq.net.limits import WITH_MESSAGES
from sluicemq.net.peer import Peer
from sluicemq.net.shares import Shares
from sluicemq.store.directory import cannot_open
from sluicemq.store.store import Store
from sluicemq.wire.frames import Command


class BrokerCore:
    """The state and the request families of one broker.

    `announce(peer, answer)` holds an answer until a change is saved and registered; `table_changed`
    is called after each such change. Without them answers leave at once.
    """

    def __init__(
        self,
        settings: Settings,
        store: Store,
        *,
        files: Files,
        clock: Clock,
        host: Host,
        unique_ids: UniqueIds,
        call_soon: Callable[[Callable[[], None]], object],
        run_sync: RunSync | None = None,
        announce: Callable[[Peer, bytes], None] | None = None,
        elsewhere: Elsewhere = in_place,
    ) -> None:
        self.settings = settings
        self.store = store
        self._clock = clock
        self._host = host
        self._announce = announce or Peer.write
        self._elsewhere = elsewhere
        self.shares = Shares(clock, call_soon)
        self._make_tables(files, call_soon)
        self.turns = Turns(
            store,
            clock,
            call_soon=call_soon,
            wake=self._wake,
            run_sync=run_sync if settings.store.flush_sync else None,
            announce=self._announce,
            sync_timeout_s=settings.store.sync_flush_timeout_ms / 1000,
        )
        self.shares.before_turn = self.turns.end_scheduled
        self._make_waiting(files, call_soon, run_sync)
        self.guard = Guard.of(files, clock, settings.broker)
        self.access = Access(self.guard)
        self._make_doors(unique_ids, call_soon)
        self.handlers = self._families(files)
        self.quick = {} if settings.is_read_only else self.send.quick()

    def _make_tables(self, files: Files, call_soon: Callable[[Callable[[], None]], object]) -> None:
        """What is known of topics, groups and clients."""
        settings, store, clock = self.settings, self.store, self._clock
        self.topics = Topics(settings, files, clock)
        self.groups = Groups(settings, files, clock)
        self.offsets = Offsets(settings, files, clock)
        self.filters = ConsumerFilters(settings, files, clock)
        self.background = Background(clock, self.shares)
        self.background.settle = self.deferred
        self.polls = LongPolls(self._write, settings.broker.parked_pulls_max, self.shares)
        self.lanes = Lanes(
            settings, self.topics, self.offsets, store, files, clock, self.polls.look_again,
            call_soon, self._elsewhere,
        )  # fmt: skip
        self.contracts = Contracts(self.groups, settings, clock)
        self.consumers = Consumers(
            settings, self.groups, self.filters, self.lanes, self.contracts, clock
        )
        self.producers = Producers(clock)
        self.locks = QueueLocks(clock)
        self.rates = Rates()
        self.days = Days()

    def _make_waiting(
        self,
        files: Files,
        call_soon: Callable[[Callable[[], None]], object],
        run_sync: RunSync | None,
    ) -> None:
        """What enters the store, and what waits in it before it may be seen."""
        settings, store, clock, host = self.settings, self.store, self._clock, self._host
        self.intake = Intake(settings, store, self.turns)
        self.delayed = Delayed(
            settings, store, self.intake, self.turns, files=files, clock=clock,
            call_soon=call_soon,
        )  # fmt: skip
        self.transactions = Transactions(
            settings, self.topics, self.offsets, store, self.intake, self.turns, clock, host,
            CheckBack(self.producers, settings.broker.broker_name),
        )  # fmt: skip
        self.epochs = Epochs(
            settings, self.topics, store, self.intake, self.turns, files=files, clock=clock,
            host=host, call_soon=call_soon, run_sync=run_sync,
        )  # fmt: skip
        self.checks = TransactionChecks(settings, self.transactions, clock)
        self.retries = Retries(self.topics, self.groups, self.locks, clock)

    def _make_doors(
        self, unique_ids: UniqueIds, call_soon: Callable[[Callable[[], None]], object]
    ) -> None:
        """What requests go through, and what watches them."""
        settings, store, clock, host = self.settings, self.store, self._clock, self._host
        self.send = Send(
            settings, self.topics, self.retries, store, self.intake, self.turns, clock, host,
            unique_ids,
        )  # fmt: skip
        self.send.batches.on_staged = self.epochs.on_staged
        self.send_back = SendBack(
            settings, self.topics, self.retries, store, self.intake, host, self.consumers,
            self.access,
        )  # fmt: skip
        self.pull = Pull(
            settings, self.topics, self.groups, self.offsets, self.consumers, self.polls, store,
            clock, call_soon, self.background,
        )  # fmt: skip
        self.runtime = RuntimeInfo(
            settings, self.topics, self.send, self.pull, self.polls, self.turns, store,
            self.rates, self.days,
        )  # fmt: skip
        self.runtime.more.append(self.delayed.runtime)
        self.watch = GroupWatch(self.offsets, store, clock)
        self.filter_watch = self._filter_watch()
        ask = self.questions = Questions(clock)
        self.replies = Replies(settings, self.topics, self.producers, self.intake, ask, clock, host)
        self.cleaning = Cleaning(settings, self.topics, self.watch, store, clock, self.turns.end)

    def _filter_watch(self) -> FilterWatch:
        watch = FilterWatch(
            self.store, self.topics, self.offsets, self.consumers, self.filters, self.pull,
            self.background, self._clock,
        )  # fmt: skip
        self.runtime.more.append(watch.runtime)
        return watch

    def _families(self, files: Files) -> dict[int, Handler]:
        settings, store, clock = self.settings, self.store, self._clock
        handlers: dict[int, Handler] = {}
        for family in (
            self.send,
            self.send_back,
            TransactionRequests(settings, self.transactions, clock, self.access),
            self.pull,
            Heartbeats(settings, self.topics, self.groups, self.consumers, self.producers, clock),
            Queries(
                settings, self.topics, self.groups, self.offsets, self.locks, self.consumers,
                store, self.access,
            ),
            Metadata(settings, self.topics, self.groups, self.offsets, store, self.turns.end),
            Admin(
                settings, self.topics, self.groups, self.offsets, self.consumers, self.producers,
                store, self.runtime, self.rates, self.watch, files, clock,
            ),
            OffsetAdmin(
                settings, self.topics, self.groups, self.offsets, self.consumers, self.polls,
                store, clock, self.turns.soon,
            ),
            Relays(
                settings, self.topics, self.groups, self.consumers, store, self.questions
            ),
            self.replies,
            self.epochs,
            self.cleaning,
            FilterAdmin(
                self.topics, self.groups, self.offsets, self.pull, self.filter_watch,
                self.background, store,
            ),
            Pending(settings, self.topics, self.delayed, self.intake, clock, self._host),
            ContractAdmin(self.groups, self.consumers),
            AccessAdmin(settings, self.guard, files, clock, self._elsewhere),
        ):  # fmt: skip
            handlers |= {int(code): handler for code, handler in family.handlers().items()}
        if settings.is_read_only:
            handlers |= readonly.refusals(settings.store.root)
        return handlers

    def load(self) -> None:
        """Blocking: reads the tables and writes what was missing in them.

        Raises StoreDamagedError, ConfigurationError (access rules), StoreError for an error of the
        file system, with path and cure.
        """
        try:
            self._load()
        except OSError as error:
            raise cannot_open(self.settings.store.root, error) from error

    def _load(self) -> None:
        if self.guard is not None:
            self.guard.load()
        self.topics.load()
        if not self.settings.is_read_only:
            store = self.store
            self.topics.adopt(key for key in store.queues() if store.queue_offsets(*key)[1])
        self.groups.load()
        self.offsets.load()
        self.lanes.load()
        self.filters.load()
        self.delayed.load()
        self.transactions.load()
        self.epochs.load()
        if self.settings.is_read_only:
            readonly.show_all(self.store, self.topics, self.groups, self.offsets)
        self.topics.document.save()
        self.groups.document.save()

    def dispatcher(self) -> Dispatcher:
        """Requests to answers, past the guard when there is one."""
        guard = self.guard
        if guard is None:
            return Dispatcher(
                self.handlers,
                quick=self.quick,
                deferred=self.deferred,
                with_messages=WITH_MESSAGES,
                shares=self.shares,
            )
        return Dispatcher(
            self.handlers,
            quick=self.quick,
            deferred=self.deferred,
            before=guard.before,
            admit=guard.admit,
            with_messages=WITH_MESSAGES,
            shares=self.shares,
        )

    @property
    def journaled(self) -> tuple[Document, ...]:
        """Those of whose changes each is kept before it is answered."""
        return self.topics.document, self.groups.document

    @property
    def documents(self) -> tuple[Document, ...]:
        return (
            *self.journaled, self.offsets.document,
            self.offsets.resets_document, self.lanes.document, self.filters.document,
            self.epochs.table.document, *self.delayed.documents,
        )  # fmt: skip

    @property
    def collector(self) -> BrokerCollector:
        """The counters as Prometheus sees them."""
        return BrokerCollector(
            Parts(
                self.settings, self.topics, self.groups, self.offsets, self.consumers,
                self.producers, self.polls, self.send, self.pull, self.turns, self.store,
                self.watch, self.filter_watch, self.retries, self.transactions, self.checks,
                self._clock, self.guard,
            )
        )  # fmt: skip

    # ---------------------------------------------------------------------- answers for later

    def deferred(self, outcome: object, command: Command, peer: Peer) -> None:
        """Takes what handlers return besides answers. HOT."""
        if outcome.__class__ is Durable:
            self.turns.hold(peer, *outcome)
        elif isinstance(outcome, Parked):
            if not self.polls.park(outcome, peer):
                peer.write(outcome.look(outcome, True) or b"")
        elif isinstance(outcome, Announced):
            answer = b"" if command.is_oneway else finish_answer(outcome.answer, command)
            self._announce(peer, answer)
        elif isinstance(outcome, Postponed):
            self.background.take(outcome.steps, command, peer)
        else:
            raise TypeError(f"a handler returned {type(outcome).__name__}, and nobody takes it")

    def _write(self, peer: Peer, frame: bytes) -> None:
        self.turns.write(peer, frame)

    def _wake(self, topic: str, queue_id: int, offset_max: int) -> None:
        """Messages of a queue have become visible."""
        self.polls.wake(topic, queue_id, offset_max)
        if topic in WAITING_TOPICS:
            self.delayed.arrived(topic, queue_id)
        elif topic in (HALF_TOPIC, OP_TOPIC):
            self.transactions.arrived()

    def move(self, host: Host) -> None:
        """The host that stands in records and message ids is this one."""
        self.send.move(host)
        self.send_back.move(host)
        self.transactions.move(host)
        self.replies.move(host)
        self.epochs.move(host)

    def disconnected(self, peer: Peer) -> None:
        """A connection is gone."""
        self.polls.disconnect(peer)
        self.questions.disconnected(peer)
        self.consumers.disconnect(peer)
        self.producers.disconnect(peer)
        self.shares.forget(peer)

    # ---------------------------------------------------------------------------- by the clock

    def sweep(self) -> None:
        """A few times a second: long polls and fsyncs whose time is over, messages that are due."""
        now_s = self._clock.monotonic_s()
        self.polls.expire(now_s)
        self.turns.expire(now_s)
        self.questions.expire(now_s)
        self.delayed.run()
        self.epochs.run()
        self.checks.run()
        self.filter_watch.run()

    def second(self) -> None:
        """Once a second: samples for rates, and what lanes have to do."""
        self.lanes.run()
        counters = self.runtime.counters()
        self.rates.sample(self._clock.monotonic_s(), counters)
        self.days.sample(self._clock.now_ms(), counters)

    def expire_clients(self) -> None:
        """Now and then: closes the connections of clients that have stopped their heartbeats."""
        age_ms = self.settings.broker.client_expiry_ms
        for peer in {*self.consumers.expire(age_ms), *self.producers.expire(age_ms)}:
            peer.close()
