"""The components of a broker, without sockets and without asyncio.

`BrokerState` creates the components and connects them. `server.py` serves them over the network and
runs their background jobs; a test or a simulator steps them by itself. Everything runs on the event
loop's thread, except `load` and the callables that a background job yields.

A background job that takes long is an iterator of steps (`flush`, `update_key_index`,
`build_property_columns`). A step is either a number, which is a pause in seconds, or a callable
that blocks and must run on another thread.
"""

import logging
import math
from collections.abc import Callable, Iterator
from random import Random
from typing import Any, Final

from sluicemq.acl.guard import Access, Guard
from sluicemq.broker.admin import readonly
from sluicemq.broker.admin.retention import RetentionHandlers, UnreadMonitor
from sluicemq.broker.admin.status import CounterHistory, MidnightCounters, RuntimeInfo
from sluicemq.broker.consume.client_memory import ClientMemory
from sluicemq.broker.consume.clients import Consumers
from sluicemq.broker.consume.contracts import Contracts
from sluicemq.broker.consume.delivery import DeliveryStates
from sluicemq.broker.consume.filter_diagnostics import FilterHandlers
from sluicemq.broker.consume.filters import ConsumerFilters, RequestFilters
from sluicemq.broker.consume.locks import QueueLocks
from sluicemq.broker.consume.longpoll import LongPolls
from sluicemq.broker.consume.pull import PullHandlers
from sluicemq.broker.context import BrokerContext, BrokerEnvironment
from sluicemq.broker.documents import Document
from sluicemq.broker.epochs.epochs import Epochs
from sluicemq.broker.group_commit import Announced, Durable, GroupCommit, Parked, Postponed
from sluicemq.broker.lanes.table import Lanes
from sluicemq.broker.offsets import Offsets
from sluicemq.broker.pop.acknowledge import InFlightHandlers
from sluicemq.broker.pop.assignment import Assignments
from sluicemq.broker.pop.checkpoints import PopCheckpoints
from sluicemq.broker.pop.order import OrderedPops
from sluicemq.broker.produce.intake import MessageIntake
from sluicemq.broker.produce.producers import Producers
from sluicemq.broker.produce.relays import ClientRequests, ReplyHandlers
from sluicemq.broker.produce.send import SendHandlers
from sluicemq.broker.produce.send_back import SendBackHandlers
from sluicemq.broker.replication.in_sync import InSyncReplicas
from sluicemq.broker.replication.status import MeasureLag, RoleController
from sluicemq.broker.settings import Settings
from sluicemq.broker.topics import Groups, Topics
from sluicemq.broker.transactions.checks import TransactionChecker
from sluicemq.broker.transactions.transactions import Transactions
from sluicemq.broker.waiting.delivery import DelayedDelivery
from sluicemq.clock import SteadyClock
from sluicemq.model.ids import Host
from sluicemq.model.topic import LMQ_PREFIX
from sluicemq.net.dispatch import Peer, encode_response_to
from sluicemq.net.limits import FairScheduler
from sluicemq.net.work.background import Background, WorkItem
from sluicemq.store.directory import open_error
from sluicemq.store.store import Store
from sluicemq.store.timers.state import discard_timer_files
from sluicemq.supervision import Supervisor
from sluicemq.wire.frames import Command

log = logging.getLogger(__name__)

GROUPS_SHOWN: Final = 10
"""The number of groups that a log line names."""
INDEX_PAUSE_S: Final = 0.005
"""The pause between two slices of an index that is being rebuilt, so that messages go first."""
SEALED_AFTER_S: Final = 10.0
"""How long a topic must have been filtered before files of its property columns are written."""


class BrokerState:
    """The components of one broker in one role. `table.py` routes requests to them."""

    role_controller: RoleController | None = None
    """What decides the role of this broker with failover. None if the configuration decides it."""
    replication_side: Any = None
    """What runs here for the other replicas: a MasterSide, a SlaveSide, or None."""

    _clock_lead_ms = 0
    """How far the steady clock was ahead of the wall clock at the last check."""
    last_sample_s = math.inf
    """The monotonic time at which `run_every_second` last ran; inf while the broker does not serve.
    A probe recognizes by it that the event loop hangs."""

    def __init__(
        self,
        settings: Settings,
        store: Store,
        environment: BrokerEnvironment,
        *,
        in_sync: InSyncReplicas | None = None,
    ) -> None:
        """Create the components of a broker for an open store.

        They are empty: call `load` before they serve requests. `environment` has what they use of
        the process: files, clocks, threads and the event loop. `in_sync` tracks how far each slave
        of a master has the log; None if this broker is not a master.
        """
        self.settings = settings
        self.store = store
        self.files = environment.files
        self.clock = environment.clock
        self.in_sync = in_sync
        self.offload = environment.offload
        self._announce = environment.announce
        self.steady_clock = environment.steady_clock or SteadyClock(self.clock)
        """The clock for deadlines of waiting messages; it never goes back."""
        self.supervisor = environment.supervisor or Supervisor(self.clock, log)
        self.replica_lag: MeasureLag = lambda: (None, None)
        self.metric_collectors: list[Callable[[], Iterator[Any]]] = []
        """Further metrics of the process, such as those of a proxy in it."""
        settings.set_host(environment.host)

        # In the order in which they need each other.
        self._make_tables()
        self._make_loop_components(environment)
        self._make_consumer_components(environment)
        self._make_store_components(environment)
        for document in self.offset_documents:
            document.use_identity_file(store)
        self._make_watchers()

    def _make_tables(self) -> None:
        """Create the components that are tables: topics, groups, offsets, filters and clients."""
        settings = self.settings
        files = self.files
        clock = self.clock
        self.topics = Topics(settings, files, clock)
        self.groups = Groups(settings, files, clock)
        self.offsets = Offsets(settings, files, clock)
        self.filters = ConsumerFilters(settings, files, clock, self.store.columns.request_columns)
        self.guard = Guard.from_config(files, clock, settings.broker)
        self.access = Access(self.guard)
        self.held_bytes = ClientMemory(settings)
        self.producers = Producers(clock, self.held_bytes)
        self.locks = QueueLocks(files, settings.store.root, clock)
        self.random = Random()

    def _make_loop_components(self, environment: BrokerEnvironment) -> None:
        """Create the scheduler, background work, the group commit, and `self.context`.

        `self.context` has the components that most of the others use.
        """
        settings = self.settings
        self.scheduler = environment.scheduler or FairScheduler(
            self.clock.monotonic_s, environment.call_soon
        )
        self.background = Background(
            self.clock,
            self.scheduler,
            self.handle_outcome,
            environment.call_later,
            environment.compute,
        )
        self.group_commit = GroupCommit(
            self.store,
            self.clock,
            call_soon=environment.call_soon,
            announce=environment.announce,
            run_sync=environment.run_sync if settings.store.flush_sync else None,
            sync_timeout_s=settings.store.sync_flush_timeout_ms / 1000,
            gate=self.in_sync if settings.is_gated else None,
        )
        self.scheduler.before_round = self.group_commit.commit
        self.context = BrokerContext(
            settings=settings,
            store=self.store,
            topics=self.topics,
            groups=self.groups,
            offsets=self.offsets,
            group_commit=self.group_commit,
            background=self.background,
            scheduler=self.scheduler,
            files=self.files,
            clock=self.clock,
            steady_clock=self.steady_clock,
            call_soon=environment.call_soon,
            call_later=environment.call_later,
        )

    def _make_consumer_components(self, environment: BrokerEnvironment) -> None:
        """Create the components that answer consumers: polls, lanes, subscriptions and pulls."""
        settings = self.settings
        group_commit = self.group_commit
        self.polls = LongPolls(
            group_commit.queue_frame,
            group_commit.send_after_commit,
            group_commit.flush,
            settings.broker.parked_pulls_max,
            self.scheduler,
        )
        group_commit.wake = wake = self.polls.wake
        self.order = OrderedPops(self.context, wake)
        self.lanes = Lanes(self.context, wake=wake, offload=self.offload)
        self.contracts = Contracts(self.groups, settings, self.clock)
        self.consumers = Consumers(
            self.context,
            filters=self.filters,
            lanes=self.lanes,
            contracts=self.contracts,
            memory=self.held_bytes,
        )
        self.assignments = Assignments(
            self.context, consumers=self.consumers, look_up=environment.look_up
        )
        self.delivered = DeliveryStates(self.offsets.pulled_offsets)
        self.request_filters = RequestFilters()
        self.pull = PullHandlers(
            self.context,
            consumers=self.consumers,
            polls=self.polls,
            deliveries=self.delivered,
            filters=self.request_filters,
        )

    def _make_store_components(self, environment: BrokerEnvironment) -> None:
        """Create the components that store messages, and those that deliver waiting messages."""
        settings = self.settings
        store = self.store
        clock = self.clock
        self.intake = intake = MessageIntake(settings, store, self.group_commit)
        self.delayed = DelayedDelivery(
            settings,
            store,
            intake,
            self.group_commit,
            files=self.files,
            clock=self.steady_clock,
            call_soon=environment.call_soon,
            call_later=environment.call_later,
            jobs=self.supervisor,
        )
        self.checkpoints = PopCheckpoints(self.context, intake=intake, delayed=self.delayed)
        self.offsets.on_forget += [self.checkpoints.forget_deleted, self.contracts.forget_deleted]
        self.in_flight = InFlightHandlers(
            self.groups, self.checkpoints, self.order, self.steady_clock, self.background
        )
        self.transactions = Transactions(
            self.context,
            intake=intake,
            checker=TransactionChecker(self.producers, settings.broker.broker_name),
        )
        self.producers.on_join = self.transactions.note_join
        self.epochs = Epochs(
            self.context, intake=intake, run_sync=environment.run_sync, access=self.access
        )
        self.retries = SendBackHandlers(
            self.context,
            intake=intake,
            consumers=self.consumers,
            locks=self.locks,
            delivered=self.delivered,
            access=self.access,
        )
        self.send = SendHandlers(
            self.context, retries=self.retries, intake=intake, unique_ids=environment.unique_ids
        )
        self.client_requests = ClientRequests(clock)
        self.replies = ReplyHandlers(
            settings, self.topics, self.producers, intake, self.client_requests, clock
        )

    def _make_watchers(self) -> None:
        """Create the components that watch the others: lag, rates, retention, runtime info."""
        self.unread_monitor = UnreadMonitor(self.offsets, self.store, self.clock)
        self.rates = CounterHistory()
        self.midnight_counters = MidnightCounters()
        self.retention = RetentionHandlers(self.context, self.unread_monitor)
        self.filter_watch = FilterHandlers(
            self.context,
            consumers=self.consumers,
            filters=self.filters,
            deliveries=self.delivered,
            unfinished=self.in_flight.count_unfinished,
        )
        self.runtime = RuntimeInfo(
            self.context,
            send=self.send,
            pull=self.pull,
            polls=self.polls,
            rates=self.rates,
            midnight_counters=self.midnight_counters,
            extra_collectors=(self.delayed.get_runtime_info, self.filter_watch.runtime_info),
        )

    # --- deleted topics

    def _follow_topics(self) -> None:
        """Connect the tables, so that deleting or creating a topic updates its groups' offsets.

        Also repeat what a crash may have prevented. Topics with offsets that do not exist are
        remembered as deleted. Groups of a deleted topic that was created again are reset to its
        first message.
        """
        self.topics.on_created = self._on_topic_created
        self.topics.on_removed = self._on_topic_removed
        self.offsets.mark_missing_as_deleted(
            lambda topic: topic in self.topics or topic.startswith(LMQ_PREFIX)
        )
        for name in [*self.offsets.groups_by_deleted_topic]:
            if name in self.topics:
                self._reset_groups_of_recreated_topic(name)

    def _on_topic_created(self, name: str) -> None:
        """Forget offsets that are left of a deleted topic of this name, and reset its groups."""
        if name in self.offsets.groups_by_deleted_topic:
            self.offsets.forget(topic=name)
            self._reset_groups_of_recreated_topic(name)

    def _reset_groups_of_recreated_topic(self, name: str) -> None:
        """Reset each group that had consumed the deleted topic `name` to offset 0 of its queues.

        The topic was created again. Without the reset, the groups would continue at their old
        offsets and miss messages. The reset is the same as one by an operator. The names of the
        groups are logged.
        """
        groups = self.offsets.take_groups_of_deleted(name)
        for group in groups:
            for queue_id in range(self.topics.table[name].config.read_queues):
                if not self.lanes.reset_queue(group, name, queue_id, 0):
                    self.offsets.reset(group, name, queue_id, 0)
        if groups:
            log.info(
                "Topic %s was deleted and created again. %d groups that consumed it start at its "
                "first message: %s",
                name,
                len(groups),
                ", ".join(groups[:GROUPS_SHOWN]),
            )

    def _on_topic_removed(self, name: str) -> None:
        """Answer the requests that are parked for a deleted topic.

        Also forget what pulls noted about its offsets.
        """
        self.polls.answer_deleted_topic(name)
        self.delivered.forget_topic(name)

    # --- loading and documents

    def _apply_settings(self) -> None:
        """Update the values that other components have computed from the settings."""
        slow_ms = self.settings.broker.slow_request_ms
        slow_s = slow_ms / 1000 if slow_ms else math.inf
        self.scheduler.slow_s = self.group_commit.slow_commit_s = slow_s

    def load(self) -> None:
        """Read all tables from their files, and apply the settings to the components.

        The files of topics, groups and pop checkpoints are written if loading has changed them.
        Blocks, so it runs on another thread. Raises StoreDamagedError for a damaged file,
        ConfigurationError for invalid access rules, and StoreError for an error of the file system.
        """
        self.settings.add_listener(self._apply_settings)
        self._apply_settings()
        try:
            self._load_tables()
        except OSError as error:
            raise open_error(self.settings.store.root, error) from error

    def _load_tables(self) -> None:
        """Load all components in the order in which they need each other.

        A slave loads only the tables, because its master does all other work. Raises the errors of
        `load`, and OSError.
        """
        store = self.store
        is_read_only = self.settings.is_read_only
        is_slave = self.settings.is_slave
        if self.guard is not None:
            self.guard.load()
        self.topics.load()
        if not (is_read_only or is_slave):
            self.topics.adopt_stored_topics(self._list_used_queues())
        self.groups.load()
        self.offsets.load()
        self.order.load()
        self.assignments.load()
        self.lanes.load()
        self.filters.load()
        self.locks.load()

        if is_slave:
            # The other jobs belong to the master, and only the master's files are written.
            discard_timer_files(store, self.files, self.settings.store.root)
            return
        if not is_read_only:
            self.offsets.clamp_to_queue_ends(self._find_queue_end)
        self.delayed.load()
        self.checkpoints.load()
        self.transactions.load()
        self.epochs.load()
        if is_read_only:
            readonly.add_missing_topics_and_groups(store, self.topics, self.groups, self.offsets)
        else:
            self._follow_topics()
        for document in (self.topics.document, self.groups.document, self.checkpoints.document):
            document.save()

    def _list_used_queues(self) -> list[tuple[str, int]]:
        """Return (topic, queue id) of each stored queue that has a message or has had one."""
        used_queues = []
        for topic, queue_id in self.store.queues():
            _, end_offset = self.store.queue_offsets(topic, queue_id)
            if end_offset:
                used_queues.append((topic, queue_id))
        return used_queues

    def _find_queue_end(self, topic: str, queue_id: int) -> int | None:
        """Return the end offset of a queue; None if the queue does not exist."""
        if not self.store.queue_exists(topic, queue_id):
            return None
        return self.store.committed_offset(topic, queue_id)

    @property
    def journaled_documents(self) -> tuple[Document, ...]:
        """The documents whose changes are each written to a journal before they are answered."""
        return self.topics.document, self.groups.document

    @property
    def offset_documents(self) -> tuple[Document, ...]:
        """The documents that contain offsets of queues or positions in the log of this store.

        Their content would be wrong with another store. So each of them has an identity file, by
        which the broker recognizes a file of another store or an old copy.
        """
        levels = self.delayed.levels
        return (
            self.offsets.document,
            self.offsets.resets_document,
            self.checkpoints.document,
            self.lanes.document,
            self.epochs.table.document,
            levels.document,
            levels.cancellations,
        )

    @property
    def documents(self) -> tuple[Document, ...]:
        """All documents, that is tables with a file, that a master saves."""
        return (
            *self.journaled_documents,
            self.offsets.document,
            self.offsets.resets_document,
            self.checkpoints.document,
            self.order.document,
            self.assignments.document,
            self.locks.document,
            self.lanes.document,
            self.filters.document,
            self.epochs.table.document,
            *self.delayed.documents,
        )

    # --- outcomes of handlers, connections

    def handle_outcome(self, outcome: object, command: Command, peer: Peer) -> None:
        """Handle the return value of a handler that is not an answer to be sent now.

        `command` is the request and `peer` is its connection. `outcome` is one of these:

        - Durable: the answer is sent after the group commit.
        - Parked: the request waits for messages. If too many requests wait, it is answered now.
        - Announced: the answer is sent after the change is saved and registered.
        - Postponed: the remaining steps run in the background.

        Raises TypeError for any other value. This function is hot.
        """
        if outcome.__class__ is Durable:
            self.group_commit.send_after_commit(peer, *outcome)
        elif isinstance(outcome, Parked):
            if not self.polls.park(outcome, peer):  # too many requests wait already
                answer = outcome.try_answer(outcome, True)
                assert not isinstance(answer, Durable), "the last attempt gives no message away"
                peer.write(answer or b"")
        elif isinstance(outcome, Announced):
            frame = b"" if command.is_oneway else encode_response_to(outcome.answer, command)
            self._announce(peer, frame)
        elif isinstance(outcome, Postponed):
            self.background.run_request(outcome.steps, command, peer)
        else:
            raise TypeError(f"unsupported handler result: {type(outcome).__name__}")

    def set_host(self, host: Host) -> None:
        """Use `host` as the address in stored records and message ids from now on."""
        self.settings.set_host(host)
        self.send.apply_settings()

    def on_disconnect(self, peer: Peer) -> None:
        """Forget everything about the closed connection `peer`.

        Its parked requests are dropped, and its client leaves its groups. The second part runs in
        the background.
        """
        self.polls.remove_connection(peer)
        self.client_requests.on_disconnect(peer)
        self.background.run_in_background(self._remove_client(peer))
        self.scheduler.remove(peer)
        if self.role_controller is not None:
            self.role_controller.disconnected(peer)

    def _remove_client(self, peer: Peer) -> WorkItem[None]:
        """Remove a closed connection from its groups, in steps: there may be thousands."""
        yield from self.consumers.remove_connection(peer)
        yield from self.producers.remove_connection(peer)

    # --- background jobs; for the meaning of a step see the module's docstring

    def flush(self) -> Iterator[float | Callable[[], object]]:
        """Yield the steps that flush the commit log and the consume queues to disk.

        A step is a function to run on another thread, or a pause in seconds (0 lets other work run
        between two slices). If the log has nothing to flush, the key index is flushed instead, if
        that is due.
        """
        if self.store.tick():
            yield self.store.sync
        elif self.store.keys.is_flush_due:
            yield self.store.keys.flush_due
        while self.store.is_flushing:
            yield 0
            if self.store.tick():
                yield self.store.sync

    def update_key_index(self) -> Iterator[float | Callable[[], object]]:
        """Add new records of the log to the key index, in slices, until the index is current.

        Yield after each slice a pause in seconds. Before the first slice, a function that loads
        NumPy may be yielded, to run on another thread.
        """
        keys = self.store.keys
        keys.catches_up_on_tick = False
        if keys.backlog_bytes and not keys.is_numpy_loaded:
            yield keys.load_numpy
        while not keys.catch_up():
            yield 0 if keys.is_nearly_current else INDEX_PAUSE_S

    def build_property_columns(self) -> Iterator[float | Callable[[], object]]:
        """Yield the steps that build property columns for the topics that are filtered.

        A property column has the values of one property of many messages, so that a filter need not
        read the messages. A step is a function to run on another thread, or a pause in seconds. A
        read-only broker writes no files of columns.
        """
        columns = self.store.columns
        if columns.has_work and not columns.is_loaded:
            yield columns.warm_up
        if not self.settings.is_read_only:
            yield from columns.seal_blocks(SEALED_AFTER_S)

    def sweep(self) -> None:
        """Run the periodic work of all components: deadlines, delayed messages, and checks.

        On a slave, only the deadlines of requests are handled. If a component fails, it is logged
        and pauses for a while, and the other components run. Called several times a second.
        """
        now_s = self.clock.monotonic_s()
        run_unless_pausing = self.supervisor.run_unless_pausing
        run_unless_pausing("parked pulls", lambda: self.polls.expire(now_s))
        run_unless_pausing("held answers", lambda: self.group_commit.expire(now_s))
        run_unless_pausing("requests to clients", lambda: self.client_requests.expire(now_s))
        run_unless_pausing("notices of members", self.consumers.notices.send_due)
        if self.settings.is_slave:
            return
        if self.in_sync is not None:
            run_unless_pausing("in-sync set", self.in_sync.tick)
        self.delayed.run_slice()
        run_unless_pausing("ordered pops", self.order.wake_free_queues)
        run_unless_pausing("epochs", self.epochs.run_slice)
        run_unless_pausing("transaction checks", self.transactions.run_slice)
        run_unless_pausing("filter watch", self.filter_watch.survey_if_due)

    def run_every_second(self) -> None:
        """Run the periodic work of the lanes, check the wall clock, and sample all counters.

        The samples give the rates that tools show. Called once a second.
        """
        self.supervisor.run_unless_pausing("lanes", self.lanes.run_periodic_work)
        self._check_wall_clock()
        counters = self.runtime.collect_counters()
        self.last_sample_s = self.clock.monotonic_s()
        self.rates.sample(self.last_sample_s, counters)
        self.midnight_counters.sample(self.clock.now_ms(), counters)
        self.runtime.period_counters.sample(
            self.clock.monotonic_s(), self.runtime.collect_statistics
        )

    def _check_wall_clock(self) -> None:
        """Log a warning if the wall clock was set back since the last call.

        `_clock_lead_ms` is updated, and the saved clock of delayed messages is marked as changed if
        the steady clock is ahead of it.
        """
        lead_ms = self.steady_clock.lead_ms
        self.delayed.saved_clock.mark_changed_if_ahead()
        if lead_ms > self._clock_lead_ms:
            log.warning(
                "The wall clock was set back by %d s. Waiting messages are still delivered on "
                "time. Searching by time gives wrong results until the wall clock has passed the "
                "newest message.",
                (lead_ms - self._clock_lead_ms) // 1000,
            )
        self._clock_lead_ms = lead_ms

    def expire_clients(self) -> None:
        """Close the connections of clients that have stopped sending heartbeats."""
        age_ms = self.settings.broker.client_expiry_ms
        for peer in {*self.consumers.expire(age_ms), *self.producers.expire(age_ms)}:
            peer.close()
