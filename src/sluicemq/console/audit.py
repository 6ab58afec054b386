"""The audit log: who changed what, as lines of JSON, one before each change and one after it.

Without a file the lines go to the logger `sluicemq.console.audit`. Secrets and bodies of messages
are left out.
"""

import logging
from collections.abc import Mapping
from typing import Any, Final

import orjson

from sluicemq.clock import Clock
from sluicemq.files import OWNER_ONLY, SYSTEM_FILES, Files

_log = logging.getLogger("sluicemq.console.audit")
_HIDDEN: Final = frozenset({"form_token", "secret", "secret_key", "body", "token", "find", "put"})
"""The fields of forms that are left out."""


class AuditLog:
    """Appends lines to the file at `path`, or to the logger if `path` is empty."""

    def __init__(self, clock: Clock, path: str = "", files: Files = SYSTEM_FILES) -> None:
        """Open the file at `path`, which is created if it does not exist; "" means the logger."""
        self._clock = clock
        self._file = files.open(path, create=True, access=OWNER_ONLY) if path else None

    def write(self, event: str, form: Mapping[str, str], **values: Any) -> None:
        """Append a line of JSON about an event to the audit log.

        It has the time, the event, `values`, and the fields of `form` without secrets. Without a
        file, the line goes to the log of the process.
        """
        shown_form = {name: text for name, text in form.items() if name not in _HIDDEN}
        record = {
            "time_ms": self._clock.now_ms(),
            "event": event,
            **values,
            "form": shown_form,
        }
        line = orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE)
        if self._file is None:
            _log.info("%s", line.decode().rstrip())
            return
        self._file.pwrite(line, self._file.size())

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
