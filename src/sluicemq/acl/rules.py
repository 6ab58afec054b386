"""Access rules as frozen values: accounts, their permissions, and white lists of addresses.

The values are frozen so that new rules take effect by one assignment: no request sees half of a
new file.

A group g is the resource `%RETRY%g`, as in RocketMQ: the group and its retry topic have one
permission, and an entry of topicPerms for that name overrides groupPerms. The dead-letter topic of
a group (`%DLQ%g`) is a topic like any other, because its messages come from all topics that the
group consumes. Names match exactly; there are no wildcards.

Address patterns in white lists (spec/acl):

    *                    every address, IPv4 and IPv6
    10.10.103.5          one address, or several separated by commas
    10.10.103.{1,5,9}    a set in the last part
    10.10.*.*            stars in the last parts
    10.10.103.20-30      a range; the parts after it must be stars
    2001:db8::1          IPv6 in any spelling; sets, stars and ranges need all eight parts

RocketMQ ignores the parts after the first star or range (`10.*.1.1` is `10.*.*.*` there) and reads
`::` before a star as one part. `parse_pattern` refuses such patterns, because they match more than
they say, and those that make every later request fail in RocketMQ (`10.0.0.0-0`, `*.168.1.1`).
IPv6 patterns never match in RocketMQ; here they do.

With `sluiceAclCompatible = true`, `parse_pattern_like_rocketmq` reads patterns as RocketMQ does:

    10.*.1.1, 10.1-5.1.2-9              the parts after the first star or range are ignored
    10.0.0.0-0, *.168.1.1, 1.2.3.4.*    each request that is compared with the pattern fails
    2001:db8::*                         2001:db8:0:*:… (:: is one part)
    10.10.103.{}                        matches no address

It refuses what RocketMQ refuses, such as spaces before an address.
"""

import enum
import ipaddress
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from sluicemq.errors import ConfigurationError
from sluicemq.model.system_names import is_revive_topic, stores_other_topics_messages
from sluicemq.model.topic import RETRY_PREFIX

GROUP_PREFIX: Final = RETRY_PREFIX


# --------------------------------------------------------------------------------------- addresses

IPV4_PARTS, IPV6_PARTS = 4, 8
Ranges = tuple[tuple[int, int], ...]
_SET_NOT_LAST: Final = "a set {…} is allowed only in the last part"
ALL_ADDRESSES: Final = ("*", "*.*.*.*", ":".join("*" * IPV6_PARTS))


class AddressPattern(NamedTuple):
    """One entry of a white list: a set of IP addresses."""

    text: str
    """The entry as it is written."""
    alternatives: tuple[tuple[Ranges, ...], ...]
    """Alternatives, of which one must match. Each has the allowed ranges of every part of an
    address. Empty for a pattern that matches every address."""
    is_incomparable: bool = False
    """Whether every comparison fails, as for such patterns in RocketMQ."""

    def matches(self, address: tuple[int, ...]) -> bool:
        """Return whether the pattern contains an address, given as `address_numbers` returns it.

        Raises ConfigurationError if the pattern is incomparable.
        """
        if self.is_incomparable and address:
            raise pattern_error(
                self.text, "no address can be compared with it", "Correct or remove it."
            )
        if not self.alternatives:
            return True
        return any(
            len(parts) == len(address)
            and all(
                any(low <= number <= high for low, high in ranges)
                for number, ranges in zip(address, parts, strict=True)
            )
            for parts in self.alternatives
        )

    @property
    def matches_all(self) -> bool:
        """Whether the pattern matches every address."""
        return not self.alternatives


def address_numbers(host: str, *, unmap: bool = True) -> tuple[int, ...]:
    """Return the 4 or 8 parts of an IP address as numbers; () if `host` is not an IP address.

    With `unmap`, an IPv4 address that is mapped into IPv6 (`::ffff:1.2.3.4`) has the 4 parts of
    IPv4.
    """
    try:
        address = ipaddress.ip_address(host.partition("%")[0].strip("[]"))
    except ValueError:
        return ()
    if unmap and isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    packed = address.packed
    if len(packed) == IPV4_PARTS:
        return tuple(packed)
    return tuple(int.from_bytes(packed[at : at + 2], "big") for at in range(0, len(packed), 2))


def parse_pattern(text: str) -> AddressPattern:
    """Parse an entry of a white list; spaces around it are ignored.

    Raises ConfigurationError if it is invalid, or if RocketMQ would read it as something else.
    """
    text = text.strip()
    if text in ALL_ADDRESSES:
        return AddressPattern(text, ())
    if "{" in text or "}" in text:
        head, brace, rest = text.partition("{")
        if not brace or not rest.endswith("}") or "{" in rest or rest.count("}") != 1:
            raise pattern_error(text, _SET_NOT_LAST, "Write 10.10.103.{1,5,9}.")
        words, base, limit = _split_pattern(head + "0")
        numbers = [_parse_number(word, base, limit, text) for word in words[:-1]]
        ends = [_parse_number(word, base, limit, text) for word in rest[:-1].split(",")]
        return AddressPattern(text, ((*map(_single, numbers), tuple((end, end) for end in ends)),))
    if "," in text:
        return AddressPattern(text, tuple(parse_address(part, text) for part in text.split(",")))
    if "*" in text or "-" in text:
        return AddressPattern(text, (_parse_wild(text),))
    return AddressPattern(text, (parse_address(text, text),))


def parse_address(address: str, whole: str, *, unmap: bool = True) -> tuple[Ranges, ...]:
    """Parse one IP address, which is part of the pattern `whole`, as ranges of one number each.

    `unmap` is that of `address_numbers`. Raises ConfigurationError if it is not an IP address.
    """
    is_odd = "%" in address or "[" in address or address != address.strip()
    numbers = () if is_odd else address_numbers(address, unmap=unmap)
    if not numbers:
        raise pattern_error(
            whole,
            f"{address!r} is not an IP address",
            "Write addresses such as 10.10.103.5 or 2001:db8::1, without port, host name, spaces,"
            " leading zeros or a /mask.",
        )
    return tuple(map(_single, numbers))


def _split_pattern(text: str) -> tuple[list[str], int, int]:
    """Split a pattern into parts. Return (parts, number base, largest number of a part).

    Raises ConfigurationError unless there are 4 parts with dots or 8 parts with colons.
    """
    is_six = ":" in text
    parts = text.split(":") if is_six else text.split(".")
    count = IPV6_PARTS if is_six else IPV4_PARTS
    if len(parts) != count or "" in parts:
        fix = (
            "Write all eight parts of an IPv6 pattern: RocketMQ reads :: before a star as one part."
            if is_six
            else "Write four parts, such as 10.10.103.*."
        )
        raise pattern_error(text, f"it must have {count} parts", fix)
    return parts, 16 if is_six else 10, 0xFFFF if is_six else 0xFF


def _parse_number(part: str, base: int, limit: int, text: str) -> int:
    try:
        value = int(part, base) if part.isascii() and part.isalnum() else -1
    except ValueError:
        value = -1
    if not 0 <= value <= limit or (base == 10 and part != str(value)):
        shown = f"{limit:x}" if base == 16 else str(limit)
        raise pattern_error(
            text, f"{part!r} is not a number from 0 to {shown}", "Write such a number."
        )
    return value


def _single(number: int) -> Ranges:
    return ((number, number),)


def _parse_wild(text: str) -> tuple[Ranges, ...]:
    parts, base, limit = _split_pattern(text)
    found: list[Ranges] = []
    is_open = False
    for index, part in enumerate(parts):
        if part == "*" and index:
            is_open = True
            found.append(((0, limit),))
        elif is_open:
            raise pattern_error(
                text,
                f"{part!r} follows a star or a range, and RocketMQ would ignore it",
                "Write stars in all parts after the first star or range.",
            )
        elif "-" in part:
            is_open = True
            low, _, high = part.partition("-")
            ends = _parse_number(low, base, limit, text), _parse_number(high, base, limit, text)
            if ends[0] > ends[1] or ends == (0, 0):
                fix = "Write the smaller number first, such as 1-9."
                raise pattern_error(text, f"{part!r} is not a valid range", fix)
            found.append((ends,))
        elif part == "*":
            raise pattern_error(text, "it begins with a star", 'Write "*" for every address.')
        else:
            found.append(_single(_parse_number(part, base, limit, text)))
    return tuple(found)


def pattern_error(text: str, why: str, fix: str) -> ConfigurationError:
    """Return the error for the invalid pattern `text`, with the reason `why`."""
    return ConfigurationError(f"The address pattern {text!r} is invalid: {why}.", fix=fix)


# --------------------------------------------------------- as RocketMQ 5 reads them

_GROUP: Final = re.compile(r"[0-9A-Fa-f]{1,4}")
_ROCKETMQ_FIX: Final = "RocketMQ refuses it too."


def parse_pattern_like_rocketmq(text: str) -> AddressPattern | None:
    """Parse an entry of a white list as RocketMQ 5 does.

    Returns None if `text` is empty or only spaces: it matches no address. Raises ConfigurationError
    if RocketMQ refuses the entry.
    """
    if not text.strip():
        return None
    if text in ALL_ADDRESSES:
        return AddressPattern(text, ())
    if text.endswith("}"):
        last = re.split("[:.]" if ":" not in text else ":", text)[-1]
        if not last.startswith("{"):
            raise pattern_error(text, _SET_NOT_LAST, _ROCKETMQ_FIX)
        head = text[: text.index("{")]
        items = [head + item for item in last[1:-1].split(",") if item]
        return _parse_addresses_like_rocketmq(text, items)
    if "," in text:
        return _parse_addresses_like_rocketmq(text, [item for item in text.split(",") if item])
    if "*" in text or "-" in text:
        return (
            _parse_wild_ipv6_like_rocketmq(text)
            if ":" in text
            else _parse_wild_ipv4_like_rocketmq(text)
        )
    return _parse_addresses_like_rocketmq(text, [text])


def _parse_addresses_like_rocketmq(text: str, addresses: list[str]) -> AddressPattern:
    # RocketMQ compares a mapped IPv4 address as IPv6, so it keeps its eight parts.
    parts = tuple(parse_address(address, text, unmap=False) for address in addresses)
    return AddressPattern(text, parts or ((),))


def _parse_wild_ipv4_like_rocketmq(text: str) -> AddressPattern:
    words = [word for word in text.split(".") if word]
    for index in range(1, IPV4_PARTS):
        if index >= len(words):
            raise pattern_error(text, f"it must have {IPV4_PARTS} parts", _ROCKETMQ_FIX)
        found = _parse_range_like_rocketmq(words[index], 10, 0xFF, text)
        if found is None:
            continue
        if len(words) != IPV4_PARTS:
            raise pattern_error(text, f"it must have {IPV4_PARTS} parts", _ROCKETMQ_FIX)
        head = [_parse_number_like_rocketmq(word, 10, 0xFF, text) for word in words[:index]]
        ranges = [_single(number) for number in head]
        if any(word != str(number) for word, number in zip(words, head, strict=False)):
            ranges[0] = ()  # compared as text, and no address is written with leading zeros
        rest: list[Ranges] = [((0, 0xFF),)] * (IPV4_PARTS - 1 - index)
        return AddressPattern(text, ((*ranges, (found,), *rest),))
    return AddressPattern(text, ((),), is_incomparable=True)


def _parse_wild_ipv6_like_rocketmq(text: str) -> AddressPattern:
    star, minus = text.find("*"), text.find("-")
    has_both = star >= 0 and minus >= 0
    words = text.split(":")
    tail = words[-2:] if has_both else words[-1:]
    if (star >= 0 and star != len(text) - 1) or (minus >= 0 and "-" not in tail[0]):
        raise pattern_error(
            text, "a star or a range is allowed only in the last parts", _ROCKETMQ_FIX
        )
    found = next(
        (
            one
            for word in words[1:]
            if word and (one := _parse_range_like_rocketmq(word, 16, 0xFFFF, text))
        ),
        None,
    )
    if found is None:
        return AddressPattern(text, ((),), is_incomparable=True)
    count = IPV6_PARTS - len(tail)
    head = ":".join(words[: -len(tail)])
    left, gap, right = head.partition("::")
    groups = left.split(":")
    if gap:
        after = right.split(":") if right else []
        groups += ["0"] * (count - len(groups) - len(after)) + after
    if len(groups) >= IPV6_PARTS:
        raise pattern_error(text, f"it has more than {IPV6_PARTS} parts", _ROCKETMQ_FIX)
    numbers = [_parse_number_like_rocketmq(group or "0", 16, 0xFFFF, text) for group in groups]
    rest: list[Ranges] = [((0, 0xFFFF),)] * (IPV6_PARTS - 1 - len(numbers))
    return AddressPattern(text, ((*map(_single, numbers), (found,), *rest),))


def _parse_range_like_rocketmq(
    word: str, base: int, limit: int, text: str
) -> tuple[int, int] | None:
    """Return the range of a part that is a star or a range.

    Returns None if RocketMQ does not recognise it as either, as for 0-0.
    """
    if word.strip() == "*":
        return 0, limit
    if "-" not in word:
        return None
    ends = [_parse_number_like_rocketmq(end, base, limit, text) for end in word.split("-")[:2]]
    if ends[0] > ends[1]:
        raise pattern_error(text, f"{word!r} is not a valid range", _ROCKETMQ_FIX)
    return (ends[0], ends[1]) if ends[1] > 0 else None


def _parse_number_like_rocketmq(word: str, base: int, limit: int, text: str) -> int:
    is_number = word.isascii() and word.isdigit() if base == 10 else _GROUP.fullmatch(word)
    if not is_number or not 0 <= int(word, base) <= limit:
        raise pattern_error(text, f"{word!r} is not a number up to {limit}", _ROCKETMQ_FIX)
    return int(word, base)


# ---------------------------------------------------------------------------------------- accounts


class Permission(enum.Flag):
    """What an account may do with a topic or group: send (PUB), consume (SUB), or neither."""

    NOTHING = 0
    PUB = enum.auto()
    SUB = enum.auto()
    ANY = PUB | SUB


_PERMISSIONS: Final = {
    "DENY": Permission.NOTHING,
    "PUB": Permission.PUB,
    "SUB": Permission.SUB,
    "PUB|SUB": Permission.ANY,
    "SUB|PUB": Permission.ANY,
    "ANY": Permission.ANY,
}
PERMISSION_WORDS: Final = {
    Permission.NOTHING: "DENY",
    Permission.PUB: "PUB",
    Permission.SUB: "SUB",
    Permission.ANY: "PUB|SUB",
}


def parse_permission(word: str) -> Permission:
    """Parse a permission: DENY, PUB, SUB, PUB|SUB or ANY; spaces around it are ignored.

    Raises ConfigurationError for any other word, which RocketMQ silently reads as DENY.
    """
    found = _PERMISSIONS.get(word.strip())
    if found is None:
        raise ConfigurationError(
            f"{word!r} is not a permission.",
            fix="Write DENY, PUB, SUB, PUB|SUB or ANY (PUB or SUB), in capitals, without spaces.",
        )
    return found


ACCOUNT_FIELDS: Final = (
    "accessKey",
    "secretKey",
    "whiteRemoteAddress",
    "admin",
    "defaultTopicPerm",
    "defaultGroupPerm",
    "topicPerms",
    "groupPerms",
)
"""The fields of an account in plain_acl.yml, in RocketMQ's order."""


@dataclass(frozen=True, slots=True)
class Account:
    """An account: one entry of `accounts` in a file of rules.

    `origin` is its file and line. The secret key is not part of its representation.
    """

    access_key: str
    secret_key: str = field(repr=False)
    white_addresses: AddressPattern | None = None
    is_admin: bool = False
    topic_default: Permission = Permission.NOTHING
    group_default: Permission = Permission.NOTHING
    permissions: Mapping[str, Permission] = field(default_factory=dict)
    origin: str = ""

    def permission(self, resource: str) -> tuple[Permission, bool]:
        """Return the permission for a resource, and True if an entry names the resource.

        `resource` is a topic, or `%RETRY%g` for the group g. Without an entry, the default of the
        account applies, except for system topics that hold messages of all topics.
        """
        explicit = self.permissions.get(resource)
        if explicit is not None:
            return explicit, True
        if stores_other_topics_messages(resource) or is_revive_topic(resource):
            return Permission.NOTHING, False
        is_group = resource.startswith(GROUP_PREFIX)
        return (self.group_default if is_group else self.topic_default), False


@dataclass(frozen=True, slots=True)
class Rules:
    """The accounts by access key, and the global white list of addresses."""

    accounts: Mapping[str, Account] = field(default_factory=dict)
    white_addresses: tuple[AddressPattern, ...] = ()

    @staticmethod
    def merge(several: Iterable["Rules"]) -> "Rules":
        """Merge the rules of several files, in order of precedence.

        The white lists are joined. If several files have the same account, the first one applies.
        """
        accounts: dict[str, Account] = {}
        white: list[AddressPattern] = []
        for rules in several:
            white += rules.white_addresses
            for access_key, account in rules.accounts.items():
                accounts.setdefault(access_key, account)
        return Rules(accounts, tuple(white))


# ------------------------------------------------------------------------- warnings about rules

SECRET_LENGTH_MIN: Final = 16
_WEAK: Final = ("12345678", "password", "rocketmq", "87654321", "secret")


class LintFinding(NamedTuple):
    """A valid but risky or useless rule. `place` is a file and line, or a key of the file."""

    place: str
    text: str
    fix: str


def lint(
    several: Iterable[Rules],
    *,
    secret_length_min: int = SECRET_LENGTH_MIN,
    topics: Collection[str] | None = None,
    groups: Collection[str] | None = None,
) -> list[LintFinding]:
    """Return findings about the rules of several files, which are given in order of precedence.

    `topics` and `groups` are the names that exist in a cluster, to find misspelled ones; None skips
    this check.
    """
    found: list[LintFinding] = []
    seen: dict[str, str] = {}
    for rules in several:
        for pattern in rules.white_addresses:
            if pattern.matches_all:
                text = f"{pattern.text!r} allows every client to do everything"
                fix = "List only the addresses of your servers, or none."
                found.append(LintFinding("globalWhiteRemoteAddresses", text, fix))
        for account in rules.accounts.values():
            first = seen.setdefault(account.access_key, account.origin)
            if first != account.origin:
                text = f"account {account.access_key} has no effect: {first} has precedence"
                found.append(LintFinding(account.origin, text, "Remove one of the two."))
                continue
            said = _lint_account(account, secret_length_min, topics, groups)
            found += [LintFinding(account.origin, text, fix) for text, fix in said]
    return found


def _lint_account(
    account: Account,
    secret_length_min: int,
    topics: Collection[str] | None,
    groups: Collection[str] | None,
) -> Iterator[tuple[str, str]]:
    """Yield text and fix of each finding about one account."""
    name, secret = account.access_key, account.secret_key
    if len(secret) < secret_length_min:
        text = f"the secret of {name} has {len(secret)} characters, fewer than {secret_length_min}"
        yield text, "Use a long random one: openssl rand -base64 24."
    elif secret.lower().startswith(_WEAK) or len(set(secret)) < 5 or secret == name:
        text = f"the secret of {name} is easy to guess"
        yield text, "Use a random one: openssl rand -base64 24."
    if account.white_addresses is not None and account.white_addresses.matches_all:
        text = f"whiteRemoteAddress lets every client act as {name} without the secret"
        yield text, "List addresses, or leave it empty."
    if not account.is_admin and account.topic_default and account.group_default:
        text = f"the defaults of {name} give it access to every topic and group"
        yield text, "Set the defaults to DENY and list the topics and groups that it needs."
    if account.is_admin and account.permissions:
        text = f"{name} is an admin: its {len(account.permissions)} permissions have no effect"
        yield text, "Remove them, or admin: true."
    missing = []
    for resource, permission in account.permissions.items():
        is_group = resource.startswith(GROUP_PREFIX)
        name = resource.removeprefix(GROUP_PREFIX)
        shown = f"{'group' if is_group else 'topic'} {name} of {account.access_key}"
        default = account.group_default if is_group else account.topic_default
        if permission == default and not account.is_admin:
            yield f"{shown} repeats the default", "Remove it."
        known = groups if is_group else topics
        if known is not None and name not in known:
            missing.append((f"{shown} does not exist", "Correct the name, or create it."))
    yield from missing
