"""The account with which the servers of one `sluice up` authenticate to each other.

With `aclEnable=true` the name server of `sluice up` takes no request without a signature, not even
from its own brokers, proxy and console. So each run makes an account with a random secret, which
all its servers accept in addition to those of plain_acl.yml. The secret is in no file and on no
command line: child processes get it in an environment variable, which they remove at once.

    SLUICE_INNER_ACCOUNT    {"accessKey": "…", "secretKey": "…", "plainAclFile": "…", …}
"""

import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar

from sluicemq.config import BrokerConfig
from sluicemq.config.keys import InnerAccount, ServerConfig
from sluicemq.errors import ConfigurationError

VARIABLE: Final = "SLUICE_INNER_ACCOUNT"
_SECRET_BYTES: Final = 32
_KEY_BYTES: Final = 8

C = TypeVar("C", bound=ServerConfig)


@dataclass(frozen=True, slots=True)
class RunAccount:
    """The account of one run, and the access rules that its servers share.

    `rules_path` is the path of plain_acl.yml, or "" if there is none. `is_compatible` is the
    setting sluiceAclCompatible.
    """

    account: InnerAccount = field(repr=False)
    rules_path: str = ""
    is_compatible: bool = False

    @classmethod
    def create(cls, config: BrokerConfig) -> "RunAccount | None":
        """Make an account with random keys, with which the servers of one run sign their requests.

        Returns None if `config` has no access control.
        """
        if not config.acl_enable:
            return None
        access_key = f"sluice-inner-{secrets.token_hex(_KEY_BYTES)}"
        account = InnerAccount(access_key, secrets.token_urlsafe(_SECRET_BYTES))
        existing_files = filter(os.path.exists, config.acl_files)
        return cls(account, next(existing_files, ""), config.acl_compatible)

    @classmethod
    def from_environment(cls) -> "RunAccount | None":
        """Return the account that the parent process passed, None if it passed none.

        The environment variable is removed. Raises ConfigurationError if it does not contain an
        account.
        """
        account_json = os.environ.pop(VARIABLE, "")
        if not account_json:
            return None
        try:
            fields = json.loads(account_json)
            account = InnerAccount(str(fields["accessKey"]), str(fields["secretKey"]))
            return cls(account, str(fields["plainAclFile"]), bool(fields["isCompatible"]))
        except (ValueError, TypeError, KeyError):
            raise ConfigurationError(
                f"the environment variable {VARIABLE} does not contain an account.",
                fix="Remove it: `sluice up` sets it for the processes that it starts.",
            ) from None

    def add_to(self, config: C) -> C:
        """Return a copy of the configuration of a server that accepts the account.

        If the server has no other credentials, it signs its own requests with the account.
        """
        return replace(config, inner_account=self.account)

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables that pass the account to a broker."""
        values = {
            "accessKey": self.account.access_key,
            "secretKey": self.account.secret_key,
            "plainAclFile": self.rules_path,
            "isCompatible": self.is_compatible,
        }
        return {VARIABLE: json.dumps(values)}

    @property
    def proxy_environment(self) -> dict[str, str]:
        """The environment variables for a proxy, which accepts the account and signs with it."""
        return self.environment | self.client_environment

    @property
    def client_environment(self) -> dict[str, str]:
        """The environment variables for a process that is only a client, such as the console."""
        return {
            "SLUICE_ACCESS_KEY": self.account.access_key,
            "SLUICE_SECRET_KEY": self.account.secret_key,
        }

    @property
    def overrides(self) -> Mapping[str, str]:
        """The settings with which a proxy checks its clients by the same access rules."""
        return {
            "aclEnable": "true",
            "plainAclFile": self.rules_path,
            "sluiceAclCompatible": str(self.is_compatible).lower(),
        }
