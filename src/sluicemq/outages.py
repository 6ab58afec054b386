"""Log an outage once when it begins and once when it is over, however often the work is retried."""

import logging


class OutageLog:
    """The log lines of one piece of work that is retried until it succeeds.

    The first failure is logged, and so is each failure whose kind differs from the one before: the
    error number of an OSError, the text of any other error. Equal failures that follow are only
    counted. `recovered` logs the end of the outage with that count.
    """

    __slots__ = ("_failures", "_kind", "_logger", "_work")

    def __init__(self, logger: logging.Logger, work: str) -> None:
        """`work` names what is attempted as a noun phrase, for example "writing consume queues"."""
        self._logger = logger
        self._work = work
        self._failures = 0
        self._kind: object = None

    @property
    def is_on(self) -> bool:
        """Whether the last attempt failed."""
        return self._failures > 0

    def failed(self, error: Exception) -> None:
        """Count a failed attempt, and log it as a warning if its kind is new in this outage."""
        self._failures += 1
        kind = (error.errno if isinstance(error, OSError) else None) or str(error)
        if kind != self._kind:
            self._kind = kind
            self._logger.warning(
                "%s failed: %s. Retrying; this is logged again when it succeeds.", self._work, error
            )

    def recovered(self) -> None:
        """Log that the work succeeds again. Do nothing when no attempt has failed since."""
        if self._failures:
            self._logger.warning(
                "%s succeeded again after %d failed attempts", self._work, self._failures
            )
            self._failures, self._kind = 0, None
