"""Log an outage when it begins and when it is over, however often the work is retried."""

import logging


class OutageLog:
    """Logs the failures of one piece of work that is retried until it succeeds.

    A failure is logged if it is the first, or if its kind differs from that of the failure before.
    The kind is the error number of an OSError, else the text of the error. Other failures are only
    counted. `recovered` logs the end of the outage and the number of all its failures.
    """

    __slots__ = ("_failures", "_kind", "_logger", "_work")

    def __init__(self, logger: logging.Logger, work: str) -> None:
        """Log to `logger`. `work` names what is attempted as a noun phrase, for example "writing
        consume queues"."""
        self._logger = logger
        self._work = work
        self._failures = 0
        self._kind: object = None

    @property
    def is_on(self) -> bool:
        """Whether the last attempt failed."""
        return self._failures > 0

    def failed(self, error: Exception) -> None:
        """Count a failed attempt. Log it as a warning, unless its kind is that of the failure
        before."""
        self._failures += 1
        kind = (error.errno if isinstance(error, OSError) else None) or str(error)
        if kind != self._kind:
            self._kind = kind
            self._logger.warning(
                "%s failed: %s. Retrying; equal failures are not logged, the next success is.",
                self._work,
                error,
            )

    def recovered(self) -> None:
        """Log that the work succeeds again, with the number of failed attempts. Do nothing if the
        last attempt succeeded."""
        if self._failures:
            self._logger.warning(
                "%s succeeded again after %d failed attempts", self._work, self._failures
            )
            self._failures, self._kind = 0, None
