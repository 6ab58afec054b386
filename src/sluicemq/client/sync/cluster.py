"""Blocking access to name servers and brokers: the base of the blocking producer, admin and bulk
reader.

No thread, no loop: a call takes an idle connection of its address (or opens one), sends one request
and waits. So any number of threads may share a `Cluster`, and a forked Spark worker can make its
own at no cost. Nothing here heartbeats; consumers, which must, live in `client.threaded.consumer`.
"""

import threading
from collections import defaultdict, deque
from types import TracebackType
from typing import Self

from sluicemq.client.core import requests
from sluicemq.client.core.answers import SUCCESS, TOPIC_NOT_EXIST, expect_success, request_error
from sluicemq.client.core.directory import Routes, as_created, broker_address, no_route
from sluicemq.client.core.names import Credentials, parse_name_servers, signed, unreachable
from sluicemq.clock import SYSTEM_CLOCK, Clock
from sluicemq.errors import (
    ClosedError,
    ConnectionLostError,
    RequestTimeoutError,
    RouteNotFoundError,
    SluiceError,
)
from sluicemq.model.topic import DEFAULT_TOPIC, MessageQueue, TopicRoute
from sluicemq.net.blocking import BlockingChannel
from sluicemq.net.tls import Tls
from sluicemq.wire.bodies import decode_cluster_info, decode_topic_route
from sluicemq.wire.frames import Command

CALL_TIMEOUT_S = 5.0
IDLE_CHANNELS_MAX = 8
IDLE_S_MAX = 100.0
"""Servers close a connection after 120 s of silence (spec/remoting.md §1): older ones are not
reused."""


class Cluster:
    """Name servers, routes and connections, for blocking programs. Safe to share among threads."""

    def __init__(
        self,
        name_servers: str | list[str] | tuple[str, ...],
        *,
        credentials: Credentials | tuple[str, str] | None = None,
        timeout_s: float = CALL_TIMEOUT_S,
        clock: Clock = SYSTEM_CLOCK,
        tls: Tls | bool | None = None,
    ) -> None:
        """`tls`: True, or a `Tls` with its files; None: as the variable SLUICE_TLS says."""
        self.tls = Tls.of(tls)
        self.name_servers = parse_name_servers(name_servers)
        self.credentials = Credentials.of(credentials)
        self.timeout_s = timeout_s
        self.clock = clock
        self.routes = Routes()
        self._idle: dict[str, deque[tuple[BlockingChannel, float]]] = defaultdict(deque)
        self._lock = threading.Lock()
        self._first = 0
        self._closed = False

    def call(self, address: str, command: Command, timeout_s: float | None = None) -> Command:
        """One request, one answer, whatever its code.

        Raises ConnectionLostError or RequestTimeoutError; the connection is then given up.
        """
        limit = self.timeout_s if timeout_s is None else timeout_s
        channel = self.take(address, limit)
        try:
            answer = channel.call(signed(command, self.credentials))
            answer.body = bytes(answer.body)  # the channel's buffer is the next caller's
        except BaseException:
            channel.close()
            raise
        self.give(address, channel)
        return answer

    def take(self, address: str, timeout_s: float) -> BlockingChannel:
        """A connection of one's own until `give`: an idle one, or a new one."""
        oldest_s = self.clock.monotonic_s() - IDLE_S_MAX
        with self._lock:
            if self._closed:
                raise ClosedError("this client is closed.", cure="Make a new one.")
            while self._idle[address]:
                channel, since_s = self._idle[address].pop()
                if since_s >= oldest_s:
                    channel.timeout_s = timeout_s
                    return channel
                channel.close()
        return BlockingChannel(address, timeout_s, self.tls)

    def give(self, address: str, channel: BlockingChannel) -> None:
        """Hands a connection back for the next call."""
        with self._lock:
            idle = self._idle[address]
            if not self._closed and len(idle) < IDLE_CHANNELS_MAX:
                idle.append((channel, self.clock.monotonic_s()))
                return
        channel.close()

    def ask_name_server(self, command: Command) -> Command:
        """The first name server that answers, starting with the one that answered last.

        Raises NameServerUnreachableError naming all of them.
        """
        failures: list[tuple[str, SluiceError]] = []
        count = len(self.name_servers)
        for step in range(count):
            index = (self._first + step) % count
            address = self.name_servers[index]
            try:
                answer = self.call(address, command)
            except (ConnectionLostError, RequestTimeoutError) as error:
                failures.append((address, error))
            else:
                self._first = index
                return answer
        raise unreachable(failures)

    def find_route(self, topic: str) -> TopicRoute | None:
        """The route as the name servers know it now; None when they know no such topic."""
        answer = self.ask_name_server(requests.route(topic))
        if answer.code == TOPIC_NOT_EXIST:
            return None
        if answer.code != SUCCESS:
            raise request_error(answer)
        return decode_topic_route(answer.body)

    def _broker_names(self) -> list[str] | None:
        """For an error's text: the brokers that are registered, None when that is not told."""
        try:
            answer = self.ask_name_server(requests.cluster_info())
            return (
                list(decode_cluster_info(answer.body).brokers) if answer.code == SUCCESS else None
            )
        except SluiceError:
            return None

    def route(self, topic: str, *, create: bool = False) -> TopicRoute:
        """The route of a topic, at most 30 s old.

        With `create` an unknown topic takes the route of TBW102, from which brokers create topics
        on the first send. Raises RouteNotFoundError, NameServerUnreachableError.
        """
        now_s = self.clock.monotonic_s()
        if not self.routes.is_fresh(topic, now_s):
            found = self.find_route(topic)
            if found is None and create and self.routes.get(topic) is None:
                default = self.find_route(DEFAULT_TOPIC)
                found = as_created(default) if default else None
            self.routes.put(topic, found, now_s)
        known = self.routes.get(topic)
        if known is None:
            self.routes.forget(topic)
            brokers = self._broker_names()
            raise no_route(topic, self.name_servers, brokers, auto_create_tried=create)
        return known

    def address(self, queue: MessageQueue) -> str:
        """Where to reach a queue's broker. Raises RouteNotFoundError."""
        address = broker_address(self.route(queue.topic), queue.broker)
        if address is None:
            self.routes.forget(queue.topic)
            raise RouteNotFoundError(
                f"the broker {queue.broker!r} is not in the route of {queue.topic!r}.",
                cure="See sluice cluster list.",
            )
        return address

    def ask(self, queue: MessageQueue, command: Command) -> Command:
        """A request to a queue's broker that must succeed."""
        address = self.address(queue)
        return expect_success(self.call(address, command), address)

    def close(self) -> None:
        """Closes every idle connection; further calls raise ClosedError."""
        with self._lock:
            self._closed = True
            channels = [channel for idle in self._idle.values() for channel, _ in idle]
            self._idle.clear()
        for channel in channels:
            channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {';'.join(self.name_servers)}>"
