"""Findings, the rules that produce them, and the list of all finding codes."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum, auto
from typing import Any, Final, Generic, TypeVar

from sluicemq.filter.selector import Explanation

F_contra = TypeVar("F_contra", contravariant=True)

Values = Mapping[str, Any]
"""The values that a finding's sentences contain, by their names in the sentences of the rule."""


class Code(StrEnum):
    """The kind of a finding. Scripts depend on the values, so they never change.

    The order of the members is the order of importance in `sluice doctor`: of the problems that it
    finds, the one whose code comes first is reported as the cause. Servers come before topics,
    topics before groups, and more specific codes before more general ones.
    """

    # Name servers, and what can be found at the address of any server.
    NAME_UNRESOLVED = "name-unresolved"
    NAME_SERVER_IS_BROKER = "name-server-is-broker"
    BROKER_IS_NAME_SERVER = "broker-is-name-server"
    HTTP_SERVER = "http-server"
    GRPC_SERVER = "grpc-server"
    TLS_DEMANDED = "tls-demanded"
    TLS_NOT_SPOKEN = "tls-not-spoken"
    CERTIFICATE_EXPIRED = "certificate-expired"
    CERTIFICATE_WRONG_NAME = "certificate-wrong-name"
    CERTIFICATE_UNTRUSTED = "certificate-untrusted"
    CLIENT_CERTIFICATE = "client-certificate"
    # Access control.
    PROTECTED_MODE = "protected-mode"
    ACCESS_KEY_MISSING = "access-key-missing"
    ACCESS_KEY_UNKNOWN = "access-key-unknown"
    SECRET_KEY_WRONG = "secret-key-wrong"
    RIGHT_MISSING = "right-missing"
    # Servers that do not answer, and wrong addresses of brokers.
    NAME_SERVER_DOWN = "name-server-down"
    BROKER_REGISTERS_ELSEWHERE = "broker-registers-elsewhere"
    NO_BROKER_REGISTERED = "no-broker-registered"
    BROKER_ADDRESS_WILDCARD = "broker-address-wildcard"
    BROKER_ADDRESS_LOOPBACK = "broker-address-loopback"
    BROKER_ADDRESS_PRIVATE = "broker-address-private"
    BROKER_IS_ANOTHER = "broker-is-another"
    BROKER_UNRESOLVED = "broker-unresolved"
    BROKER_DOWN = "broker-down"
    BROKER_MUTE = "broker-mute"
    NO_MASTER = "no-master"
    CLOCK_SKEW = "clock-skew"
    # Stores and replicas.
    DISK_FULL = "disk-full"
    DISK_FORCED = "disk-forced"
    DISK_FILLING = "disk-filling"
    BROKER_READ_ONLY = "broker-read-only"
    WRITE_PERM_WIPED = "write-perm-wiped"
    REQUESTS_QUEUE = "requests-queue"
    POLLS_FULL = "polls-full"
    REPLICA_CUT_OFF = "replica-cut-off"
    REPLICA_NOT_IN_SYNC = "replica-not-in-sync"
    REPLICAS_TOO_FEW = "replicas-too-few"
    REPLICA_BEHIND = "replica-behind"
    # The topic.
    TOPIC_AT_OTHER_NAME_SERVER = "topic-at-other-name-server"
    TOPIC_NOT_REGISTERED = "topic-not-registered"
    TOPIC_NOT_SENT_TO = "topic-not-sent-to"
    TOPIC_MISSING = "topic-missing"
    TOPIC_CLOSED = "topic-closed"
    TOPIC_NOT_WRITABLE = "topic-not-writable"
    TOPIC_NOT_READABLE = "topic-not-readable"
    ORDER_NAMES_GONE_BROKER = "order-names-gone-broker"
    WRONG_TYPE = "wrong-type"
    # The message.
    MESSAGE_DELAYED = "message-delayed"
    MESSAGE_HALF = "message-half"
    MESSAGE_EXPIRED = "message-expired"
    MESSAGE_UNKNOWN = "message-unknown"
    MESSAGE_UNDECODABLE = "message-undecodable"
    # The group and its members.
    CLIENT_CLOCK_SKEW = "client-clock-skew"
    MODELS_MIXED = "models-mixed"
    POP_AND_PULL = "pop-and-pull"
    BODIES_UNDECODABLE = "bodies-undecodable"
    MESSAGE_POISONED = "message-poisoned"
    QUEUE_BLOCKED = "queue-blocked"
    RETENTION_LOST = "retention-lost"
    RETENTION_NEAR = "retention-near"
    RETENTION_MAYBE_NEAR = "retention-maybe-near"
    MEMBER_MUTE = "member-mute"
    FILTER_MATCHES_NOTHING = "filter-matches-nothing"
    NO_SUCH_GROUP = "no-such-group"
    CONSUMING_OFF = "consuming-is-off"
    REFUSED = "refused-by-contract"
    UNEQUAL = "unequal-subscription"
    BROKEN_FILTER = "filter-does-not-compile"
    NO_MEMBER = "no-member"
    NOT_SUBSCRIBED = "not-subscribed"
    BEYOND_END = "offset-beyond-end"
    NOT_ACKNOWLEDGING = "not-acknowledging"
    DEAD_LETTER = "dead-letter"
    FILTER_FALSE = "filter-false"
    FILTER_ERROR = "filter-error"
    NO_LANE = "no-lane-matches"
    NO_ROUTE = "no-route"
    MEMBER_IDLE = "member-without-queue"
    QUEUE_IDLE = "queue-without-member"
    IGNORED_TEXT = "ignored-text"
    FORGOTTEN = "subscription-forgotten"
    RETRY_PENDING = "retry-pending"
    BEHIND = "behind"
    DEAD_LETTERS = "dead-letters"
    VIP_PORT = "vip-port"
    # Details of `sluice explain`, which `sluice doctor` does not report.
    OFFSET_PAST = "offset-past-message"
    IN_HAND = "in-hand"
    ONLY_FILTERED = "only-filtered-ahead"
    LANE = "lane"
    IN_FLIGHT = "in-flight"
    UNDECODABLE = "body-undecodable"


_RANKS: Final = {code: rank for rank, code in enumerate(Code)}


class Severity(Enum):
    """How important a finding is."""

    PROBLEM = auto()
    """Something is wrong. `sluice doctor` reports it and exits with code 1."""
    NOTE = auto()
    """Nothing is wrong, but an operator should know it. `sluice doctor` prints it as a note."""
    DETAIL = auto()
    """It explains the state of a message or group. Only `sluice explain` prints it."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One diagnosed fact: `what` is true, and `fix` says what the user can do about it.

    `what` is one sentence. `fix` may be several, or "" if there is nothing to do.
    """

    code: Code
    what: str
    fix: str = ""
    severity: Severity = Severity.PROBLEM

    @property
    def is_note(self) -> bool:
        """Whether nothing is wrong, but an operator should know the fact."""
        return self.severity is Severity.NOTE

    @property
    def rank(self) -> int:
        """The place of the finding's code in `Code`; lower ranks are more important."""
        return _RANKS[self.code]


@dataclass(frozen=True, slots=True)
class Rule(Generic[F_contra]):
    """One row of the rule table.

    `condition` yields the values of the sentences, once for each thing in the facts for which the
    rule holds. `what` and `fix` are format strings over these values.
    """

    code: Code
    condition: Callable[[F_contra], Iterable[Values]]
    what: str
    fix: str = ""
    severity: Severity = Severity.PROBLEM

    def findings(self, facts: F_contra) -> Iterator[Finding]:
        """Yield one finding for each thing in `facts` for which the rule holds.

        The values that the condition yields are filled into the two sentences of the rule.
        """
        for values in self.condition(facts):
            what_is_true = self.what.format(**values)
            fix = self.fix.format(**values)
            yield Finding(self.code, what_is_true, fix, self.severity)


def judge(rules: Iterable[Rule[F_contra]], facts: F_contra) -> list[Finding]:
    """Return the findings of several rules about the same facts, in the order of the rules."""
    return [finding for rule in rules for finding in rule.findings(facts)]


# ---------------------------------------------------------------------------- explanations


class Fate(StrEnum):
    """What happened to a message in a consumer group. Scripts depend on the values."""

    CONSUMED = "consumed"
    FILTERED = "filtered"
    WAITING = "waiting"
    RETRY = "retry"
    IN_FLIGHT = "in-flight"
    DEAD = "dead"
    OFFLINE = "offline"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class MessageExplained:
    """What happened to a message in one consumer group, and why.

    `times` counts the deliveries or retries of a message that is in flight, waits for a retry or is
    a dead letter; it is 0 otherwise. `verdict` is the result of the group's SQL92 filter, None
    without such a filter. `owner` is the client id of the member that reads the message's queue,
    "" if no member reads it, None if that is unknown.
    """

    group: str
    fate: Fate
    findings: tuple[Finding, ...]
    times: int = 0
    verdict: Explanation | None = None
    owner: str | None = None

    @property
    def cause(self) -> Finding | None:
        """The most important finding, None if there is none."""
        return self.findings[0] if self.findings else None


@dataclass(frozen=True, slots=True)
class GroupExplained:
    """Why a consumer group is idle or behind. The most important finding comes first.

    Without findings the group is up to date. `lag` is the number of messages that the group has not
    consumed, and `matching` how many of them match its filters, None if that is unknown.
    """

    group: str
    findings: tuple[Finding, ...]
    lag: int
    matching: int | None
