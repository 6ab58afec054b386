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
        """Ask the name servers for the live brokers that have this broker's name.

        Return a dict of address ("host:port") by broker id. The name servers are asked in order
        with GET_BROKER_MEMBER_GROUP (901), and the first successful answer is returned. Return
        None if no name server answers with success. Errors of the connection are ignored.
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
        """Return the ActingMaster of this slave, which decides when the slave acts for its master.

        The ActingMaster opens and closes the acting master with methods of this context, asks the
        name servers for the live brokers with `fetch_members`, and passes messages on to other
        brokers through an EscapeBridge.
        """
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
        """Open an acting master on the files of this slave, and return its components.

        The acting master reads the slave's files. What it writes is kept in memory, so the files
        do not change. The slave gives each END_TRANSACTION request that it receives to the acting
        master, until `close` is called. The acting master sends its transaction checks to the
        producers that are connected to the slave. Raises SluiceError if the store cannot be opened.
        """
        acting = await self._create_acting_broker()
        # Transaction checks go to the producers of the slave, which keep their access rights.
        acting.producers.groups = self.core.producers.groups
        acting.access = self.core.access
        await self.in_executor(acting.load)
        self._redirect_transaction_ends(acting)
        return acting

    async def _create_acting_broker(self) -> BrokerState:
        """Open the store of the acting master, and return its components before they are loaded.

        The acting master has the settings of this slave, with three changes: its role is
        ASYNC_MASTER, it checks no access rights, and it does not wait for an fsync.
        """
        core = self.core
        files = overlay(self.files)  # keeps all changes in memory
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
        """Give the END_TRANSACTION requests that this slave receives to `acting`.

        The answers of `acting` are written to the client. The slave's own handler is kept in
        `self.replaced_handler`, so that `close` can restore it.
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
