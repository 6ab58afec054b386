"""The broker that a slave opens to act for its unreachable master (`enableSlaveActingMaster`).

It is opened over an overlay in memory of the slave's files, so that nothing it does changes them.
`replication/acting.py` decides when it is opened, and moves its messages to other brokers. This
module builds it from the components of the slave, and hands it the ends of transactions
(END_TRANSACTION, 37) that producers send meanwhile.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from sluicemq.broker.context import BrokerEnvironment
from sluicemq.broker.replication.acting import (
    SEND_S,
    ActingBroker,
    ActingMaster,
    EscapeBridge,
    fetch_escaped,
)
from sluicemq.broker.settings import Settings
from sluicemq.broker.state import BrokerState
from sluicemq.errors import SluiceError
from sluicemq.files import Files
from sluicemq.files.overlay import overlay
from sluicemq.model.ids import UniqueIds
from sluicemq.model.topic import MASTER_ID
from sluicemq.net.channel import ChannelPool
from sluicemq.net.dispatch import Dispatcher, Handler, Peer
from sluicemq.store.store import Store
from sluicemq.wire.bodies import decode_broker_member_group
from sluicemq.wire.codes import RequestCode, ResponseCode
from sluicemq.wire.declare import encode_header
from sluicemq.wire.frames import Command
from sluicemq.wire.replicas import GetBrokerMemberGroupRequest


@dataclass(slots=True)
class ActingMasterContext:
    """What an acting master needs from the slave that opens it."""

    core: BrokerState
    """The components of the slave."""
    files: Files
    pool: ChannelPool
    """Connections to other brokers and to name servers."""
    name_servers: Iterable[str]
    """The addresses of the name servers."""
    sign: Callable[[Command], Command]
    """Signs a request with the credentials of the broker."""
    look_up: Callable[[str, Callable[[Command | None], None]], None]
    """Calls back with the answer of a name server to a route request for a topic, or None."""
    in_executor: Callable[[Callable[[], Any]], Awaitable[Any]]
    """Runs blocking work on another thread."""
    make_dispatcher: Callable[[BrokerState], Dispatcher]
    """Creates a dispatcher for the components of a broker."""
    current_dispatcher: Callable[[], Dispatcher]
    """Returns the dispatcher of the slave."""
    replaced_handler: Handler | None = None
    """The slave's handler of END_TRANSACTION while the acting master replaces it."""

    async def call(self, address: str, command: Command, timeout_s: float) -> Command:
        """Send a signed request to `address`, and return the answer.

        Raises SluiceError if the broker cannot be reached or does not answer within `timeout_s`.
        """
        return await (await self.pool.get(address)).call(self.sign(command), timeout_s)

    async def fetch_route(self, topic: str) -> Command | None:
        """Return a name server's answer to GET_ROUTEINFO_BY_TOPIC (105); None if none answers."""
        future: asyncio.Future[Command | None] = asyncio.get_running_loop().create_future()
        self.look_up(topic, lambda answer: None if future.done() else future.set_result(answer))
        return await future

    async def fetch_members(self) -> Mapping[int, str] | None:
        """Return the live brokers of the same name, as addresses by broker id.

        The first name server that answers GET_BROKER_MEMBER_GROUP (901) is used. Return None if
        none does.
        """
        config = self.core.settings.broker
        header = GetBrokerMemberGroupRequest(cluster=config.cluster_name, broker=config.broker_name)
        for address in self.name_servers:
            with contextlib.suppress(SluiceError):
                command = Command(RequestCode.GET_BROKER_MEMBER_GROUP, encode_header(header))
                answer = await self.call(address, command, SEND_S)
                if answer.code == ResponseCode.SUCCESS:
                    return decode_broker_member_group(answer.body).addresses
        return None

    async def fetch_escaped(self) -> list[tuple[str, str]]:
        """Return what the slaves have delivered for this master while it was down.

        A master that starts must not deliver these messages again. See `ask_escaped`.
        """
        members = await self.fetch_members() or {}
        slaves = [address for broker_id, address in members.items() if broker_id != MASTER_ID]
        return await fetch_escaped(slaves, self.call)

    def make_acting(self) -> ActingMaster:
        """Create the component of a slave that decides when it acts for its master."""
        config = self.core.settings.broker
        return ActingMaster(
            config.broker_id,
            open_broker=self.open_acting_master,
            close_broker=self.close,
            make_escape_bridge=lambda: EscapeBridge(
                config.broker_name,
                config.cluster_name,
                self.call,
                self.fetch_route,
                self.core.clock,
            ),
            fetch_members=self.fetch_members,
            clock=self.core.clock,
            period_s=lambda: self.core.settings.broker.members_period_ms / 1000,
        )

    async def open_acting_master(self) -> BrokerState:
        """Open a master over an overlay of this slave's files, and return its components.

        The overlay keeps all changes in memory. Until `close`, the slave passes END_TRANSACTION on
        to the new master. Transaction checks go to the producers of the slave. Raises SluiceError
        if the store cannot be opened.
        """
        acting = await self._create_acting_broker()
        # Transaction checks go to the producers of the slave, which keep their access rights.
        acting.producers.groups = self.core.producers.groups
        acting.access = self.core.access
        await self.in_executor(acting.load)
        self._redirect_transaction_ends(acting)
        return acting

    async def _create_acting_broker(self) -> BrokerState:
        """Return the components of the acting master, which are not loaded yet."""
        core = self.core
        files = overlay(self.files)
        loop = asyncio.get_running_loop()
        settings = Settings(
            replace(core.settings.broker, broker_role="ASYNC_MASTER", acl_enable=False),
            replace(core.settings.store, flush_sync=False),
        )
        store = await self.in_executor(
            lambda: Store.open(settings.store, files=files, clock=core.clock)
        )
        environment = BrokerEnvironment(
            files=files,
            clock=core.clock,
            host=core.settings.host,
            unique_ids=UniqueIds(core.clock, core.settings.store_host[:-4], 0, 0),
            call_soon=loop.call_soon,
            call_later=loop.call_later,
        )
        return BrokerState(settings, store, environment)

    def _redirect_transaction_ends(self, acting: BrokerState) -> None:
        """Let `acting` handle the END_TRANSACTION requests that this slave receives.

        The slave's own handler is kept in `replaced_handler`.
        """
        dispatcher = self.make_dispatcher(acting)

        def end_transaction(command: Command, peer: Peer) -> None:
            answer = dispatcher.handle_command(command, peer)
            if answer:
                peer.write(answer)

        handlers = self.current_dispatcher().handlers
        self.replaced_handler = handlers[RequestCode.END_TRANSACTION]
        handlers[RequestCode.END_TRANSACTION] = end_transaction

    async def close(self, acting: ActingBroker) -> None:
        """Close the acting master, and let the slave handle END_TRANSACTION itself again.

        The changes of the acting master, which are in memory only, are lost.
        """
        if self.replaced_handler is not None:
            self.current_dispatcher().handlers[RequestCode.END_TRANSACTION] = self.replaced_handler
        await self.in_executor(acting.store.close)
