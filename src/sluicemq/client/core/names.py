"""Rules for what users name: topics, groups, tags, properties, name server addresses.

The limits are the broker's own (spec/remoting.md §9: topic 127, group 120 characters of a small
set); the tag rule is RocketMQ's advice made binding, because a tag with `|` can never be
subscribed.

Access key and secret of a user, and how a request is signed with them.

The secret is never part of a text that could be shown. Facts: spec/remoting.md §20.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

from sluicemq.errors import ConfigurationError
from sluicemq.hints import with_hints
from sluicemq.model.addresses import NAME_SERVER_PORT
from sluicemq.model.properties import is_refused_property
from sluicemq.model.system_names import is_group_topic, is_send_forbidden_topic
from sluicemq.model.topic import (
    GROUP_LENGTH_MAX,
    RETRY_TOPIC_LENGTH_MAX,
    TOPIC_LENGTH_MAX,
    MessageQueue,
)
from sluicemq.numbers import natural
from sluicemq.wire.frames import Command
from sluicemq.wire.signature import sign_command

TAG_LENGTH_MAX: Final = 128
_NAME = re.compile(r"[%|a-zA-Z0-9_-]+")


def check_number(
    what: str, value: object, low: float, high: float | None = None, *, whole: bool = True
) -> None:
    """A number between two, both included. Raises ConfigurationError."""
    is_number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    if not (is_number and low <= value and (high is None or value <= high)):  # type: ignore[operator]
        kind = "a whole number" if whole else "a number"
        most = "or more" if high is None else f"to {high:,}"
        raise ConfigurationError(f"{what} is {value!r:.60}.", fix=f"Use {kind}, {low:,} {most}.")


def check_queue(queue: object) -> None:
    """Raises ConfigurationError for what is none."""
    if not isinstance(queue, MessageQueue):
        raise ConfigurationError(
            f"{queue!r:.60} is no queue.", fix="Give a MessageQueue: one of `queues(topic)`."
        )


def check_topic(name: str) -> str:
    """The name itself. Raises ConfigurationError."""
    is_long = isinstance(name, str) and is_group_topic(name)
    return _check("topic", name, RETRY_TOPIC_LENGTH_MAX if is_long else TOPIC_LENGTH_MAX)


def check_topic_to_send(name: str) -> str:
    """Like `check_topic`, and refuses the topics that brokers keep for themselves."""
    if isinstance(name, str) and is_send_forbidden_topic(name):
        raise ConfigurationError(
            f"the topic {name!r} belongs to the broker itself.", fix="Send to a topic of yours."
        )
    return check_topic(name)


def check_group(name: str) -> str:
    """The name itself. Raises ConfigurationError."""
    return _check("group", name, GROUP_LENGTH_MAX)


def _check(what: str, name: str, limit: int) -> str:
    if not isinstance(name, str):
        raise ConfigurationError(f"the {what} is {name!r:.60}.", fix=f"Give the {what}'s name.")
    if not name:
        raise ConfigurationError(f"the {what} name is empty.", fix=f"Name a {what}.")
    if len(name) > limit:
        raise ConfigurationError(
            f"the {what} name {name!r} has {len(name)} characters, the limit is {limit}.",
            fix="Choose a shorter one.",
        )
    if not _NAME.fullmatch(name):
        wrong = next(character for character in name if not _NAME.fullmatch(character))
        raise ConfigurationError(
            f"the {what} name {name!r} contains {wrong!r}.",
            fix="Allowed are letters, digits and the four characters % | - _ of ASCII.",
        )
    return name


def check_tag(tag: str) -> str:
    """Visible characters, no `|`, at most 128. Raises ConfigurationError."""
    if not isinstance(tag, str):
        raise ConfigurationError(f"the tag is {tag!r:.60}.", fix="A message has one tag, a text.")
    if not tag:
        raise ConfigurationError("the tag is empty.", fix="Leave it out, or name one.")
    if len(tag) > TAG_LENGTH_MAX:
        raise ConfigurationError(
            f"the tag {tag[:20]!r}… has {len(tag)} characters, the limit is {TAG_LENGTH_MAX}.",
            fix="Choose a shorter one, or use a property and an SQL92 filter.",
        )
    if "|" in tag:
        raise ConfigurationError(
            f"the tag {tag!r} contains '|', which separates tags in a subscription.",
            fix="A message has one tag; use a property and an SQL92 filter for more.",
        )
    if tag == "*":
        raise ConfigurationError(
            "the tag '*' means every tag in a subscription.", fix="Choose another one."
        )
    if not tag.isprintable() or tag.strip() != tag:
        raise ConfigurationError(
            f"the tag {tag!r} has an invisible character, or a space at an end.",
            fix="Use visible characters only.",
        )
    return tag


def check_keys(keys: tuple[str, ...]) -> tuple[str, ...]:
    """Keys travel separated by spaces, so none may hold one. Raises ConfigurationError."""
    for key in keys:
        if not isinstance(key, str):
            raise ConfigurationError(f"a key is {key!r:.60}.", fix="Keys are text: str(key).")
        if not key or any(character.isspace() or character in "\x01\x02" for character in key):
            raise ConfigurationError(
                f"the key {key!r} is empty or contains white space.",
                fix="Keys are joined by spaces: replace it by another character.",
            )
    return keys


def check_properties(properties: Mapping[str, str], allowed: Collection[str] = frozenset()) -> None:
    """Check the user's own properties, and reserved ones that are `allowed` here. Raises
    ConfigurationError naming the one at fault."""
    if not isinstance(properties, Mapping):
        raise ConfigurationError(
            f"the properties are {properties!r:.60}.", fix="Give a dict of texts: {'price': '3'}."
        )
    for name, value in properties.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise ConfigurationError(
                f"the property {name!r} has the value {value!r}.",
                fix="Names and values are text: write str(value).",
            )
        if is_refused_property(name) and name not in allowed:
            raise ConfigurationError(
                f"the property name {name!r} is reserved.",
                fix="Use the argument made for it (tag=, keys=, sharding_key=…), or another name.",
            )
        if not name or "\x01" in name or "\x02" in name or "\x01" in value or "\x02" in value:
            raise ConfigurationError(
                f"the property {name!r} is empty or holds U+0001 or U+0002, which separate "
                "properties on the wire.",
                fix="Leave those characters out.",
            )


def parse_name_servers(text: str | list[str] | tuple[str, ...]) -> tuple[str, ...]:
    """`a:9876;b:9876` (also `,`, or a list) -> addresses. The port 9876 may be left out.

    Raises ConfigurationError when nothing is left or a port is not a number.
    """
    if not isinstance(text, str | list | tuple) or not all(isinstance(one, str) for one in text):
        raise ConfigurationError(
            f"the name servers are {text!r:.60}.", fix="Write 'host:port', or a list of these."
        )
    addresses: dict[str, None] = {}
    for part in filter(None, re.split(r"[;,\s]+", text) if isinstance(text, str) else text):
        bare = part.removeprefix("http://").removeprefix("rocketmq://").rstrip("/")
        if bare.startswith("["):
            host, _, port = bare.rpartition("]:") if "]:" in bare else (bare[:-1], "", "")
            host = f"{host}]"
        else:
            host, _, port = bare.partition(":")
        if not host or (port and not natural(port, 65_535)):
            raise ConfigurationError(
                f"{part!r} is not an address.", fix="Write host:port, for example 127.0.0.1:9876."
            )
        addresses[f"{host}:{port or NAME_SERVER_PORT}"] = None
    if not addresses:
        raise ConfigurationError(
            "no name server is given.", fix="Write host:port, for example 127.0.0.1:9876."
        )
    return tuple(addresses)


@with_hints
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
        if not isinstance(value, tuple | list) or len(value) != 2 or not all(value):
            raise ConfigurationError(
                "credentials are not a pair of texts.", fix="Give (access_key, secret_key)."
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
