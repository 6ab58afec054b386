"""Access key and secret of a user, and how a request is signed with them.

The secret is never part of a text that could be shown. Facts: spec/remoting.md §20.
"""

from dataclasses import dataclass, field

from sluicemq.errors import ConfigurationError
from sluicemq.protocol.command import Command
from sluicemq.protocol.signature import sign_command


@dataclass(frozen=True, slots=True)
class Credentials:
    """Who asks. `security_token` is for temporary keys."""

    access_key: str
    secret_key: str = field(repr=False)
    security_token: str | None = field(default=None, repr=False)

    @staticmethod
    def of(value: "Credentials | tuple[str, str] | None") -> "Credentials | None":
        """A pair (access key, secret key) or Credentials. Raises ConfigurationError."""
        if value is None or isinstance(value, Credentials):
            return value
        if len(value) != 2 or not all(value):
            raise ConfigurationError(
                "credentials are not a pair of texts.", cure="Give (access_key, secret_key)."
            )
        return Credentials(*value)


def signed(command: Command, credentials: Credentials | None) -> Command:
    """The same command, its fields signed when there are credentials."""
    if credentials is not None:
        sign_command(
            command,
            credentials.access_key,
            credentials.secret_key,
            credentials.security_token,
        )
    return command
