"""Decide after a failed attempt to send a message whether to make another one.

`SendAttempts` is the state of one send: its deadline for all attempts, the retries that are left,
and what each attempt failed with. A time-out is never retried, because the message may be stored.
If no other broker can accept the message and the failed broker has replicas, the send waits within
its time limit for a replica to become master: a failover takes seconds, three attempts only
milliseconds.
"""

from typing import Final

from sluicemq.client.core.conversations import Call
from sluicemq.client.core.requests import SendStatus
from sluicemq.errors import (
    ConnectionLostError,
    RequestError,
    RequestTimeoutError,
    RouteNotFoundError,
    SendError,
    SendUnknownError,
    SluiceError,
)
from sluicemq.model.topic import MessageQueue

SEND_TIMEOUT_MS: Final = 10_000
"""The time for all attempts of a send together, by default."""
RETRIES: Final = 2
"""The number of further attempts after the first one, by default."""
RETRY_CODES: Final = frozenset({17, 14, 1, 2, 16, 204, 205, 1500})
"""Response codes after which another broker may accept the message (spec/remoting.md §7.3)."""
PAUSE_S_MIN: Final = 0.05
"""The first pause in seconds of a send that waits for a new master. Each one is twice as long."""
PAUSE_S_MAX: Final = 0.5
"""The longest pause in seconds between two attempts while a send waits for a new master."""


class SendAttempts:
    """The state of one send, from the first attempt to its result. Times are monotonic seconds.

    The current attempt began at `started_s` and goes to the queue `target` (None before one is
    chosen). `call` is its request, None before the request is made. `deadline_s` ends all attempts.
    `last_broker` is the broker of the last failed attempt, None before the first failure.
    """

    __slots__ = (
        "_failures",
        "_may_be_stored",
        "_may_retry",
        "_retries_left",
        "_timeout_ms",
        "call",
        "deadline_s",
        "has_fixed_queue",
        "last_broker",
        "pause_s",
        "started_s",
        "target",
    )

    def __init__(self, now_s: float, timeout_ms: int = SEND_TIMEOUT_MS, retries: int = RETRIES):
        """Begin the attempts of one send at `now_s` (monotonic seconds).

        `timeout_ms` is the time for all attempts together. `retries` is the number of attempts
        after the first one.
        """
        self.started_s = now_s
        self.deadline_s = now_s + timeout_ms / 1000
        self.target: MessageQueue | None = None
        self.call: Call | None = None
        self.has_fixed_queue = False
        """Whether only one queue can accept the message, because the caller has chosen it."""
        self._timeout_ms = timeout_ms
        self._retries_left = retries
        self._may_retry = retries > 0
        self._failures: tuple[str, ...] = ()
        self._may_be_stored = False
        self.last_broker: str | None = None
        self.pause_s = 0.0
        """The pause in seconds before the next attempt."""

    def record_failure(
        self,
        broker: str,
        error: SluiceError,
        now_s: float,
        *,
        was_written: bool,
        waits_for_master: bool = False,
    ) -> bool:
        """Record a failed attempt, and return whether another attempt may be made.

        `broker` is the broker that failed, `error` the failure. `was_written` says that the request
        may have reached the broker; then a broken connection or a time-out leaves open whether the
        message is stored. `waits_for_master` says that the broker will get a new master. Attempts
        then go on until the deadline without using up retries, unless the send was created without
        retries.

        Sets `last_broker`, and `pause_s` for the pause before the next attempt.
        """
        self.last_broker = broker
        failure = f"{broker}: {error.fact}"
        if failure not in self._failures:
            self._failures += (failure,)

        # A message that may be stored is not sent again after a time-out: a retry could duplicate
        # it.
        if was_written and isinstance(error, ConnectionLostError | RequestTimeoutError):
            self._may_be_stored = True
        if was_written and isinstance(error, RequestTimeoutError):
            return False

        # Errors that another attempt would only repeat, and the end of the time.
        is_final_refusal = isinstance(error, RequestError) and error.code not in RETRY_CODES
        has_no_route = isinstance(error, RouteNotFoundError) and not waits_for_master
        is_too_late = now_s >= self.deadline_s
        if is_final_refusal or has_no_route or is_too_late:
            return False

        # Waiting for a new master uses up no retries; other attempts do.
        if waits_for_master and self._may_retry:
            self.pause_s = min(max(2 * self.pause_s, PAUSE_S_MIN), PAUSE_S_MAX)
            return True
        if self._retries_left <= 0:
            return False
        self._retries_left -= 1
        self.pause_s = 0.0
        return True

    def use_retry_if_unsafe(self, status: SendStatus, broker: str, now_s: float) -> bool:
        """Use up a retry if the message is stored unsafely, and return whether to send it again.

        This is so if `status` says that `broker` has not stored it as safely as configured, a retry
        is left and the deadline has not passed. `last_broker` is then set to `broker`, so that the
        next attempt goes elsewhere. Otherwise nothing changes.
        """
        if status is SendStatus.OK or self._retries_left <= 0 or now_s >= self.deadline_s:
            return False
        self._retries_left -= 1
        self.last_broker = broker
        return True

    def make_error(self, topic: str, message_id: str, error: SluiceError) -> SluiceError:
        """Return the exception for a failed send; `error` is the failure of the last attempt.

        It is a SendUnknownError if any attempt may have stored the message. Otherwise a
        RequestError or RouteNotFoundError is returned as it is, and any other error becomes a
        SendError that lists all attempts. The caller raises the result `from error`.
        """
        failures = "; ".join(self._failures)
        if self._may_be_stored:
            return SendUnknownError(
                f"no response for message {message_id} to {topic!r} (time for all attempts "
                f"{self._timeout_ms} ms): it may be stored or not [{failures}].",
                fix="Do not send it again unless consumers tolerate duplicates; look it up by its "
                "id first.",
            )
        if isinstance(error, RequestError | RouteNotFoundError):
            return error
        return SendError(
            f"message {message_id} to {topic!r} was not stored [{failures}].",
            fix="Check sluice cluster list, and that the brokers' addresses are reachable.",
        )
