"""The accounts of the console, in one file that only its owner can read.

A secret is stored as its scrypt hash with a salt of its own. The file is read again when it has
changed. So the removal of an account, or another role, takes effect with the next request.
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
"""The addresses that only this machine can reach."""
NAME_LENGTH_MAX: Final = 128
"""The longest name of an account, in characters. Longer names are neither checked nor logged."""
_COST: Final = {"n": 2**15, "r": 8, "p": 1}
_MEMORY_MAX: Final = 64 << 20
_DUMMY_SALT: Final = "0" * 32
"""The salt for names without an account."""


class Role(IntEnum):
    """What an account may do. A role includes what the lower ones may do."""

    READ = 1
    OPERATE = 2
    ADMIN = 3

    @classmethod
    def parse(cls, name: str) -> "Role":
        """Return the role with this name, in upper or lower case.

        Raises ConfigurationError if there is none.
        """
        try:
            return cls[name.upper()]
        except KeyError:
            names = ", ".join(role.name.lower() for role in cls)
            raise ConfigurationError(f"There is no role {name!r}.", fix=f"Use {names}.") from None


@dataclass(frozen=True, slots=True)
class Account:
    """An account of the console. The salt and the hash of its secret are hexadecimal."""

    name: str
    role: Role
    salt: str
    hash: str


class Accounts:
    """The accounts in the file at `path`. If the file does not exist, there are none."""

    def __init__(self, path: str, files: Files = SYSTEM_FILES) -> None:
        """Use the file at `path`, which is read when accounts are needed.

        `files` reads and writes it.
        """
        self.path = path
        self._files = files
        self._read_ms = -1  # the modification time of the file when it was read
        self._accounts: dict[str, Account] = {}

    def load(self) -> dict[str, Account]:
        """Return name -> account; {} if the file does not exist.

        The file is read again only if its modification time has changed. Raises ConfigurationError
        if the file is invalid.
        """
        if not self._files.exists(self.path):
            return {}
        modified_ms = self._files.modified_ms(self.path)
        if modified_ms != self._read_ms:
            try:
                self._accounts = self._read_file()
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ConfigurationError(
                    f"{self.path} is not a valid file of accounts: {error!r}.",
                    fix="Remove it and create the accounts again with `sluice console account"
                    " add`.",
                ) from error
            self._read_ms = modified_ms
        return self._accounts

    def _read_file(self) -> dict[str, Account]:
        """Return name -> account from the file, which is JSON.

        An account is {"role": "read", "salt": hexadecimal, "hash": hexadecimal}. Raises ValueError,
        KeyError, TypeError or AttributeError if the file has another format.
        """
        entries: dict[str, dict[str, Any]] = orjson.loads(read_text(self._files, self.path) or "{}")
        accounts = {}
        for name, entry in entries.items():
            role = Role.parse(entry["role"])
            accounts[name] = Account(name, role, entry["salt"], entry["hash"])
        return accounts

    def add(self, name: str, secret: str, role: Role) -> None:
        """Add an account to the file, or replace the account with this name.

        Raises ConfigurationError if the name is empty, too long or has unprintable characters or
        spaces at its ends, and if the secret has fewer than SECRET_LENGTH_MIN characters.
        """
        if not name or not name.isprintable() or name != name.strip():
            raise ConfigurationError(f"The account name {name!r} is invalid.", fix="Use one word.")
        if len(name) > NAME_LENGTH_MAX:
            raise ConfigurationError(
                f"The name has {len(name)} characters, the limit is {NAME_LENGTH_MAX}.",
                fix="Use a shorter name.",
            )
        if len(secret) < SECRET_LENGTH_MIN:
            raise ConfigurationError(
                f"The secret has {len(secret)} characters.",
                fix=f"Use {SECRET_LENGTH_MIN} or more.",
            )
        salt = secrets.token_hex(16)
        self._write(self.load() | {name: Account(name, role, salt, _hash(secret, salt))})

    def remove(self, name: str) -> None:
        """Remove an account. Raises ConfigurationError if it does not exist."""
        remaining_accounts = dict(self.load())
        if remaining_accounts.pop(name, None) is None:
            raise ConfigurationError(
                f"There is no account {name!r}.",
                fix=f"The accounts are: {', '.join(remaining_accounts) or 'none'}.",
            )
        self._write(remaining_accounts)

    def _write(self, accounts: dict[str, Account]) -> None:
        """Replace the file by these accounts; the next `load` reads it again.

        The file is JSON: name -> {"role": "read", "salt": hexadecimal, "hash": hexadecimal}.
        """
        entries = {}
        for account in accounts.values():
            role_name = account.role.name.lower()
            entries[account.name] = {"role": role_name, "salt": account.salt, "hash": account.hash}
        layout = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
        overwrite_text(self._files, self.path, orjson.dumps(entries, option=layout).decode())
        self._read_ms = -1

    def authenticate(self, name: str, secret: str) -> Account | None:
        """Return the account with this name if `secret` is its secret, else None.

        The call takes about a tenth of a second, also for an unknown name. So the time does not
        reveal which names exist.
        """
        account = self.load().get(name)
        if account is None:
            _hash(secret, _DUMMY_SALT)  # takes as long as for an account
            return None
        is_correct = hmac.compare_digest(_hash(secret, account.salt), account.hash)
        return account if is_correct else None


def _hash(secret: str, salt: str) -> str:
    """Return the scrypt hash of a secret. Salt and hash are hexadecimal."""
    return hashlib.scrypt(
        secret.encode(), salt=bytes.fromhex(salt), maxmem=_MEMORY_MAX, **_COST
    ).hex()


def require_accounts(accounts: Accounts, host: str, server: str) -> None:
    """Raise ConfigurationError if there are no accounts and other machines can reach `host`.

    `server` is the name of the server for the text of the error.
    """
    if host not in LOOPBACKS and not accounts.load():
        raise ConfigurationError(
            f"{server} would listen at {host} without accounts.",
            fix="Add one with `sluice console account add`, or listen at 127.0.0.1.",
        )
