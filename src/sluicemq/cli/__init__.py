"""The command `sluice`: one module a group of commands, imported when it is used.

`sluice up` has to be ready in half a second and to stay small, so nothing here may import rich,
lark or pyarrow before a command needs it.
"""

try:
    from sluicemq.cli.root import main
except ModuleNotFoundError as error:
    if error.name != "click":
        raise
    raise SystemExit(
        "The command sluice needs more than the client: pip install 'sluicemq[server]'"
    ) from None

__all__ = ["main"]
