"""Who may sign in: accounts of the console, in one file that only its owner reads.

A secret is kept as its scrypt hash with a salt of its own. The file is read again when it has
changed, so that an account that is removed, or has another role, counts at the next request.
"""

import hashlib
import hmac
import secrets
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

import orjson

from sluicemq.errors import ConfigurationError
from sluicemq.files import SYSTEM_FILES, Files, overwrite_text, read_text

SECRET_LENGTH_MIN: Final = 12
LOOPBACKS: Final = frozenset({"127.0.0.1", "::1", "localhost"})
NAME_LENGTH_MAX: Final = 128
"""No account has a longer name: it needs neither be checked nor noted."""
_COST: Final = {"n": 2**15, "r": 8, "p": 1}
_MEMORY_MAX: Final = 64 << 20
_NOBODY: Final = "0" * 32


class Role(IntEnum):
    """What somebody may do; each may do what those below it may."""

    READ = 1
    OPERATE = 2
    ADMIN = 3

    @classmethod
    def of(cls, name: str) -> "Role":
        """Raises ConfigurationError for another word."""
        try:
            return cls[name.upper()]
        except KeyError:
            names = ", ".join(role.name.lower() for role in cls)
            raise ConfigurationError(f"there is no role {name!r}.", fix=f"Use {names}.") from None


@dataclass(frozen=True, slots=True)
class Account:
    """Salt and hash are hexadecimal."""

    name: str
    role: Role
    salt: str
    hash: str


class Accounts:
    """The file at `path`; none there means no accounts."""

    def __init__(self, path: str, files: Files = SYSTEM_FILES) -> None:
        self.path, self._files = path, files
        self._read_ms = -1
        self._known: dict[str, Account] = {}

    def all(self) -> dict[str, Account]:
        """By name. Raises ConfigurationError for a file that is none of accounts."""
        if not self._files.exists(self.path):
            return {}
        modified_ms = self._files.modified_ms(self.path)
        if modified_ms != self._read_ms:
            try:
                told: dict[str, dict[str, Any]] = orjson.loads(
                    read_text(self._files, self.path) or "{}"
                )
                self._known = {
                    name: Account(name, Role.of(own["role"]), own["salt"], own["hash"])
                    for name, own in told.items()
                }
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ConfigurationError(
                    f"{self.path} is no file of accounts: {error!r}.",
                    fix="Make it again with `sluice console account add`.",
                ) from error
            self._read_ms = modified_ms
        return self._known

    def add(self, name: str, secret: str, role: Role) -> None:
        """Adds an account, or changes one. Raises ConfigurationError."""
        if not name or not name.isprintable() or name != name.strip():
            raise ConfigurationError(f"{name!r} is no name of an account.", fix="Use one word.")
        if len(name) > NAME_LENGTH_MAX:
            raise ConfigurationError(
                f"the name has {len(name)} characters.",
                fix=f"It may have {NAME_LENGTH_MAX} at most.",
            )
        if len(secret) < SECRET_LENGTH_MIN:
            raise ConfigurationError(
                f"the secret has {len(secret)} characters.",
                fix=f"It needs {SECRET_LENGTH_MIN} or more.",
            )
        salt = secrets.token_hex(16)
        self._write(self.all() | {name: Account(name, role, salt, _hash(secret, salt))})

    def remove(self, name: str) -> None:
        """Raises ConfigurationError when it is not there."""
        known = dict(self.all())
        if known.pop(name, None) is None:
            raise ConfigurationError(
                f"there is no account {name!r}.", fix=f"There are: {', '.join(known) or 'none'}."
            )
        self._write(known)

    def _write(self, accounts: dict[str, Account]) -> None:
        told = {
            one.name: {"role": one.role.name.lower(), "salt": one.salt, "hash": one.hash}
            for one in accounts.values()
        }
        text = orjson.dumps(told, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE).decode()
        overwrite_text(self._files, self.path, text)
        self._read_ms = -1

    def check(self, name: str, secret: str) -> Account | None:
        """The account, if that is its secret. Takes a tenth of a second, for nobody as well."""
        account = self.all().get(name)
        made = _hash(secret, account.salt if account else _NOBODY)
        is_right = hmac.compare_digest(made, account.hash if account else "")
        return account if is_right else None


def _hash(secret: str, salt: str) -> str:
    return hashlib.scrypt(
        secret.encode(), salt=bytes.fromhex(salt), maxmem=_MEMORY_MAX, **_COST
    ).hex()


def check_listening(accounts: Accounts, host: str, what: str) -> None:
    """Raises ConfigurationError for an address that everybody reaches when there is no account."""
    if host not in LOOPBACKS and not accounts.all():
        raise ConfigurationError(
            f"{what} would listen at {host} without accounts.",
            fix="Add one with `sluice console account add`, or listen at 127.0.0.1.",
        )
