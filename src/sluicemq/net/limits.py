"""What a connection, an address and all connections together may take of a server: bytes and time.

Frames are bounded where they are read (`wire.frames`, `net.dispatch`): size of a frame and
of its header. Here is what only a server can count: connections of an address, bytes of unfinished
frames, the time one takes to become whole, requests of a client that has not yet been let in.
the page on security has the table.

A limit closes the connection when going on would cost memory or time, and is an answer when the
request itself is what is too large. Nothing here costs a whole frame anything.

`Shares` gives each connection a fair share of the loop's time. One request may take a millisecond,
and one client may send a thousand at once. A turn of the loop has a budget: when it is used up,
further requests wait for the next turn, where the connection that has used least goes first
(start-time fair queueing: a connection that returns after a pause starts slightly ahead of the
others, and has saved nothing else). So a client that asks for little waits for one slice of another
client, however many ask for much, and a client that is alone may use everything.

Sends do not wait here (`dispatch`: quick handlers), nor does work that has begun: a slice is as
long as its handler makes it. Longer work is cut into slices by `net.work.background`.
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
"""Of a request. The largest honest one, a send whose 32 KiB of properties all need escapes, has
200 kB. RocketMQ takes 16 MiB."""
FIELDS_MAX: Final = 256
BODY_BYTES_MAX: Final = 1 << 20
"""Of a request that carries no messages and is one of WITH_TABLES. A heartbeat for 1,000 topics has
250 kB."""
SMALL_BODY_BYTES_MAX: Final = 64 * 1024
"""Of all other requests that carry no messages."""
INLINE_BYTES: Final = 16 * 1024
"""What is decoded on the loop: a millisecond of it."""
ODD_BODY_BYTES_MAX: Final = 64 * 1024
"""The most bytes of a body in JSON as only fastjson writes it: integer keys, objects as keys,
references."""
ODD_VALUES_MAX: Final = 4096
"""The most values of such a body. The tolerant parser takes 1.5 µs for a value."""
REFERENCED_VALUES_MAX: Final = 2 * ODD_VALUES_MAX
"""The most values of a body in plain JSON with references, which take 1 µs for a value."""
JSON_VALUES_MAX: Final = 250_000
"""The most values of a body in plain JSON. 1 MiB of a heartbeat has 100,000."""
JSON_CONTAINERS_MAX: Final = 32_768
"""The most objects and lists of a body in plain JSON: each costs as much as ten numbers. 1 MiB of
a heartbeat has 20,000."""
HEADER_PLAIN_BYTES: Final = 32 * 1024
"""Up to here the JSON of a header cannot be dear. A longer one is weighed before it is decoded."""
HEADER_VALUES_MAX: Final = 4096
"""The most values of a header that is longer than HEADER_PLAIN_BYTES."""
REFUSED_MAX: Final = 64
"""Requests without rights that a connection may make before the first that is allowed."""
KINDS_MAX: Final = 4096
UNTRUSTED_PART: Final = 4
"""Of the unfinished bytes of all connections, those that nobody vouches for have this part."""
PENDING_SMALL: Final = 64 * 1024
"""Unfinished frames below it are not counted: 16,384 connections may well have some."""

WITH_MESSAGES: Final = frozenset({
    RequestCode.SEND_MESSAGE, RequestCode.SEND_MESSAGE_V2, RequestCode.SEND_BATCH_MESSAGE,
    RequestCode.SEND_REPLY_MESSAGE, RequestCode.SEND_REPLY_MESSAGE_V2,
    RequestCode.REGISTER_BROKER,
})  # fmt: skip
"""Their bodies may fill a frame; 103 brings all topics of a broker."""
WITH_TABLES: Final = frozenset({
    RequestCode.HEART_BEAT, RequestCode.LOCK_BATCH_MQ, RequestCode.UNLOCK_BATCH_MQ,
    RequestCode.UPDATE_AND_CREATE_TOPIC_LIST, RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST,
    RequestCode.BATCH_ACK_MESSAGE, RequestCode.SLUICE_COMMIT_EPOCH,
})  # fmt: skip
"""Their bodies name many things. They are decoded beside the loop, and worked at in steps."""


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Of one listening server; `connections_per_address_max` 0 is without a limit, `is_protected`
    lets in clients of this machine alone (`protected.py`)."""

    connections_max: int = 10_000
    connections_per_address_max: int = 0
    idle_timeout_s: float = 120.0
    frame_timeout_s: float = 60.0
    pending_bytes_max: int = 256 * 1024 * 1024
    write_buffer_bytes_max: int = 16 * 1024 * 1024
    is_protected: bool = False

    @classmethod
    def of(cls, config: ServerConfig) -> "ServerLimits":
        """Those of the settings of a server, which has a field for each."""
        return cls(
            **{
                item.name: getattr(config, item.name)
                for item in fields(cls)
                if hasattr(config, item.name)
            }
        )


SERVER_LIMITS: Final = ServerLimits()


_JSON_START: Final = re.compile(rb"[ \t\r\n\f\b]*[{\[]")


def check_request(command: Command, with_messages: Collection[int] | None) -> None:
    """Raise RequestError unless a request has a size, and JSON of a weight, that its code may have.

    `with_messages`: the codes whose bodies may fill a frame; None: all, and then no body is
    weighed.
    """
    fields = command.fields
    if fields is not None and len(fields) > FIELDS_MAX:
        raise RequestError(
            ResponseCode.SYSTEM_ERROR,
            f"The request has {len(fields)} header fields, the limit is {FIELDS_MAX}.",
        )
    size = len(command.body)
    most = BODY_BYTES_MAX if command.code in WITH_TABLES else SMALL_BODY_BYTES_MAX
    if size > most and with_messages is not None and command.code not in with_messages:
        raise RequestError(
            ResponseCode.SYSTEM_ERROR,
            f"The body of a request {command.code} has {size} bytes, the limit is {most}. "
            "Split it up.",
        )
    if with_messages is None or command.code in WITH_MESSAGES or not size:
        return
    check_json(command.code, bytes(command.body))


def check_json(code: int, body: bytes) -> None:
    """Raise RequestError if `body`, that of a request `code`, is JSON whose decoding could take
    longer than a few milliseconds. A body that is not JSON passes. Commas, colons and brackets
    within texts count as if they separated values."""
    if _JSON_START.match(body) is None or len(body) <= ODD_VALUES_MAX:
        return
    values, containers = fastjson.weigh(body)
    if values > JSON_VALUES_MAX or containers > JSON_CONTAINERS_MAX:
        raise RequestError(
            ResponseCode.SYSTEM_ERROR,
            f"The body of a request {code} has more than {JSON_VALUES_MAX} values, or more than "
            f"{JSON_CONTAINERS_MAX} objects and lists. Split it up.",
        )
    if code not in WITH_TABLES or len(body) <= INLINE_BYTES:
        check_plain(body)


def check_plain(body: bytes) -> None:
    """Raise RequestError if `body` is JSON that only the tolerant parser reads, or has references,
    and more than a little of it. For a body of WITH_TABLES this is done where it is decoded."""
    values = fastjson.weigh(body).values
    if len(body) <= ODD_BODY_BYTES_MAX and values <= ODD_VALUES_MAX:
        return
    try:
        orjson.loads(body)
    except orjson.JSONDecodeError:
        raise RequestError(
            ResponseCode.SYSTEM_ERROR,
            f"The body of {len(body)} bytes is not plain JSON; such bodies may have "
            f"{ODD_BODY_BYTES_MAX} bytes and {ODD_VALUES_MAX} values. Write plain JSON.",
        ) from None
    if values > REFERENCED_VALUES_MAX and fastjson.REFERENCE in body:
        raise RequestError(
            ResponseCode.SYSTEM_ERROR,
            f"The body of {len(body)} bytes has references and more than {REFERENCED_VALUES_MAX} "
            "values. Write the values in full.",
        )


def check_header(header: bytes) -> None:
    """Raise ProtocolError if the JSON of a header longer than HEADER_PLAIN_BYTES could take longer
    than a few milliseconds to decode."""
    if fastjson.weigh(header).values <= HEADER_VALUES_MAX:
        return
    # The properties of a message may hold any number of commas.
    if fastjson.weigh(fastjson.without_texts(header, HEADER_VALUES_MAX)).values > HEADER_VALUES_MAX:
        raise ProtocolError(
            f"A header of {len(header)} bytes has more than {HEADER_VALUES_MAX} values."
        )


class AddressLimit:
    """Connections by address. Loopback is exempt: all clients behind a proxy or a tunnel on this
    machine come from there, and who is on the machine has other means."""

    __slots__ = ("_count", "_is_exempt", "max")

    def __init__(self, maximum: int, exempt: Callable[[str], bool] = is_loopback) -> None:
        self.max = maximum
        self._is_exempt = exempt
        self._count: dict[str, int] = {}

    def enter(self, address: str) -> bool:
        """One more; False, and not counted, when there are too many already."""
        count = self._count.get(address, 0)
        if 0 < self.max <= count and not self._is_exempt(address):
            return False
        self._count[address] = count + 1
        return True

    def leave(self, address: str) -> None:
        """One that was counted is gone."""
        count = self._count.get(address, 0) - 1
        if count > 0:
            self._count[address] = count
        else:
            self._count.pop(address, None)

    def __len__(self) -> int:
        return len(self._count)


class Pending:
    """The bytes of unfinished frames, of all connections of a server.

    Where requests need rights, connections that have not had one allowed share a part: they
    can neither fill the memory nor take the place of those that have.
    """

    __slots__ = ("_max", "_untrusted_max", "total", "untrusted")

    def __init__(self, bytes_max: int, *, is_guarded: bool) -> None:
        self._max = bytes_max
        self._untrusted_max = bytes_max // UNTRUSTED_PART if is_guarded else bytes_max
        self.total = 0
        self.untrusted = 0

    def change(self, more: int, *, is_trusted: bool) -> bool:
        """A connection holds `more` bytes than before (or less, below 0). False: too many."""
        self.total += more
        if not is_trusted:
            self.untrusted += more
        if more <= 0:
            return True
        return self.total <= self._max and (is_trusted or self.untrusted <= self._untrusted_max)

    def trust(self, held: int) -> None:
        """A connection that holds so many bytes is trusted from now on."""
        self.untrusted -= held


class LogLimit(logging.Filter):
    """At most `count_max` records of a kind in `period_s`: whatever clients can make a server say
    again and again must not fill its disk. A kind is a logger and its text before the values are
    in it. The first record of the next period says how many were left out.
    """

    def __init__(self, count_max: int = 50, period_s: float = 60.0) -> None:
        super().__init__()
        self._count_max = count_max
        self._period_s = period_s
        self._kinds: dict[tuple[str, str], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        key = (record.name, str(record.msg)[:200])
        begin_s, count = self._kinds.get(key, (record.created, 0))
        if not 0 <= record.created - begin_s < self._period_s:
            left_out = count - self._count_max
            if left_out > 0:
                record.msg = f"{record.msg} ({left_out} more like this were left out)"
            begin_s, count = record.created, 0
        if count == 0 and len(self._kinds) >= KINDS_MAX:
            self._kinds.clear()
        self._kinds[key] = (begin_s, count + 1)
        return count < self._count_max


log = logging.getLogger(__name__)
slow_log = logging.getLogger("sluicemq.slow")

TURN_S: Final = 0.001
"""So much of a turn goes to requests; then those that are left have to wait for the next one."""
CREDIT_S: Final = 0.005
"""A connection that has asked for nothing starts this far ahead of the others."""
NOTED_S: Final = 0.000_05
"""What takes less goes on no account, as long as nobody waits: an ordinary pull."""
SERVED_MAX: Final = 64
"""So many of those who wait are served in a turn, under a clock that stands still."""
WEIGHT_MAX: Final = 16
"""The next request of a connection waits while its work items weigh this much together."""

Run = Callable[[], Any]


class _Account:
    """What a connection has used, and what it waits for: slices of its work, and to be read."""

    __slots__ = ("is_waiting", "request", "slices", "spent_s", "works")

    def __init__(self) -> None:
        self.spent_s = 0.0
        self.slices: deque[Run] = deque()
        self.request: Run | None = None
        self.works = 0
        self.is_waiting = False  # in `Shares._waiting`

    @property
    def has_something(self) -> bool:
        """Can it do something?"""
        return bool(self.slices) or self.can_be_read

    @property
    def can_be_read(self) -> bool:
        return self.request is not None and self.works < WEIGHT_MAX

    def take(self) -> Run:
        """What it does next: nothing if it has become full while it waited."""
        if not self.can_be_read or self.request is None:
            return self.slices.popleft() if self.slices else lambda: None
        run, self.request = self.request, None
        return run


class Shares:
    """The time of one loop. Who uses it may be anything; connections are peers."""

    def __init__(self, now_s: Callable[[], float], call_soon: Callable[[Run], object]) -> None:
        self.now_s = now_s
        self._call_soon = call_soon
        self._accounts: defaultdict[Hashable, _Account] = defaultdict(_Account)
        self._waiting: list[tuple[float, int, _Account]] = []
        self._numbers = count()
        self._begun_s = 0.0  # what the one who was served last had used
        self._used_s = 0.0  # of this turn
        self.is_tight = False
        """Does anybody have to wait? Then `has_to_wait` says who."""
        self._is_over = False
        self._is_scheduled = False
        self._full: set[Hashable] = set()
        self.before_turn: Run = lambda: None
        """What must not wait for a turn: the answers of sends."""
        self.slow_s = math.inf
        """A request that takes longer goes into the log."""

    def has_to_wait(self, who: Hashable) -> bool:
        """Is the turn's budget used up, or has this one too many works under way?"""
        return self._is_over or who in self._full

    def spent(self, who: Hashable, begin_s: float, code: int = 0) -> float:
        """Somebody has computed since `begin_s`, for a request of this code. Returns the time.
        HOT."""
        now_s = self.now_s()
        passed_s = now_s - begin_s
        self._used_s += passed_s
        if passed_s > NOTED_S:
            self.charge(who, passed_s)
            if passed_s > self.slow_s:
                note_slow(code, who, passed_s, "of computing")
        if self._used_s >= TURN_S and not self._is_over:
            self._is_over = self.is_tight = True
            self._schedule()
        return now_s

    def charge(self, who: Hashable, seconds: float) -> None:
        """Somebody has used time, of another thread too."""
        account = self._accounts[who]
        account.spent_s = max(account.spent_s, self._begun_s - CREDIT_S) + seconds

    def spent_s(self, who: Hashable) -> float:
        """By which to order those who wait for something else than the loop."""
        return max(self._accounts[who].spent_s, self._begun_s - CREDIT_S)

    def wait(self, who: Hashable, run: Run) -> None:
        """A connection is read on when it is its turn."""
        account = self._accounts[who]
        account.request = run
        self._stand(account)

    def add(self, who: Hashable, run: Run) -> None:
        """A slice of a work, when it is its turn."""
        account = self._accounts[who]
        account.slices.append(run)
        self._stand(account)

    def begin_work(self, who: Hashable, weight: int = 1) -> None:
        """A work is under way. The requests behind it need not wait, as long as the works of the
        connection weigh less than WEIGHT_MAX together."""
        account = self._accounts[who]
        account.works += weight
        if account.works >= WEIGHT_MAX:
            self._full.add(who)
            self.is_tight = True

    def end_work(self, who: Hashable, weight: int = 1) -> None:
        """A work of this weight has ended."""
        account = self._accounts.get(who)
        if account is not None:
            account.works -= weight
            if account.works < WEIGHT_MAX:
                self._full.discard(who)
                self.is_tight = self._is_over or bool(self._full)
                self._stand(account)

    def forget(self, who: Hashable) -> None:
        """The connection is gone."""
        self._accounts.pop(who, None)
        self._full.discard(who)
        self.is_tight = self._is_over or bool(self._full)

    def _stand(self, account: _Account) -> None:
        if account.is_waiting or not account.has_something:
            return
        account.is_waiting = True
        account.spent_s = max(account.spent_s, self._begun_s - CREDIT_S)
        heapq.heappush(self._waiting, (account.spent_s, next(self._numbers), account))
        self._schedule()

    def _schedule(self) -> None:
        """One iteration of the loop lies between two turns, in which others read and write."""
        if not self._is_scheduled:
            self._is_scheduled = True
            self._call_soon(lambda: self._call_soon(self._begin_turn))

    def _begin_turn(self) -> None:
        """A new budget, for those first who wait."""
        self._is_scheduled = self._is_over = False
        self.is_tight = bool(self._full)
        self._used_s = 0.0
        self.before_turn()
        for _ in range(SERVED_MAX):
            if not self._waiting or self._used_s >= TURN_S:
                break
            spent_s, _, account = heapq.heappop(self._waiting)
            self._begun_s = max(self._begun_s, spent_s)
            begin_s, used_s = self.now_s(), self._used_s
            try:
                account.take()()
            except Exception:  # the others must go on
                log.exception("a request that had waited failed")
            passed_s = self.now_s() - begin_s
            self._used_s = max(self._used_s, used_s + passed_s)
            account.spent_s = max(account.spent_s, spent_s + passed_s)
            account.is_waiting = False  # from here on: it stands where what it has used puts it
            self._stand(account)
        self._is_over = self._used_s >= TURN_S
        self.is_tight = self._is_over or bool(self._full)
        if self._is_over or self._waiting:
            self._schedule()


def note_slow(code: int, who: object, seconds: float, of_what: str) -> None:
    """One line of the slow-request log (`sluicemq.slow`)."""
    slow_log.warning("request %d of %s: %.0f ms %s", code, who, seconds * 1000, of_what)


NOBODY_WAITS: Final = Shares(float, lambda run: None)
"""For transports that cannot let a connection wait: no time passes."""
