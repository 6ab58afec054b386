"""The broker that a slave opens over an overlay of its files while it stands in for its master.

`replicas/acting.py` says when, and where to what comes of it; here it is put together from the
parts of the broker that it lives in, and takes over what producers say of their transactions (37).
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from sluicemq.broker.replication.acting import SEND_S, Acting, Escape, StandIn, ask_escaped
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
class Surroundings:
    """What a stand-in and its escape need of the broker that they are in. `serve` makes the
    dispatcher of a broker core, `served` is the one at the port."""

    core: BrokerState
    files: Files
    pool: ChannelPool
    name_servers: Iterable[str]
    signed: Callable[[Command], Command]
    look_up: Callable[[str, Callable[[Command | None], None]], None]
    in_executor: Callable[[Callable[[], Any]], Awaitable[Any]]
    serve: Callable[[BrokerState], Dispatcher]
    served: Callable[[], Dispatcher]
    former: Handler | None = None
    """What answers the ends of transactions (37) while nobody stands in."""

    async def ask(self, address: str, command: Command, timeout_s: float) -> Command:
        """One exchange, signed as brokers do."""
        return await (await self.pool.get(address)).call(self.signed(command), timeout_s)

    async def route(self, topic: str) -> Command | None:
        """105, of the name server that answers first."""
        found: asyncio.Future[Command | None] = asyncio.get_running_loop().create_future()
        self.look_up(topic, lambda answer: None if found.done() else found.set_result(answer))
        return await found

    async def members(self) -> Mapping[int, str] | None:
        """901, of the name server that answers first: who of the broker's name lives."""
        config = self.core.settings.broker
        header = GetBrokerMemberGroupRequest(cluster=config.cluster_name, broker=config.broker_name)
        for address in self.name_servers:
            with contextlib.suppress(SluiceError):
                command = Command(RequestCode.GET_BROKER_MEMBER_GROUP, encode_header(header))
                answer = await self.ask(address, command, SEND_S)
                if answer.code == ResponseCode.SUCCESS:
                    return decode_broker_member_group(answer.body).addresses
        return None

    async def escaped(self) -> list[tuple[str, str]]:
        """What a master that starts has to pass over."""
        members = await self.members() or {}
        return await ask_escaped([at for id_, at in members.items() if id_ != MASTER_ID], self.ask)

    def acting(self) -> Acting:
        """The slave's part."""
        config = self.core.settings.broker
        return Acting(
            config.broker_id,
            open_stand_in=self.open,
            close=self.close,
            escape=lambda: Escape(
                config.broker_name, config.cluster_name, self.ask, self.route, self.core.clock
            ),
            members=self.members,
            clock=self.core.clock,
            period_s=lambda: self.core.settings.broker.members_period_ms / 1000,
        )

    async def open(self) -> BrokerState:
        """What a restart would make of this slave's files, above them."""
        core, files, loop = self.core, overlay(self.files), asyncio.get_running_loop()
        settings = Settings(
            replace(core.settings.broker, broker_role="ASYNC_MASTER", acl_enable=False),
            replace(core.settings.store, flush_sync=False),
        )
        store = await self.in_executor(
            lambda: Store.open(settings.store, files=files, clock=core.clock)
        )
        made = BrokerState(
            settings, store, files=files, clock=core.clock, host=core.settings.host,
            unique_ids=UniqueIds(core.clock, core.settings.store_host[:-4], 0, 0),
            call_soon=loop.call_soon, call_later=loop.call_later,
        )  # fmt: skip
        # Producers are asked where they are, and may do here what they may do there.
        made.producers.groups, made.access = core.producers.groups, core.access
        await self.in_executor(made.load)
        inner, handlers = self.serve(made), self.served().handlers

        def end_transaction(command: Command, peer: Peer) -> None:
            if answer := inner.handle_command(command, peer):
                peer.write(answer)

        self.former = handlers[RequestCode.END_TRANSACTION]
        handlers[RequestCode.END_TRANSACTION] = end_transaction
        return made

    async def close(self, made: StandIn) -> None:
        """What it has changed is gone."""
        if self.former is not None:
            self.served().handlers[RequestCode.END_TRANSACTION] = self.former
        await self.in_executor(made.store.close)
