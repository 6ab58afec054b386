"""What a client says of itself, and what brokers ask of it: Telemetry, Heartbeat and
NotifyClientTermination (spec/grpc.md §4).

    settings   -> merged with what its group is told to do, echoed; the client is a member at once
    Heartbeat  -> 34 to the master of each broker that has one of its topics: it stays a member
    brokers ask -> a command on the telemetry stream -> the client's answer, by its nonce

To brokers a producer is a member of a group for each of its topics, named like the topic, as
RocketMQ's proxy has it; so contract, lanes, checks of transactions and what tools show are as for
clients of remoting. Whoever is refused at its first settings is told so by the end of the stream,
which makes the start of its application fail; afterwards by the status of its heartbeats.

What is put on a stream is never waited for: a command that is not answered in ANSWER_S is answered
for the client. Checks of transactions want no answer, brokers ask again.
"""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Any, Final, TypeVar

from sluicemq.client.core import requests
from sluicemq.client.core.conversations import Call as Ask
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
from sluicemq.filter.subscriptions import subscribe
from sluicemq.model.subscription import SQL92, Subscription
from sluicemq.model.topic import GroupConfig
from sluicemq.net.grpc import Call
from sluicemq.proxy import messages as m
from sluicemq.proxy.backend import Backend, masters_of
from sluicemq.proxy.clients import OK, QUEUED_BYTES_MAX, Client, Clients, kind_of
from sluicemq.proxy.convert import message_of
from sluicemq.proxy.limits import Refusal, StatusError, group_of, topic_of
from sluicemq.proxy.messages import ClientType, Code, FilterType
from sluicemq.proxy.sending import transaction_id_of
from sluicemq.record.codec import decode_record
from sluicemq.wire import bodies
from sluicemq.wire.codes import RequestCode, ResponseCode
from sluicemq.wire.declare import decode_header
from sluicemq.wire.frames import Command
from sluicemq.wire.headers import GetConsumerRunningInfoRequest

log = logging.getLogger(__name__)
T = TypeVar("T")

TOPICS_MAX: Final = 4096
"""Of a client."""
BROKER_S: Final = 1.0
"""For the heartbeat to a broker: a Java client waits 3 s for the answer to its settings."""
ANSWER_S: Final = 4.0
"""Looked at once a second: so tools, which wait for 5 s (spec/grpc.md §4), hear of it."""
OPEN_MAX: Final = 1024

INT_MAX: Final = (1 << 31) - 1

CONSUMERS: Final[Mapping[int, str]] = {
    ClientType.PUSH_CONSUMER: bodies.CONSUME_PASSIVELY,
    ClientType.SIMPLE_CONSUMER: bodies.CONSUME_ACTIVELY,
    ClientType.PULL_CONSUMER: bodies.CONSUME_ACTIVELY,
}
_RESULTS: Final[Mapping[int, bodies.ConsumeResult]] = {
    Code.OK: bodies.ConsumeResult.SUCCESS,
    Code.FAILED_TO_CONSUME_MESSAGE: bodies.ConsumeResult.LATER,
    Code.MESSAGE_CORRUPTED: bodies.ConsumeResult.NOTHING,
}

Answer = Callable[[Command], None]


# ---------------------------------------------------------------------------------------- settings


def duration(ms: int) -> m.Duration:
    """Of milliseconds."""
    return m.Duration(seconds=ms // 1000, nanos=ms % 1000 * 1_000_000)


def backoff_of(group: GroupConfig) -> m.RetryPolicy:
    """When a group's messages come again, and how often. What is wrong in its policy, which is an
    administrator's JSON, counts as missing."""
    said = group.retry_policy or {}
    policy = m.RetryPolicy(max_attempts=min(max(1, group.retry_times_max + 1), INT_MAX))
    if said.get("type") == "EXPONENTIAL":
        found = _object(said, "exponentialRetryPolicy")
        policy.exponential_backoff.CopyFrom(
            m.ExponentialBackoff(
                initial=duration(_number(found.get("initial"), 5000)),
                max=duration(_number(found.get("max"), 7_200_000)),
                multiplier=_number(found.get("multiplier"), 2),
            )
        )
    else:
        times = _object(said, "customizedRetryPolicy").get("next")
        known = [_number(it, 0) for it in times] if isinstance(times, list) else []
        steps = [duration(it) for it in known or parse_delay_levels(DEFAULT_LEVELS)]
        policy.customized_backoff.CopyFrom(m.CustomizedBackoff(next=steps))
    return policy


def _object(value: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = value.get(name)
    return found if isinstance(found, dict) else {}


def _number(value: Any, default: int) -> int:
    return value if isinstance(value, int) and 0 <= value < 1 << 40 else default


def merged(said: m.Settings, group: GroupConfig | None, limits: ProxyLimits) -> m.Settings:
    """Return what a client is answered: what it said, unknown fields too, and what the server
    decides by its limits and by the settings of the client's group."""
    settings = m.Settings()
    settings.CopyFrom(said)
    settings.metric.CopyFrom(m.Metric(on=False))
    if settings.HasField("publishing"):
        backoff = m.ExponentialBackoff(
            initial=duration(limits.backoff_ms_min),
            max=duration(limits.backoff_ms_max),
            multiplier=limits.backoff_multiplier,
        )
        policy = m.RetryPolicy(max_attempts=limits.attempts_max, exponential_backoff=backoff)
        settings.publishing.validate_message_type = limits.checks_type
        settings.publishing.max_body_size = limits.body_bytes_largest
    else:
        group = group or GroupConfig(said.subscription.group.name)
        policy = backoff_of(group)
        settings.subscription.fifo = group.consume_message_orderly
        settings.subscription.receive_batch_size = limits.batch_size
        settings.subscription.long_polling_timeout.CopyFrom(duration(limits.poll_ms_longest))
    settings.backoff_policy.CopyFrom(policy)
    return settings


def member_of(client_id: str, settings: m.Settings, now_ms: int) -> bodies.Heartbeat:
    """A client as brokers are told it. Raises StatusError for settings that say what must not be:
    names, types of clients, expressions of tags. SQL92 is the broker's to compile, which takes
    its time for it; what does not compile is refused at the first receive."""
    if settings.HasField("publishing"):
        topics = dict.fromkeys(topic_of(it) for it in _few(settings.publishing.topics))
        return bodies.Heartbeat(client_id, tuple(topics))
    if not settings.HasField("subscription"):
        raise StatusError(
            Refusal.SETTINGS_EMPTY, "name what the client publishes or subscribes to."
        )
    kind = CONSUMERS.get(settings.client_type)
    if kind is None:
        raise StatusError(
            Refusal.CLIENT_TYPE,
            f"use one of {', '.join(m.ClientType(kind).name for kind in CONSUMERS)}.",
            kind=kind_of(settings),
        )
    group = group_of(settings.subscription.group)
    found = [_subscription(it, now_ms) for it in _few(settings.subscription.subscriptions)]
    consumer = bodies.ConsumerData(group, kind, subscriptions=tuple(found))
    return bodies.Heartbeat(client_id, (), (consumer,))


def _few(found: Collection[T]) -> Collection[T]:
    if len(found) > TOPICS_MAX:
        raise StatusError(
            Refusal.SETTINGS_TOO_MANY,
            f"The settings name {len(found)} topics, the limit is {TOPICS_MAX}.",
            fix="Use several clients.",
        )
    return found


def _subscription(entry: m.SubscriptionEntry, now_ms: int) -> Subscription:
    topic, expression = topic_of(entry.topic), entry.expression.expression
    if entry.expression.type == FilterType.SQL:
        return Subscription(topic, expression, SQL92, version=now_ms)
    try:
        return subscribe(topic, expression, version=now_ms)
    except FilterError as error:
        raise StatusError(Refusal.FILTER_OF_SETTINGS, str(error)) from error


def _topics(member: bodies.Heartbeat) -> Iterator[str]:
    yield from member.producer_groups
    for consumer in member.consumers:
        yield from (it.topic for it in consumer.subscriptions)


# -------------------------------------------------------------------------------------- the family


@dataclass(slots=True)
class Question:
    """What a client was asked, and who waits for it."""

    client: Client
    said: Callable[[m.TelemetryCommand], None]
    answer: Answer
    asked_s: float


class Telemetry:
    """Telemetry, Heartbeat and NotifyClientTermination; and what brokers ask."""

    def __init__(self, backend: Backend, clients: Clients, limits: ProxyLimits) -> None:
        self._backend = backend
        self._clients = clients
        self._limits = limits
        self._open: dict[str, Question] = {}  # by nonce, the oldest first
        self._nonces = count(1)
        clients.on_asked = self.asked

    def run(self) -> None:
        """Once a second: what was not answered in time is answered for the client."""
        late_s = self._backend.clock.monotonic_s() - ANSWER_S
        for nonce, question in list(self._open.items()):
            if question.asked_s > late_s:
                break
            del self._open[nonce]
            question.answer(_unanswered(question.client))

    # ------------------------------------------------------------------------ what clients say

    def telemetry(
        self, client: Client, said: m.TelemetryCommand, call: Call
    ) -> Conversation[Sequence[m.TelemetryCommand]]:
        """One message of a stream. Raises StatusError, which ends it."""
        if not said.HasField("settings"):
            if call not in client.streams:
                raise StatusError(
                    Refusal.SETTINGS_MISSING, "A stream begins with the client's settings."
                )
            self._answered(client, said)
            return ()
        if call.connection.queued_bytes > QUEUED_BYTES_MAX:
            raise StatusError(Refusal.ANSWERS_NOT_TAKEN, "The client does not take its answers.")
        member = member_of(client.id, said.settings, self._backend.clock.now_ms())
        client.spoke(call)
        group = None
        for consumer in member.consumers:
            group = yield from self._backend.group(consumer.group)
        before, client.member = client.member, member
        client.settings = settings = merged(said.settings, group, self._limits)
        status = OK
        try:
            if before is not None:
                yield from self._leave(client, before, member)
            yield from self._join(client, member)
        except (StatusError, PermissionDeniedError) as error:
            if before is None:
                raise
            status = m.Status(code=Code.FORBIDDEN, message=str(error))
        except SluiceError as error:  # the next heartbeat tries again
            log.info("client %s is no member yet: %s", client.id, error)
        return (m.TelemetryCommand(status=status, settings=settings),)

    def heartbeat(
        self, client: Client, request: m.HeartbeatRequest, call: Call
    ) -> Conversation[m.HeartbeatResponse]:
        """Raises StatusError (UNRECOGNIZED_CLIENT_TYPE) when its settings are not known: then the
        client says them again."""
        yield from self._join(client, _known(client))
        return m.HeartbeatResponse(status=OK)

    def notify_client_termination(
        self, client: Client, request: m.NotifyClientTerminationRequest, call: Call
    ) -> Conversation[m.NotifyClientTerminationResponse]:
        """It leaves its groups. Raises StatusError as `heartbeat` does."""
        yield from self._leave(client, _known(client))
        self._clients.end(client)
        return m.NotifyClientTerminationResponse(status=OK)

    def _brokers(self, member: bodies.Heartbeat) -> Conversation[list[str]]:
        """The masters that have one of its topics. Topics that do not exist (yet) have none."""
        found = dict[str, str]()
        for topic in _topics(member):
            with suppress(RouteNotFoundError):
                found |= masters_of((yield from self._backend.route(topic)))
        return list(found.values())

    def _join(self, client: Client, member: bodies.Heartbeat) -> Conversation[None]:
        """Its heartbeat to its brokers. Raises StatusError and PermissionDeniedError when one
        refuses it; when none takes it, what went wrong."""
        wrong: SluiceError | None = None
        is_member = False
        for address in (yield from self._brokers(member)):
            command = requests.heartbeat(member)
            command.language, command.version = client.wire_language, client.wire_version
            try:
                requests.expect_success((yield Ask(address, command, BROKER_S)), address)
                is_member = True
            except (StatusError, PermissionDeniedError):
                raise
            except SluiceError as error:
                wrong = error
        if wrong is not None and not is_member:
            raise wrong

    def _leave(
        self, client: Client, member: bodies.Heartbeat, now: bodies.Heartbeat | None = None
    ) -> Conversation[None]:
        """Takes it out of the groups that it is not in `now`. A broker that cannot be reached finds
        out by itself."""
        stays = now or bodies.Heartbeat(client.id)
        kept = {it.group for it in stays.consumers}
        left = [
            {"producer": it} for it in member.producer_groups if it not in stays.producer_groups
        ]
        left += [{"consumer": it.group} for it in member.consumers if it.group not in kept]
        for address in (yield from self._brokers(member)) if left else ():
            for group in left:
                with suppress(SluiceError):
                    yield Ask(address, requests.unregister(client.id, **group), BROKER_S)

    # ----------------------------------------------------------------------- what brokers ask

    def asked(self, client: Client, command: Command, answer: Answer) -> None:
        """A request of a broker to a client. Two kinds need nothing. Who else is in its group (40)
        is nothing to a client that is given all of each broker. Offsets that were reset (220) lie
        with the broker, where the next receive looks at them; a client keeps none."""
        ask = _ASKED.get(command.code)
        try:
            if ask is not None:
                ask(self, client, command, answer)
            elif not command.is_oneway:
                answer(Command(ResponseCode.REQUEST_CODE_NOT_SUPPORTED, remark=NOT_ASKED))
        except SluiceError as error:
            log.warning("a broker asks client %s oddly (%d): %s", client.id, command.code, error)
            if not command.is_oneway:
                answer(Command(ResponseCode.SYSTEM_ERROR, remark=str(error)))

    def _check_transaction(self, client: Client, command: Command, answer: Answer) -> None:
        """39. A client that has no stream now is asked again, or another one is."""
        asked = parse_check_request(command)
        client.tell(
            m.TelemetryCommand(
                recover_orphaned_transaction_command=m.RecoverOrphanedTransactionCommand(
                    message=message_of(asked.message),
                    transaction_id=transaction_id_of(asked.location),
                )
            )
        )

    def _running_info(self, client: Client, command: Command, answer: Answer) -> None:
        """307. What the client has said is known here; for stacks of threads it is asked."""
        header = decode_header(GetConsumerRunningInfoRequest, command.fields)

        def inform(said: m.TelemetryCommand | None) -> None:
            stack = None if said is None else said.thread_stack_trace.thread_stack_trace
            info = running_info(client, header.group, stack)
            answer(Command(ResponseCode.SUCCESS, body=bodies.encode_running_info(info)))

        if not header.stack_enable:
            inform(None)
            return
        self._ask(
            client, answer, inform,
            lambda nonce: m.TelemetryCommand(
                print_thread_stack_trace_command=m.PrintThreadStackTraceCommand(nonce=nonce)
            ),
        )  # fmt: skip

    def _verify(self, client: Client, command: Command, answer: Answer) -> None:
        """309: the client handles this message now."""
        message = message_of(decode_record(command.body))
        began_s = self._backend.clock.monotonic_s()

        def report(said: m.TelemetryCommand) -> None:
            code = said.status.code
            result = bodies.DirectResult(
                _RESULTS.get(code, bodies.ConsumeResult.EXCEPTION),
                said.status.message or f"status {code}",
                int((self._backend.clock.monotonic_s() - began_s) * 1000),
                client.settings is not None and client.settings.subscription.fifo,
            )
            answer(Command(ResponseCode.SUCCESS, body=bodies.encode_direct_result(result)))

        self._ask(
            client, answer, report,
            lambda nonce: m.TelemetryCommand(
                verify_message_command=m.VerifyMessageCommand(nonce=nonce, message=message)
            ),
        )  # fmt: skip

    def _ask(
        self,
        client: Client,
        answer: Answer,
        said: Callable[[m.TelemetryCommand], None],
        command: Callable[[str], m.TelemetryCommand],
    ) -> None:
        """Asks a client; either `said` gets what it says, or `answer` an error."""
        nonce = f"{next(self._nonces)}"
        if len(self._open) >= OPEN_MAX or not client.tell(command(nonce)):
            answer(_unanswered(client))
            return
        self._open[nonce] = Question(client, said, answer, self._backend.clock.monotonic_s())

    def _answered(self, client: Client, said: m.TelemetryCommand) -> None:
        """What nobody waits for (any more) is dropped, as are commands of newer clients."""
        nonce = said.thread_stack_trace.nonce or said.verify_message_result.nonce
        question = self._open.get(nonce)
        if question is not None and question.client is client:
            del self._open[nonce]
            question.said(said)


_ASKED: Final[Mapping[int, Callable[[Telemetry, Client, Command, Answer], None]]] = {
    RequestCode.CHECK_TRANSACTION_STATE: Telemetry._check_transaction,
    RequestCode.GET_CONSUMER_RUNNING_INFO: Telemetry._running_info,
    RequestCode.CONSUME_MESSAGE_DIRECTLY: Telemetry._verify,
}
NOT_ASKED: Final = "This is not asked of clients of gRPC."


def _known(client: Client) -> bodies.Heartbeat:
    """Raises StatusError when its settings are not known."""
    if client.member is None:
        raise StatusError(
            Refusal.SETTINGS_UNKNOWN, f"client {client.id} has to send its settings first."
        )
    return client.member


def _unanswered(client: Client) -> Command:
    return Command(
        ResponseCode.SYSTEM_BUSY,
        remark=f"Client {client.id} has no telemetry stream, or does not answer: {ANSWER_S:g} s.",
    )


def running_info(client: Client, group: str, stack: str | None) -> bodies.RunningInfo:
    """What is known of a client, in the form of one of remoting."""
    info, member = client.info, client.member or bodies.Heartbeat(client.id)
    consumers = [it for it in member.consumers if it.group == group]
    settings = client.settings or m.Settings()
    properties = {
        "PROP_CONSUME_TYPE": consumers[0].consume_type if consumers else "",
        "PROP_CLIENT_VERSION": info.version,
        "PROP_CONSUMEORDERLY": str(settings.subscription.fifo).lower(),
        "PROP_CONSUMER_START_TIMESTAMP": str(info.since_ms),
        "language": info.language,
        "consumerGroup": group,
    }
    subscriptions = tuple(it for one in consumers for it in one.subscriptions)
    return bodies.RunningInfo(properties, subscriptions, stack=stack)
