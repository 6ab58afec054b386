"""What was changed by whom, as lines of JSON: one before it is done and one after.

Without a file they go to the log (`sluicemq.console.audit`). Secrets and bodies of messages are not
in them.
"""

import logging
from collections.abc import Mapping
from typing import Any, Final

import orjson

from sluicemq.clock import Clock
from sluicemq.files import OWNER_ONLY, SYSTEM_FILES, Files

_log = logging.getLogger("sluicemq.console.audit")
_HIDDEN: Final = frozenset({"form_token", "secret", "secret_key", "body", "token", "find", "put"})


class Audit:
    """Appends to the file at `path`; "" is the log."""

    def __init__(self, clock: Clock, path: str = "", files: Files = SYSTEM_FILES) -> None:
        self._clock = clock
        self._file = files.open(path, create=True, access=OWNER_ONLY) if path else None

    def write(self, event: str, form: Mapping[str, str], **values: Any) -> None:
        """One line; what is secret of the form is left out."""
        line = {"time_ms": self._clock.now_ms(), "event": event, **values}
        line |= {"form": {name: text for name, text in form.items() if name not in _HIDDEN}}
        data = orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)
        if self._file is None:
            _log.info("%s", data.decode().rstrip())
            return
        self._file.pwrite(data, self._file.size())

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()
