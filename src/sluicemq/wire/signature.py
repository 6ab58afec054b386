"""Signatures of requests for access control, ACL 1.0 and 2.0 (spec/remoting.md §20).

The signed content of a remoting request consists of the values of all fields, without separators,
followed by the body. The values are ordered by the names of their fields in Java's string order
(UTF-16 code units). AccessKey and SecurityToken are among the fields, Signature is not. A gRPC call
signs only its date.
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
"""The last version, V4_9_3, whose signed content does not contain `_UNIQUE_KEY_QUERY`."""


def signed_content(
    fields: Mapping[str, str], body: bytes | memoryview = b"", *, version: int | None = None
) -> bytes:
    """Return the bytes of a request that are signed.

    A server passes the `version` of the request, because old versions sign fewer fields. None means
    the current version.
    """
    is_old = version is not None and version <= UNSIGNED_UNIQUE_KEY_VERSION_MAX
    names = signed_names(tuple(fields), is_old)
    return "".join([fields[name] for name in names]).encode("utf-8", "replace") + bytes(body)


@lru_cache(maxsize=1024)
def signed_names(names: tuple[str, ...], is_old: bool = False) -> tuple[str, ...]:
    """Return the names of the signed fields in the order in which their values are signed.

    `is_old` selects the rule for versions up to UNSIGNED_UNIQUE_KEY_VERSION_MAX. Results are
    cached, because requests with the same code have the same fields.
    """
    skipped = (SIGNATURE, UNIQUE_KEY_QUERY) if is_old else (SIGNATURE,)
    signed = (name for name in names if name not in skipped)
    return tuple(sorted(signed, key=lambda name: name.encode("utf-16-be", "surrogatepass")))


class SigningKey:
    """A secret key that is prepared for HMAC-SHA1.

    The first block of both hashes, which depends on the key only, is hashed in advance. That halves
    the time to sign. `copy_inner()` and `copy_outer()` return copies of these hashes. Creating a
    key raises ConfigurationError if the secret key is empty, because Java refuses it too.
    """

    __slots__ = ("copy_inner", "copy_outer")

    def __init__(self, secret_key: str) -> None:
        """Prepare the two SHA-1 states of an HMAC for a secret key.

        Raises ConfigurationError if the key is empty.
        """
        if not secret_key:
            raise ConfigurationError("The secret key is empty.", fix="Set a secret key.")
        key = secret_key.encode("utf-8", "replace")
        if len(key) > _BLOCK_BYTES:
            key = hashlib.sha1(key).digest()
        key = key.ljust(_BLOCK_BYTES, b"\0")
        # `_INNER` and `_OUTER` XOR each byte with the constants of HMAC, 0x36 and 0x5C.
        self.copy_inner = hashlib.sha1(key.translate(_INNER)).copy
        self.copy_outer = hashlib.sha1(key.translate(_OUTER)).copy

    def sign(self, content: bytes) -> bytes:
        """Return the HMAC-SHA1 of `content` in base64. This runs for every signed request."""
        inner = self.copy_inner()
        outer = self.copy_outer()
        # HMAC is a hash of a hash: both hashes have begun with the padded key already.
        inner.update(content)
        outer.update(inner.digest())
        return binascii.b2a_base64(outer.digest(), newline=False)


_BLOCK_BYTES: Final = 64
_INNER: Final = bytes(byte ^ 0x36 for byte in range(256))
_OUTER: Final = bytes(byte ^ 0x5C for byte in range(256))
_signing_key = lru_cache(maxsize=256)(SigningKey)


def sign(
    fields: Mapping[str, str],
    body: bytes | memoryview,
    secret_key: str,
    *,
    version: int | None = None,
) -> str:
    """Return the signature of a request: the HMAC-SHA1 of its signed content, in base64.

    `version` is explained at `signed_content`. Raises ConfigurationError if the secret is empty.
    """
    return _signing_key(secret_key).sign(signed_content(fields, body, version=version)).decode()


def sign_command(
    command: Command, access_key: str, secret_key: str, security_token: str | None = None
) -> None:
    """Add AccessKey, SecurityToken and Signature to the fields of a command.

    `command.fields` is replaced by a new dict. A `security_token` of None is not added. The
    signature covers all fields and the body, so neither may change afterwards. Raises
    ConfigurationError if the secret key is empty.
    """
    fields = dict(command.fields or {})
    fields[ACCESS_KEY] = access_key
    if security_token is not None:
        fields[SECURITY_TOKEN] = security_token
    fields[SIGNATURE] = sign(fields, command.body, secret_key)
    command.fields = fields


CALL_SCHEME: Final = "MQv2-HMAC-SHA1"
"""The scheme in the `authorization` metadata of a gRPC call."""


def format_call_date(time_ms: int) -> str:
    """Return a time in ms since 1970 as the date of a gRPC call, in UTC: `20261128T094500Z`."""
    return f"{datetime.fromtimestamp(time_ms / 1000, UTC):%Y%m%dT%H%M%SZ}"


@lru_cache(maxsize=64)
def parse_call_date(date_text: str) -> int | None:
    """Return the time of a gRPC call's date in ms since 1970, or None if the text is not a date.

    The date has the form `20261128T094500Z`, or the form of RFC 3339, which the Rust client uses.
    Several clients wrongly send their local time with a Z at the end. It is taken as UTC. Results
    are cached, because all calls in one second have the same date.
    """
    if len(date_text) > DATE_LENGTH_MAX:
        return None
    try:
        if _COMPACT.fullmatch(date_text):
            # 20261128T094500Z becomes 2026-11-28T09:45:00Z.
            date = f"{date_text[:4]}-{date_text[4:6]}-{date_text[6:8]}"
            date_text = f"{date}{date_text[8:11]}:{date_text[11:13]}:{date_text[13:]}"
        date_time = datetime.fromisoformat(date_text)
    except ValueError:
        return None
    return None if date_time.tzinfo is None else round(date_time.timestamp() * 1000)


DATE_LENGTH_MAX: Final = 64
_COMPACT: Final = re.compile(r"[0-9]{8}T[0-9]{6}Z")


def sign_call(access_key: str, secret_key: str, date_time: str) -> tuple[tuple[str, str], ...]:
    """Return the metadata that sign a gRPC call at `date_time` (spec/grpc.md §1).

    The metadata are (name, value) pairs: the date, and the authorization with the signature.
    `date_time` is a text such as `20261128T094500Z`. Only this text is signed, not the call.
    """
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
