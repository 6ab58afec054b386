"""Check what users name: topics, groups, tags, properties, name servers; and sign requests.

The limits of names are the broker's (spec/remoting.md §9): 127 characters for a topic, 120 for a
group, of a small alphabet. For tags, RocketMQ's advice is a rule here, because a tag that contains
`|` can never be subscribed to.

`Credentials` are the access key and the secret key that sign a user's requests (spec/remoting.md
§20). The secret key never appears in a text that could be displayed.
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
"""The maximum number of characters in a tag."""
_NAME = re.compile(r"[%|a-zA-Z0-9_-]+")


def check_number(
    number_name: str, number: object, low: float, high: float | None = None, *, whole: bool = True
) -> None:
    """Raise ConfigurationError unless `number` is from `low` to `high`, both inclusive.

    `high` None means no upper limit. The number must be an int if `whole` is True, else an int or
    float; a bool is neither. `number_name` names the value in the error.
    """
    number_types = int if whole else int | float
    if isinstance(number, number_types) and not isinstance(number, bool):
        is_too_high = high is not None and number > high
        if low <= number and not is_too_high:  # False for NaN
            return
    number_kind = "a whole number" if whole else "a number"
    range_end = "or more" if high is None else f"to {high:,}"
    raise ConfigurationError(
        f"{number_name} cannot be {number!r:.60}.",
        fix=f"Use {number_kind}, {low:,} {range_end}.",
    )


def check_queue(queue: object) -> None:
    """Raise ConfigurationError unless `queue` is a MessageQueue."""
    if not isinstance(queue, MessageQueue):
        raise ConfigurationError(
            f"the queue must be a MessageQueue, got {queue!r:.60}.",
            fix="Use one of the queues that `queues(topic)` returns.",
        )


def check_topic(name: str) -> str:
    """Return the name of a topic unchanged. Raises ConfigurationError if it is not valid.

    Retry and dead-letter topics may have longer names, because they contain a group's name.
    """
    contains_group = isinstance(name, str) and is_group_topic(name)
    length_max = RETRY_TOPIC_LENGTH_MAX if contains_group else TOPIC_LENGTH_MAX
    return _check_name("topic", name, length_max)


def check_topic_to_send(name: str) -> str:
    """Return `name` if messages may be sent to this topic, else raise ConfigurationError.

    The name must be valid, and not one of the topics that only brokers write.
    """
    if isinstance(name, str) and is_send_forbidden_topic(name):
        raise ConfigurationError(
            f"the topic {name!r} is reserved for the broker.", fix="Send to another topic."
        )
    return check_topic(name)


def check_group(name: str) -> str:
    """Return the name of a group unchanged. Raises ConfigurationError if it is not valid."""
    return _check_name("group", name, GROUP_LENGTH_MAX)


def _check_name(name_kind: str, name: str, length_max: int) -> str:
    """Return `name` if it is valid, else raise ConfigurationError.

    A valid name is a string of 1 to `length_max` characters: ASCII letters, digits and % | - _.
    `name_kind`, "topic" or "group", is used in errors.
    """
    if not isinstance(name, str):
        raise ConfigurationError(
            f"the {name_kind} must be a string, got {name!r:.60}.",
            fix=f"Pass the {name_kind}'s name.",
        )
    if not name:
        raise ConfigurationError(
            f"the {name_kind} name is empty.", fix=f"Pass the name of the {name_kind}."
        )
    if len(name) > length_max:
        raise ConfigurationError(
            f"the {name_kind} name {name!r} has {len(name)} characters, the limit is {length_max}.",
            fix="Choose a shorter name.",
        )
    if not _NAME.fullmatch(name):
        forbidden = next(character for character in name if not _NAME.fullmatch(character))
        shown = "a space" if forbidden == " " else repr(forbidden)
        raise ConfigurationError(
            f"the {name_kind} name {name!r} contains {shown}.",
            fix="Use only ASCII letters, digits and the characters % | - and _.",
        )
    return name


def check_tag(tag: str) -> str:
    """Return `tag` if it is valid, else raise ConfigurationError.

    A valid tag has 1 to 128 printable characters. It does not contain `|`, does not begin or end
    with a space, and is not "*".
    """
    if not isinstance(tag, str):
        raise ConfigurationError(
            f"the tag must be a string, got {tag!r:.60}.", fix="Pass one tag, for example 'TagA'."
        )
    if not tag:
        raise ConfigurationError(
            "the tag is empty.", fix="Pass a tag of at least one character, or no tag."
        )
    if len(tag) > TAG_LENGTH_MAX:
        raise ConfigurationError(
            f"the tag {tag[:20]!r}… has {len(tag)} characters, the limit is {TAG_LENGTH_MAX}.",
            fix="Choose a shorter tag, or use a property and an SQL92 filter.",
        )
    if "|" in tag:
        raise ConfigurationError(
            f"the tag {tag!r} contains '|', which separates tags in a subscription.",
            fix="Use one tag for each message, or a property and an SQL92 filter.",
        )
    if tag == "*":
        raise ConfigurationError(
            "the tag '*' means every tag in a subscription.", fix="Choose another tag."
        )
    if not tag.isprintable() or tag.strip() != tag:
        raise ConfigurationError(
            f"the tag {tag!r} contains an unprintable character, or begins or ends with a space.",
            fix="Use printable characters only.",
        )
    return tag


def check_keys(keys: tuple[str, ...]) -> tuple[str, ...]:
    """Return `keys` if each is valid, else raise ConfigurationError.

    A valid key is a string that is not empty and has no white space, because keys are sent in one
    text, separated by spaces.
    """
    for key in keys:
        if not isinstance(key, str):
            raise ConfigurationError(
                f"a key must be a string, got {key!r:.60}.", fix="Convert it with str(key)."
            )
        if not key or any(character.isspace() or character in "\x01\x02" for character in key):
            raise ConfigurationError(
                f"the key {key!r} is empty or contains white space.",
                fix="Replace white space by another character: keys are joined by spaces.",
            )
    return keys


def check_properties(properties: Mapping[str, str], allowed: Collection[str] = frozenset()) -> None:
    """Raise ConfigurationError if a property is not valid; the error names the property.

    Names and values must be strings without U+0001 and U+0002, and names must not be empty. A name
    that RocketMQ uses itself is refused unless it is in `allowed`.
    """
    if not isinstance(properties, Mapping):
        raise ConfigurationError(
            f"the properties must be a dict of strings, got {properties!r:.60}.",
            fix="Pass a dict such as {'price': '3'}.",
        )
    for name, property_value in properties.items():
        if not isinstance(name, str) or not isinstance(property_value, str):
            raise _property_type_error(name, property_value)
        if is_refused_property(name) and name not in allowed:
            raise ConfigurationError(
                f"the property name {name!r} is reserved.",
                fix="Choose another name; to set the tag, the keys or the sharding key, use tag=, "
                "keys= or sharding_key=.",
            )
        if (
            not name
            or "\x01" in name
            or "\x02" in name
            or "\x01" in property_value
            or "\x02" in property_value
        ):
            raise ConfigurationError(
                f"the property {name!r} has an empty name or contains U+0001 or U+0002, which "
                "separate properties on the wire.",
                fix="Remove those characters, and give every property a name.",
            )


def _property_type_error(name: object, property_value: object) -> ConfigurationError:
    """Return the error for a property whose name or value is not a string."""
    wrong_object = name
    place_of_object = "as a name"
    if isinstance(name, str):
        wrong_object = property_value
        place_of_object = f"for {name!r:.60}"
    return ConfigurationError(
        f"property names and values must be strings, got {wrong_object!r:.60} "
        f"({type(wrong_object).__name__}) {place_of_object}.",
        fix="Convert it with str().",
    )


def parse_name_servers(text: str | list[str] | tuple[str, ...]) -> tuple[str, ...]:
    """Return the addresses of name servers in `text`, each as "host:port", without duplicates.

    `text` is a string in which `;`, `,` or white space separates the addresses, or a list of
    addresses. An address without a port gets port 9876. A prefix "http://" or "rocketmq://" is
    removed. Raises ConfigurationError if there is no address, and if one has no host or an invalid
    port.
    """
    has_right_type = isinstance(text, str | list | tuple)
    if not has_right_type or not all(isinstance(element, str) for element in text):
        raise ConfigurationError(
            f"the name servers must be a string or a list of strings, got {text!r:.60}.",
            fix="Pass 'host:port', or a list of such addresses.",
        )
    listed = re.split(r"[;,\s]+", text) if isinstance(text, str) else text
    addresses = [_parse_address(address) for address in listed if address]
    if not addresses:
        raise ConfigurationError(
            "the list of name servers is empty.",
            fix="Write host:port, for example localhost:9876.",
        )
    return tuple(dict.fromkeys(addresses))  # a dict keeps the order and drops duplicates


def _parse_address(address: str) -> str:
    """Return the address of a name server as "host:port"; the default port is 9876.

    Raises ConfigurationError without a host, or for a port that is not 1 to 65535.
    """
    host, port = _split_host_port(address)
    is_port_valid = not port or natural(port, 65_535)
    if not host or not is_port_valid:
        rule = "the port must be a number from 1 to 65535" if host else "it has no host"
        raise ConfigurationError(
            f"{address!r} is not a valid name server address: {rule}.",
            fix="Write host:port, for example localhost:9876.",
        )
    return f"{host}:{port or NAME_SERVER_PORT}"


def _split_host_port(address: str) -> tuple[str, str]:
    """Split an address into (host, port), each "" if it is missing, without checking them.

    "http://a:1/" becomes ("a", "1"), and "[::1]:9876" becomes ("[::1]", "9876").
    """
    bare = address.removeprefix("http://").removeprefix("rocketmq://").rstrip("/")
    if not bare.startswith("["):
        host, _, port = bare.partition(":")
        return host, port
    if "]:" in bare:
        host, _, port = bare.rpartition("]:")
        return f"{host}]", port
    return f"{bare[:-1]}]", ""  # the brackets remain


@with_hints
@dataclass(frozen=True, slots=True)
class Credentials:
    """The access keys of a client. `security_token` belongs to temporary keys."""

    access_key: str
    secret_key: str = field(repr=False)
    security_token: str | None = field(default=None, repr=False)

    @staticmethod
    def from_value(value: "Credentials | tuple[str, str] | None") -> "Credentials | None":
        """Return `value` as Credentials; None stays None.

        `value` may be Credentials or a pair (access key, secret key). Raises ConfigurationError for
        any other value.
        """
        if value is None or isinstance(value, Credentials):
            return value
        is_pair = isinstance(value, tuple | list) and len(value) == 2
        if not is_pair or not all(value):
            raise ConfigurationError(
                f"credentials must be a pair of strings, {_describe_credentials_fault(value)}.",
                fix="Pass both: (access_key, secret_key).",
            )
        return Credentials(*value)


def _describe_credentials_fault(wrong_credentials: object) -> str:
    """Return what is wrong with credentials that are not a pair of keys.

    The text does not contain the keys, because it goes into an error.
    """
    if not isinstance(wrong_credentials, tuple | list):
        return f"got {type(wrong_credentials).__name__}"
    if len(wrong_credentials) > 2:
        return f"got {len(wrong_credentials)} values"
    has_access_key = bool(wrong_credentials and wrong_credentials[0])
    missing_key = "secret_key" if has_access_key else "access_key"
    return f"but {missing_key} is missing"


def sign_request(command: Command, credentials: Credentials | None) -> Command:
    """Sign `command` with `credentials` unless they are None, and return it."""
    if credentials is not None:
        sign_command(
            command,
            credentials.access_key,
            credentials.secret_key,
            credentials.security_token,
        )
    return command
