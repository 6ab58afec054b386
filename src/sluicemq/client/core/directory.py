"""Where things are: the name servers of a client, the routes learnt from them, what follows.

`Routes` remembers the last route of each topic and when it was learnt. A route that the name
servers no longer know is kept (spec/namesrv.md §8), because a broker that restarts is away for a
moment only. `Directory` asks: its methods that end in a Talk need a shell.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final

from sluicemq.client.core import requests
from sluicemq.client.core.conversations import Call, Conversation, Exclusive
from sluicemq.client.core.messages import NEW_TOPIC_QUEUES
from sluicemq.client.core.names import parse_name_servers
from sluicemq.client.core.requests import (
    NOT_AVAILABLE,
    SUCCESS,
    TOPIC_NOT_EXIST,
    PullAnswer,
    expect_success,
    pull_answer,
    request_error,
)
from sluicemq.clock import Clock
from sluicemq.errors import (
    ConfigurationError,
    ConnectionLostError,
    NameServerUnreachableError,
    RequestTimeoutError,
    RouteNotFoundError,
    SluiceError,
)
from sluicemq.model.topic import (
    DEFAULT_TOPIC,
    MASTER_ID,
    PERM_WRITE,
    MessageQueue,
    TopicRoute,
)
from sluicemq.outages import Outages, is_outage
from sluicemq.wire.bodies import decode_cluster_info, decode_topic_route
from sluicemq.wire.codes import RequestCode, ResponseCode
from sluicemq.wire.frames import Command

_log = logging.getLogger("sluicemq.client")
ROUTE_PERIOD_S: Final = 30.0
_NOWHERE: Final[dict[str, str]] = {}
NAME_SERVERS: Final = ""
"""As an address: whichever name server answers first."""
_ASKED_OF_ALL: Final = frozenset(
    {
        RequestCode.GET_ROUTEINFO_BY_TOPIC,
        RequestCode.GET_BROKER_CLUSTER_INFO,
        RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER,
    }
)
"""Requests that every name server supports, and no broker."""
_ALL_NAME_SERVERS: Final = "the name servers"
"""The name of an outage in which no name server answers."""


def write_queues(topic: str, route: TopicRoute) -> list[MessageQueue]:
    """The queues a producer may choose from: writable, and their broker's master is known."""
    if route.order_topic_config:  # strict order keeps the count while a broker is away
        pairs = [part.partition(":") for part in route.order_topic_config.split(";") if part]
        return [
            MessageQueue(topic, broker, queue_id)
            for broker, _, count in pairs
            for queue_id in range(int(count))
        ]
    masters = {data.broker for data in route.brokers if MASTER_ID in data.addresses}
    return [
        MessageQueue(topic, data.broker, queue_id)
        for data in sorted(route.queues, key=lambda data: data.broker)
        if data.perm & PERM_WRITE and data.broker in masters
        for queue_id in range(data.write_queues)
    ]


def read_addresses(route: TopicRoute) -> dict[str, str]:
    """Broker name -> where to read: its master, or the first slave while that is away."""
    return {
        data.broker: data.addresses[min(data.addresses)] for data in route.brokers if data.addresses
    }


def as_created(default: TopicRoute) -> TopicRoute:
    """The route that a topic will have once a broker made it from TBW102's: at most as many queues
    as our send requests ask for, as the Java client counts them."""
    return replace(
        default,
        queues=tuple(
            replace(
                data,
                read_queues=min(data.read_queues, NEW_TOPIC_QUEUES),
                write_queues=min(data.write_queues, NEW_TOPIC_QUEUES),
            )
            for data in default.queues
        ),
    )


class Routes:
    """The last known route of each topic, however old, and what follows from it: the queues to
    write to, the masters of brokers, and by broker where to read. Times are monotonic seconds,
    passed in."""

    __slots__ = ("_learnt_s", "known", "masters", "places", "sources", "writers")

    def __init__(self) -> None:
        self.places: dict[str, str] = {}
        """Broker name -> the last known address of its master, also while it is in no route."""
        self.known: dict[str, TopicRoute] = {}
        self.writers: dict[str, list[MessageQueue]] = {}
        self.masters: dict[str, dict[str, str]] = {}
        self.sources: dict[str, dict[str, str]] = {}
        self._learnt_s: dict[str, float] = {}

    def is_fresh(self, topic: str, now_s: float) -> bool:
        """Whether the route was learnt (or looked for) less than 30 s ago. HOT."""
        return now_s - self._learnt_s.get(topic, -1e9) < ROUTE_PERIOD_S

    def fresh_writers(self, topic: str, now_s: float) -> list[MessageQueue] | None:
        """The queues that may be written to, while the route is fresh. HOT."""
        if now_s - self._learnt_s.get(topic, -1e9) < ROUTE_PERIOD_S:
            return self.writers.get(topic)
        return None

    def put(self, topic: str, route: TopicRoute | None, now_s: float) -> bool:
        """Remembers a route; None (unknown there) keeps the old one. True when it changed."""
        self._learnt_s[topic] = now_s
        if route is None or route == self.known.get(topic):
            return False
        self.known[topic] = route
        self.writers[topic] = write_queues(topic, route)
        self.masters[topic] = {
            data.broker: data.addresses[MASTER_ID]
            for data in route.brokers
            if MASTER_ID in data.addresses
        }
        self.sources[topic] = read_addresses(route)
        self.places.update(self.masters[topic])
        return True

    def has_replicas(self, topic: str, broker: str | None) -> bool:
        """May another replica of this broker take over as its master? None: of a broker that has
        no master now."""
        route = self.known.get(topic)
        return route is not None and any(
            max(data.addresses, default=MASTER_ID) != MASTER_ID
            for data in route.brokers
            if broker == data.broker or (broker is None and MASTER_ID not in data.addresses)
        )

    def forget(self, topic: str) -> None:
        """The next use asks again (after a topic or connection error)."""
        self._learnt_s.pop(topic, None)

    def drop(self, topic: str) -> None:
        """The topic was deleted."""
        for table in (self.known, self.writers, self.masters, self.sources, self._learnt_s):
            table.pop(topic, None)

    def addresses(self, topics: Iterable[str]) -> set[str]:
        """All broker addresses, slaves too, that serve the topics."""
        return {
            address
            for topic in topics
            if (route := self.known.get(topic))
            for data in route.brokers
            for address in data.addresses.values()
        }


def is_of_broker(command: Command, answer: Command) -> bool:
    """Return whether an answer to `command` shows that its sender is no name server."""
    return answer.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED and command.code in _ASKED_OF_ALL


def no_name_server(address: str, answer: Command) -> ConfigurationError:
    """Return the error for an address of a name server at which a broker answers."""
    return ConfigurationError(
        f"a broker answers at {address}, which is given as a name server ({answer.remark}).",
        fix="Give the name server's address; its port is 9876 unless its listenPort differs.",
    )


class Directory:
    """The name servers and routes of one client. `on_route` hears of topics whose route changed."""

    def __init__(self, name_servers: str | list[str] | tuple[str, ...], clock: Clock) -> None:
        self.name_servers: tuple[str, ...] = parse_name_servers(name_servers)
        self.clock = clock
        self.routes: Routes = Routes()
        self.outages: Outages = Outages(clock, _log)
        self.on_route: Callable[[str], None] = lambda topic: None
        # Not all clients begin with the same one.
        self._first = clock.now_ms() % len(self.name_servers)

    def note_outage(
        self, error: Exception, queue: MessageQueue | None, own: str, text: str, *arguments: object
    ) -> None:
        """Log a failure once: as an outage of the name servers or of the broker of `queue` if
        `error` says so, else as one of `own`, a name for what did not work."""
        what = own
        if isinstance(error, NameServerUnreachableError):
            what = _ALL_NAME_SERVERS
        elif queue is not None and is_outage(error):
            what = self.place(queue)
        self.outages.report_failure(what, text, *arguments)

    def note_success(self, queue: MessageQueue, own: str = "") -> None:
        """Note that the broker of `queue`, and `own`, work."""
        if self.outages.current:
            self.outages.report_success(self.place(queue))
            self.outages.report_success(own)

    def place(self, queue: MessageQueue) -> str:
        """The address of a queue's broker as it was known last, else the broker's name."""
        return self.routes.places.get(queue.broker, queue.broker)

    def ask_name_server(
        self, command: Command, is_enough: Callable[[Command], bool] = lambda _answer: True
    ) -> Conversation[Command]:
        """The first name server that answers, starting with the one that answered last; one whose
        answer is not enough is believed when no other has a better one. An address at which a
        broker answers is passed over.

        Raises NameServerUnreachableError naming all of them, and ConfigurationError when brokers
        answer at all of them.
        """
        failures: list[tuple[str, SluiceError]] = []
        poor: Command | None = None
        count = len(self.name_servers)
        for step in range(count):
            index = (self._first + step) % count
            address = self.name_servers[index]
            try:
                answer = yield Call(address, command)
            except (ConnectionLostError, RequestTimeoutError) as error:
                failures.append((address, error))
            else:
                if is_of_broker(command, answer):
                    failures.append((address, no_name_server(address, answer)))
                    continue
                if self.outages.current:
                    self.outages.report_success(_ALL_NAME_SERVERS)
                if is_enough(answer):
                    self._first = index
                    return answer
                poor = poor or answer
        if poor is not None:
            return poor
        misplaced = [error for _, error in failures if isinstance(error, ConfigurationError)]
        if len(misplaced) == count:
            raise misplaced[0]
        reasons = "; ".join(f"{address}: {error.fact}" for address, error in failures)
        fixes = [error.fix for _, error in failures]
        about_tls = (one for one in fixes if "tls" in one.lower() or "certificate" in one.lower())
        usual = "Check host and port, and that the name server runs (sluice nameserver)."
        raise NameServerUnreachableError(
            f"no name server answers [{reasons}].", fix=next(about_tls, usual)
        )

    def find_route(self, topic: str) -> Conversation[TopicRoute | None]:
        """The route as the name servers know it now; None when they know no such topic. One that
        was restarted knows only the brokers that have registered since, so all are asked."""
        answer = yield from self.ask_name_server(
            requests.route(topic), lambda answer: answer.code == SUCCESS
        )
        if answer.code == TOPIC_NOT_EXIST:
            return None
        if answer.code != SUCCESS:
            raise request_error(answer)
        return decode_topic_route(answer.body)

    def route(self, topic: str, *, create: bool = False) -> Conversation[TopicRoute]:
        """The route of a topic, at most 30 s old; concurrent callers share one question.

        With `create` an unknown topic takes the route of TBW102, from which brokers create topics
        on the first send. A name server that cannot be reached does not matter while an older
        route is known. Raises RouteNotFoundError, NameServerUnreachableError.
        """
        known = self.routes.known.get(topic)
        if known is None or not self.routes.is_fresh(topic, self.clock.monotonic_s()):
            yield Exclusive(topic, self._refresh(topic, create=create))
            known = self.routes.known.get(topic)
        if known is None:
            self.routes.forget(topic)
            brokers = None
            try:
                answer = yield from self.ask_name_server(requests.cluster_info())
                if answer.code == SUCCESS:
                    brokers = sorted(decode_cluster_info(answer.body).brokers)
            except SluiceError:
                pass  # the error's text leaves them out
            raise no_route(topic, self.name_servers, brokers, auto_create_tried=create)
        return known

    def _refresh(self, topic: str, *, create: bool) -> Conversation[None]:
        known = self.routes.known.get(topic)
        if self.routes.is_fresh(topic, self.clock.monotonic_s()):
            return
        try:
            found = yield from self.find_route(topic)
            if found is None and create and known is None:
                default = yield from self.find_route(DEFAULT_TOPIC)
                found = as_created(default) if default else None
        except NameServerUnreachableError as error:
            if known is None:
                raise
            self.outages.report_failure(
                _ALL_NAME_SERVERS, "%s The last known routes are used on.", error.fact
            )
            found = None
        if self.routes.put(topic, found, self.clock.monotonic_s()):
            self.on_route(topic)

    def write_queues(self, topic: str) -> Conversation[list[MessageQueue]]:
        """The queues that a message of the topic may go to. Raises RouteNotFoundError."""
        yield from self.route(topic, create=True)
        queues = self.routes.writers.get(topic)
        if not queues:
            self.routes.forget(topic)
            raise no_writable_queue(topic)
        return queues

    def master(self, queue: MessageQueue) -> str:
        """The address that takes messages for a queue, by the route that is known. Raises
        ConnectionLostError when it is away."""
        address = self.routes.masters.get(queue.topic, _NOWHERE).get(queue.broker)
        if address is None:
            self.routes.forget(queue.topic)
            raise ConnectionLostError(
                f"the master of {queue.broker!r} is not in the route of {queue.topic!r}.",
                fix="See sluice cluster list.",
            )
        return address

    def address(self, queue: MessageQueue, replica_id: int = MASTER_ID) -> Conversation[str]:
        """Where to read a queue: at this replica of its broker, else at the master or, while that
        is away, at a slave. Raises RouteNotFoundError."""
        route = yield from self.route(queue.topic)
        address = self.routes.sources[queue.topic].get(queue.broker)
        if replica_id != MASTER_ID:
            replicas = next((it.addresses for it in route.brokers if it.broker == queue.broker), {})
            address = replicas.get(replica_id, address)
        if address is None:
            self.routes.forget(queue.topic)
            raise RouteNotFoundError(
                f"the broker {queue.broker!r} is not in the route of {queue.topic!r}.",
                fix="See sluice cluster list.",
            )
        return address

    def pull(
        self, queue: MessageQueue, command: Command, timeout_s: float, replica_id: int = MASTER_ID
    ) -> Conversation[PullAnswer]:
        """The outcome of a pull at the queue's broker. Raises RouteNotFoundError, RequestError."""
        address = yield from self.address(queue, replica_id)
        return pull_answer((yield Call(address, command, timeout_s)), address)

    def _exchange(
        self, topic: str, address: str, command: Command, timeout_s: float | None = None
    ) -> Conversation[Command]:
        """A broker that is not there may have been replaced: the next who asks has a new route."""
        try:
            return (yield Call(address, command, timeout_s))
        except (ConnectionLostError, RequestTimeoutError):
            self.routes.forget(topic)
            raise

    def ask_master(
        self, queue: MessageQueue, command: Command, timeout_s: float | None = None
    ) -> Conversation[Command]:
        """A request that must succeed, to the only broker that may write to a queue. Raises
        ConnectionLostError when it is away, RouteNotFoundError, RequestError."""
        yield from self.route(queue.topic)
        address = self.master(queue)
        answer = yield from self._exchange(queue.topic, address, command, timeout_s)
        if answer.code == NOT_AVAILABLE:
            self.routes.forget(queue.topic)
        return expect_success(answer, address)

    def ask(self, where: MessageQueue | str, command: Command) -> Conversation[Command]:
        """A request that must succeed: to a queue's broker, an address, or NAME_SERVERS."""
        if where == NAME_SERVERS:
            return expect_success((yield from self.ask_name_server(command)))
        if isinstance(where, str):
            return expect_success((yield Call(where, command)), where)
        address = yield from self.address(where)
        return expect_success((yield from self._exchange(where.topic, address, command)), address)


def no_route(
    topic: str, servers: Iterable[str], brokers: Iterable[str] | None, *, auto_create_tried: bool
) -> RouteNotFoundError:
    """The error for a topic without a route: which of the usual causes are excluded, and the cure.

    RocketMQ has one text for five causes : name server not reachable, no broker
    registered with it (or the wrong name server), topic missing, automatic creation off, topic
    misspelt. This is raised only after a name server answered, so the first is excluded; `brokers`
    (None: could not be asked) tells about the second, TBW102's route about automatic creation.
    """
    found = None if brokers is None else sorted(brokers)
    answer = f"The name servers ({', '.join(servers)}) answer, so the network to them is fine"
    if found == []:
        return RouteNotFoundError(
            f"no broker serves the topic {topic!r}. {answer}, but no broker is registered there.",
            fix="Start a broker (sluice broker), or name the name servers that it registers with.",
        )
    there = f", and brokers are registered there ({', '.join(found)})" if found else ""
    create = (
        "they know no such topic and automatic creation is off (no broker offers TBW102)"
        if auto_create_tried
        else "they know no such topic, and consumers do not create topics"
    )
    return RouteNotFoundError(
        f"no broker serves the topic {topic!r}. {answer}{there}; {create}.",
        fix=f"Check the spelling (sluice topic list), then create it: sluice topic create {topic}.",
    )


def no_writable_queue(topic: str) -> RouteNotFoundError:
    """The error for a topic that is known but cannot be written to."""
    return RouteNotFoundError(
        f"the topic {topic!r} exists, but none of its queues can be written to: read-only, or the "
        "master of its broker is away.",
        fix=f"See sluice topic show {topic} and sluice cluster list.",
    )
