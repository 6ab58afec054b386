"""The name server as a process: its parts, and all of its asynchronous I/O.

`requests.py` answers every request from one table in memory. A timer removes brokers that have
stopped registering, and a closed connection removes the brokers that have registered over it.

Name servers do not know each other: a broker registers with each of them. They send no requests,
with one exception (notifyMinBrokerIdChanged): they notify replicas once which of them has the
smallest id now (NOTIFY_MIN_BROKER_ID_CHANGE, 905). A replica that cannot be notified finds out when
it asks by GET_BROKER_MEMBER_GROUP (901).
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from sluicemq.acl.guard import Guard, access_status
from sluicemq.clock import SYSTEM_CLOCK, Clock
from sluicemq.config import NameServerConfig
from sluicemq.errors import SluiceError
from sluicemq.files import SYSTEM_FILES, Files
from sluicemq.model.addresses import is_loopback
from sluicemq.nameserver.requests import TABLE, NameServerRequests
from sluicemq.nameserver.routes import RouteTable, SmallestIdChange, empty_in_slices
from sluicemq.net.accept import log_protected_mode
from sluicemq.net.channel import ChannelPool
from sluicemq.net.dispatch import Dispatcher, Handler, Outcome, Peer
from sluicemq.net.limits import CODES_WITH_MESSAGES, WORK_WEIGHT_MAX, FairScheduler, ServerLimits
from sluicemq.net.network import SOCKET_NETWORK, Network, with_tls
from sluicemq.net.work.background import Background, offload_to_executor
from sluicemq.supervision import Supervisor
from sluicemq.telemetry.health import event_loop_problems
from sluicemq.wire.codes import RequestCode
from sluicemq.wire.declare import encode_header
from sluicemq.wire.frames import Command
from sluicemq.wire.replicas import MinBrokerIdChangedRequest

log = logging.getLogger("sluicemq.nameserver")

CallSoon = Callable[[Callable[[], object]], object]
RULES_CHECK_S = 0.5
"""The interval at which the files with access rules are checked for changes."""

NOTIFY_TIMEOUT_S = 0.3
"""The timeout of a connection to a replica that is notified."""


class NameServer:
    """A name server: it tells clients which brokers have a topic.

    It serves clients from `start` to `close`. A test may use its `dispatcher` without sockets.
    """

    def __init__(
        self,
        config: NameServerConfig,
        *,
        clock: Clock = SYSTEM_CLOCK,
        files: Files = SYSTEM_FILES,
        network: Network = SOCKET_NETWORK,
        shares: FairScheduler | None = None,
    ) -> None:
        """Read the key-values from their file. The server does not listen before `start`.

        `network` opens the listener and the connections to replicas. `shares` is a fair scheduler
        that this server shares with other servers in the same event loop; None means that it
        creates one.

        Raises StoreDamagedError if the key-values cannot be read, and ConfigurationError if access
        control is enabled without a file.
        """
        self._clock = clock
        table = RouteTable(config.registered_topics_max)
        self.requests = NameServerRequests(config, files, table, self._now_ms())
        # The event loop does not run yet, so it is looked up at each call.
        call_soon: CallSoon = lambda run: asyncio.get_running_loop().call_soon(run)  # noqa: E731
        self._shares = shares or FairScheduler(clock.monotonic_s, call_soon)
        self._background = Background(clock, self._shares)
        self.requests.free_topics = lambda topics: self._background.run_in_background(
            empty_in_slices(topics)
        )
        self._decoder = ThreadPoolExecutor(1, "sluice-registrations")
        self.guard = Guard.from_config(files, clock, config)
        self.dispatcher = self._make_dispatcher()
        network = with_tls(network, None, config)
        self._pool = ChannelPool(timeout_s=NOTIFY_TIMEOUT_S, clock=clock, connect=network.dial)
        self._notices: set[asyncio.Task[None]] = set()
        self.requests.table.on_smallest_changed = self._notify
        self._server = network.listener(
            self.dispatcher,
            on_disconnect=self.on_disconnect,
            limits=ServerLimits.from_config(config),
        )
        self._timer: asyncio.TimerHandle | None = None
        self._rules_watch: asyncio.Task[None] | None = None
        self._closing = False
        self._jobs = Supervisor(clock, log)
        self._swept_ms = self._now_ms()

    def _make_dispatcher(self) -> Dispatcher:
        """Return the dispatcher that calls the handler of each request.

        It checks access rules if access control is configured.
        """

        def handle(command: Command, peer: Peer) -> Outcome:
            return self.requests.handle(command, peer, self._now_ms())

        handlers: dict[int, Handler] = {
            **dict.fromkeys(TABLE, handle),
            RequestCode.SLUICE_ACCESS_STATUS: lambda _command, _peer: access_status(self.guard),
        }
        return Dispatcher(
            handlers,
            # With the maximum weight, a connection has one such request at a time: each may contain
            # a hundred thousand topics.
            handle_outcome=partial(self._background.run_request, weight=WORK_WEIGHT_MAX),
            scheduler=self._shares,
            authorize=None if self.guard is None else self.guard.refuse_command,
            codes_with_messages=CODES_WITH_MESSAGES,
        )

    @property
    def port(self) -> int:
        """The port on which the server listens.

        If the configured port is 0, the operating system has chosen this one. Available after
        `start`.
        """
        return self._server.ports[0]

    async def start(self) -> None:
        """Load the access rules, listen for connections, and start the timers.

        The timers remove expired brokers and check the files of access rules for changes. The
        listening address is logged, with a warning if the server is not protected. Raises
        ConfigurationError if the port is in use or the access rules are not valid.
        """
        self._background.offload = offload_to_executor(self._decoder, computes=True)
        self._background.call_later = asyncio.get_running_loop().call_later
        if self.guard is not None:
            self.guard.load()
            watch = self._jobs.repeat(
                "access rules", lambda: RULES_CHECK_S, self._reload_changed_rules
            )
            self._rules_watch = asyncio.get_running_loop().create_task(watch)
        config = self.requests.config
        await self._server.start(config.listen_address, [config.listen_port])
        log.info("name server is listening on %s:%d", config.listen_address, self.port)
        log_protected_mode(config)
        self._warn_of_exposure()
        self._sweep()

    def _warn_of_exposure(self) -> None:
        """Log a warning if clients on other machines can change routes without authentication.

        They cannot if access control, protected mode or required client certificates protect the
        server, or if it listens only on this machine.
        """
        config = self.requests.config
        is_mutual = config.tls_mode == "enforcing" and config.tls_client_auth == "require"
        is_open = not (config.acl_enable or config.is_protected or is_mutual)
        if is_open and not is_loopback(config.listen_address):
            log.warning(
                "This name server is not protected: every client that can reach %s:%d can register "
                "a broker, remove its write permission, or delete a route. Set aclEnable = true, "
                "require client certificates, or listen on 127.0.0.1.",
                config.listen_address,
                self.port,
            )

    async def close(self) -> None:
        """Stop the timers and the listener, and close all connections.

        The brokers that lose their connection by this are not logged.
        """
        self._closing = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._rules_watch is not None:
            self._rules_watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._rules_watch
            self._rules_watch = None
        await self._server.close()
        await self._pool.close()
        self._decoder.shutdown(wait=False, cancel_futures=True)

    def remove_expired(self) -> None:
        """Remove brokers that have not registered in time, log them, and close their connections.

        Their topics are removed in the background after this method returns.
        """
        expired = self.requests.table.find_expired(self._now_ms())
        self._background.run_in_background(self.requests.table.unregister_lost(expired))
        for broker in expired:
            log.warning(
                "broker %s at %s has not registered for %d ms; removing it",
                broker.broker,
                broker.address,
                broker.timeout_ms,
            )
            if isinstance(broker.connection, Peer):
                broker.connection.close()

    def unhealthy(self) -> list[str]:
        """Return the reasons for which the process should be restarted; [] if it is healthy.

        The event loop is blocked if the timer that removes expired brokers is late. May be called
        in any thread.
        """
        late_ms = self._now_ms() - self._swept_ms - self.requests.config.scan_interval_ms
        return event_loop_problems(late_ms / 1000)

    def unready(self) -> list[str]:
        """Return the reasons for which clients should use another server now; [] if it is ready.

        May be called in any thread.
        """
        wait_ms = self.requests.remaining_wait_ms(self._now_ms())
        if not wait_ms:
            return []
        return [f"routes are refused for another {wait_ms} ms (needWaitForService)."]

    def on_disconnect(self, peer: Peer) -> None:
        """Remove the brokers that registered over a connection, because it was closed.

        Their topics are removed in the background. The brokers are logged, unless the server is
        closing. The connection is also removed from the scheduler.
        """
        lost = self.requests.table.registered_by(peer)
        self._background.run_in_background(self.requests.table.unregister_lost(lost))
        self._shares.remove(peer)
        if self._closing:
            return
        for broker in lost:
            log.warning(
                "the connection of broker %s at %s was closed; removing it",
                broker.broker,
                broker.address,
            )

    def _notify(self, change: SmallestIdChange) -> None:
        """Tell replicas that another replica of their broker has the smallest id.

        NOTIFY_MIN_BROKER_ID_CHANGE is sent one-way to each of `change.notified_addresses`, in a
        task of its own. Errors are ignored. The change is logged. Do nothing if the setting
        `notify_smallest_id` is off or the server is closing.
        """
        if not self.requests.config.notify_smallest_id or self._closing:
            return
        fields = encode_header(
            MinBrokerIdChangedRequest(
                broker_id=change.broker_id,
                address=change.address,
                offline_address=change.offline_address,
                ha_address=change.ha_address,
            )
        )

        log.info(
            "id %d at %s is the smallest now; notifying %s",
            change.broker_id,
            change.address,
            ", ".join(change.notified_addresses),
        )
        for address in change.notified_addresses:
            notice = asyncio.get_running_loop().create_task(self._send_notice(address, fields))
            self._notices.add(notice)
            notice.add_done_callback(self._notices.discard)

    async def _send_notice(self, address: str, fields: dict[str, str]) -> None:
        """Send NOTIFY_MIN_BROKER_ID_CHANGE with these fields to a replica; ignore errors."""
        with contextlib.suppress(SluiceError):
            channel = await self._pool.get(address)
            channel.send_oneway(Command(RequestCode.NOTIFY_MIN_BROKER_ID_CHANGE, fields))

    async def _reload_changed_rules(self) -> None:
        """Apply the access rules of files that were edited, as a whole and between two requests.

        The files are read in another thread. Does nothing without access control.
        """
        if self.guard is not None:
            self.guard.apply_checked_files(await asyncio.to_thread(self.guard.check_files))

    def _sweep(self) -> None:
        """Remove expired brokers, and schedule the next call in `scan_interval_ms`.

        The time of the call is recorded, because a late call shows that the server is unhealthy.
        """
        interval_s = self.requests.config.scan_interval_ms / 1000
        self._timer = asyncio.get_running_loop().call_later(interval_s, self._sweep)
        self._swept_ms = self._now_ms()
        self._jobs.run_unless_pausing("broker expiry", self.remove_expired)

    def _now_ms(self) -> int:
        """Return the time of the monotonic clock, in ms."""
        return int(self._clock.monotonic_s() * 1000)
