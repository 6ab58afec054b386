"""Changes of `plain_acl.yml` by request: text in, text out.

What others wrote stays, in its order; comments and spacing do not: the file is written anew. Each
change raises the counter of `dataVersion`, as RocketMQ does. Nothing is checked here: the caller
loads the new text before it writes it.
"""

from collections.abc import Mapping
from typing import Any, Final

import yaml  # type: ignore[import-untyped]

from sluicemq.acl.loading import plain_document

Document = dict[str, Any]
_DUMPER: Final[Any] = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
ACCOUNTS, WHITE, VERSION = "accounts", "globalWhiteRemoteAddresses", "dataVersion"


def with_account(text: str, access_key: str, changes: Mapping[str, Any], now_ms: int) -> str:
    """The account with some of its keys set; a new one when there is none."""
    document = _read(text)
    account = _find(document, access_key)
    if account is None:
        account = {"accessKey": access_key}
        document[ACCOUNTS] = [*(document.get(ACCOUNTS) or []), account]
    account.update(changes)
    return _written(document, now_ms)


def without_account(text: str, access_key: str, now_ms: int) -> str | None:
    """The same without this account; None when it is not there."""
    document = _read(text)
    if _find(document, access_key) is None:
        return None
    accounts = document[ACCOUNTS]
    document[ACCOUNTS] = [one for one in accounts if one.get("accessKey") != access_key]
    return _written(document, now_ms)


def with_white_addresses(text: str, addresses: list[str], now_ms: int) -> str:
    """The same with this global white list."""
    return _written({**_read(text), WHITE: addresses}, now_ms)


def version_of(text: str) -> tuple[int, int]:
    """Counter and time (ms) of the last change by request; (0, 0) when there was none."""
    return _version(_read(text))


def _version(document: Document) -> tuple[int, int]:
    entries = document.get(VERSION)
    entry = entries[0] if isinstance(entries, list) and entries else None
    if not isinstance(entry, dict):
        return 0, 0
    counter, time_ms = (_integer(entry.get(name)) for name in ("counter", "timestamp"))
    return counter, time_ms


def _integer(value: object) -> int:
    text = str(value)
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else 0


def _read(text: str) -> Document:
    found = plain_document(text)
    return found if isinstance(found, dict) else {}


def _find(document: Document, access_key: str) -> dict[str, Any] | None:
    for account in document.get(ACCOUNTS) or []:
        if account.get("accessKey") == access_key:
            return account  # type: ignore[no-any-return]
    return None


def _written(document: Document, now_ms: int) -> str:
    counter = _version(document)[0] + 1
    document[VERSION] = [{"counter": counter, "timestamp": now_ms}]
    for account in document.get(ACCOUNTS) or []:
        if str(account.get("admin")).lower() in ("true", "yes", "on"):
            account["admin"] = True  # RocketMQ takes no text for it
        elif "admin" in account:
            account["admin"] = False
    return _dumped(document)


def _dumped(document: Document) -> str:
    """Every text as itself: 12345678 gets quotes, and an account stays one."""
    text = yaml.dump(
        document, Dumper=_DUMPER, sort_keys=False, allow_unicode=True, default_flow_style=False
    )
    return str(text)
