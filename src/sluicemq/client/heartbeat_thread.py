"""Keep a client registered at its brokers while the application's event loop is busy.

A client id is `address@process#time`, as Java makes it in clustering mode (spec/remoting.md §15).
Two clients with the same id would read the same share of the queues, so each `Sluice` has a
different one. A message id contains the address, the process, a salt, the milliseconds of the month
and a counter (spec/remoting.md §12).

A broker removes a client that is silent for 120 s, gives its queues to other members and delivers
its messages again. A handler that blocks the event loop for minutes must not cause that. So
heartbeats run on a thread of their own, with its own event loop and its own connection to each
broker. That connection registers the client (HEART_BEAT, 34) and unregisters it (UNREGISTER_CLIENT,
35), and the broker sends requests to the client on it: members changed (40), transaction checks
(39) and others. Pulls, sends and offsets use the data connections of the application's event loop.

    application's loop                            heartbeat thread                      brokers
       --send_heartbeats, update_addresses-->            --34, 35-->
       <--on_request-------------------------            <--39, 40, 220, 221, 307, 309, 326--
       --send_oneway------------------------>            --37-->

`on_request` is called on the heartbeat thread with a request of a broker, the address of the
broker, and a function that accepts the response, now or later and on any thread. It returns False
for a request that it does not support. The answer to a transaction check is sent on the connection
on which the check came (`send_oneway`).

The thread is a daemon: a program that ends without `close` still ends.

With `has_thread=False` the same code runs on the event loop that calls it. That is for clusters in
one process that share the time of the loop (testing.embedded): a handler that blocks that loop
blocks the broker as well.
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
from sluicemq.client.core.names import Credentials, sign_request
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

HEARTBEAT_PERIOD_S: Final = 30.0
"""The interval in seconds between heartbeats to all brokers."""
RECONNECT_S: Final = 1.0
"""The pause in seconds before a heartbeat is repeated, after a connection was lost or not made."""
STACK_DEPTH_MAX: Final = 64
"""The number of nested coroutines of a task that `format_stacks` shows."""
_log = logging.getLogger("sluicemq.client")
_T = TypeVar("_T")
Respond = Callable[[Command], None]
"""Accepts the response to a request of a broker. May be called from any thread."""


def local_address() -> str:
    """Return the IPv4 address of this machine that it uses to reach other networks.

    The result is "127.0.0.1" if there is no network. Nothing is sent.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # To connect a UDP socket only chooses the local address.
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


def make_client_id(clock: Clock) -> str:
    """Return a client id that no other client has."""
    return f"{local_address()}@{os.getpid()}#{clock.now_ms()}{secrets.randbelow(1_000_000):06d}"


def make_unique_ids(clock: Clock) -> UniqueIds:
    """Return a generator of message ids for this process."""
    address = ipaddress.ip_address(local_address()).packed
    return UniqueIds(clock, address, os.getpid(), secrets.randbits(31))


class HeartbeatThread:
    """The thread that sends the heartbeats of one client.

    Its methods may be called from any thread.
    """

    def __init__(
        self,
        client_id: str,
        *,
        credentials: Credentials | None = None,
        on_request: Callable[[Command, str, Respond], bool] = lambda *_: False,
        period_s: float = HEARTBEAT_PERIOD_S,
        connect: Dialer = dial,
        has_thread: bool = True,
        outages: Outages | None = None,
    ) -> None:
        """Prepare the thread that sends heartbeats; it starts with the first heartbeat.

        - `client_id` is part of each heartbeat; `credentials` sign them, None means unsigned.
        - `on_request(command, address, respond)` is called on the thread with a request of a
          broker. It returns False if it does not support the request.
        - `period_s` is the interval of heartbeats in seconds.
        - `connect` opens the connections; tests pass another one.
        - `has_thread` False runs the heartbeats on the caller's event loop.
        - `outages` are those of the client, so that each outage of a broker is logged once.
        """
        self._outages = outages or Outages(SYSTEM_CLOCK, _log)
        self.client_id = client_id
        self._credentials = credentials
        self._handle_request = on_request
        self._period_s = period_s
        self._producers: tuple[str, ...] = ()
        self._consumers: dict[str, ConsumerData] = {}
        self._addresses: frozenset[str] = frozenset()
        self._channels: dict[str, Channel] = {}
        self._unreachable: dict[str, tuple[int, float]] = {}
        """Maps the address of an unreachable broker to (failures, time of the next attempt)."""
        self._access_errors: dict[str, dict[str, RequestError]] = {}
        """Maps address and group to the access control error of the last heartbeat."""
        self._connect = connect
        self._has_thread = has_thread
        self._tasks = Tasks()
        """The tasks of heartbeats without a thread."""
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready = threading.Event()
        self._wake = asyncio.Event()
        self._due_addresses: set[str] = set()
        """Brokers whose heartbeat is due before the next one to all brokers.

        One unreachable broker of a thousand must not make every client send heartbeats to all of
        them.
        """
        self._heartbeat_lock = asyncio.Lock()
        self._closed = False

    def add_producer_group(self, group: str) -> None:
        """Add a producer group to the next heartbeats."""
        self._producers = tuple(sorted({*self._producers, group}))

    def set_consumer_group(self, consumer_group: ConsumerData) -> None:
        """Add a consumer group with its subscriptions to the next heartbeats, or replace it."""
        self._consumers = {**self._consumers, consumer_group.group: consumer_group}

    def update_addresses(
        self, addresses: Iterable[str], routed: Container[str] | None = None
    ) -> None:
        """Add brokers that receive heartbeats, and remove unreachable ones that have no route.

        If heartbeats are running, new brokers receive one at once. `routed` are the addresses that
        routes contain. A broker that does not respond is removed if it is not among them; None
        removes no broker.
        """
        old_addresses = self._addresses
        removed_addresses = self._find_removed_addresses(routed)
        self._addresses = old_addresses.difference(removed_addresses).union(addresses)

        for address in removed_addresses:
            self._access_errors.pop(address, None)
        for new_address in self._addresses - old_addresses:
            if self._loop is not None and not self._closed:
                self._loop.call_soon_threadsafe(self._mark_due, new_address)

    def _find_removed_addresses(self, routed: Container[str] | None) -> set[str]:
        """Return the brokers that do not respond and are not in `routed`.

        The result is empty if `routed` is None.
        """
        if routed is None:
            return set()
        # A copy, because the heartbeat thread changes the table meanwhile.
        unreachable_addresses = tuple(self._unreachable)
        return {address for address in unreachable_addresses if address not in routed}

    def send_heartbeats(self) -> "Future[dict[str, SluiceError | None]]":
        """Send a heartbeat to every broker now.

        Return a future of the outcome at each address: None, or the error. Raises ClosedError.
        """
        return self._submit(self._send_heartbeats(lambda: self._addresses))

    def send_oneway(self, address: str, command: Command) -> None:
        """Send a one-way request to a broker on its heartbeat connection, without waiting.

        The request is dropped if there is no such connection, or if this object is closed.
        """

        async def send() -> None:
            channel = self._channels.get(address)
            with contextlib.suppress(SluiceError):
                if channel is not None:
                    channel.send_oneway(sign_request(command, self._credentials))

        with contextlib.suppress(ClosedError):
            self._submit(send())

    def remove_group(
        self, *, producer: str | None = None, consumer: str | None = None
    ) -> "Future[None]":
        """Remove a group from the heartbeats, and unregister it at all brokers.

        `producer` and `consumer` are the names of groups; None means no group. Returns a future
        that is done when each broker has responded or failed to. Raises ClosedError.
        """
        if producer:
            self._producers = tuple(group for group in self._producers if group != producer)
        if consumer:
            # A new dict, because the heartbeat thread may iterate over the old one.
            remaining_consumers = dict(self._consumers)
            remaining_consumers.pop(consumer, None)
            self._consumers = remaining_consumers
        return self._submit(self._unregister(producer, consumer))

    def close(self, timeout_s: float = 3.0) -> None:
        """Unregister all groups and end the thread; wait at most `timeout_s` seconds for that.

        If there is no thread, this only stops the heartbeats. `aclose` then also unregisters the
        groups.
        """
        thread = self._thread
        self._closed = True
        if thread is None or self._loop is None or not thread.is_alive():
            return
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._wake.set)
        thread.join(timeout_s)

    def _submit(self, coroutine: Coroutine[Any, Any, _T]) -> "Future[_T]":
        """Start a coroutine on the event loop of the heartbeats, and return its future.

        The first call starts the loop. Raises ClosedError if this object is closed.
        """
        if self._closed:
            coroutine.close()
            raise ClosedError("this client is closed.", fix="Create a new client.")
        if self._has_thread:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=lambda: asyncio.run(self._main()),
                    name=f"sluicemq heartbeats {self.client_id}",
                    daemon=True,
                )
                self._thread.start()
            self._ready.wait()
        elif self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._tasks.supervise(self._main, "sluicemq heartbeats")
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def aclose(self, timeout_s: float = 3.0) -> None:
        """Unregister all groups and end the heartbeats, without blocking the event loop.

        This waits at most `timeout_s` seconds.
        """
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
        """Send heartbeats until this object is closed, and then unregister all groups.

        All brokers receive one each period. In between, `_wake` is set when single brokers are due.
        """
        self._loop = asyncio.get_running_loop()
        self._ready.set()
        all_due_s = self._loop.time() + self._period_s
        while not self._closed:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(all_due_s):
                    await self._wake.wait()
            self._wake.clear()
            due_addresses = frozenset(self._due_addresses)
            self._due_addresses.clear()
            if self._loop.time() >= all_due_s:
                due_addresses = self._addresses
                all_due_s = self._loop.time() + self._period_s
            has_groups = bool(self._producers or self._consumers)
            if has_groups and not self._closed:
                await self._send_due_heartbeats(due_addresses)
        await self._unregister_all()

    async def _send_due_heartbeats(self, due_addresses: frozenset[str]) -> None:
        """Send heartbeats to these brokers; log an unexpected error, and try again soon."""
        try:
            await run_application_code(
                self._send_heartbeats(partial(self._select_due, due_addresses))
            )
        except Exception:  # noqa: BLE001 - without heartbeats brokers remove the client
            _log.exception("heartbeats of %s failed, retrying", self.client_id)
            for address in due_addresses:
                self._schedule_heartbeat(RECONNECT_S, address)

    async def _unregister_all(self) -> None:
        """Unregister all groups at every broker, and close the heartbeat connections."""
        # The lock waits for a heartbeat that may still be opening a connection.
        async with self._heartbeat_lock:
            for group in self._consumers:
                await self._unregister_at_once(None, group)
            for group in self._producers:
                await self._unregister_at_once(group, None)
            channels = self._channels
            self._channels = {}
            for channel in channels.values():
                await channel.close()

    def _select_due(self, addresses: frozenset[str]) -> frozenset[str]:
        """Return those of `addresses` that may receive a heartbeat now.

        Unknown addresses are left out, and unreachable brokers whose pause has not ended.
        """
        now_s = asyncio.get_running_loop().time()
        waiting_addresses = {
            address
            for address, (_, next_attempt_s) in self._unreachable.items()
            if next_attempt_s > now_s
        }
        return (addresses & self._addresses) - waiting_addresses

    async def _send_heartbeats(
        self, select_addresses: Callable[[], frozenset[str]]
    ) -> dict[str, SluiceError | None]:
        """Send a heartbeat to each address in `select_addresses()`, and return the results.

        The result maps each address to None or to the error. Heartbeats that are being sent are
        awaited first, and `select_addresses` is called afterwards, so that it knows their results.
        Returns {} if this object is closed.
        """
        async with self._heartbeat_lock:
            if self._closed:
                return {}
            heartbeat = Heartbeat(self.client_id, self._producers, tuple(self._consumers.values()))
            addresses = sorted(select_addresses())
            outcomes = await asyncio.gather(
                *(self._send_heartbeat(address, heartbeat) for address in addresses)
            )
            return dict(zip(addresses, outcomes, strict=True))

    async def _send_heartbeat(self, address: str, heartbeat: Heartbeat) -> SluiceError | None:
        """Send a heartbeat to one broker, and return None or the error.

        Outages and refusals are logged when they begin and when they end.
        """
        try:
            channel = await self._get_channel(address)
            response = await self._call(channel, heartbeat)
            refused_groups = await self._resend_refused_by_group(channel, heartbeat, response)
        except SluiceError as error:
            await self._handle_unreachable(address, error)
            return error
        self._unreachable.pop(address, None)
        self._outages.report_success(address)
        self._access_errors[address] = refused_groups
        self._log_refusals(address, heartbeat, response, refused_groups)
        return None

    async def _handle_unreachable(self, address: str, error: SluiceError) -> None:
        """Close the connection to a broker that failed, and schedule the next heartbeat to it.

        The pause before it doubles with each failure: 1 s, 2 s … 30 s. The failure is logged once
        for each outage.
        """
        failure_count = self._unreachable.get(address, (0, 0.0))[0]
        self._outages.report_failure(
            address, "heartbeat to %s failed, retrying: %s", address, error.fact
        )
        pause_s = min(self._period_s, RECONNECT_S * (1 << min(failure_count, 5)))
        next_attempt_s = asyncio.get_running_loop().time() + pause_s
        self._unreachable[address] = (failure_count + 1, next_attempt_s)
        broken_channel = self._channels.pop(address, None)
        if broken_channel is not None:
            await broken_channel.close()
        self._schedule_heartbeat(pause_s, address)

    def _log_refusals(
        self,
        address: str,
        heartbeat: Heartbeat,
        response: Command,
        refused_groups: dict[str, RequestError],
    ) -> None:
        """Log which groups a broker refuses, and which it accepts again, once for each change.

        `response` is the response to `heartbeat`. `refused_groups` maps each group that access
        control refuses to its error.
        """
        for group in _split_by_group(heartbeat):
            activity = f"the membership of {group} at {address}"
            if group in refused_groups:
                log_text = "access control of %s refuses the membership of %s, retrying: %s"
                remark = refused_groups[group].remark
                self._outages.report_failure(activity, log_text, address, group, remark)
            else:
                self._outages.report_success(activity)

        # A refusal by access control was logged for its groups above.
        activity = f"the heartbeat of {self.client_id} to {address}"
        if response.code == SUCCESS or refused_groups:
            self._outages.report_success(activity)
        else:
            log_text = "heartbeat refused by %s: %s %s"
            self._outages.report_failure(
                activity, log_text, address, response.code, response.remark
            )

    async def _call(self, channel: Channel, heartbeat: Heartbeat) -> Command:
        """Sign and send a heartbeat, and return the response."""
        command = sign_request(requests.heartbeat(heartbeat), self._credentials)
        return await channel.call(command, CALL_TIMEOUT_S)

    async def _resend_refused_by_group(
        self, channel: Channel, heartbeat: Heartbeat, response: Command
    ) -> dict[str, RequestError]:
        """Find out which groups of a refused heartbeat access control refuses.

        Returns group -> error. A server refuses a heartbeat as a whole if one of its groups may not
        be used. So each group is sent in a heartbeat of its own, and the other groups stay members.
        If access control has not refused the heartbeat, nothing is sent and the result is {}.
        `response` is the response to `heartbeat`. Raises SluiceError if a request fails.
        """
        if not requests.is_access_denied(response):
            return {}
        heartbeats_by_group = _split_by_group(heartbeat)
        if len(heartbeats_by_group) == 1:  # the response is about this group
            (group,) = heartbeats_by_group
            return {group: requests.request_error(response, channel.address)}

        refused_groups = {}
        for group, group_heartbeat in heartbeats_by_group.items():
            group_response = await self._call(channel, group_heartbeat)
            if requests.is_access_denied(group_response):
                error = requests.request_error(group_response, channel.address)
                refused_groups[group] = error
        return refused_groups

    def find_access_error(self, group: str, addresses: Iterable[str]) -> RequestError | None:
        """Return the error with which access control refused `group` in the last heartbeat.

        The brokers at `addresses` are considered. Returns None if none of them refused it.
        """
        for address in addresses:
            error = self._access_errors.get(address, {}).get(group)
            if error is not None:
                return error
        return None

    def _schedule_heartbeat(self, seconds: float, address: str) -> None:
        """Schedule a heartbeat to a broker in `seconds` seconds, unless this object is closed."""
        if not self._closed and self._loop is not None:
            self._loop.call_later(seconds, self._mark_due, address)

    def _mark_due(self, address: str) -> None:
        """Let the heartbeat to a broker be sent now. Called on the heartbeat loop."""
        self._due_addresses.add(address)
        self._wake.set()

    async def _get_channel(self, address: str) -> Channel:
        """Return the heartbeat connection to a broker, and open it if necessary.

        Raises SluiceError if it cannot be opened.
        """
        channel = self._channels.get(address)
        if channel is None or channel.closed:
            channel = await self._connect(
                address,
                timeout_s=CALL_TIMEOUT_S,
                on_request=self._on_request,
                # A lost connection ends the membership: send a heartbeat in 1 s, not in 30 s.
                on_close=lambda lost: self._schedule_heartbeat(RECONNECT_S, lost.address),
            )
            self._channels[address] = channel
        return channel

    async def _unregister(self, producer: str | None, consumer: str | None) -> None:
        """Unregister a group while no heartbeat is running.

        A heartbeat that began before the group was removed would register it again.
        """
        async with self._heartbeat_lock:
            await self._unregister_at_once(producer, consumer)

    async def _unregister_at_once(self, producer: str | None, consumer: str | None) -> None:
        """Unregister a producer or consumer group at every connected broker. Ignore errors."""
        for channel in list(self._channels.values()):
            command = requests.unregister(self.client_id, producer=producer, consumer=consumer)
            with contextlib.suppress(SluiceError):
                await channel.call(sign_request(command, self._credentials), 1.0)

    def _on_request(self, command: Command, channel: Channel) -> Command | None:
        """Pass a request of a broker to the function `on_request` of the client.

        Returns an error response if the client does not support the request. Otherwise returns
        None: the client responds later, or not at all to a one-way request.
        """
        # Only these two are kept, so that the request's body is not held until the response.
        opaque = command.opaque
        is_oneway = command.is_oneway

        def respond(response: Command) -> None:
            loop = self._loop
            if not is_oneway and loop is not None and not loop.is_closed():
                loop.call_soon_threadsafe(channel.send_response, opaque, response)

        if self._handle_request(command, channel.address, respond) or is_oneway:
            return None
        return Command(
            ResponseCode.REQUEST_CODE_NOT_SUPPORTED,
            opaque=opaque,
            flag=FLAG_RESPONSE,
            remark=f" request type {command.code} not supported",
        )


_PRODUCERS_NAME: Final = "the producers"
"""The name of all producer groups together in the result of `_split_by_group`."""


def _split_by_group(heartbeat: Heartbeat) -> dict[str, Heartbeat]:
    """Divide a heartbeat into one for each consumer group, and one for all producer groups.

    Returns name of the group -> heartbeat. The producers' name is `_PRODUCERS_NAME`.
    """
    client_id = heartbeat.client_id
    heartbeats_by_group = {
        consumer.group: Heartbeat(client_id, (), (consumer,)) for consumer in heartbeat.consumers
    }
    if heartbeat.producer_groups:
        producers_heartbeat = Heartbeat(client_id, heartbeat.producer_groups, ())
        heartbeats_by_group[_PRODUCERS_NAME] = producers_heartbeat
    return heartbeats_by_group


# --------------------------------------------------------------------------------- stacks


def format_stacks(loop: asyncio.AbstractEventLoop | None) -> str:
    """Return the stacks of all threads of this process, and of all tasks of `loop`, as text.

    It is Java's jstack for Python. It runs on the heartbeat thread, so it works while the event
    loop of the application is blocked. A waiting task is shown with all coroutines that wait for
    each other.
    """
    tasks = set() if loop is None else _list_tasks_of_loop(loop)
    stacks = []
    threads_by_ident = {thread.ident: thread for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        thread_label = '"(not a Python thread)"'
        thread = threads_by_ident.get(ident)
        if thread is not None:
            thread_label = f'"{thread.name}" daemon' if thread.daemon else f'"{thread.name}"'
        lines = "".join(traceback.format_stack(frame)).rstrip()
        stacks.append(f"thread {thread_label} id {ident}\n{lines}")

    for task in sorted(tasks, key=lambda task: task.get_name()):
        if not task.done():
            task_lines = [f'task "{task.get_name()}"', *_format_frames(task.get_coro())]
            stacks.append("\n".join(task_lines))
    return "\n".join(stacks)


def _list_tasks_of_loop(loop: asyncio.AbstractEventLoop) -> set[asyncio.Task[Any]]:
    """Return the tasks of an event loop that runs on another thread; set() if that fails."""
    for _ in range(100):
        with contextlib.suppress(RuntimeError):  # a task started or ended meanwhile
            return asyncio.all_tasks(loop)
    return set()


def _format_frames(coroutine: Any) -> Iterator[str]:
    """Yield one line for a coroutine, and one for each that it awaits, down to the innermost."""
    for _ in range(STACK_DEPTH_MAX):
        frame = _get_first_attribute(coroutine, "cr_frame", "ag_frame", "gi_frame")
        if frame is not None:
            code = frame.f_code
            yield f'  File "{code.co_filename}", line {frame.f_lineno}, in {code.co_qualname}'
        coroutine = _get_first_attribute(coroutine, "cr_await", "ag_await", "gi_yieldfrom")
        if coroutine is None:
            return


def _get_first_attribute(coroutine: Any, *names: str) -> Any:
    """Return the first of the attributes `names` that exists and is not None, else None."""
    for name in names:
        attribute = getattr(coroutine, name, None)
        if attribute is not None:
            return attribute
    return None
