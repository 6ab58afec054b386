"""Signing of requests as ACL 1.0 and 2.0 want it (spec/remoting.md §20).

The content is every field's value, ordered by the field's name in Java's string order (UTF-16
units), without separators, then the body. It has no `Signature` in it, but AccessKey and, when
used, SecurityToken.
"""

import binascii
import hashlib
import hmac
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import lru_cache
from typing import Final

from sluicemq.errors import ConfigurationError
from sluicemq.wire.frames import Command

ACCESS_KEY: Final = "AccessKey"
SECURITY_TOKEN: Final = "SecurityToken"
SIGNATURE: Final = "Signature"
UNIQUE_KEY_QUERY: Final = "_UNIQUE_KEY_QUERY"
UNSIGNED_UNIQUE_KEY_VERSION_MAX: Final = 399
"""Up to V4_9_3 servers leave `_UNIQUE_KEY_QUERY` out of the content."""


def content(
    fields: Mapping[str, str], body: bytes | memoryview = b"", *, version: int | None = None
) -> bytes:
    """What is signed. `version` is the request's, for the server's side of the check."""
    is_old = version is not None and version <= UNSIGNED_UNIQUE_KEY_VERSION_MAX
    names = signed_names(tuple(fields), is_old)
    return "".join([fields[name] for name in names]).encode("utf-8", "replace") + bytes(body)


@lru_cache(maxsize=1024)
def signed_names(names: tuple[str, ...], is_old: bool = False) -> tuple[str, ...]:
    """Names of fields in the order in which their values are signed. Cached: the requests of a kind
    have the same fields."""
    skipped = (SIGNATURE, UNIQUE_KEY_QUERY) if is_old else (SIGNATURE,)
    signed = (name for name in names if name not in skipped)
    return tuple(sorted(signed, key=lambda name: name.encode("utf-16-be", "surrogatepass")))


class Key:
    """A secret, ready to sign: HMAC-SHA1 whose first blocks are done, which halves its time."""

    __slots__ = ("begin", "finish")

    def __init__(self, secret_key: str) -> None:
        """Raises ConfigurationError for an empty secret, as Java cannot sign with one."""
        if not secret_key:
            raise ConfigurationError("The secret key is empty.", fix="Set a secret key.")
        key = secret_key.encode("utf-8", "replace")
        if len(key) > _BLOCK_BYTES:
            key = hashlib.sha1(key).digest()
        key = key.ljust(_BLOCK_BYTES, b"\0")
        self.begin = hashlib.sha1(key.translate(_INNER)).copy
        self.finish = hashlib.sha1(key.translate(_OUTER)).copy

    def signature(self, data: bytes) -> bytes:
        """Base64 of the HMAC. HOT."""
        inner, outer = self.begin(), self.finish()
        inner.update(data)
        outer.update(inner.digest())
        return binascii.b2a_base64(outer.digest(), newline=False)


_BLOCK_BYTES: Final = 64
_INNER: Final = bytes(byte ^ 0x36 for byte in range(256))
_OUTER: Final = bytes(byte ^ 0x5C for byte in range(256))
_key_of = lru_cache(maxsize=256)(Key)


def sign(
    fields: Mapping[str, str],
    body: bytes | memoryview,
    secret_key: str,
    *,
    version: int | None = None,
) -> str:
    """Base64 of HMAC-SHA1. Raises ConfigurationError for an empty secret, as Java cannot sign."""
    return _key_of(secret_key).signature(content(fields, body, version=version)).decode()


def sign_command(
    command: Command, access_key: str, secret_key: str, security_token: str | None = None
) -> None:
    """Put AccessKey, SecurityToken and Signature into the command's fields."""
    fields = dict(command.fields or {})
    fields[ACCESS_KEY] = access_key
    if security_token is not None:
        fields[SECURITY_TOKEN] = security_token
    fields[SIGNATURE] = sign(fields, command.body, secret_key)
    command.fields = fields


CALL_SCHEME: Final = "MQv2-HMAC-SHA1"


def call_date(time_ms: int) -> str:
    """Return the date of a gRPC call as it is signed, in UTC: `20261128T094500Z`."""
    return f"{datetime.fromtimestamp(time_ms / 1000, UTC):%Y%m%dT%H%M%SZ}"


@lru_cache(maxsize=64)
def call_date_ms(text: str) -> int | None:
    """Return the time of a signed date; None if it is none.

    It is `20261128T094500Z`, or a date of RFC 3339, which is what the client for Rust signs.
    Several clients write their local time and end it in Z. Cached: the calls of a second have one
    date.
    """
    if len(text) > DATE_LENGTH_MAX:
        return None
    try:
        if _COMPACT.fullmatch(text):
            text = f"{text[:4]}-{text[4:6]}-{text[6:11]}:{text[11:13]}:{text[13:]}"
        found = datetime.fromisoformat(text)
    except ValueError:
        return None
    return None if found.tzinfo is None else round(found.timestamp() * 1000)


DATE_LENGTH_MAX: Final = 64
_COMPACT: Final = re.compile(r"[0-9]{8}T[0-9]{6}Z")


def sign_call(access_key: str, secret_key: str, date_time: str) -> tuple[tuple[str, str], ...]:
    """The metadata of a gRPC call: the time as a text, which alone is signed (spec/grpc.md §1)."""
    key = secret_key.encode("utf-8", "replace")
    signature = hmac.new(key, date_time.encode("utf-8", "replace"), "sha1").hexdigest()
    return (
        ("x-mq-date-time", date_time),
        (
            "authorization",
            f"{CALL_SCHEME} Credential={access_key}, SignedHeaders=x-mq-date-time, "
            f"Signature={signature}",
        ),
    )
