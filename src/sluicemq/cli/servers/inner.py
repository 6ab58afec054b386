"""The account by which the servers of one `sluice up` know each other.

With `aclEnable=true` the name server of `sluice up` takes no request without a signature, not even
from its own brokers, proxy and console. So each run makes an account with a random secret, which
all its servers accept beside those of plain_acl.yml. It stands in no file and in no command line:
processes below this one get it in their environment, and take it out at once.

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
class Inner:
    """The account of one run, and where the rules are that its servers share."""

    account: InnerAccount = field(repr=False)
    rules_path: str = ""
    is_compatible: bool = False

    @classmethod
    def made(cls, config: BrokerConfig) -> "Inner | None":
        """Return a new account for the servers of a run; None without access control."""
        if not config.acl_enable:
            return None
        access_key = f"sluice-inner-{secrets.token_hex(_KEY_BYTES)}"
        path = next((path for path in config.acl_files if os.path.exists(path)), "")  # noqa: PTH110
        account = InnerAccount(access_key, secrets.token_urlsafe(_SECRET_BYTES))
        return cls(account, path, config.acl_compatible)

    @classmethod
    def taken(cls) -> "Inner | None":
        """Return the account that the parent process handed down, and take it out of the
        environment; None for a process that nobody started so. Raises ConfigurationError."""
        text = os.environ.pop(VARIABLE, "")
        if not text:
            return None
        try:
            found = json.loads(text)
            account = InnerAccount(str(found["accessKey"]), str(found["secretKey"]))
            return cls(account, str(found["plainAclFile"]), bool(found["isCompatible"]))
        except (ValueError, TypeError, KeyError):
            raise ConfigurationError(
                f"the environment variable {VARIABLE} does not hold an account.",
                cure="Remove it: `sluice up` sets it for the processes that it starts.",
            ) from None

    def accepted(self, config: C) -> C:
        """Return `config` of a server that accepts the account, and signs with it where it signs
        with nothing else."""
        return replace(config, inner_account=self.account)

    @property
    def environment(self) -> dict[str, str]:
        """Variables for a broker."""
        values = {
            "accessKey": self.account.access_key,
            "secretKey": self.account.secret_key,
            "plainAclFile": self.rules_path,
            "isCompatible": self.is_compatible,
        }
        return {VARIABLE: json.dumps(values)}

    @property
    def proxy_environment(self) -> dict[str, str]:
        """Variables for a proxy, which is a server by the same rules and a client of brokers."""
        return self.environment | self.client_environment

    @property
    def client_environment(self) -> dict[str, str]:
        """Variables for a process that is a client of the cluster: the console."""
        return {
            "SLUICE_ACCESS_KEY": self.account.access_key,
            "SLUICE_SECRET_KEY": self.account.secret_key,
        }

    @property
    def overrides(self) -> Mapping[str, str]:
        """The settings of a proxy that checks its clients by the same rules."""
        return {
            "aclEnable": "true",
            "plainAclFile": self.rules_path,
            "sluiceAclCompatible": str(self.is_compatible).lower(),
        }
