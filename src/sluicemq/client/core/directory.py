"""Find out which server a request has to go to: name servers, routes and broker addresses.

`RouteCache` stores the last route of each topic and when it was learned. If the name servers no
longer know the route of a topic, the cached one stays in use (spec/namesrv.md §8), because a broker
that restarts is missing only for a moment. `Directory` asks the name servers and sends requests to
the brokers that the routes name. Its methods that return a `Conversation` are run by a shell.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
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
    PullResponse,
    expect_success,
    parse_pull_response,
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
"""A route that is older than this is fetched again before its next use."""
_NO_MASTERS: Final[dict[str, str]] = {}
NAME_SERVERS: Final = ""
"""An address for `Directory.call` that stands for the first name server that responds."""
_NAME_SERVER_REQUESTS: Final = frozenset(
    {
        RequestCode.GET_ROUTEINFO_BY_TOPIC,
        RequestCode.GET_BROKER_CLUSTER_INFO,
        RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER,
    }
)
"""Requests that every name server supports, and no broker."""
_NAME_SERVER_OUTAGE: Final = "the name servers"
"""The name of an outage in which no name server responds."""


def list_write_queues(topic: str, route: TopicRoute) -> list[MessageQueue]:
    """Return the queues of a topic to which a producer may send, sorted by broker and queue id.

    These are the writable queues of each broker that has a master in the route. A topic with an
    order configuration has exactly the queues of that configuration, in its order. So their number
    stays the same while a broker is down.
    """
    if route.order_topic_config:
        return _list_ordered_queues(topic, route.order_topic_config)
    with_master = {
        broker_data.broker for broker_data in route.brokers if MASTER_ID in broker_data.addresses
    }
    queues: list[MessageQueue] = []
    for queue_data in sorted(route.queues, key=lambda queue_data: queue_data.broker):
        if queue_data.perm & PERM_WRITE and queue_data.broker in with_master:
            queues += [
                MessageQueue(topic, queue_data.broker, queue_id)
                for queue_id in range(queue_data.write_queues)
            ]
    return queues


def _list_ordered_queues(topic: str, order_config: str) -> list[MessageQueue]:
    """Return the queues of an order configuration, which is a text such as `broker-a:4;broker-b:4`.

    The number after a broker's name is the number of its queues. `a:2` becomes queues 0 and 1 of
    broker a.
    """
    queues: list[MessageQueue] = []
    for entry in filter(None, order_config.split(";")):
        broker, _, queue_count = entry.partition(":")
        queues += [MessageQueue(topic, broker, queue_id) for queue_id in range(int(queue_count))]
    return queues


def find_read_addresses(route: TopicRoute) -> dict[str, str]:
    """Return broker name -> address to read from, for each broker of a route.

    This is the address of the master, or of the slave with the lowest id if the route has no
    master. Brokers without any address are left out.
    """
    # `addresses` maps replica ids to addresses. The id of the master is 0, the lowest.
    return {
        broker_data.broker: broker_data.addresses[min(broker_data.addresses)]
        for broker_data in route.brokers
        if broker_data.addresses
    }


def predict_created_route(default: TopicRoute) -> TopicRoute:
    """Return the route that a topic will have after the first send has created it.

    `default` is the route of TBW102, the topic that brokers copy. The new topic has at most
    `NEW_TOPIC_QUEUES` queues on each broker, as many as send requests ask for. Java's client
    predicts the same.
    """
    queues = [
        replace(
            queue_data,
            read_queues=min(queue_data.read_queues, NEW_TOPIC_QUEUES),
            write_queues=min(queue_data.write_queues, NEW_TOPIC_QUEUES),
        )
        for queue_data in default.queues
    ]
    return replace(default, queues=tuple(queues))


class RouteCache:
    """The last known route of each topic, with the tables that are derived from it.

    Routes are kept after they expire; see the module docstring. Times are monotonic seconds that
    the caller passes.
    """

    __slots__ = (
        "_learned_s",
        "last_master_addresses",
        "master_addresses",
        "read_addresses",
        "routes",
        "write_queues",
    )

    def __init__(self) -> None:
        """Begin without routes."""
        self.last_master_addresses: dict[str, str] = {}
        """Maps broker name to the last known address of its master, which may be outdated."""
        self.routes: dict[str, TopicRoute] = {}
        """Maps topic to route."""
        self.write_queues: dict[str, list[MessageQueue]] = {}
        """Maps topic to the queues that a producer may send to."""
        self.master_addresses: dict[str, dict[str, str]] = {}
        """Maps topic to a table of broker name and master address."""
        self.read_addresses: dict[str, dict[str, str]] = {}
        """Maps topic to a table of broker name and the address to read from."""
        self._learned_s: dict[str, float] = {}

    def is_fresh(self, topic: str, now_s: float) -> bool:
        """Return whether the name servers were asked for the route within `ROUTE_PERIOD_S`. HOT."""
        return now_s - self._learned_s.get(topic, -1e9) < ROUTE_PERIOD_S

    def fresh_write_queues(self, topic: str, now_s: float) -> list[MessageQueue] | None:
        """Return the queues a producer may send to, or None if the route must be fetched. HOT.

        The list is empty if the route has no writable queue. None is also returned if the topic has
        no known route.
        """
        if now_s - self._learned_s.get(topic, -1e9) < ROUTE_PERIOD_S:
            return self.write_queues.get(topic)
        return None

    def store(self, topic: str, route: TopicRoute | None, now_s: float) -> bool:
        """Store a route that the name servers returned at `now_s`; return whether it has changed.

        The tables that are derived from the route are updated, too. `route` None means that the
        name servers know none: the older route stays, counts as fresh again, and the result is
        False.
        """
        self._learned_s[topic] = now_s
        if route is None or route == self.routes.get(topic):
            return False
        self.routes[topic] = route
        self.write_queues[topic] = list_write_queues(topic, route)
        self.master_addresses[topic] = {
            broker_data.broker: broker_data.addresses[MASTER_ID]
            for broker_data in route.brokers
            if MASTER_ID in broker_data.addresses
        }
        self.read_addresses[topic] = find_read_addresses(route)
        self.last_master_addresses.update(self.master_addresses[topic])
        return True

    def has_replicas(self, topic: str, broker: str | None) -> bool:
        """Return whether a broker has a slave that can become its master.

        The last known route of the topic decides; without a route the result is False. With None as
        `broker`, the result says whether some broker of the topic has a slave and no master.
        """
        route = self.routes.get(topic)
        if route is None:
            return False
        for broker_data in route.brokers:
            has_slave = max(broker_data.addresses, default=MASTER_ID) != MASTER_ID
            if broker is None:
                is_concerned = MASTER_ID not in broker_data.addresses
            else:
                is_concerned = broker_data.broker == broker
            if is_concerned and has_slave:
                return True
        return False

    def expire(self, topic: str) -> None:
        """Make the next use of the topic fetch its route again."""
        self._learned_s.pop(topic, None)

    def remove(self, topic: str) -> None:
        """Remove everything that is cached about a topic, because it was deleted."""
        for table in (
            self.routes,
            self.write_queues,
            self.master_addresses,
            self.read_addresses,
            self._learned_s,
        ):
            table.pop(topic, None)

    def broker_addresses(self, topics: Iterable[str]) -> set[str]:
        """Return the addresses of all brokers, masters and slaves, in the cached routes of topics.

        A topic without a route has none.
        """
        addresses: set[str] = set()
        for topic in topics:
            route = self.routes.get(topic)
            if route is not None:
                for broker_data in route.brokers:
                    addresses.update(broker_data.addresses.values())
        return addresses


def is_broker_response(command: Command, response: Command) -> bool:
    """Return whether a response shows that a broker, not a name server, has the address.

    This is so if the server does not support `command`, although every name server supports it.
    """
    return (
        response.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED
        and command.code in _NAME_SERVER_REQUESTS
    )


def broker_as_name_server_error(address: str, response: Command) -> ConfigurationError:
    """Return the error for an address of a name server at which a broker responds.

    The remark of `response`, the broker's response, becomes part of the text.
    """
    return ConfigurationError(
        f"{address} is configured as a name server, but a broker responds there "
        f"({response.remark}).",
        fix="Use the name server's address; its port is 9876 unless its listenPort differs.",
    )


class Directory:
    """The name servers of one client and the routes that it learned from them.

    `on_route_change(topic)` is called when the route of a topic has changed; it does nothing until
    the client sets it. `outages` logs each outage of a server once.
    """

    def __init__(self, name_servers: str | list[str] | tuple[str, ...], clock: Clock) -> None:
        """Create a directory of routes. No request is sent.

        `name_servers` are addresses, as text or as a list. Raises ConfigurationError for an invalid
        one.
        """
        self.name_servers: tuple[str, ...] = parse_name_servers(name_servers)
        self.clock = clock
        self.routes: RouteCache = RouteCache()
        self.outages: Outages = Outages(clock, _log)
        self.on_route_change: Callable[[str], None] = lambda topic: None
        # The clock spreads the clients over the name servers.
        self._next_server = clock.now_ms() % len(self.name_servers)

    def log_failure(
        self,
        error: Exception,
        queue: MessageQueue | None,
        activity: str,
        log_text: str,
        *arguments: object,
    ) -> None:
        """Log a failure with `log_text % arguments`, but only once during an outage.

        An outage lasts until a success is reported for it. `error` says to which outage the failure
        belongs: all name servers if none responds, or the broker of `queue` if that does not
        respond. Any other failure belongs to `activity`, a name for what failed, and so does every
        failure if `queue` is None.
        """
        outage = activity
        if isinstance(error, NameServerUnreachableError):
            outage = _NAME_SERVER_OUTAGE
        elif queue is not None and is_outage(error):
            outage = self.last_known_address(queue)
        self.outages.report_failure(outage, log_text, *arguments)

    def log_recovery(self, queue: MessageQueue, activity: str = "") -> None:
        """Log that the broker of `queue` responds again and `activity` works again.

        Only what was reported as failed before is logged.
        """
        if self.outages.current:
            self.outages.report_success(self.last_known_address(queue))
            self.outages.report_success(activity)

    def last_known_address(self, queue: MessageQueue) -> str:
        """Return the last known address of the queue's master, or the broker's name without one."""
        return self.routes.last_master_addresses.get(queue.broker, queue.broker)

    def call_name_server(
        self, command: Command, is_conclusive: Callable[[Command], bool] = lambda _answer: True
    ) -> Conversation[Command]:
        """Send a request to the name servers, one after the other, and return the first response.

        The server that responded last is asked first. Servers that do not respond are skipped, and
        so are brokers that are configured as name servers. `is_conclusive(response)` may reject a
        response, so that the next server is asked as well. If no response is accepted, the first
        rejected one is returned.

        Raises NameServerUnreachableError, which lists the failure of every server. Raises
        ConfigurationError if brokers respond at all addresses.
        """
        failures: list[tuple[str, SluiceError]] = []
        first_inconclusive: Command | None = None
        server_count = len(self.name_servers)
        # Begin with the server that responded last, and ask each server once.
        for step in range(server_count):
            index = (self._next_server + step) % server_count
            address = self.name_servers[index]
            try:
                response = yield Call(address, command)
            except (ConnectionLostError, RequestTimeoutError) as error:
                failures.append((address, error))
                continue
            if is_broker_response(command, response):
                failures.append((address, broker_as_name_server_error(address, response)))
                continue
            if self.outages.current:
                self.outages.report_success(_NAME_SERVER_OUTAGE)
            if is_conclusive(response):
                self._next_server = index
                return response
            if first_inconclusive is None:
                first_inconclusive = response

        if first_inconclusive is not None:
            return first_inconclusive
        raise _no_name_server_error(failures)

    def fetch_route(self, topic: str) -> Conversation[TopicRoute | None]:
        """Ask the name servers for the route of a topic; return None if it does not exist.

        All name servers are asked until one knows the topic, because one that has just started does
        not know all brokers yet. Raises RequestError if the last answer is another failure.
        """
        response = yield from self.call_name_server(
            requests.route(topic), lambda response: response.code == SUCCESS
        )
        if response.code == TOPIC_NOT_EXIST:
            return None
        if response.code != SUCCESS:
            raise request_error(response)
        return decode_topic_route(response.body)

    def get_route(self, topic: str, *, create: bool = False) -> Conversation[TopicRoute]:
        """Return the route of a topic, from the cache if it is at most `ROUTE_PERIOD_S` old.

        Concurrent callers share one request. While no name server responds, the older route stays
        in use. With `create`, a missing topic gets the route that it will have when brokers create
        it on the first send.

        Raises RouteNotFoundError if the topic has no route, NameServerUnreachableError if no name
        server responds and no older route is known.
        """
        route = self.routes.routes.get(topic)
        if route is None or not self.routes.is_fresh(topic, self.clock.monotonic_s()):
            yield Exclusive(topic, self._refresh(topic, create=create))
            route = self.routes.routes.get(topic)
        if route is not None:
            return route

        self.routes.expire(topic)
        broker_names = None
        try:
            response = yield from self.call_name_server(requests.cluster_info())
            if response.code == SUCCESS:
                broker_names = sorted(decode_cluster_info(response.body).brokers)
        except SluiceError:
            pass  # the error's text does not mention brokers then
        raise route_not_found_error(
            topic, self.name_servers, broker_names, auto_create_tried=create
        )

    def _refresh(self, topic: str, *, create: bool) -> Conversation[None]:
        """Fetch the route of a topic into the cache, unless the cached route is fresh.

        If the route has changed, `on_route_change` is called. If no name server responds, an older
        route stays in use, and the outage is logged. With `create`, a missing topic gets the route
        that it will have when brokers create it.

        Raises NameServerUnreachableError if no older route is known, RequestError if a name server
        refuses.
        """
        old_route = self.routes.routes.get(topic)
        if self.routes.is_fresh(topic, self.clock.monotonic_s()):
            return
        try:
            new_route = yield from self.fetch_route(topic)
            if new_route is None and create and old_route is None:
                default_route = yield from self.fetch_route(DEFAULT_TOPIC)
                if default_route is not None:
                    new_route = predict_created_route(default_route)
        except NameServerUnreachableError as error:
            if old_route is None:
                raise
            self.outages.report_failure(
                _NAME_SERVER_OUTAGE, "%s. The last known routes stay in use.", error.fact
            )
            new_route = None  # `store` then keeps the old route
        if self.routes.store(topic, new_route, self.clock.monotonic_s()):
            self.on_route_change(topic)

    def get_write_queues(self, topic: str) -> Conversation[list[MessageQueue]]:
        """Return the queues to which a message of the topic can be sent, at least one.

        A missing topic gets the queues that it will have when brokers create it. Raises
        RouteNotFoundError if there is no route or no writable queue, and
        NameServerUnreachableError.
        """
        yield from self.get_route(topic, create=True)
        queues = self.routes.write_queues.get(topic)
        if not queues:
            self.routes.expire(topic)
            raise no_write_queue_error(topic)
        return queues

    def get_master_address(self, queue: MessageQueue) -> str:
        """Return the address of the master of a queue's broker, from the cached route of the topic.

        Raises ConnectionLostError if the route has no master for the broker. The route is then
        fetched again before its next use.
        """
        address = self.routes.master_addresses.get(queue.topic, _NO_MASTERS).get(queue.broker)
        if address is None:
            self.routes.expire(queue.topic)
            raise ConnectionLostError(
                f"the master of {queue.broker!r} is not in the route of {queue.topic!r}.",
                fix="Check that the master is running and registered (sluice cluster list).",
            )
        return address

    def get_read_address(
        self, queue: MessageQueue, replica_id: int = MASTER_ID
    ) -> Conversation[str]:
        """Return the address to read a queue from, and fetch the topic's route if it is too old.

        `replica_id` is the preferred replica of the queue's broker. If the route does not have it,
        the master is used, or a slave if there is no master.

        Raises RouteNotFoundError if the route does not contain the broker, and
        NameServerUnreachableError.
        """
        route = yield from self.get_route(queue.topic)
        address = self.routes.read_addresses[queue.topic].get(queue.broker)
        if replica_id != MASTER_ID:
            for broker_data in route.brokers:
                if broker_data.broker == queue.broker:
                    address = broker_data.addresses.get(replica_id, address)
                    break
        if address is None:
            self.routes.expire(queue.topic)
            raise RouteNotFoundError(
                f"the broker {queue.broker!r} is not in the route of {queue.topic!r}.",
                fix="Check that the broker is running and registered (sluice cluster list).",
            )
        return address

    def pull(
        self, queue: MessageQueue, command: Command, timeout_s: float, replica_id: int = MASTER_ID
    ) -> Conversation[PullResponse]:
        """Send a pull request to the broker of a queue, and parse the response.

        `replica_id` selects a replica of that broker, as in `get_read_address`. `timeout_s` limits
        the call in seconds. Raises RouteNotFoundError, NameServerUnreachableError,
        ConnectionLostError, RequestTimeoutError, and RequestError for a response that is none of
        the outcomes of a pull.
        """
        address = yield from self.get_read_address(queue, replica_id)
        return parse_pull_response((yield Call(address, command, timeout_s)), address)

    def _call_broker(
        self, topic: str, address: str, command: Command, timeout_s: float | None = None
    ) -> Conversation[Command]:
        """Send a request to `address` and return the response, whatever its code.

        If no response comes, another broker may have become master. So the cached route of `topic`
        expires, and is fetched again before its next use.
        """
        try:
            return (yield Call(address, command, timeout_s))
        except (ConnectionLostError, RequestTimeoutError):
            self.routes.expire(topic)
            raise

    def call_master(
        self, queue: MessageQueue, command: Command, timeout_s: float | None = None
    ) -> Conversation[Command]:
        """Send a request to the master of a queue, and return its response if that is a success.

        Raises RequestError for any other response. If the master does not respond or cannot write,
        the route of the topic is fetched again before its next use. Also raises RouteNotFoundError,
        NameServerUnreachableError, RequestTimeoutError, and ConnectionLostError, which can mean
        that the route has no master.
        """
        yield from self.get_route(queue.topic)
        address = self.get_master_address(queue)
        response = yield from self._call_broker(queue.topic, address, command, timeout_s)
        if response.code == NOT_AVAILABLE:
            self.routes.expire(queue.topic)
        return expect_success(response, address)

    def call(self, target: MessageQueue | str, command: Command) -> Conversation[Command]:
        """Send a request to a server, and return its response if that is a success.

        `target` is the server: an address, a queue, which means its broker, or `NAME_SERVERS`,
        which means the first name server that responds. Raises RequestError for a response that is
        not a success, and the errors of the connection.
        """
        if target == NAME_SERVERS:
            response = yield from self.call_name_server(command)
            return expect_success(response)
        if isinstance(target, str):
            response = yield Call(target, command)
            return expect_success(response, target)
        address = yield from self.get_read_address(target)
        response = yield from self._call_broker(target.topic, address, command)
        return expect_success(response, address)


def route_not_found_error(
    topic: str, servers: Iterable[str], brokers: Iterable[str] | None, *, auto_create_tried: bool
) -> RouteNotFoundError:
    """Return the error for a topic without a route, with its most probable cause and the fix.

    A name server has responded before. So the possible causes are: no broker is registered with it,
    the topic does not exist or is misspelt, or automatic creation is off. `servers` are the
    addresses of the name servers. `brokers` are the names of the registered brokers; None means
    unknown. `auto_create_tried` is True for a producer, for which brokers may create the topic.
    """
    broker_names = None if brokers is None else sorted(brokers)
    reachable = f"The name servers ({', '.join(servers)}) are reachable"
    if broker_names == []:
        return RouteNotFoundError(
            f"no broker serves the topic {topic!r}. {reachable}, but no broker is registered with "
            "them.",
            fix="Start a broker (sluice broker), wait for one that starts (sluice cluster wait), "
            "or use the name servers that it registers with.",
        )
    registered = ", but none of their brokers serves this topic"
    if broker_names:
        registered = (
            f", and brokers are registered ({', '.join(broker_names)}), but none of them serves "
            "this topic"
        )
    cause = "consumers do not create topics"
    if auto_create_tried:
        cause = "automatic creation is off (no broker has TBW102)"
    return RouteNotFoundError(
        f"the topic {topic!r} does not exist, and {cause}. {reachable}{registered}.",
        fix="Check the spelling with `sluice topic list`, or create the topic with "
        f"`sluice topic create {topic}`.",
    )


def _no_name_server_error(failures: Sequence[tuple[str, SluiceError]]) -> SluiceError:
    """Return the error for a request to which no name server responded.

    `failures` are pairs (address, error), one for each name server. If brokers responded at all
    addresses, the result is the first error, a ConfigurationError. Otherwise it is a
    NameServerUnreachableError that lists all failures.
    """
    broker_errors = [error for _, error in failures if isinstance(error, ConfigurationError)]
    if len(broker_errors) == len(failures) and broker_errors:
        return broker_errors[0]

    fix = (
        "Check the host and port, and make sure that the name server is running; to start one, "
        "run `sluice nameserver`."
    )
    for _, error in failures:
        # A fix about TLS is more specific than the usual one.
        if "tls" in error.fix.lower() or "certificate" in error.fix.lower():
            fix = error.fix
            break
    reasons = "; ".join(_describe_failure(address, error) for address, error in failures)
    return NameServerUnreachableError(f"no name server responded ({reasons}).", fix=fix)


def _describe_failure(address: str, error: SluiceError) -> str:
    """Return "address: reason" of a failed request, without naming the address twice.

    "Cannot connect to a:1: Refused" of address "a:1" becomes "a:1: refused".
    """
    fact = error.fact
    if address not in fact:
        return f"{address}: {fact}"
    beginning = f"Cannot connect to {address}: "
    if not fact.startswith(beginning):
        return fact
    reason = fact.removeprefix(beginning)
    return f"{address}: {reason[:1].lower()}{reason[1:]}"


def no_write_queue_error(topic: str) -> RouteNotFoundError:
    """Return the error for a topic that has a route but no queue to send to."""
    return RouteNotFoundError(
        f"the topic {topic!r} exists, but none of its queues is writable: it is read-only, or the "
        "master of its broker is not running.",
        fix=f"Check sluice topic show {topic} and sluice cluster list.",
    )
