"""A replica whose broker is a running `Broker`: its role executor, its start and its end."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from sluicemq.acl.rules import Account
from sluicemq.broker.failover.consensus import Consensus
from sluicemq.broker.failover.election import INCOMPLETE
from sluicemq.broker.failover.forward import FORWARDED_CODES, READ_CODES, Forwarder
from sluicemq.broker.failover.replica import LEASE_S, BrokerClosedError, Replica
from sluicemq.broker.failover.role_executor import LogEnd
from sluicemq.broker.replication.in_sync import InSyncReplicas, Term
from sluicemq.broker.replication.sides import SlaveSide
from sluicemq.broker.server import Broker
from sluicemq.config import BrokerConfig, StoreConfig
from sluicemq.errors import SluiceError
from sluicemq.files import SYSTEM_FILES, Files
from sluicemq.files.incarnation import Incarnation
from sluicemq.net.dispatch import Dispatcher, FastHandler, Handler, Peer, RunEngine
from sluicemq.net.network import SOCKET_NETWORK, Network, with_tls
from sluicemq.net.tls import broker_client_tls
from sluicemq.wire.frames import Command

_Handlers = tuple[dict[int, Handler], dict[int, FastHandler], RunEngine | None]
"""The handlers, fast handlers and engine of a dispatcher."""


class BrokerRoleExecutor:
    """The `RoleExecutor` of a running broker.

    At two times the broker must answer no request that needs a master, although its port is open:
    a master that hands over accepts no messages, and a new master returns nothing before its whole
    log is confirmed, because a consumer could otherwise see a queue end before its own offset. Such
    requests are queued, and handled in their order afterwards. If the role ends first, they are
    dropped with their connections.
    """

    broker: Broker

    def __init__(self) -> None:
        """Create the executor, without a broker.

        Before the broker starts, the function `start_replica` sets the attribute `broker`.
        """
        self._dispatcher: Dispatcher
        """Handles the requests in the present role. `on_role_opening` sets it."""
        self._handlers_before_pause: _Handlers | None = None
        """The dispatcher's handlers from before the pause; None if requests are not paused."""
        self._queued_requests: list[tuple[Command, Peer, Account | None]] = []
        """The requests that came during the pause, with the client and account of each."""

    def on_role_opening(self, dispatcher: Dispatcher) -> None:
        """Use `dispatcher`, which handles the requests of the role that begins.

        The broker calls this before it opens its port in a new role. Requests that were queued in
        the last role are dropped. If the broker is a master, requests are queued until enough
        slaves have the whole log.
        """
        self._dispatcher = dispatcher
        self._handlers_before_pause = None
        self._queued_requests = []
        if (in_sync := self.broker.in_sync) is not None:
            self.pause_requests(True)

            def on_confirmed(result: int | BaseException) -> None:
                # The log becomes visible in the loop iteration after its confirmation.
                loop = asyncio.get_running_loop()
                loop.call_soon(self.on_log_confirmed, dispatcher, result)

            in_sync.wait(in_sync.local_end(), on_confirmed)

    def on_log_confirmed(self, dispatcher: Dispatcher, confirmed: int | BaseException) -> None:
        """Resume the requests of a new master whose log is confirmed.

        `confirmed` is the confirmed position. Do nothing if it is an error, which means that the
        master was deposed, or if the broker has another dispatcher, and so another role, by now.
        """
        is_deposed = isinstance(confirmed, BaseException)
        if dispatcher is self._dispatcher and not is_deposed:
            self.pause_requests(False)

    @property
    def address(self) -> str:
        """The host:port that clients connect to."""
        return self.broker.address

    @property
    def ha_address(self) -> str:
        """The host:port that slaves connect to."""
        return self.broker.registration.ha_address

    @property
    def log_end(self) -> LogEnd:
        """The term in which the end of the broker's log was written, and the position of the end.

        The term is 0 if no term is known. The position is INCOMPLETE instead if the disk has
        failed, or if this is a slave that does not have all tables of its master. Such a broker
        must not become the master.
        """
        terms = self.broker.log_terms
        side = self.broker.replication_side
        term = max(terms.last.number, 0) if terms is not None else 0
        is_complete = not self.has_failed_disk and (
            not isinstance(side, SlaveSide) or side.check_complete()
        )
        return LogEnd(term, self.broker.store.written_offset if is_complete else INCOMPLETE)

    @property
    def in_sync(self) -> InSyncReplicas | None:
        """The replication gate of a master; None in every other role."""
        return self.broker.in_sync

    @property
    def has_failed_disk(self) -> bool:
        """Whether the store cannot be written until the broker is restarted."""
        return self.broker.store.failure is not None

    async def change_role(self, term: Term, run_id: str) -> None:
        """Make the broker the master of `term`, or a slave of the master of `term`.

        If `term` has no master, a slave only stops copying the log, and keeps serving. In all other
        cases the broker closes, and opens again in the new role. `run_id` is the new id of this run
        of the replica. Raises BrokerClosedError if the broker could not open again.
        """
        side = self.broker.replication_side
        if not term.master_id and isinstance(side, SlaveSide):
            side.stop_following()
            return
        self.broker.identity = self.broker.identity._replace(run_id=run_id)
        try:
            await self.broker.change_role(term if term.master_id else None)
        except (SluiceError, OSError) as error:
            raise BrokerClosedError(f"the broker could not change its role: {error}") from error

    def update_term(self, term: Term) -> None:
        """Give the master `term`, the present state of its term, as the end of its proposal.

        The broker is the master in this term already.
        """
        self.broker.update_term(term)

    def depose(self, reason: str) -> None:
        """Make the master stop confirming messages and making messages visible."""
        self.broker.depose(reason)

    def pause_requests(self, is_paused: bool) -> None:
        """Begin to queue the requests that need a master, or end that and handle the queued ones.

        If `is_paused` is true, requests with FORWARDED_CODES and READ_CODES are queued from now on.
        The dispatcher's handlers of these codes are replaced by `queue_request`. Its fast handlers
        and its engine are switched off, because they would handle such requests directly.

        If `is_paused` is false, the handlers are restored. Then the queued requests are handled in
        their order, each with the account that sent it, and the answers are written. Requests of
        clients that have disconnected are dropped.

        Do nothing if the pause has begun, or ended, already.
        """
        dispatcher = self._dispatcher
        if is_paused and self._handlers_before_pause is None:
            self._handlers_before_pause = (
                dispatcher.handlers,
                dispatcher.fast_handlers,
                dispatcher.run_engine,
            )
            codes = map(int, FORWARDED_CODES | READ_CODES)
            queueing_handlers = dict.fromkeys(codes, self.queue_request)
            dispatcher.handlers = {**dispatcher.handlers, **queueing_handlers}
            dispatcher.fast_handlers = {}
            dispatcher.run_engine = None
        elif not is_paused and self._handlers_before_pause is not None:
            dispatcher.handlers, dispatcher.fast_handlers, dispatcher.run_engine = (
                self._handlers_before_pause
            )
            self._handlers_before_pause = None
            self._handle_queued_requests()

    def _handle_queued_requests(self) -> None:
        """Handle the queued requests in their order, and write the answers to the clients.

        Each is handled with the access rights of the account that sent it. Requests of clients that
        have disconnected are dropped.
        """
        queued_requests = self._queued_requests
        self._queued_requests = []
        for command, peer, account in queued_requests:
            if peer.closed:
                continue
            guard = self.broker.core.guard
            if guard is not None:
                guard.account = account
            peer.write(self._dispatcher.handle_command(command, peer))

    def queue_request(self, command: Command, peer: Peer) -> None:
        """Queue a request with the account that sent it. Return None: it is answered later."""
        guard = self.broker.core.guard
        self._queued_requests.append((command, peer, None if guard is None else guard.account))

    def handle_one_way(self, command: Command, peer: Peer) -> None:
        """Handle a one-way command in the broker's present role, and discard the answer."""
        self._dispatcher.handle_command(command, peer)


async def start_replica(
    config: BrokerConfig,
    store_config: StoreConfig,
    consensus: Consensus,
    *,
    role_executor: BrokerRoleExecutor | None = None,
    files: Files = SYSTEM_FILES,
    network: Network = SOCKET_NETWORK,
    boot: str | None = None,
    lease_s: float = LEASE_S,
    make_run_id: Callable[[], str] | None = None,
    **parts: Any,
) -> tuple[Replica, Broker]:
    """Start a broker whose role a consensus service decides (the setting sluiceConsensus).

    Return its Replica, which changes the role, and the Broker. The broker is a slave without a
    master until the caller runs `Replica.run`.

    `role_executor` connects the two; None means a new one. `boot` is the id of the machine's boot;
    None means that it is read from the system. `lease_s` is the time to live of the replica's lease
    in seconds. `make_run_id` returns a new unique id of a run; None means random ids. `parts` are
    further arguments of `Broker`.

    Raises SluiceError if the broker cannot start.
    """
    incarnation = Incarnation(files, store_config.root, boot=boot)
    role_executor = role_executor or BrokerRoleExecutor()
    forwarder = Forwarder(with_tls(network, broker_client_tls(config), config).dial)
    replica_options: dict[str, Any] = {}
    if make_run_id is not None:
        replica_options["make_run_id"] = make_run_id
    replica = Replica(
        role_executor,
        consensus,
        cluster=config.cluster_name,
        broker=config.broker_name,
        replica_id=config.broker_id,
        incarnation=incarnation,
        forwarder=forwarder,
        serves_reads=config.slave_read,
        lease_s=lease_s,
        **replica_options,
    )
    broker = role_executor.broker = Broker(
        config,
        store_config,
        files=files,
        network=network,
        propose=replica.propose,
        role_controller=replica,
        incarnation=incarnation,
        **parts,
    )
    broker.on_opening = role_executor.on_role_opening
    forwarder.handle_one_way = role_executor.handle_one_way
    await broker.start()

    # `sign` uses the credentials of the configuration in every role.
    forwarder.sign = broker.registration.sign
    forwarder.get_guard = lambda: broker.core.guard
    broker.identity = broker.identity._replace(incarnation=incarnation.text, run_id=replica.run_id)
    return replica, broker


@contextlib.asynccontextmanager
async def run_replica(
    config: BrokerConfig, store_config: StoreConfig, consensus: Consensus, **parts: Any
) -> AsyncIterator[tuple[Replica, Broker]]:
    """Run a broker whose role a consensus service decides, while the `async with` block runs.

    Yield its Replica and the Broker. At the end, a master hands over to another replica, and the
    broker closes. The arguments are those of `start_replica`.

    Raises SluiceError if the broker cannot start. If the replica fails later, the block is
    cancelled, and the SluiceError of the replica is raised.
    """
    replica, broker = await start_replica(config, store_config, consensus, **parts)
    try:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(replica.run())
            yield replica, broker
            task.cancel()
    except* SluiceError as errors:
        raise errors.exceptions[0] from None
    finally:
        await replica.close()
        await broker.close()
