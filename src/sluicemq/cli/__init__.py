"""The command `sluice`: one module a group of commands, imported when it is used.

`sluice up` has to be ready in half a second and to stay small, so nothing here may import rich,
lark or pyarrow before a command needs it.
"""

from typing import Final

from sluicemq.errors import install_extra

INTERRUPTED: Final = 130
"""The exit code of a program that Ctrl-C ended, as shells give it."""

try:
    from sluicemq.cli.root import main
except ModuleNotFoundError as error:
    if error.name != "click":
        raise
    raise SystemExit(
        f"The command sluice needs more than the client. {install_extra('server')}"
    ) from None
except KeyboardInterrupt:  # click handles those that come later
    raise SystemExit(INTERRUPTED) from None

__all__ = ["main"]
