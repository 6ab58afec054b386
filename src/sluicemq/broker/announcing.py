"""Announcements: a change of topics or groups is on disk, then the name servers are told, then its
answer leaves.

All changes of a moment share one round. `registration.py` says whom to tell what; here are the
calls. Before the broker has an address (`open`) there is nobody to tell.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final

from sluicemq.broker.registration import NameServer, Registration
from sluicemq.broker.state import BrokerCore
from sluicemq.broker.switching import calm
from sluicemq.broker.turns import failed
from sluicemq.clock import Clock
from sluicemq.errors import RequestError, RequestTimeoutError, SluiceError, StoreError
from sluicemq.net.channel import Channel, ChannelPool
from sluicemq.net.network import Network
from sluicemq.net.peer import Peer

log = logging.getLogger(__name__)

# Together less than the 5 s after which RocketMQ's tools give up a change of a topic.
DIAL_WAIT_S: Final = 1.5
REGISTER_WAIT_S: Final = 3.0
TOPIC_WAIT_S: Final = 0.5
FAREWELL_WAIT_S: Final = 1.0


class Announcements:
    """What waits to be announced, and the connections to the name servers."""

    def __init__(
        self,
        clock: Clock,
        network: Network,
        in_executor: Callable[[Callable[[], Any]], Awaitable[Any]],
        save_offsets: Callable[[], Awaitable[None]],
    ) -> None:
        self.registration: Registration
        self.told = asyncio.Event()
        """Set when the first round is over."""
        self._core: BrokerCore
        self._clock = clock
        self._in_executor = in_executor
        self._save_offsets = save_offsets
        self._waiting: list[tuple[Peer, bytes]] = []
        self._news = asyncio.Event()
        self._pool = ChannelPool(
            timeout_s=DIAL_WAIT_S, on_close=self._lost, clock=clock, connect=network.dial
        )

    def open(self, core: BrokerCore, registration: Registration) -> None:
        """From now on `run` may be awaited."""
        self._core, self.registration = core, registration
        core.topics.on_change = self._topic_changed
        core.groups.on_change = lambda _name: self._news.set()
        core.settings.on_change(self._settings_changed)

    def hold(self, peer: Peer, answer: bytes) -> None:
        """The answer leaves when every change so far is announced."""
        self._waiting.append((peer, answer))
        self._news.set()

    def release(self) -> None:
        """What is held leaves now."""
        waiting, self._waiting = self._waiting, []
        for peer, answer in waiting:
            peer.write(answer)

    async def close(self) -> None:
        await self._pool.close()

    async def run(self) -> None:
        """Round after round, until it is cancelled."""
        while True:
            try:
                await self._round()
            except Exception:
                log.exception("telling the name servers failed")
                await asyncio.sleep(1.0)
            self.told.set()
            wait_s = self.registration.wait_s(self._clock.monotonic_s())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._news.wait()
            self._news.clear()

    async def farewell(self) -> None:
        """Tell the name servers that know the broker that it goes."""

        async def tell(server: NameServer) -> None:
            with contextlib.suppress(SluiceError, OSError):
                channel = await self._pool.get(server.address)
                await channel.call(self.registration.farewell(), FAREWELL_WAIT_S)

        known = [server for server in self.registration.name_servers if server.is_known]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FAREWELL_WAIT_S):
                await asyncio.gather(*map(tell, known))

    # ---------------------------------------------------------------------------- what happens

    def _topic_changed(self, name: str) -> None:
        self.registration.topic_changed(name)
        self._news.set()

    def _settings_changed(self) -> None:
        """Permissions stand in routes."""
        self.registration.all_due()
        self._news.set()

    def _lost(self, channel: Channel) -> None:
        """A name server forgets us with the connection: tell it as soon as it is back."""
        for server in self.registration.name_servers:
            if server.address == channel.address:
                server.takes_topics = True  # another one may come back
                server.next_try_s = 0.0
                self._news.set()

    # --------------------------------------------------------------------------------- a round

    async def _round(self) -> None:
        waiting, self._waiting = self._waiting, []
        syncs = filter(None, [document.sync() for document in self._core.journaled])
        if self._core.offsets.is_urgent:
            self._core.offsets.is_urgent = False
            await self._save_offsets()
        for sync in syncs:
            try:
                await self._in_executor(sync)
            except StoreError as error:
                log.error("%s", error)
                waiting = [(peer, a and failed(a, error, str(error))) for peer, a in waiting]
        due = self.registration.due(self._clock.monotonic_s())
        changed = [server for server in self.registration.changed if server not in due]
        await asyncio.gather(*map(self._tell_all, due), *map(self._tell_changes, changed))
        for peer, answer in waiting:
            peer.write(answer)

    async def _tell_all(self, server: NameServer) -> None:
        try:
            make_request = self.registration.begin(server)
            channel = await self._pool.get(server.address)
            with calm():
                request = await self._in_executor(make_request)
            answer = await channel.call(request, REGISTER_WAIT_S)
            if answer.code != 0:
                raise RequestError(answer.code, answer.remark or "", address=server.address)
            self.registration.answered(server, answer, self._clock.monotonic_s())
        except (SluiceError, OSError) as error:
            self.registration.failed(server, error, self._clock.monotonic_s())

    async def _tell_changes(self, server: NameServer) -> None:
        """Of the topics that changed; of all when the name server does not take that: one of 4.9
        does not even answer."""
        if not server.takes_topics:
            await self._tell_all(server)
            return
        try:
            channel = await self._pool.get(server.address)
            for request in self.registration.take_changes(server):
                answer = await channel.call(request, TOPIC_WAIT_S)
                if answer.code != 0:
                    server.takes_topics = False
                    await self._tell_all(server)
                    return
        except RequestTimeoutError:
            server.takes_topics = False
            await self._tell_all(server)
        except (SluiceError, OSError) as error:
            self.registration.failed(server, error, self._clock.monotonic_s())
