"""Limits that protect a server against its clients: memory, frames, requests, time.

`wire.frames` and `net.dispatch` limit the size of a single frame and of its header. This module has
the limits that only a server can count: connections of one address, bytes of unfinished frames,
and refused requests. The page on security has the table of all limits.

A limit closes the connection if continuing would cost memory or time. It is answered with an error
if only the request itself is too large. Frames that arrive whole are not counted here at all.

`FairScheduler` gives each connection a fair share of the event loop's time, because one request may
take a millisecond and one client may send a thousand at once. Time is divided into scheduling
rounds. A round has a budget of `ROUND_BUDGET_S`. When it is used up, further requests wait for the
next round, which begins with the connection that has used the least time. (The literature calls
this start-time fair queueing: a connection that was idle is placed slightly ahead of the others,
but the time that it did not use is not saved.) So a client with few requests waits for at most one
slice of another client, however many clients ask for much, and a client that is alone may use all
the time.

Requests with a fast handler, such as sends, never wait here (`dispatch`). Work that has begun is
not interrupted: a slice is as long as its handler takes. Long work is divided into slices by
`net.work.background`.
"""

import heapq
import logging
import math
import re
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, fields
from itertools import count
from typing import Any, Final

import orjson

from sluicemq.config.keys import ServerConfig
from sluicemq.errors import ProtocolError, RequestError
from sluicemq.model.addresses import is_loopback
from sluicemq.wire import fastjson
from sluicemq.wire.codes import RequestCode, ResponseCode
from sluicemq.wire.frames import Command

HEADER_BYTES_MAX: Final = 1 << 20
"""The largest header of a request. The largest legitimate one has 200 kB: a send with 32 KiB of
properties that all need escapes. RocketMQ accepts 16 MiB."""
FIELDS_MAX: Final = 256
BODY_BYTES_MAX: Final = 1 << 20
"""The largest body of a request in CODES_WITH_LISTS. A heartbeat for 1,000 topics has 250 kB."""
SMALL_BODY_BYTES_MAX: Final = 64 * 1024
"""The largest body of a request that is neither in CODES_WITH_LISTS nor in CODES_WITH_MESSAGES."""
INLINE_DECODE_BYTES: Final = 16 * 1024
"""Larger bodies are decoded on another thread. Decoding this many bytes takes a millisecond."""
EXTENDED_JSON_BYTES_MAX: Final = 64 * 1024
"""The largest body with extensions of JSON that only fastjson writes: integer keys, objects as
keys, references."""
EXTENDED_JSON_VALUES_MAX: Final = 4096
"""The most values of such a body. The lenient parser takes 1.5 µs for each value."""
REFERENCED_VALUES_MAX: Final = 2 * EXTENDED_JSON_VALUES_MAX
"""The most values of a body in standard JSON with references, which take 1 µs for each value."""
JSON_VALUES_MAX: Final = 250_000
"""The most values of a body in standard JSON. 1 MiB of a heartbeat has 100,000."""
JSON_CONTAINERS_MAX: Final = 32_768
"""The most objects and lists of a body in standard JSON: each costs as much as ten numbers. 1 MiB
of a heartbeat has 20,000."""
HEADER_UNCHECKED_BYTES: Final = 32 * 1024
"""Decoding a header of up to this size is cheap. The values of a longer one are counted first."""
HEADER_VALUES_MAX: Final = 4096
"""The most values of a header that is longer than HEADER_UNCHECKED_BYTES."""
REFUSALS_MAX: Final = 64
"""Refused requests of a connection before its first allowed one; one more closes it."""
LOG_KINDS_MAX: Final = 4096
UNTRUSTED_DIVISOR: Final = 4
"""Untrusted connections together may hold this fraction (1/4) of all unfinished bytes."""
UNCOUNTED_BYTES: Final = 64 * 1024
"""Smaller unfinished frames are not counted, because 16,384 connections may well have some."""

CODES_WITH_MESSAGES: Final = frozenset(
    {
        RequestCode.SEND_MESSAGE,
        RequestCode.SEND_MESSAGE_V2,
        RequestCode.SEND_BATCH_MESSAGE,
        RequestCode.SEND_REPLY_MESSAGE,
        RequestCode.SEND_REPLY_MESSAGE_V2,
        RequestCode.REGISTER_BROKER,
    }
)
"""Requests whose bodies may be as large as a frame. REGISTER_BROKER (103) contains all topics of a
broker."""
CODES_WITH_LISTS: Final = frozenset(
    {
        RequestCode.HEART_BEAT,
        RequestCode.LOCK_BATCH_MQ,
        RequestCode.UNLOCK_BATCH_MQ,
        RequestCode.UPDATE_AND_CREATE_TOPIC_LIST,
        RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST,
        RequestCode.BATCH_ACK_MESSAGE,
        RequestCode.SLUICE_COMMIT_EPOCH,
    }
)
"""Requests whose bodies are long lists. They are decoded on another thread and processed in
slices."""


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """The limits of one listening server.

    `connections_per_address_max` 0 means no limit. `is_protected` means protected mode: only
    clients on this machine are served (`accept`).
    """

    connections_max: int = 10_000
    connections_per_address_max: int = 0
    idle_timeout_s: float = 120.0
    frame_timeout_s: float = 60.0
    pending_bytes_max: int = 256 * 1024 * 1024
    write_buffer_bytes_max: int = 16 * 1024 * 1024
    is_protected: bool = False

    @classmethod
    def from_config(cls, config: ServerConfig) -> "ServerLimits":
        """Return the limits of a server: those in `config`, and defaults for the others."""
        configured: dict[str, Any] = {}
        for field in fields(cls):
            if hasattr(config, field.name):
                configured[field.name] = getattr(config, field.name)
        return cls(**configured)


SERVER_LIMITS: Final = ServerLimits()


_JSON_START: Final = re.compile(rb"[ \t\r\n\f\b]*[{\[]")


def check_request(command: Command, codes_with_messages: Collection[int] | None) -> None:
    """Raise RequestError if a request has too many header fields or too large a body.

    Requests in `codes_with_messages` may have a body of any size. None means that all requests may.
    A JSON body that takes too long to decode is an error too, unless `codes_with_messages` is None
    or the code is in CODES_WITH_MESSAGES.
    """
    header_fields = command.fields
    if header_fields is not None and len(header_fields) > FIELDS_MAX:
        raise RequestError(
            ResponseCode.SYSTEM_ERROR,
            f"The request has {len(header_fields)} header fields, the limit is {FIELDS_MAX}.",
        )

    body_bytes = len(command.body)
    if codes_with_messages is None or not body_bytes:
        return
    bytes_max = BODY_BYTES_MAX if command.code in CODES_WITH_LISTS else SMALL_BODY_BYTES_MAX
    if body_bytes > bytes_max and command.code not in codes_with_messages:
        raise RequestError(
            ResponseCode.SYSTEM_ERROR,
            f"The body of request {command.code} has {body_bytes} bytes, the limit is {bytes_max}. "
            "Split it up.",
        )
    if command.code in CODES_WITH_MESSAGES:
        return
    check_json(command.code, bytes(command.body))


def check_json(code: int, body: bytes) -> None:
    """Raise RequestError if a body is JSON that takes more than a few milliseconds to decode.

    `code` is the request code. A body that is not JSON passes. The number of values is estimated by
    counting commas, colons and brackets, also within strings.
    """
    if _JSON_START.match(body) is None or len(body) <= EXTENDED_JSON_VALUES_MAX:
        return
    values, containers = fastjson.bound_counts(body)
    if values > JSON_VALUES_MAX or containers > JSON_CONTAINERS_MAX:
        raise RequestError(
            ResponseCode.SYSTEM_ERROR,
            f"The body of request {code} has more than {JSON_VALUES_MAX} values, or more than "
            f"{JSON_CONTAINERS_MAX} objects and lists. Split it up.",
        )
    if code not in CODES_WITH_LISTS or len(body) <= INLINE_DECODE_BYTES:
        check_fastjson_extensions(body)


def check_fastjson_extensions(body: bytes) -> None:
    """Raise RequestError if a large body uses fastjson's extensions of JSON.

    Extensions are everything that is not standard JSON, and references. They take longer to decode.
    The check itself takes time, so large bodies are checked where they are decoded.
    """
    values = fastjson.bound_counts(body).values
    if len(body) <= EXTENDED_JSON_BYTES_MAX and values <= EXTENDED_JSON_VALUES_MAX:
        return
    try:
        orjson.loads(body)
    except orjson.JSONDecodeError:
        raise RequestError(
            ResponseCode.SYSTEM_ERROR,
            f"The body of {len(body)} bytes is not standard JSON; such bodies may have at most "
            f"{EXTENDED_JSON_BYTES_MAX} bytes and {EXTENDED_JSON_VALUES_MAX} values. Write "
            "standard JSON.",
        ) from None
    if values > REFERENCED_VALUES_MAX and fastjson.REFERENCE in body:
        raise RequestError(
            ResponseCode.SYSTEM_ERROR,
            f"The body of {len(body)} bytes has references and more than {REFERENCED_VALUES_MAX} "
            "values. Write the values in full.",
        )


def check_header(header: bytes) -> None:
    """Raise ProtocolError if a header has more than HEADER_VALUES_MAX values.

    Call it before decoding a header that is longer than HEADER_UNCHECKED_BYTES.
    """
    if fastjson.bound_counts(header).values <= HEADER_VALUES_MAX:
        return
    # The properties of a message are one string, which may contain any number of commas.
    if (
        fastjson.bound_counts(fastjson.remove_strings(header, HEADER_VALUES_MAX)).values
        > HEADER_VALUES_MAX
    ):
        raise ProtocolError(
            f"A header of {len(header)} bytes has more than {HEADER_VALUES_MAX} values."
        )


class AddressLimit:
    """Counts the connections of each IP address, up to a limit.

    Loopback addresses are exempt: all clients behind a proxy or tunnel on this machine have them,
    and a local attacker has other means.
    """

    __slots__ = ("_count", "_is_exempt", "count_max")

    def __init__(self, count_max: int, is_exempt: Callable[[str], bool] = is_loopback) -> None:
        """Allow `count_max` connections for each address; 0 means no limit."""
        self.count_max = count_max
        self._is_exempt = is_exempt
        self._count: dict[str, int] = {}

    def acquire(self, address: str) -> bool:
        """Count one more connection of `address`. If the limit is reached, return False instead."""
        count = self._count.get(address, 0)
        if 0 < self.count_max <= count and not self._is_exempt(address):
            return False
        self._count[address] = count + 1
        return True

    def release(self, address: str) -> None:
        """Count one connection of `address` less. Call it when a connection has ended."""
        count = self._count.get(address, 0) - 1
        if count > 0:
            self._count[address] = count
        else:
            self._count.pop(address, None)

    def __len__(self) -> int:
        return len(self._count)


class UnfinishedBytes:
    """The number of bytes of unfinished frames, over all connections of a server.

    If access control decides about requests, the untrusted connections (those without an allowed
    request) may together hold only a part of the limit. So they can neither fill the memory nor
    leave no room for trusted connections.
    """

    __slots__ = ("_max", "_untrusted_max", "total_bytes", "untrusted_bytes")

    def __init__(self, bytes_max: int, *, is_guarded: bool) -> None:
        """Create a counter that allows `bytes_max` bytes of all connections together.

        `is_guarded` means that access control decides about requests. Then clients that are not
        trusted yet may hold only a part of these bytes.
        """
        self._max = bytes_max
        self._untrusted_max = bytes_max // UNTRUSTED_DIVISOR if is_guarded else bytes_max
        self.total_bytes = 0
        self.untrusted_bytes = 0

    def add(self, size: int, *, is_trusted: bool) -> bool:
        """Count `size` bytes that a connection holds; a negative size subtracts them.

        Return False if the limit is exceeded. The bytes are counted even then. `is_trusted` says
        whether access control has allowed a request of the connection.
        """
        self.total_bytes += size
        if not is_trusted:
            self.untrusted_bytes += size
        if size <= 0:
            return True
        return self.total_bytes <= self._max and (
            is_trusted or self.untrusted_bytes <= self._untrusted_max
        )

    def move_to_trusted(self, size: int) -> None:
        """Count the `size` bytes of a connection, which has become trusted, as trusted bytes."""
        self.untrusted_bytes -= size


class LogRateLimit(logging.Filter):
    """A log filter that passes at most `count_max` records of a kind in `period_s` seconds.

    Without it, clients that make a server log the same again and again could fill its disk. Records
    are of the same kind if their logger and their text before formatting are equal. The first
    record of the next period says how many were suppressed.
    """

    def __init__(self, count_max: int = 50, period_s: float = 60.0) -> None:
        """Create a filter that lets `count_max` records of each kind pass in `period_s` seconds.

        Records are of the same kind if they have the same logger and text.
        """
        super().__init__()
        self._count_max = count_max
        self._period_s = period_s
        self._kinds: dict[tuple[str, str], tuple[float, int]] = {}
        """By logger and text: when the period began, and the number of records in it."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Count a log record. Return whether it may be logged.

        If records of its kind were suppressed in the last period, their number is added to the
        text.
        """
        kind_of_record = (record.name, str(record.msg)[:200])
        begin_s, count = self._kinds.get(kind_of_record, (record.created, 0))
        # Below 0 if the wall clock was set back.
        is_in_period = 0 <= record.created - begin_s < self._period_s
        if not is_in_period:
            suppressed = count - self._count_max
            if suppressed > 0:
                record.msg = f"{record.msg} ({suppressed} more like this were suppressed)"
            begin_s = record.created
            count = 0
        if count == 0 and len(self._kinds) >= LOG_KINDS_MAX:
            self._kinds.clear()
        self._kinds[kind_of_record] = (begin_s, count + 1)
        return count < self._count_max


log = logging.getLogger(__name__)
slow_log = logging.getLogger("sluicemq.slow")

ROUND_BUDGET_S: Final = 0.001
"""The time of a scheduling round for requests; the remaining requests wait for the next round."""
CREDIT_S: Final = 0.005
"""A connection that was idle is placed this far ahead of the others."""
CHARGED_MIN_S: Final = 0.000_05
"""Shorter requests, such as an ordinary pull, are not charged to their connection."""
RUNS_PER_ROUND_MAX: Final = 64
"""The most waiting slices and reads that run in one round, in case the clock does not advance."""
WORK_WEIGHT_MAX: Final = 16
"""The next request of a connection waits while its open work items have this weight together."""

Run = Callable[[], Any]


class _OwnerState:
    """What one owner has used and what it waits for: slices of its work items, and a read."""

    __slots__ = ("is_waiting", "open_weight", "pending_read", "slices", "used_s")

    def __init__(self) -> None:
        """Create the state of an owner that has used no time and waits for nothing."""
        self.used_s = 0.0
        self.slices: deque[Run] = deque()
        self.pending_read: Run | None = None
        self.open_weight = 0  # of all its open work items
        self.is_waiting = False  # whether it is in `FairScheduler._waiting`

    @property
    def has_runnable(self) -> bool:
        """Whether it has a slice or a read that may run now."""
        return bool(self.slices) or self.can_read

    @property
    def can_read(self) -> bool:
        """Whether a read is pending and its open work items leave room for another request."""
        return self.pending_read is not None and self.open_weight < WORK_WEIGHT_MAX

    def take_next(self) -> Run:
        """Remove and return the function to run next: the read if it may run, else a slice.

        If neither may run, because the owner began further work items while it waited, return a
        function that does nothing.
        """
        if self.can_read and self.pending_read is not None:
            read = self.pending_read
            self.pending_read = None
            return read
        if self.slices:
            return self.slices.popleft()
        return lambda: None


class FairScheduler:
    """Shares the time of one event loop between owners, which are connections (peers) here.

    An owner may be any hashable value; None stands for the server itself. The compiled engine uses
    `now_s`, `is_tight`, `has_to_wait` and `spent` by these names.
    """

    def __init__(self, now_s: Callable[[], float], call_soon: Callable[[Run], object]) -> None:
        """Create a scheduler, which shares the time of the event loop between owners.

        `now_s` is the clock. `call_soon` is the event loop's function that schedules a call.
        """
        self.now_s = now_s
        self._call_soon = call_soon
        self._owners: defaultdict[Hashable, _OwnerState] = defaultdict(_OwnerState)
        self._waiting: list[tuple[float, int, _OwnerState]] = []
        """A heap of (used time, serial number, owner)."""
        self._serial_numbers = count()
        self._virtual_time_s = 0.0  # the used time of the owner that ran last
        self._round_used_s = 0.0
        self.is_tight = False
        """Whether any owner has to wait. If so, `has_to_wait` says which."""
        self._is_budget_used = False
        self._is_scheduled = False
        self._full_owners: set[Hashable] = set()
        self.before_round: Run = lambda: None
        """Called before each round, for what must not wait: the responses to sends."""
        self.slow_s = math.inf
        """Requests that take longer are logged."""

    def has_to_wait(self, owner: Hashable) -> bool:
        """Return whether the next request of `owner` has to wait.

        It waits if the budget of the round is used up, or if the owner's open work items weigh
        WORK_WEIGHT_MAX or more.
        """
        return self._is_budget_used or owner in self._full_owners

    # Called for each request that has no fast handler: keep it cheap.
    def spent(self, owner: Hashable, begin_s: float, code: int = 0) -> float:
        """Charge `owner` the time since `begin_s`, in which a request was handled.

        Return the present time by `now_s`. `code` is the request code, for the log of slow
        requests. If the budget of this round is used up, further requests wait.
        """
        now_s = self.now_s()
        passed_s = now_s - begin_s
        self._round_used_s += passed_s
        if passed_s > CHARGED_MIN_S:
            self.charge(owner, passed_s)
            if passed_s > self.slow_s:
                log_slow_request(code, owner, passed_s, "of computing")
        if self._round_used_s >= ROUND_BUDGET_S and not self._is_budget_used:
            self._is_budget_used = self.is_tight = True
            self._schedule_round()
        return now_s

    def charge(self, owner: Hashable, seconds: float) -> None:
        """Charge `owner` time that it has used, on this thread or another one.

        The time for which it was idle before counts as used, except for CREDIT_S.
        """
        state = self._owners[owner]
        state.used_s = max(state.used_s, self._virtual_time_s - CREDIT_S) + seconds

    def used_time_s(self, owner: Hashable) -> float:
        """Return the time by which to order `owner` among others: the least goes first."""
        return max(self._owners[owner].used_s, self._virtual_time_s - CREDIT_S)

    def schedule_read(self, owner: Hashable, read: Run) -> None:
        """Call `read()`, which reads further requests of `owner`, in a later round.

        It replaces an earlier `read` that was not called yet. It waits longer while the open work
        items of the owner weigh WORK_WEIGHT_MAX or more.
        """
        state = self._owners[owner]
        state.pending_read = read
        self._enqueue(state)

    def schedule_slice(self, owner: Hashable, run_slice: Run) -> None:
        """Call `run_slice()`, a slice of a work item of `owner`, in a later round.

        The slices of an owner run in the order in which they were scheduled.
        """
        state = self._owners[owner]
        state.slices.append(run_slice)
        self._enqueue(state)

    def begin_work(self, owner: Hashable, weight: int = 1) -> None:
        """Note that `owner` has one more open work item, of this weight.

        If the weights of its open work items reach WORK_WEIGHT_MAX, its further requests wait.
        """
        state = self._owners[owner]
        state.open_weight += weight
        if state.open_weight >= WORK_WEIGHT_MAX:
            self._full_owners.add(owner)
            self.is_tight = True

    def end_work(self, owner: Hashable, weight: int = 1) -> None:
        """Note that a work item of `owner` has ended.

        `weight` is the weight with which the item began. If the weights of the owner's open work
        items are below WORK_WEIGHT_MAX again, its requests need not wait for that any more.
        """
        state = self._owners.get(owner)
        if state is not None:
            state.open_weight -= weight
            if state.open_weight < WORK_WEIGHT_MAX:
                self._full_owners.discard(owner)
                self.is_tight = self._is_budget_used or bool(self._full_owners)
                self._enqueue(state)

    def remove(self, owner: Hashable) -> None:
        """Forget an owner that is gone, for example a closed connection."""
        self._owners.pop(owner, None)
        self._full_owners.discard(owner)
        self.is_tight = self._is_budget_used or bool(self._full_owners)

    def _enqueue(self, state: _OwnerState) -> None:
        """Queue an owner for a round, unless it waits already or has nothing to run."""
        if state.is_waiting or not state.has_runnable:
            return
        state.is_waiting = True
        # An owner that was idle for long gets at most CREDIT_S ahead of the others.
        state.used_s = max(state.used_s, self._virtual_time_s - CREDIT_S)
        heapq.heappush(self._waiting, (state.used_s, next(self._serial_numbers), state))
        self._schedule_round()

    def _schedule_round(self) -> None:
        """Begin a round after the next iteration of the event loop, which reads and writes."""
        if not self._is_scheduled:
            self._is_scheduled = True
            self._call_soon(lambda: self._call_soon(self._run_round))

    def _run_round(self) -> None:
        """Run the waiting owners, those that have used the least time first, with a new budget.

        Each is run once, then waits again if it has more to run. The round ends when the budget is
        used up, nothing waits, or RUNS_PER_ROUND_MAX were run. An exception is logged. If owners
        still wait, the next round is scheduled.
        """
        self._is_scheduled = self._is_budget_used = False
        self.is_tight = bool(self._full_owners)
        self._round_used_s = 0.0
        self.before_round()
        for _ in range(RUNS_PER_ROUND_MAX):
            if not self._waiting or self._round_used_s >= ROUND_BUDGET_S:
                break
            used_s, _, state = heapq.heappop(self._waiting)
            self._virtual_time_s = max(self._virtual_time_s, used_s)
            begin_s = self.now_s()
            round_used_s = self._round_used_s
            try:
                state.take_next()()
            except Exception:  # the other owners must go on
                log.exception("a deferred request failed")
            passed_s = self.now_s() - begin_s
            self._round_used_s = max(self._round_used_s, round_used_s + passed_s)
            state.used_s = max(state.used_s, used_s + passed_s)
            # Only now may it wait again, in the order that its used time gives it.
            state.is_waiting = False
            self._enqueue(state)
        self._is_budget_used = self._round_used_s >= ROUND_BUDGET_S
        self.is_tight = self._is_budget_used or bool(self._full_owners)
        if self._is_budget_used or self._waiting:
            self._schedule_round()


def log_slow_request(code: int, client: object, seconds: float, activity: str) -> None:
    """Write a line to the log of slow requests (`sluicemq.slow`).

    `activity` says how the time was spent, for example "of computing".
    """
    slow_log.warning("request %d of %s: %.0f ms %s", code, client, seconds * 1000, activity)


NULL_SCHEDULER: Final = FairScheduler(float, lambda run: None)
"""A scheduler on whose clock no time passes, for transports on which no connection waits."""
