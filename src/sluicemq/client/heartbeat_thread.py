"""Who a client is, and what keeps it alive at its brokers, whatever the user's program does.

A client id is `address@process#time` as Java makes it in clustering mode (spec/remoting.md §15):
two clients with one id would take the same share of the queues, so it differs for each `Sluice`. A
message id holds address, process, a salt, milliseconds of this month and a counter
(spec/remoting.md §12).

A broker forgets a client that is silent for 120 s, gives its queues to others and redelivers. A
handler that blocks the event loop for minutes must not cause that. So
heartbeats run on a thread of their own, with its own small loop and its own connection to each
broker: the connection that registers the client (34, 35), and on which the broker sends requests
to it (40: members changed; 39: how did a transaction end?). Pulls, sends and offsets use the data
connections of the user's loop.

    user's loop  --describe / use / beat-->  keeper thread  --34, 35-->  brokers
                 <--on_ask------------------                <--40, 39, 220, 221, 307, 309, 326-
                  --tell------------------>                 --37----->

`on_ask` is called on the keeper's thread, with a request of a broker, whom it is from, and a
function that takes the answer, now or later, on any thread; it returns False for what it does not
know. A check is answered on the connection it came by (`tell`).
The thread is a daemon: a program that ends without `close` still ends.

`has_thread=False` is the same on the loop that calls it, for clusters in one process whose time is
the loop's (testing.embedded): a handler that blocks that loop blocks the broker as well.
"""

import asyncio
import contextlib
import ipaddress
import logging
import os
import secrets
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Container, Coroutine, Iterable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any, Final, TypeVar

from sluicemq.client.core import requests
from sluicemq.client.core.conversations import CALL_TIMEOUT_S
from sluicemq.client.core.names import Credentials, signed
from sluicemq.client.core.requests import SUCCESS
from sluicemq.client.tasks import Tasks, run_application_code
from sluicemq.clock import SYSTEM_CLOCK, Clock
from sluicemq.errors import ClosedError, RequestError, SluiceError
from sluicemq.model.ids import UniqueIds
from sluicemq.net.channel import Channel, Dialer, dial
from sluicemq.outages import Outages
from sluicemq.wire.bodies import ConsumerData, Heartbeat
from sluicemq.wire.codes import ResponseCode
from sluicemq.wire.frames import FLAG_RESPONSE, Command

PERIOD_S: Final = 30.0
RECONNECT_S: Final = 1.0
DEPTH_MAX: Final = 64
_log = logging.getLogger("sluicemq.client")
_T = TypeVar("_T")
Answer = Callable[[Command], None]


def local_address() -> str:
    """The address by which this machine goes out, 127.0.0.1 without a network. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


def make_client_id(clock: Clock) -> str:
    """An id that no other client has."""
    return f"{local_address()}@{os.getpid()}#{clock.now_ms()}{secrets.randbelow(1_000_000):06d}"


def unique_ids(clock: Clock) -> UniqueIds:
    """Ids of messages, of this process alone."""
    address = ipaddress.ip_address(local_address()).packed
    return UniqueIds(clock, address, os.getpid(), secrets.randbits(31))


class HeartbeatThread:
    """The heartbeat thread of one client. Its methods may be called from any thread."""

    def __init__(
        self,
        client_id: str,
        *,
        credentials: Credentials | None = None,
        on_ask: Callable[[Command, str, Answer], bool] = lambda *_: False,
        period_s: float = PERIOD_S,
        connect: Dialer = dial,
        has_thread: bool = True,
        outages: Outages | None = None,
    ) -> None:
        """`outages`: those of the client whose heartbeats these are."""
        self._outages = outages or Outages(SYSTEM_CLOCK, _log)
        self.client_id = client_id
        self._credentials = credentials
        self._on_ask = on_ask
        self._period_s = period_s
        self._producers: tuple[str, ...] = ()
        self._consumers: dict[str, ConsumerData] = {}
        self._addresses: frozenset[str] = frozenset()
        self._channels: dict[str, Channel] = {}
        self._down: dict[str, tuple[int, float]] = {}
        self._refusals: dict[str, dict[str, RequestError]] = {}
        """By address and group: what access control did not allow in the last heartbeat."""
        self._connect = connect
        self._has_thread = has_thread
        self._tasks = Tasks()
        """Of a keeper without a thread."""
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready = threading.Event()
        self._wake = asyncio.Event()
        self._soon: set[str] = set()
        """Where a beat is due before all others: a broker of a thousand that is away must not make
        every client beat at all of them."""
        self._beating = asyncio.Lock()
        self._closed = False

    def produce(self, group: str) -> None:
        """Adds a producer group to the next heartbeats."""
        self._producers = tuple(sorted({*self._producers, group}))

    def consume(self, data: ConsumerData) -> None:
        """Adds or replaces a consumer group and its subscriptions in the next heartbeats."""
        self._consumers = {**self._consumers, data.group: data}

    def use(self, addresses: Iterable[str], routed: Container[str] | None = None) -> None:
        """Adds brokers to beat at; new ones hear of us at once when we beat already. Of those that
        do not answer only the `routed` stay: the others are gone for good."""
        gone = {one for one in tuple(self._down) if routed is not None and one not in routed}
        known, self._addresses = self._addresses, self._addresses.difference(gone).union(addresses)
        for address in gone:
            self._refusals.pop(address, None)
        for address in self._addresses - known:
            if self._loop is not None and not self._closed:
                self._loop.call_soon_threadsafe(self._beat_soon, address)

    def beat(self) -> "Future[dict[str, SluiceError | None]]":
        """A heartbeat to every broker now; the future holds what went wrong at each address."""
        return self._submit(self._beat_at(lambda: self._addresses))

    def tell(self, address: str, command: Command) -> None:
        """Sends a one-way request on the keeper's connection to a broker; dropped without one."""

        async def send() -> None:
            channel = self._channels.get(address)
            with contextlib.suppress(SluiceError):
                if channel is not None:
                    channel.send_oneway(signed(command, self._credentials))

        with contextlib.suppress(ClosedError):
            self._submit(send())

    def leave(self, *, producer: str | None = None, consumer: str | None = None) -> "Future[None]":
        """Takes a group out of the heartbeats and unregisters it everywhere at once."""
        if producer:
            self._producers = tuple(group for group in self._producers if group != producer)
        if consumer:
            self._consumers = {
                group: data for group, data in self._consumers.items() if group != consumer
            }
        return self._submit(self._unregister(producer, consumer))

    def close(self, timeout_s: float = 3.0) -> None:
        """Unregisters everything and ends the thread; waits at most `timeout_s`."""
        thread, self._closed = self._thread, True
        if thread is None or self._loop is None or not thread.is_alive():
            return
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._wake.set)
        thread.join(timeout_s)

    def _submit(self, coroutine: Coroutine[Any, Any, _T]) -> "Future[_T]":
        if self._closed:
            coroutine.close()
            raise ClosedError("this client is closed.", fix="Make a new one.")
        if self._has_thread:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=lambda: asyncio.run(self._main()),
                    name=f"sluicemq keeper {self.client_id}",
                    daemon=True,
                )
                self._thread.start()
            self._ready.wait()
        elif self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._tasks.keep(self._main, "sluicemq keeper")
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def end(self, timeout_s: float = 3.0) -> None:
        """`close` for those who must not block."""
        if self._has_thread:
            await asyncio.to_thread(self.close, timeout_s)
            return
        self._closed = True
        self._wake.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._tasks.wait()
        await self._tasks.close()

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ready.set()
        all_due_s = self._loop.time() + self._period_s
        while not self._closed:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(all_due_s):
                    await self._wake.wait()
            self._wake.clear()
            due = frozenset(self._soon)
            self._soon.clear()
            if self._loop.time() >= all_due_s:
                due, all_due_s = self._addresses, self._loop.time() + self._period_s
            if not self._closed and (self._producers or self._consumers):
                try:
                    await run_application_code(self._beat_at(partial(self._without_resting, due)))
                except Exception:  # noqa: BLE001 - the brokers would forget this client
                    _log.exception("heartbeats of %s failed, will try again", self.client_id)
                    for address in due:
                        self._beat_in(RECONNECT_S, address)
        async with self._beating:  # A heartbeat that was asked for just before may be dialling.
            for group in self._consumers:
                await self._unregister_at_once(None, group)
            for group in self._producers:
                await self._unregister_at_once(group, None)
            channels, self._channels = self._channels, {}
            for channel in channels.values():
                await channel.close()

    def _without_resting(self, addresses: frozenset[str]) -> frozenset[str]:
        """Those but for brokers that were away and are not due for another try."""
        now_s = asyncio.get_running_loop().time()
        down = {address for address, (_, due_s) in self._down.items() if due_s > now_s}
        return (addresses & self._addresses) - down

    async def _beat_at(self, find: Callable[[], frozenset[str]]) -> dict[str, SluiceError | None]:
        """Once nobody else beats: at those that are found then."""
        async with self._beating:
            if self._closed:
                return {}
            value = Heartbeat(self.client_id, self._producers, tuple(self._consumers.values()))
            addresses = sorted(find())
            outcomes = await asyncio.gather(*(self._beat(address, value) for address in addresses))
            return dict(zip(addresses, outcomes, strict=True))

    async def _beat(self, address: str, value: Heartbeat) -> SluiceError | None:
        try:
            channel = await self._channel(address)
            answer = await self._call(channel, value)
            refused = await self._refused(channel, value, answer)
        except SluiceError as error:
            # Said once, and tried again after 1 s, 2 s … 30 s.
            failures = self._down.get(address, (0, 0.0))[0]
            self._outages.report_failure(
                address, "heartbeat to %s failed, will try again: %s", address, error.fact
            )
            pause_s = min(self._period_s, RECONNECT_S * (1 << min(failures, 5)))
            self._down[address] = (failures + 1, asyncio.get_running_loop().time() + pause_s)
            broken = self._channels.pop(address, None)
            if broken is not None:
                await broken.close()
            self._beat_in(pause_s, address)
            return error
        self._down.pop(address, None)
        self._outages.report_success(address)
        self._refusals[address] = refused
        for group in _parts(value):
            own = f"the membership of {group} at {address}"
            if group in refused:
                text = "access control of %s refuses the membership of %s, will try again: %s"
                self._outages.report_failure(own, text, address, group, refused[group].remark)
            else:
                self._outages.report_success(own)
        own = f"the heartbeat of {self.client_id} to {address}"
        if answer.code == SUCCESS or refused:
            self._outages.report_success(own)
        else:
            text = "heartbeat refused by %s: %s %s"
            self._outages.report_failure(own, text, address, answer.code, answer.remark)
        return None

    async def _call(self, channel: Channel, value: Heartbeat) -> Command:
        command = signed(requests.heartbeat(value), self._credentials)
        return await channel.call(command, CALL_TIMEOUT_S)

    async def _refused(
        self, channel: Channel, value: Heartbeat, answer: Command
    ) -> dict[str, RequestError]:
        """Return the groups of a heartbeat that access control refuses, each with the error.

        A server refuses a heartbeat as a whole if one of its groups may not be used. The other
        groups have to stay members, so each is sent in a heartbeat of its own then. Raises
        SluiceError.
        """
        if not requests.is_refused(answer):
            return {}
        parts = _parts(value)
        refused = {}
        for group, part in parts.items():
            if len(parts) > 1:
                answer = await self._call(channel, part)
            if requests.is_refused(answer):
                refused[group] = requests.request_error(answer, channel.address)
        return refused

    def refusal(self, group: str, addresses: Iterable[str]) -> RequestError | None:
        """Return why access control of one of the brokers refused the group in the last heartbeat;
        None if none of them did."""
        found = (self._refusals.get(address, {}).get(group) for address in addresses)
        return next((error for error in found if error is not None), None)

    def _beat_in(self, seconds: float, address: str) -> None:
        if not self._closed and self._loop is not None:
            self._loop.call_later(seconds, self._beat_soon, address)

    def _beat_soon(self, address: str) -> None:
        self._soon.add(address)
        self._wake.set()

    async def _channel(self, address: str) -> Channel:
        channel = self._channels.get(address)
        if channel is None or channel.closed:
            channel = await self._connect(
                address,
                timeout_s=CALL_TIMEOUT_S,
                on_request=self._on_request,
                # A lost connection means a lost membership: beat again in a second, not in thirty.
                on_close=lambda lost: self._beat_in(RECONNECT_S, lost.address),
            )
            self._channels[address] = channel
        return channel

    async def _unregister(self, producer: str | None, consumer: str | None) -> None:
        """Unregister a group when no heartbeat is under way: one that began before the group was
        taken out would enter it again."""
        async with self._beating:
            await self._unregister_at_once(producer, consumer)

    async def _unregister_at_once(self, producer: str | None, consumer: str | None) -> None:
        for channel in list(self._channels.values()):
            command = requests.unregister(self.client_id, producer=producer, consumer=consumer)
            with contextlib.suppress(SluiceError):
                await channel.call(signed(command, self._credentials), 1.0)

    def _on_request(self, command: Command, channel: Channel) -> Command | None:
        opaque, is_oneway = command.opaque, command.is_oneway

        def answer(made: Command) -> None:
            loop = self._loop
            if not is_oneway and loop is not None and not loop.is_closed():
                loop.call_soon_threadsafe(channel.send_response, opaque, made)

        if self._on_ask(command, channel.address, answer) or is_oneway:
            return None
        return Command(
            ResponseCode.REQUEST_CODE_NOT_SUPPORTED,
            opaque=opaque,
            flag=FLAG_RESPONSE,
            remark=f" request type {command.code} not supported",
        )


_PRODUCERS: Final = "the producers"


def _parts(value: Heartbeat) -> dict[str, Heartbeat]:
    """Return a heartbeat for each consumer group of `value` by its name, and one for its
    producers."""
    found = {one.group: Heartbeat(value.client_id, (), (one,)) for one in value.consumers}
    if value.producer_groups:
        found[_PRODUCERS] = Heartbeat(value.client_id, value.producer_groups, ())
    return found


# --------------------------------------------------------------------------------- stacks


def stacks(loop: asyncio.AbstractEventLoop | None) -> str:
    """What every thread of this process does now, then every task of `loop`: our answer to Java's
    jstack. Called on the keeper's thread, so it also works while the program's own loop is blocked,
    which is when one wants to know. A task that waits is shown with all coroutines it waits in."""
    tasks: set[asyncio.Task[Any]] = set()
    for _ in range(100 if loop is not None else 0):
        with contextlib.suppress(RuntimeError):  # one was born or died while we looked
            tasks = asyncio.all_tasks(loop)
            break
    names = {thread.ident: thread for thread in threading.enumerate()}
    texts = []
    for ident, frame in sys._current_frames().items():
        thread = names.get(ident)
        name = thread.name if thread is not None else "(not a Python thread)"
        kind = " daemon" if thread is not None and thread.daemon else ""
        lines = "".join(traceback.format_stack(frame)).rstrip()
        texts.append(f'thread "{name}"{kind} id {ident}\n{lines}')
    texts += [
        "\n".join([f'task "{task.get_name()}"', *_frames(task.get_coro())])
        for task in sorted(tasks, key=lambda task: task.get_name())
        if not task.done()
    ]
    return "\n".join(texts)


def _frames(coroutine: Any) -> Iterator[str]:
    """From the outermost to the innermost that is awaited."""
    for _ in range(DEPTH_MAX):
        frame = _first(coroutine, "cr_frame", "ag_frame", "gi_frame")
        if frame is not None:
            code = frame.f_code
            yield f'  File "{code.co_filename}", line {frame.f_lineno}, in {code.co_qualname}'
        coroutine = _first(coroutine, "cr_await", "ag_await", "gi_yieldfrom")
        if coroutine is None:
            return


def _first(coroutine: Any, *names: str) -> Any:
    """The first of these attributes that is there and something."""
    return next(
        (x for x in (getattr(coroutine, name, None) for name in names) if x is not None), None
    )
