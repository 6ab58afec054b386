"""Telemetry, Heartbeat and NotifyClientTermination, and requests of brokers to clients.

    settings         -> merged with the settings of its group and echoed; the client joins it
    Heartbeat        -> HEART_BEAT (34) to the master of each broker that has one of its topics
    broker's request -> a command on the telemetry stream -> the client's reply, by its nonce

See spec/grpc.md §4. For brokers, a producer is a member of one producer group per topic, which has
the topic's name, as in RocketMQ's proxy. Contract, lanes, transaction checks and tools therefore
work as for remoting clients. If the first settings of a client are refused, the stream ends with
the error, so that the application fails to start. Later, the status of its heartbeats is the error.

Commands are sent without waiting. If a client does not reply within `CLIENT_REPLY_S`, the proxy
responds to the broker instead. A transaction check needs no reply, because brokers repeat it.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Any, Final

from sluicemq.client.core import requests
from sluicemq.client.core.conversations import Call as BrokerCall
from sluicemq.client.core.conversations import Conversation
from sluicemq.client.core.transactions import parse_check_request
from sluicemq.config.proxying import ProxyLimits
from sluicemq.config.settings import DEFAULT_LEVELS, parse_delay_levels
from sluicemq.errors import (
    FilterError,
    PermissionDeniedError,
    RouteNotFoundError,
    SluiceError,
)
from sluicemq.filter.subscriptions import parse_subscription
from sluicemq.model.subscription import SQL92, Subscription
from sluicemq.model.topic import GroupConfig
from sluicemq.net.grpc import Call
from sluicemq.proxy import messages as m
from sluicemq.proxy.backend import Backend, master_addresses
from sluicemq.proxy.clients import OK, QUEUED_BYTES_MAX, Client, Clients, client_type_name
from sluicemq.proxy.convert import to_message
from sluicemq.proxy.limits import Refusal, StatusError, checked_group, checked_topic
from sluicemq.proxy.messages import ClientType, Code, FilterType
from sluicemq.proxy.sending import format_transaction_id
from sluicemq.record.codec import decode_record
from sluicemq.wire import bodies
from sluicemq.wire.codes import RequestCode, ResponseCode
from sluicemq.wire.declare import decode_header
from sluicemq.wire.frames import Command
from sluicemq.wire.headers import GetConsumerRunningInfoRequest

log = logging.getLogger(__name__)

TOPICS_PER_CLIENT_MAX: Final = 4096
"""The maximum number of topics or subscriptions in the settings of a client."""
BROKER_TIMEOUT_S: Final = 1.0
"""The timeout of a heartbeat to a broker, in seconds.

A Java client waits 3 s for the response to its settings.
"""
CLIENT_REPLY_S: Final = 4.0
"""The time in seconds that a client has to reply to a command.

It is checked once a second, so that tools, which wait for 5 s (spec/grpc.md §4), get a response.
"""
PENDING_COMMANDS_MAX: Final = 1024
"""The maximum number of commands that wait for a reply."""

INT_MAX: Final = (1 << 31) - 1
"""The largest value of an int32 field."""

CONSUME_TYPES: Final[Mapping[int, str]] = {
    ClientType.PUSH_CONSUMER: bodies.CONSUME_PASSIVELY,
    ClientType.SIMPLE_CONSUMER: bodies.CONSUME_ACTIVELY,
    ClientType.PULL_CONSUMER: bodies.CONSUME_ACTIVELY,
}
"""The consume type in heartbeats by the client type of a consumer."""
_RESULT_BY_CODE: Final[Mapping[int, bodies.ConsumeResult]] = {
    Code.OK: bodies.ConsumeResult.SUCCESS,
    Code.FAILED_TO_CONSUME_MESSAGE: bodies.ConsumeResult.LATER,
    Code.MESSAGE_CORRUPTED: bodies.ConsumeResult.NOTHING,
}
"""The result of direct consumption by the status code of the client's reply."""

Respond = Callable[[Command], None]
"""A function that sends a client's response to a broker."""


# ---------------------------------------------------------------------------------------- settings


def to_duration(ms: int) -> m.Duration:
    """Return a duration of `ms` milliseconds."""
    return m.Duration(seconds=ms // 1000, nanos=ms % 1000 * 1_000_000)


def to_retry_policy(group: GroupConfig) -> m.RetryPolicy:
    """Return the retry policy of a group for its consumers: backoff and maximum number of attempts.

    The settings of the group may have a policy, a JSON object of an administrator with times in ms:

        {"type": "EXPONENTIAL", "exponentialRetryPolicy": {"initial": …, "max": …, "multiplier": …}}
        {"type": "CUSTOMIZED", "customizedRetryPolicy": {"next": [10000, 30000, …]}}

    Any other type counts as CUSTOMIZED. Missing or invalid values are replaced by defaults. For
    EXPONENTIAL, these are RocketMQ's. For a missing list, they are the default delay levels. An
    invalid item of the list becomes 0.
    """
    stored = group.retry_policy or {}
    policy = m.RetryPolicy(max_attempts=min(max(1, group.retry_times_max + 1), INT_MAX))
    if stored.get("type") == "EXPONENTIAL":
        backoff = _dict_or_empty(stored, "exponentialRetryPolicy")
        policy.exponential_backoff.CopyFrom(
            m.ExponentialBackoff(
                initial=to_duration(_int_or_default(backoff.get("initial"), 5000)),
                max=to_duration(_int_or_default(backoff.get("max"), 7_200_000)),
                multiplier=_int_or_default(backoff.get("multiplier"), 2),
            )
        )
    else:
        stored_delays = _dict_or_empty(stored, "customizedRetryPolicy").get("next")
        if isinstance(stored_delays, list) and stored_delays:
            delays_ms = [_int_or_default(delay, 0) for delay in stored_delays]
        else:
            delays_ms = list(parse_delay_levels(DEFAULT_LEVELS))
        policy.customized_backoff.CopyFrom(
            m.CustomizedBackoff(next=[to_duration(delay_ms) for delay_ms in delays_ms])
        )
    return policy


def _dict_or_empty(json_object: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the JSON object `json_object[name]`; {} if it is missing or not an object."""
    member = json_object.get(name)
    return member if isinstance(member, dict) else {}


def _int_or_default(json_value: Any, default: int) -> int:
    """Return `json_value` if it is an integer from 0 to 2^40 - 1, or else `default`."""
    is_valid = isinstance(json_value, int) and 0 <= json_value < 1 << 40
    return json_value if is_valid else default


def merge_settings(
    client_settings: m.Settings, group: GroupConfig | None, limits: ProxyLimits
) -> m.Settings:
    """Return the settings that the server sends back to a client.

    The result is a copy of the client's settings, including unknown fields. The server sets the
    limits, the backoff policy and, for a consumer, whether its group is ordered. Metrics are turned
    off. `group` has the settings of the consumer's group; None means default settings. It is
    ignored for a client that only sends.
    """
    settings = m.Settings()
    settings.CopyFrom(client_settings)
    settings.metric.CopyFrom(m.Metric(on=False))
    if settings.HasField("publishing"):
        backoff = m.ExponentialBackoff(
            initial=to_duration(limits.backoff_ms_min),
            max=to_duration(limits.backoff_ms_max),
            multiplier=limits.backoff_multiplier,
        )
        policy = m.RetryPolicy(max_attempts=limits.attempts_max, exponential_backoff=backoff)
        settings.publishing.validate_message_type = limits.checks_type
        settings.publishing.max_body_size = limits.body_bytes_largest
    else:
        group = group or GroupConfig(client_settings.subscription.group.name)
        policy = to_retry_policy(group)
        settings.subscription.fifo = group.consume_message_orderly
        settings.subscription.receive_batch_size = limits.batch_size
        settings.subscription.long_polling_timeout.CopyFrom(to_duration(limits.poll_ms_longest))
    settings.backoff_policy.CopyFrom(policy)
    return settings


def to_heartbeat(client_id: str, settings: m.Settings, now_ms: int) -> bodies.Heartbeat:
    """Return the heartbeat by which a client with these settings becomes known to brokers.

    The heartbeat of a client that publishes has one producer group for each topic, which has the
    topic's name. The heartbeat of a consumer has one group with its subscriptions, whose version is
    `now_ms`. SQL92 expressions are not checked here, but by the broker at the first receive.

    Raises StatusError if the settings name neither topics nor a group, for more than
    `TOPICS_PER_CLIENT_MAX` topics, and for invalid names, client types or tag expressions.
    """
    if settings.HasField("publishing"):
        resources = settings.publishing.topics
        _check_topic_count(len(resources))
        topics = dict.fromkeys(checked_topic(resource) for resource in resources)
        return bodies.Heartbeat(client_id, tuple(topics))
    if settings.HasField("subscription"):
        consumer = _to_consumer_data(settings, now_ms)
        return bodies.Heartbeat(client_id, (), (consumer,))
    raise StatusError(Refusal.SETTINGS_EMPTY, "name what the client publishes or subscribes to.")


def _to_consumer_data(settings: m.Settings, now_ms: int) -> bodies.ConsumerData:
    """Return the group of a consumer with its subscriptions, for the heartbeat.

    The subscriptions get the version `now_ms`. Raises StatusError for more than
    `TOPICS_PER_CLIENT_MAX` topics, and for an invalid name, client type or tag expression.
    """
    consume_type = CONSUME_TYPES.get(settings.client_type)
    if consume_type is None:
        valid_types = ", ".join(m.ClientType(client_type).name for client_type in CONSUME_TYPES)
        raise StatusError(
            Refusal.CLIENT_TYPE, f"use one of {valid_types}.", kind=client_type_name(settings)
        )
    group = checked_group(settings.subscription.group)
    entries = settings.subscription.subscriptions
    _check_topic_count(len(entries))
    subscriptions = tuple(_to_subscription(entry, now_ms) for entry in entries)
    return bodies.ConsumerData(group, consume_type, subscriptions=subscriptions)


def _check_topic_count(topic_count: int) -> None:
    """Raise StatusError if the settings of a client name too many topics."""
    if topic_count > TOPICS_PER_CLIENT_MAX:
        raise StatusError(
            Refusal.SETTINGS_TOO_MANY,
            f"The settings name {topic_count} topics, the limit is {TOPICS_PER_CLIENT_MAX}.",
            fix="Use several clients.",
        )


def _to_subscription(subscription_entry: m.SubscriptionEntry, now_ms: int) -> Subscription:
    """Return the subscription that an entry in a client's settings describes.

    Its version is `now_ms`. Raises StatusError for an invalid topic or tag expression. SQL92 is not
    checked.
    """
    topic = checked_topic(subscription_entry.topic)
    expression = subscription_entry.expression.expression
    if subscription_entry.expression.type == FilterType.SQL:
        return Subscription(topic, expression, SQL92, version=now_ms)
    try:
        return parse_subscription(topic, expression, version=now_ms)
    except FilterError as error:
        raise StatusError(Refusal.FILTER_OF_SETTINGS, str(error)) from error


def _iter_topics(heartbeat: bodies.Heartbeat) -> Iterator[str]:
    """Yield the topics that a client sends to, then those to which it has subscribed.

    A topic may be yielded more than once.
    """
    yield from heartbeat.producer_groups
    for consumer in heartbeat.consumers:
        for subscription in consumer.subscriptions:
            yield subscription.topic


# ------------------------------------------------------------------------------------- the service


@dataclass(slots=True)
class PendingCommand:
    """A command that was sent to a client and has no reply yet.

    `on_reply` is called with the reply. If there is none in time, `respond` is called with the
    response to the broker. `sent_s` is the monotonic time at which the command was sent.
    """

    client: Client
    on_reply: Callable[[m.TelemetryCommand], None]
    respond: Respond
    sent_s: float


class Telemetry:
    """The service object of Telemetry, Heartbeat and NotifyClientTermination.

    It also handles the requests that brokers send to clients.
    """

    def __init__(self, backend: Backend, clients: Clients, limits: ProxyLimits) -> None:
        """Create the object that serves telemetry streams.

        From now on, it also handles the requests that brokers send to `clients`.
        """
        self._backend = backend
        self._clients = clients
        self._limits = limits
        # The commands without a reply by nonce, the text that identifies a command, oldest first.
        self._pending: dict[str, PendingCommand] = {}
        self._nonces = count(1)
        clients.on_broker_request = self.handle_broker_request

    def run(self) -> None:
        """Respond SYSTEM_BUSY to brokers for commands to which the client has not replied in time.

        The time is `CLIENT_REPLY_S`. A reply that arrives later is ignored. The proxy calls this
        method once a second.
        """
        latest_sent_s = self._backend.clock.monotonic_s() - CLIENT_REPLY_S
        for nonce, pending in list(self._pending.items()):
            if pending.sent_s > latest_sent_s:  # the others were sent even later
                break
            del self._pending[nonce]
            pending.respond(_make_unanswered_response(pending.client))

    # ------------------------------------------------------------------------ calls of clients

    def telemetry(
        self, client: Client, message: m.TelemetryCommand, call: Call
    ) -> Conversation[Sequence[m.TelemetryCommand]]:
        """Serve one message of a Telemetry stream, and return the commands to send back.

        A message without settings is the client's reply to an earlier command. It is passed on, and
        nothing is returned.

        A message with settings makes `call` the stream for commands to this client. The settings,
        with the values of the server added, and the heartbeat are stored in `client`. Then the
        client leaves the groups that are not in its new settings, and joins the others by a
        heartbeat to the brokers. The result is one command with a status and the settings. The
        status is FORBIDDEN if a broker refuses changed settings. If a broker refuses the first
        settings, its error is raised. Other failures of brokers are logged, and the next heartbeat
        tries again.

        Raises StatusError, which ends the stream, if the settings are invalid, if the first message
        has no settings, or if the client does not read its responses.
        """
        if message.HasField("settings"):
            return (yield from self._apply_settings(client, message.settings, call))
        if call not in client.streams:
            raise StatusError(
                Refusal.SETTINGS_MISSING,
                "A stream begins with the client's settings. Send them first.",
            )
        self._handle_reply(client, message)
        return ()

    def _apply_settings(
        self, client: Client, client_settings: m.Settings, call: Call
    ) -> Conversation[Sequence[m.TelemetryCommand]]:
        """Store new settings of a client, and let it leave and join groups.

        Return one command with a status and the settings. The status is FORBIDDEN if a broker
        refuses changed settings. Raises the broker's error if it refuses the client's first
        settings, and StatusError if the settings are invalid or the client does not read its
        responses.
        """
        if call.connection.queued_bytes > QUEUED_BYTES_MAX:
            raise StatusError(
                Refusal.ANSWERS_NOT_TAKEN,
                "The client does not read its responses. Read from the stream.",
            )
        heartbeat = to_heartbeat(client.id, client_settings, self._backend.clock.now_ms())
        client.use_stream(call)
        group_config = None
        for consumer in heartbeat.consumers:  # there is one at most
            group_config = yield from self._backend.fetch_group_config(consumer.group)
        previous_heartbeat = client.heartbeat
        client.heartbeat = heartbeat
        client.settings = settings = merge_settings(client_settings, group_config, self._limits)

        status = OK
        try:
            if previous_heartbeat is not None:
                yield from self._leave_groups(client, previous_heartbeat, heartbeat)
            yield from self._send_heartbeat(client, heartbeat)
        except (StatusError, PermissionDeniedError) as error:
            if previous_heartbeat is None:
                raise
            status = m.Status(code=Code.FORBIDDEN, message=str(error))
        except SluiceError as error:  # the next heartbeat retries
            log.info("Client %s has not joined its groups yet: %s", client.id, error)
        return (m.TelemetryCommand(status=status, settings=settings),)

    def heartbeat(
        self, client: Client, request: m.HeartbeatRequest, call: Call
    ) -> Conversation[m.HeartbeatResponse]:
        """Serve Heartbeat: renew the client's membership of its groups at brokers.

        Raises StatusError (UNRECOGNIZED_CLIENT_TYPE) if the client has not sent its settings; the
        client then sends them again. Raises StatusError or PermissionDeniedError if a broker
        refuses the client, and SluiceError if all brokers fail.
        """
        yield from self._send_heartbeat(client, _require_heartbeat(client))
        return m.HeartbeatResponse(status=OK)

    def notify_client_termination(
        self, client: Client, request: m.NotifyClientTerminationRequest, call: Call
    ) -> Conversation[m.NotifyClientTerminationResponse]:
        """Serve NotifyClientTermination: remove the client from its groups and from the proxy.

        Errors of brokers are ignored. Raises StatusError, without removing anything, if the client
        has not sent its settings.
        """
        yield from self._leave_groups(client, _require_heartbeat(client))
        self._clients.remove(client)
        return m.NotifyClientTerminationResponse(status=OK)

    def _broker_addresses(self, heartbeat: bodies.Heartbeat) -> Conversation[list[str]]:
        """Return the addresses of the masters that have a topic of the client, each once.

        A topic that does not exist is skipped.
        """
        addresses_by_broker = dict[str, str]()
        for topic in _iter_topics(heartbeat):
            with suppress(RouteNotFoundError):
                route = yield from self._backend.fetch_route(topic)
                addresses_by_broker |= master_addresses(route)
        return list(addresses_by_broker.values())

    def _send_heartbeat(self, client: Client, heartbeat: bodies.Heartbeat) -> Conversation[None]:
        """Send a heartbeat to the masters of a client's topics, one after the other.

        Do nothing if no topic exists. Raises StatusError or PermissionDeniedError at once if a
        broker refuses the client. Any other error is raised only if no broker accepts the
        heartbeat: the error of the last broker.
        """
        failure: SluiceError | None = None
        is_member = False  # whether a broker has accepted the heartbeat
        for address in (yield from self._broker_addresses(heartbeat)):
            command = requests.heartbeat(heartbeat)
            command.language = client.wire_language
            command.version = client.wire_version
            try:
                requests.expect_success(
                    (yield BrokerCall(address, command, BROKER_TIMEOUT_S)), address
                )
                is_member = True
            except (StatusError, PermissionDeniedError):
                raise
            except SluiceError as error:
                failure = error
        if failure is not None and not is_member:
            raise failure

    def _leave_groups(
        self,
        client: Client,
        previous_heartbeat: bodies.Heartbeat,
        new_heartbeat: bodies.Heartbeat | None = None,
    ) -> Conversation[None]:
        """Remove a client from the groups in its previous heartbeat that are not in its new one.

        A `new_heartbeat` of None means that the client leaves all groups. The masters of the
        client's previous topics get a request for each group. Errors are ignored, because a broker
        that gets no heartbeats removes the client by itself later.
        """
        new_heartbeat = new_heartbeat or bodies.Heartbeat(client.id)
        remaining_groups = {consumer.group for consumer in new_heartbeat.consumers}
        # Keyword arguments of `requests.unregister`.
        groups_to_leave = [
            {"producer": producer_group}
            for producer_group in previous_heartbeat.producer_groups
            if producer_group not in new_heartbeat.producer_groups
        ]
        groups_to_leave += [
            {"consumer": consumer.group}
            for consumer in previous_heartbeat.consumers
            if consumer.group not in remaining_groups
        ]
        if not groups_to_leave:
            return

        for address in (yield from self._broker_addresses(previous_heartbeat)):
            for group in groups_to_leave:
                command = requests.unregister(client.id, **group)
                with suppress(SluiceError):
                    yield BrokerCall(address, command, BROKER_TIMEOUT_S)

    # ------------------------------------------------------------ requests of brokers to clients

    def handle_broker_request(self, client: Client, command: Command, respond: Respond) -> None:
        """Handle a request that a broker sends to a client, and respond to the broker.

        `respond(command)` sends the response, possibly after this method has returned. A request
        with an unknown code gets REQUEST_CODE_NOT_SUPPORTED. A malformed request or a failure is
        logged and gets SYSTEM_ERROR. A one-way request gets neither of these.

        NOTIFY_CONSUMER_IDS_CHANGED (40) and RESET_CONSUMER_CLIENT_OFFSET (220) count as unknown,
        because nothing needs to be done: a client receives from all queues of a broker, and the
        broker itself applies offsets that were reset.
        """
        handler = _BROKER_REQUESTS.get(command.code)
        try:
            if handler is not None:
                handler(self, client, command, respond)
            elif not command.is_oneway:
                respond(Command(ResponseCode.REQUEST_CODE_NOT_SUPPORTED, remark=UNSUPPORTED_REMARK))
        except SluiceError as error:
            log.warning(
                "Invalid request of a broker to client %s (code %d): %s",
                client.id,
                command.code,
                error,
            )
            if not command.is_oneway:
                respond(Command(ResponseCode.SYSTEM_ERROR, remark=str(error)))

    def _check_transaction(self, client: Client, command: Command, respond: Respond) -> None:
        """Handle CHECK_TRANSACTION_STATE (39): ask the client for the state of a transaction.

        The broker gets no response. If the client has no open stream, nothing is sent. The broker
        repeats the check later, with this client or another producer of the group.
        """
        check = parse_check_request(command)
        client.send_command(
            m.TelemetryCommand(
                recover_orphaned_transaction_command=m.RecoverOrphanedTransactionCommand(
                    message=to_message(check.message),
                    transaction_id=format_transaction_id(check.location),
                )
            )
        )

    def _request_running_info(self, client: Client, command: Command, respond: Respond) -> None:
        """Handle GET_CONSUMER_RUNNING_INFO (307): respond with the state of the client.

        The proxy knows most of the state. If the request asks for thread stacks, the client is
        asked first, and the broker gets its response after the client's reply. Otherwise it gets it
        at once.
        """
        header = decode_header(GetConsumerRunningInfoRequest, command.fields)

        def respond_with_info(stack: str | None) -> None:
            running_info = to_running_info(client, header.group, stack)
            respond(Command(ResponseCode.SUCCESS, body=bodies.encode_running_info(running_info)))

        def handle_stack_reply(reply: m.TelemetryCommand) -> None:
            respond_with_info(reply.thread_stack_trace.thread_stack_trace)

        def make_stack_command(nonce: str) -> m.TelemetryCommand:
            """Return the command that asks the client for its stack, with this nonce."""
            return m.TelemetryCommand(
                print_thread_stack_trace_command=m.PrintThreadStackTraceCommand(nonce=nonce)
            )

        if header.stack_enable:
            self._send_to_client(client, respond, handle_stack_reply, make_stack_command)
        else:
            respond_with_info(None)

    def _request_direct_consumption(
        self, client: Client, command: Command, respond: Respond
    ) -> None:
        """Handle CONSUME_MESSAGE_DIRECTLY (309): let the client process one message now.

        The body of the request is the record of the message. The broker gets its response when the
        client has replied. It contains the result that belongs to the status of the reply, and the
        time that passed in ms. A status without such a result means EXCEPTION.
        """
        message = to_message(decode_record(command.body))
        began_s = self._backend.clock.monotonic_s()

        def handle_result_reply(reply: m.TelemetryCommand) -> None:
            """Send the client's result to the broker, with the ms since the request came."""
            code = reply.status.code
            spent_ms = int((self._backend.clock.monotonic_s() - began_s) * 1000)
            direct_result = bodies.DirectResult(
                _RESULT_BY_CODE.get(code, bodies.ConsumeResult.EXCEPTION),
                reply.status.message or f"status {code}",
                spent_ms,
                client.settings is not None and client.settings.subscription.fifo,
            )
            respond(Command(ResponseCode.SUCCESS, body=bodies.encode_direct_result(direct_result)))

        def make_verify_command(nonce: str) -> m.TelemetryCommand:
            """Return the command that lets the client process the message, with this nonce."""
            return m.TelemetryCommand(
                verify_message_command=m.VerifyMessageCommand(nonce=nonce, message=message)
            )

        self._send_to_client(client, respond, handle_result_reply, make_verify_command)

    def _send_to_client(
        self,
        client: Client,
        respond: Respond,
        on_reply: Callable[[m.TelemetryCommand], None],
        make_command: Callable[[str], m.TelemetryCommand],
    ) -> None:
        """Send a command to a client, and store the callbacks for its reply.

        `make_command(nonce)` returns the command with a nonce, an id that the client repeats in its
        reply. `on_reply(reply)` is called when the client replies. `respond(command)` sends a
        response to the broker. It is called with SYSTEM_BUSY if the client does not reply in time.
        It is called so at once if the command cannot be sent, or if PENDING_COMMANDS_MAX commands
        wait for replies.
        """
        nonce = f"{next(self._nonces)}"
        is_full = len(self._pending) >= PENDING_COMMANDS_MAX
        if is_full or not client.send_command(make_command(nonce)):
            respond(_make_unanswered_response(client))
            return
        self._pending[nonce] = PendingCommand(
            client, on_reply, respond, self._backend.clock.monotonic_s()
        )

    def _handle_reply(self, client: Client, reply: m.TelemetryCommand) -> None:
        """Call the `on_reply` callback of the command to which a client replies.

        The command is found by the nonce in the reply. The reply is ignored if no such command
        waits for a reply, if the command was sent to another client, or if the reply is of an
        unknown kind.
        """
        nonce = reply.thread_stack_trace.nonce or reply.verify_message_result.nonce
        pending = self._pending.get(nonce)
        if pending is not None and pending.client is client:
            del self._pending[nonce]
            pending.on_reply(reply)


_BROKER_REQUESTS: Final[Mapping[int, Callable[[Telemetry, Client, Command, Respond], None]]] = {
    RequestCode.CHECK_TRANSACTION_STATE: Telemetry._check_transaction,
    RequestCode.GET_CONSUMER_RUNNING_INFO: Telemetry._request_running_info,
    RequestCode.CONSUME_MESSAGE_DIRECTLY: Telemetry._request_direct_consumption,
}
UNSUPPORTED_REMARK: Final = "This request is not supported by gRPC clients."
"""The remark of the response to a broker's request that gRPC clients cannot handle."""


def _require_heartbeat(client: Client) -> bodies.Heartbeat:
    """Return the heartbeat of a client. Raises StatusError if it has not sent its settings."""
    if client.heartbeat is None:
        raise StatusError(
            Refusal.SETTINGS_UNKNOWN,
            f"client {client.id} has not sent its settings. Send them first.",
        )
    return client.heartbeat


def _make_unanswered_response(client: Client) -> Command:
    """Return the response to a broker for a client that does not reply to a command."""
    return Command(
        ResponseCode.SYSTEM_BUSY,
        remark=f"Client {client.id} has no telemetry stream, or did not reply within "
        f"{CLIENT_REPLY_S:g} s.",
    )


def to_running_info(client: Client, group: str, stack: str | None) -> bodies.RunningInfo:
    """Return the state of a client in the form in which remoting clients report it.

    It contains the client's subscriptions, or none if the client is not in `group`. `stack` is the
    text of the client's thread stacks; None means that they were not requested.
    """
    consume_type = ""
    subscriptions: list[Subscription] = []
    if client.heartbeat is not None:
        for consumer in client.heartbeat.consumers:  # there is one at most
            if consumer.group == group:
                consume_type = consumer.consume_type
                subscriptions.extend(consumer.subscriptions)
    settings = client.settings or m.Settings()
    properties = {
        "PROP_CONSUME_TYPE": consume_type,
        "PROP_CLIENT_VERSION": client.version,
        "PROP_CONSUMEORDERLY": str(settings.subscription.fifo).lower(),
        "PROP_CONSUMER_START_TIMESTAMP": str(client.since_ms),
        "language": client.wire_language,
        "consumerGroup": group,
    }
    return bodies.RunningInfo(properties, tuple(subscriptions), stack=stack)
