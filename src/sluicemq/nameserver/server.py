"""The name server: its parts put together, and the only place here that waits.

Everything is decided by `requests.py` on one table in memory; a timer
removes brokers that have stopped registering, and a closed connection removes its brokers at once.
Name servers know nothing of each other: a broker registers with each. They call nobody, but for
notifyMinBrokerIdChanged: then replicas hear who of them is the smallest (905), once, and those that
cannot be told find out by asking (901).
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
from sluicemq.nameserver.requests import TABLE, Requests
from sluicemq.nameserver.routes import RouteTable, SmallestChanged, drained
from sluicemq.net.accept import log_protected_mode
from sluicemq.net.channel import ChannelPool
from sluicemq.net.dispatch import Dispatcher, Peer
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
LOOK_S = 0.5
NOTIFY_S = 0.3


class NameServer:
    """Tells clients where topics live.

    `start` and `close` bracket its life; `dispatcher` can be served without sockets as well.
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
        """Read the key-value configuration. `shares` are those of other servers on the same loop.

        Raises StoreDamagedError when the key-values are broken, ConfigurationError when access
        control is on without a file.
        """
        self._clock = clock
        table = RouteTable(config.registered_topics_max)
        self.requests = Requests(config, files, table, self._now_ms())
        call_soon: CallSoon = lambda run: asyncio.get_running_loop().call_soon(run)  # noqa: E731
        self._shares = shares or FairScheduler(clock.monotonic_s, call_soon)
        self._background = Background(clock, self._shares)
        self.requests.drop = lambda topics: self._background.run_in_background(drained(topics))
        self._decoder = ThreadPoolExecutor(1, "sluice-registrations")
        self.guard = Guard.from_config(files, clock, config)
        self.dispatcher = Dispatcher(
            {
                **dict.fromkeys(
                    TABLE, lambda command, peer: self.requests.begin(command, peer, self._now_ms())
                ),
                RequestCode.SLUICE_ACCESS_STATUS: lambda _command, _peer: access_status(self.guard),
            },
            # One at a time of a connection: a hundred thousand topics may wait in each.
            handle_outcome=partial(self._background.run_request, weight=WORK_WEIGHT_MAX),
            scheduler=self._shares,
            authorize=None if self.guard is None else self.guard.refuse_command,
            codes_with_messages=CODES_WITH_MESSAGES,
        )
        network = with_tls(network, None, config)
        self._pool = ChannelPool(timeout_s=NOTIFY_S, clock=clock, connect=network.dial)
        self._notices: set[asyncio.Task[None]] = set()
        self.requests.table.on_smallest_changed = self._notify
        self._server = network.listener(
            self.dispatcher,
            on_disconnect=self.disconnected,
            limits=ServerLimits.from_config(config),
        )
        self._timer: asyncio.TimerHandle | None = None
        self._watch: asyncio.Task[None] | None = None
        self._closing = False
        self._jobs = Supervisor(clock, log)
        self._swept_ms = self._now_ms()

    @property
    def port(self) -> int:
        """The port it listens at: the one that was free when the configured one is 0."""
        return self._server.ports[0]

    async def start(self) -> None:
        """Listen. Raises ConfigurationError when the port is taken or access rules are wrong."""
        self._background.offload = offload_to_executor(self._decoder, computes=True)
        self._background.call_later = asyncio.get_running_loop().call_later
        if self.guard is not None:
            self.guard.load()
            watch = self._jobs.repeat("access rules", lambda: LOOK_S, self._look_at_rules)
            self._watch = asyncio.get_running_loop().create_task(watch)
        config = self.requests.config
        await self._server.start(config.listen_address, [config.listen_port])
        log.info("name server listens at %s:%d", config.listen_address, self.port)
        log_protected_mode(config)
        self._warn_of_exposure()
        self._sweep()

    def _warn_of_exposure(self) -> None:
        """Log who could change routes, if the name server checks nothing and others reach it."""
        config = self.requests.config
        is_mutual = config.tls_mode == "enforcing" and config.tls_client_auth == "require"
        is_open = not (config.acl_enable or config.is_protected or is_mutual)
        if is_open and not is_loopback(config.listen_address):
            log.warning(
                "This name server is not protected: whoever reaches %s:%d can register a broker, "
                "take write permission from one, or delete a route. Set aclEnable = true, require "
                "client certificates, or listen on 127.0.0.1.",
                config.listen_address,
                self.port,
            )

    async def close(self) -> None:
        """Stop; all connections are closed on return."""
        self._closing = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._watch is not None:
            self._watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watch
            self._watch = None
        await self._server.close()
        await self._pool.close()
        self._decoder.shutdown(wait=False, cancel_futures=True)

    def tick(self) -> None:
        """Remove brokers that have been silent too long, and close their connections."""
        expired = self.requests.table.expire(self._now_ms())
        self._background.run_in_background(self.requests.table.forgetting(expired))
        for broker in expired:
            log.warning(
                "broker %s at %s has not registered for %d ms and is removed",
                broker.broker, broker.address, broker.timeout_ms,
            )  # fmt: skip
            if isinstance(broker.connection, Peer):
                broker.connection.close()

    def unhealthy(self) -> list[str]:
        """Why the process ought to be started anew. Any thread may ask."""
        still_ms = self._now_ms() - self._swept_ms - self.requests.config.scan_interval_ms
        return event_loop_problems(still_ms / 1000)

    def unready(self) -> list[str]:
        """Why clients are better served elsewhere for now. Any thread may ask."""
        wait_ms = self.requests.wait_ms(self._now_ms())
        return [f"routes are refused for {wait_ms} ms more (needWaitForService)."] * (wait_ms > 0)

    def disconnected(self, peer: Peer) -> None:
        """A connection is gone, and with it the brokers that registered over it."""
        lost = self.requests.table.registered_by(peer)
        self._background.run_in_background(self.requests.table.forgetting(lost))
        self._shares.remove(peer)
        for broker in () if self._closing else lost:
            log.warning(
                "broker %s at %s is removed: its connection closed", broker.broker, broker.address
            )

    def _notify(self, change: SmallestChanged) -> None:
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

        async def tell(address: str) -> None:
            with contextlib.suppress(SluiceError):
                command = Command(RequestCode.NOTIFY_MIN_BROKER_ID_CHANGE, fields)
                (await self._pool.get(address)).send_oneway(command)

        log.info("id %d at %s is the smallest now; telling %s", *change[:2], ", ".join(change.told))
        for address in change.told:
            notice = asyncio.get_running_loop().create_task(tell(address))
            self._notices.add(notice)
            notice.add_done_callback(self._notices.discard)

    async def _look_at_rules(self) -> None:
        """Take up an edit of plain_acl.yml as a whole, between two requests."""
        if self.guard is not None:
            self.guard.apply_checked_files(await asyncio.to_thread(self.guard.check_files))

    def _sweep(self) -> None:
        interval_s = self.requests.config.scan_interval_ms / 1000
        self._timer = asyncio.get_running_loop().call_later(interval_s, self._sweep)
        self._swept_ms = self._now_ms()
        self._jobs.run_unless_pausing("broker expiry", self.tick)

    def _now_ms(self) -> int:
        return int(self._clock.monotonic_s() * 1000)
