"""All parts of a broker but its sockets and its waiting: what `server.py` serves and a test or a
simulator steps."""

import logging
import math
from collections.abc import Callable, Iterator
from random import Random
from typing import Any, Final

from sluicemq.acl.guard import Access, Guard
from sluicemq.broker.admin import readonly
from sluicemq.broker.admin.retention import Cleaning, GroupWatch
from sluicemq.broker.admin.status import Days, Rates, RuntimeInfo
from sluicemq.broker.consume.client_memory import ClientMemory
from sluicemq.broker.consume.clients import Consumers, Producers
from sluicemq.broker.consume.contracts import Contracts
from sluicemq.broker.consume.delivery import DeliveryStates
from sluicemq.broker.consume.filter_diagnostics import FilterHandlers
from sluicemq.broker.consume.filters import ConsumerFilters, RequestFilters
from sluicemq.broker.consume.locks import QueueLocks
from sluicemq.broker.consume.longpoll import LongPolls
from sluicemq.broker.consume.pull import PullHandlers
from sluicemq.broker.documents import Document
from sluicemq.broker.epochs.epochs import Epochs
from sluicemq.broker.group_commit import Announced, Durable, GroupCommit, Parked, Postponed, RunSync
from sluicemq.broker.lanes.table import Lanes
from sluicemq.broker.offsets import Offsets
from sluicemq.broker.pop.acknowledge import InFlight
from sluicemq.broker.pop.assignment import Assignments, LookUp
from sluicemq.broker.pop.checkpoints import Checkpoints
from sluicemq.broker.pop.order import ConsumerOrder
from sluicemq.broker.produce.intake import Intake
from sluicemq.broker.produce.relays import Questions, Replies
from sluicemq.broker.produce.send import Retries, Send
from sluicemq.broker.replication.insync import InSync
from sluicemq.broker.replication.status import Behind, Steering
from sluicemq.broker.settings import Settings
from sluicemq.broker.topics import LIGHT_PREFIX, Groups, Topics
from sluicemq.broker.transactions.transactions import CheckBack, Transactions
from sluicemq.broker.waiting.delivery import Delayed
from sluicemq.clock import Clock, SteadyClock
from sluicemq.files import Files
from sluicemq.model.ids import Host, UniqueIds
from sluicemq.net.dispatch import Peer, finish_answer
from sluicemq.net.limits import Shares
from sluicemq.net.work.background import Background, CallLater, Offload, Steps, in_place
from sluicemq.store.directory import cannot_open
from sluicemq.store.store import Store
from sluicemq.store.timers.state import discard_timer_files
from sluicemq.supervision import Supervisor
from sluicemq.wire.frames import Command

log = logging.getLogger(__name__)

GROUPS_SHOWN: Final = 10
"""Groups that a log line names."""
INDEX_PAUSE_S: Final = 0.005
"""Between two slices of an index that is built anew: messages go first."""
SEALED_AFTER_S: Final = 10.0
"""So long a topic is filtered before files of its property columns are made."""


class BrokerState:
    """One broker's parts. Requests find their way to them by `table.py`.

    `call_soon` and `call_later` are the loop's; `run_sync` starts an fsync in another thread,
    `offload` what blocks, `compute` what filters compute. `announce(peer, answer)` holds an answer
    until a change is saved and registered; without it answers leave at once. `look_up` asks the
    name servers. `in_sync`: what a master knows of its slaves.
    """

    steering: Steering | None = None
    """Who decides about the role, when that is not the file."""
    side: Any = None
    """What runs here for the other replicas (`replicas/sides.py`)."""

    _lead_ms = 0
    sampled_s = math.inf
    """When `second` ran last; a loop that hangs is known by it."""

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
        call_later: CallLater | None = None,
        run_sync: RunSync | None = None,
        announce: Callable[[Peer, bytes], None] = Peer.write,
        look_up: LookUp = lambda topic, done: done(None),
        offload: Offload = in_place,
        compute: Offload | None = None,
        in_sync: InSync | None = None,
        shares: Shares | None = None,
        steady: SteadyClock | None = None,
        jobs: Supervisor | None = None,
    ) -> None:
        self.settings, self.store, self.files, self.clock = settings, store, files, clock
        self.in_sync, self.offload, self._announce = in_sync, offload, announce
        self.steady = steady = steady or SteadyClock(clock)  # of what waits
        self.jobs = jobs or Supervisor(clock, log)
        self.behind: Behind = lambda: (None, None)
        self.collectors: list[Callable[[], Iterator[Any]]] = []  # metrics of who lives with it
        settings.move(host)
        # What is known of topics, groups and clients.
        self.topics = topics = Topics(settings, files, clock)
        self.groups = groups = Groups(settings, files, clock)
        self.offsets = offsets = Offsets(settings, files, clock)
        self.filters = ConsumerFilters(settings, files, clock, store.columns.want)
        self.guard = guard = Guard.of(files, clock, settings.broker)
        self.held = ClientMemory(settings)
        self.access, self.producers = Access(guard), Producers(clock, self.held)
        self.locks, self.random = QueueLocks(files, settings.store.root, clock), Random()
        self.shares = shares or Shares(clock.monotonic_s, call_soon)
        self.background = Background(clock, self.shares, self.deferred, call_later, compute)
        self.turns = turns = GroupCommit(
            store, clock, call_soon=call_soon, announce=announce,
            run_sync=run_sync if settings.store.flush_sync else None,
            sync_timeout_s=settings.store.sync_flush_timeout_ms / 1000,
            gate=in_sync if settings.is_gated else None,
        )  # fmt: skip
        self.shares.before_turn = turns.commit
        # Consumers.
        polls_max = settings.broker.parked_pulls_max
        self.polls = LongPolls(
            turns.queue_frame, turns.send_after_commit, turns.flush, polls_max, self.shares
        )
        turns.wake = wake = self.polls.wake
        common, waking = (settings, topics, groups, offsets), (files, steady, wake)
        self.order = ConsumerOrder(*common, *waking, call_later)
        self.lanes = Lanes(settings, topics, offsets, store, *waking, call_soon, offload)
        self.contracts = Contracts(groups, settings, clock)
        self.consumers = consumers = Consumers(
            settings, groups, self.filters, self.lanes, self.contracts, clock, self.held
        )
        self.assignments = Assignments(settings, topics, groups, consumers, files, clock, look_up)
        self.delivered, self.request_filters = DeliveryStates(offsets.pulled_by), RequestFilters()
        self.pull = PullHandlers(
            *common, consumers, self.polls, store, clock, call_soon, self.background,
            self.delivered, self.request_filters, self.shares, call_later=call_later,
        )  # fmt: skip
        # What enters the store, and what waits in it before it may be seen.
        self.intake = intake = Intake(settings, store, turns)
        self.delayed = Delayed(
            settings, store, intake, turns, files=files, clock=steady, call_soon=call_soon,
            call_later=call_later, jobs=self.jobs,
        )  # fmt: skip
        self.checkpoints = Checkpoints(
            settings, topics, offsets, store, intake, turns, self.delayed, files, steady
        )
        offsets.on_forget += [self.checkpoints.forget, self.contracts.forget_deleted]
        self.in_flight = InFlight(groups, self.checkpoints, self.order, steady, self.background)
        self.checks = self.transactions = Transactions(
            settings, topics, offsets, store, intake, turns, clock, steady,
            CheckBack(self.producers, settings.broker.broker_name),
        )  # fmt: skip
        self.epochs = Epochs(
            settings, topics, store, intake, turns, files=files, clock=clock,
            call_soon=call_soon, run_sync=run_sync, access=self.access,
        )  # fmt: skip
        self.retries = Retries(
            settings, topics, groups, store, intake, consumers, self.locks, clock, self.delivered,
            self.access,
        )  # fmt: skip
        self.send = Send(settings, topics, self.retries, store, intake, turns, unique_ids)
        self.questions = Questions(clock)
        self.replies = Replies(settings, topics, self.producers, intake, self.questions, clock)
        for document in self.documents_of_offsets:
            document.identify(store)
        self._make_watchers()

    def _make_watchers(self) -> None:
        """Make the parts that watch the others: lag, rates, retention, runtime information."""
        settings, store, clock, topics = self.settings, self.store, self.clock, self.topics
        groups, offsets, consumers, turns = self.groups, self.offsets, self.consumers, self.turns
        self.watch, self.rates, self.days = GroupWatch(offsets, store, clock), Rates(), Days()
        self.cleaning = Cleaning(settings, topics, self.watch, store, clock, turns.commit)
        self.filter_watch = FilterHandlers(
            store, topics, groups, offsets, consumers, self.filters, self.delivered,
            self.background, clock, self.in_flight.unfinished,
        )  # fmt: skip
        self.runtime = RuntimeInfo(
            topics, self.send, self.pull, self.polls, turns, store, self.rates, self.days,
            (self.delayed.runtime, self.filter_watch.runtime_info),
        )  # fmt: skip

    def _follow_topics(self) -> None:
        """Follow topics that are deleted and created from now on. Find out which were deleted
        before, and finish creations of topics that a crash has interrupted."""
        self.topics.on_created, self.topics.on_removed = self._topic_created, self._topic_removed
        self.offsets.note_deleted(
            lambda topic: topic in self.topics or topic.startswith(LIGHT_PREFIX)
        )
        for name in [name for name in self.offsets.deleted if name in self.topics]:
            self._reset_returning(name)

    def _topic_created(self, name: str) -> None:
        """Forget offsets that are left of a deleted topic of this name, and reset its groups."""
        if name in self.offsets.deleted:
            self.offsets.forget(topic=name)
            self._reset_returning(name)

    def _reset_returning(self, name: str) -> None:
        """Send every group that had consumed a deleted topic of this name to offset 0 of its
        queues, as an operator's reset would."""
        groups = self.offsets.take_deleted(name)
        for group in groups:
            for queue_id in range(self.topics.table[name].config.read_queues):
                if not self.lanes.reset(group, name, queue_id, 0):
                    self.offsets.reset(group, name, queue_id, 0)
        if groups:
            log.info(
                "topic %s was deleted and is created again: %d groups that consumed it begin at "
                "its first message: %s", name, len(groups), ", ".join(groups[:GROUPS_SHOWN]),
            )  # fmt: skip

    def _topic_removed(self, name: str) -> None:
        """Answer the requests that wait for messages of a deleted topic, and forget what pulls
        noted about its offsets."""
        self.polls.answer_deleted_topic(name)
        self.delivered.forget_topic(name)

    def _take_up(self) -> None:
        """Settings that others hold copies of."""
        slow_ms = self.settings.broker.slow_request_ms
        self.shares.slow_s = self.turns.slow_commit_s = slow_ms / 1000 if slow_ms else math.inf

    def load(self) -> None:
        """Blocking: reads the tables and writes what was missing in them.

        Raises StoreDamagedError, ConfigurationError (access rules), StoreError for an error of the
        file system, with path and cure.
        """
        self.settings.on_change(self._take_up)
        self._take_up()
        store, is_read_only = self.store, self.settings.is_read_only
        is_slave = self.settings.is_slave
        try:
            if self.guard is not None:
                self.guard.load()
            self.topics.load()
            if not (is_read_only or is_slave):
                self.topics.adopt(key for key in store.queues() if store.queue_offsets(*key)[1])
            for part in (
                self.groups,
                self.offsets,
                self.order,
                self.assignments,
                self.lanes,
                self.filters,
                self.locks,
            ):
                part.load()
            if is_slave:  # what a master works at, and no file is written but by its master
                discard_timer_files(store, self.files, self.settings.store.root)
                return
            if not is_read_only:
                self.offsets.cut(
                    lambda *key: store.end_offset(*key) if store.queue_exists(*key) else None
                )
            for worker in (self.delayed, self.checkpoints, self.transactions, self.epochs):
                worker.load()
            if is_read_only:
                readonly.show_all(store, self.topics, self.groups, self.offsets)
            else:
                self._follow_topics()
            for document in (self.topics.document, self.groups.document, self.checkpoints.document):
                document.save()
        except OSError as error:
            raise cannot_open(self.settings.store.root, error) from error

    @property
    def journaled(self) -> tuple[Document, ...]:
        """Those of whose changes each is kept before it is answered."""
        return self.topics.document, self.groups.document

    @property
    def documents_of_offsets(self) -> tuple[Document, ...]:
        """Those that name offsets of this store: wrong, and dangerous, beside any other log."""
        levels = self.delayed.levels
        return (
            self.offsets.document, self.offsets.resets_document, self.checkpoints.document,
            self.lanes.document, self.epochs.table.document, levels.document,
            levels.cancellations,
        )  # fmt: skip

    @property
    def documents(self) -> tuple[Document, ...]:
        return (
            *self.journaled, self.offsets.document, self.offsets.resets_document,
            self.checkpoints.document, self.order.document, self.assignments.document,
            self.locks.document, self.lanes.document, self.filters.document,
            self.epochs.table.document, *self.delayed.documents,
        )  # fmt: skip

    # ---------------------------------------------------------------------- answers for later

    def deferred(self, outcome: object, command: Command, peer: Peer) -> None:
        """Takes what handlers return besides answers. HOT."""
        if outcome.__class__ is Durable:
            self.turns.send_after_commit(peer, *outcome)
        elif isinstance(outcome, Parked):
            if not self.polls.park(outcome, peer):
                answer = outcome.look(outcome, True)
                assert not isinstance(answer, Durable), "the last look gives nothing away"
                peer.write(answer or b"")
        elif isinstance(outcome, Announced):
            frame = b"" if command.is_oneway else finish_answer(outcome.answer, command)
            self._announce(peer, frame)
        elif isinstance(outcome, Postponed):
            self.background.run_request(outcome.steps, command, peer)
        else:
            raise TypeError(f"a handler returned {type(outcome).__name__}, and nobody takes it")

    def move(self, host: Host) -> None:
        """The host that stands in records and message ids is this one."""
        self.settings.move(host)
        self.send.prepare()

    def disconnected(self, peer: Peer) -> None:
        """A connection is gone."""
        self.polls.remove_connection(peer)
        self.questions.disconnected(peer)
        self.background.run_in_background(self._leaving(peer))
        self.shares.forget(peer)
        if self.steering is not None:
            self.steering.disconnected(peer)

    def _leaving(self, peer: Peer) -> Steps[None]:
        """A connection may have been in thousands of groups."""
        yield from self.consumers.remove_connection(peer)
        yield from self.producers.remove_connection(peer)

    # ---------------------------------------------------------------------------- by the clock

    # Steps: pauses (s), and what blocks, for another thread.

    def flush(self) -> Iterator[float | Callable[[], object]]:
        """The log, and the index of keys when the log has nothing new; many queues in slices."""
        if self.store.tick():
            yield self.store.sync
        elif self.store.keys.is_flush_due:
            yield self.store.keys.flush_due
        while self.store.is_flushing:
            yield 0
            if self.store.tick():
                yield self.store.sync

    def follow_keys(self) -> Iterator[float | Callable[[], object]]:
        """The key index follows the log, in slices between which everything else has its turn."""
        keys = self.store.keys
        keys.follows_ticks = False
        if keys.backlog_bytes and not keys.is_warm:
            yield keys.warm_up
        while not keys.catch_up():
            yield 0 if keys.is_close else INDEX_PAUSE_S

    def work_at_columns(self) -> Iterator[float | Callable[[], object]]:
        """Property columns follow the log where somebody wants them; a copy gets no files."""
        columns = self.store.columns
        if columns.is_wanted and not columns.is_warm:
            yield columns.warm_up
        if not self.settings.is_read_only:
            yield from columns.work(SEALED_AFTER_S)

    def sweep(self) -> None:
        """A few times a second: long polls and fsyncs whose time is over, messages that are due."""
        now_s, run = self.clock.monotonic_s(), self.jobs.run_unless_pausing
        run("parked pulls", lambda: self.polls.expire(now_s))
        run("held answers", lambda: self.turns.expire(now_s))
        run("relayed questions", lambda: self.questions.expire(now_s))
        run("notices of members", self.consumers.notices.send_due)
        if self.settings.is_slave:
            return
        if self.in_sync is not None:
            run("in-sync set", self.in_sync.run)
        self.delayed.run()
        run("ordered pops", self.order.run)
        run("epochs", self.epochs.run)
        run("transaction checks", self.transactions.run)
        run("filter watch", self.filter_watch.survey_if_due)

    def second(self) -> None:
        """Once a second: samples for rates, and what lanes have to do."""
        self.jobs.run_unless_pausing("lanes", self.lanes.run)
        self._look_at_clock()
        counters = self.runtime.counters()
        self.sampled_s = self.clock.monotonic_s()
        self.rates.sample(self.sampled_s, counters)
        self.days.sample(self.clock.now_ms(), counters)
        self.runtime.spans.sample(self.clock.monotonic_s(), self.runtime.statistics)

    def _look_at_clock(self) -> None:
        """Log that the wall clock was set back, once for each time."""
        lead_ms = self.steady.lead_ms
        self.delayed.kept_clock.mark_if_ahead()
        if lead_ms > self._lead_ms:
            log.warning(
                "The wall clock was set back by %d s. Messages that wait are delivered as if it "
                "had not been; searching by time is wrong until it has passed the newest message.",
                (lead_ms - self._lead_ms) // 1000,
            )
        self._lead_ms = lead_ms

    def expire_clients(self) -> None:
        """Now and then: closes the connections of clients that have stopped their heartbeats."""
        age_ms = self.settings.broker.client_expiry_ms
        for peer in {*self.consumers.expire(age_ms), *self.producers.expire(age_ms)}:
            peer.close()
