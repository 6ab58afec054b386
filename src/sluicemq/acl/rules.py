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

import contextlib
import enum
import ipaddress
import re
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from sluicemq.errors import ConfigurationError
from sluicemq.model.system_names import is_revive_topic, stores_other_topics_messages
from sluicemq.model.topic import RETRY_PREFIX

GROUP_PREFIX: Final = RETRY_PREFIX


# --------------------------------------------------------------------------------------- addresses

IPV4_PARTS = 4
IPV6_PARTS = 8
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
        """Return whether an address, given by its numbers as from `address_numbers`, matches.

        Raises ConfigurationError if RocketMQ cannot compare any address with the pattern.
        """
        if self.is_incomparable and address:
            raise pattern_error(
                self.text, "no address can be compared with it", "Correct or remove it."
            )
        if not self.alternatives:
            return True
        return any(_is_in_ranges(address, parts) for parts in self.alternatives)

    @property
    def matches_all(self) -> bool:
        """Whether the pattern matches every address."""
        return not self.alternatives


def _is_in_ranges(address: tuple[int, ...], ranges_of_parts: tuple[Ranges, ...]) -> bool:
    """Return whether each number of an address is in one of the ranges for its part.

    Return False if an IPv4 address is compared with ranges for IPv6, or the other way round.
    """
    if len(ranges_of_parts) != len(address):
        return False
    return all(
        any(low <= number <= high for low, high in ranges)
        for number, ranges in zip(address, ranges_of_parts, strict=True)
    )


class _Notation(NamedTuple):
    """How the parts of an IPv4 or IPv6 address are written."""

    base: int
    """The number base, 10 or 16."""
    number_max: int
    """The largest number of a part."""


_IPV4: Final = _Notation(10, 0xFF)
_IPV6: Final = _Notation(16, 0xFFFF)


def address_numbers(host: str, *, unmap: bool = True) -> tuple[int, ...]:
    """Return the 4 or 8 parts of an IP address as numbers; () if `host` is not an IP address.

    If `unmap`, an IPv4 address that is mapped into IPv6 (`::ffff:1.2.3.4`) gives the 4 parts of
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
    return struct.unpack(">8H", packed)


def parse_pattern(pattern: str) -> AddressPattern:
    """Parse an entry of a white list; spaces around it are ignored.

    Raises ConfigurationError if it is invalid, or if RocketMQ would read it as something else.
    """
    pattern = pattern.strip()
    if pattern in ALL_ADDRESSES:
        return AddressPattern(pattern, ())
    if "{" in pattern or "}" in pattern:
        return AddressPattern(pattern, (_parse_set(pattern),))
    if "," in pattern:
        alternatives = [parse_address(address, pattern) for address in pattern.split(",")]
        return AddressPattern(pattern, tuple(alternatives))
    if "*" in pattern or "-" in pattern:
        return AddressPattern(pattern, (_parse_wild(pattern),))
    return AddressPattern(pattern, (parse_address(pattern, pattern),))


def parse_address(address: str, pattern: str, *, unmap: bool = True) -> tuple[Ranges, ...]:
    """Parse an IP address. Return for each of its parts the range of this one number.

    `pattern` is the entry that contains it, for the error. If `unmap`, an IPv4 address that is
    mapped into IPv6 gives 4 parts. Raises ConfigurationError if it is not an IP address.
    """
    # `address_numbers` would accept these.
    is_odd = "%" in address or "[" in address or address != address.strip()
    numbers = () if is_odd else address_numbers(address, unmap=unmap)
    if not numbers:
        raise pattern_error(
            pattern,
            f"{address!r} is not an IP address",
            "Write addresses such as 10.10.103.5 or 2001:db8::1, without port, host name, spaces,"
            " leading zeros or a /mask.",
        )
    return tuple(map(_make_single_range, numbers))


def _parse_set(pattern: str) -> tuple[Ranges, ...]:
    """Parse a pattern with a set, such as `10.10.103.{1,5,9}`: return the ranges of each part.

    Raises ConfigurationError if the set is not the whole last part, or a part is not a number.
    """
    before_set, brace, after_brace = pattern.partition("{")
    has_one_set = after_brace.endswith("}") and "{" not in after_brace
    if not brace or not has_one_set or after_brace.count("}") != 1:
        raise pattern_error(pattern, _SET_NOT_LAST, "Write 10.10.103.{1,5,9}.")

    # A 0 in place of the set makes the text a pattern that `_split_pattern` accepts.
    parts, notation = _split_pattern(before_set + "0")
    first_numbers = _parse_numbers(parts[:-1], notation, pattern)
    members = _parse_numbers(after_brace[:-1].split(","), notation, pattern)
    ranges_of_set = tuple((member, member) for member in members)
    return (*map(_make_single_range, first_numbers), ranges_of_set)


def _split_pattern(pattern: str) -> tuple[list[str], _Notation]:
    """Split a pattern into parts. Return (parts, notation), where notation is IPv4 or IPv6.

    Raises ConfigurationError unless there are 4 parts with dots or 8 parts with colons.
    """
    if ":" in pattern:
        parts = pattern.split(":")
        if len(parts) != IPV6_PARTS or "" in parts:
            raise pattern_error(
                pattern,
                f"it must have {IPV6_PARTS} parts",
                "Write all eight parts of an IPv6 pattern: RocketMQ reads :: before a star as one "
                "part.",
            )
        return parts, _IPV6

    parts = pattern.split(".")
    if len(parts) != IPV4_PARTS or "" in parts:
        raise pattern_error(
            pattern, f"it must have {IPV4_PARTS} parts", "Write four parts, such as 10.10.103.*."
        )
    return parts, _IPV4


def _parse_number(part: str, notation: _Notation, pattern: str) -> int:
    """Parse a part of `pattern` as a number.

    Raises ConfigurationError if the notation does not allow it, or if a decimal number has leading
    zeros.
    """
    base, number_max = notation
    number = -1
    if part.isascii() and part.isalnum():
        with contextlib.suppress(ValueError):
            number = int(part, base)

    has_leading_zeros = base == 10 and part != str(number)
    if not 0 <= number <= number_max or has_leading_zeros:
        shown_max = f"{number_max:x}" if base == 16 else str(number_max)
        raise pattern_error(
            pattern, f"{part!r} is not a number from 0 to {shown_max}", "Write such a number."
        )
    return number


def _parse_numbers(parts: list[str], notation: _Notation, pattern: str) -> list[int]:
    """Return the numbers that several parts of `pattern` are; see `_parse_number`."""
    return [_parse_number(part, notation, pattern) for part in parts]


def _make_single_range(number: int) -> Ranges:
    """Return the ranges of a part that must be equal to `number`."""
    return ((number, number),)


def _parse_wild(pattern: str) -> tuple[Ranges, ...]:
    """Parse a pattern with stars or a range, such as `10.10.1-9.*`: return the ranges of each part.

    Raises ConfigurationError if it begins with a star, or if something other than a star follows
    the first star or range.
    """
    parts, notation = _split_pattern(pattern)
    if parts[0] == "*":
        raise pattern_error(pattern, "it begins with a star", 'Write "*" for every address.')

    ranges_of_parts: list[Ranges] = []
    is_open = False  # whether a star or a range came before, so that only stars may follow
    for part in parts:
        if part == "*":
            is_open = True
            ranges_of_parts.append(((0, notation.number_max),))
        elif is_open:
            raise pattern_error(
                pattern,
                f"{part!r} follows a star or a range, and RocketMQ would ignore it",
                "Write stars in all parts after the first star or range.",
            )
        elif "-" in part:
            is_open = True
            ranges_of_parts.append((_parse_range(part, notation, pattern),))
        else:
            ranges_of_parts.append(_make_single_range(_parse_number(part, notation, pattern)))
    return tuple(ranges_of_parts)


def _parse_range(part: str, notation: _Notation, pattern: str) -> tuple[int, int]:
    """Parse a range such as `1-9`. Return (smallest number, largest number).

    Raises ConfigurationError if one of them is invalid, the first one is larger, or both are 0.
    """
    low_text, _, high_text = part.partition("-")
    low = _parse_number(low_text, notation, pattern)
    high = _parse_number(high_text, notation, pattern)
    if low > high or high == 0:
        raise pattern_error(
            pattern,
            f"{part!r} is not a valid range",
            "Write the smaller number first, such as 1-9.",
        )
    return low, high


def pattern_error(pattern: str, why: str, fix: str) -> ConfigurationError:
    """Return the error for an invalid pattern, with the reason `why`."""
    return ConfigurationError(f"The address pattern {pattern!r} is invalid: {why}.", fix=fix)


# --------------------------------------------------------- as RocketMQ 5 reads them

_GROUP: Final = re.compile(r"[0-9A-Fa-f]{1,4}")
_ROCKETMQ_FIX: Final = "RocketMQ refuses it too."
_MATCHES_NO_ADDRESS: Final[tuple[Ranges, ...]] = ()
"""An alternative of an `AddressPattern` without parts: no address has so few."""


def parse_pattern_like_rocketmq(pattern: str) -> AddressPattern | None:
    """Parse an entry of a white list as RocketMQ 5 does, including its oddities.

    Return None if `pattern` is empty or only spaces: then it matches no address. Raises
    ConfigurationError if RocketMQ refuses the entry.
    """
    if not pattern.strip():
        return None
    if pattern in ALL_ADDRESSES:
        return AddressPattern(pattern, ())
    if pattern.endswith("}"):
        return _parse_set_like_rocketmq(pattern)
    if "," in pattern:
        addresses = [address for address in pattern.split(",") if address]
        return _parse_addresses_like_rocketmq(pattern, addresses)
    if "*" in pattern or "-" in pattern:
        if ":" in pattern:
            return _parse_wild_ipv6_like_rocketmq(pattern)
        return _parse_wild_ipv4_like_rocketmq(pattern)
    return _parse_addresses_like_rocketmq(pattern, [pattern])


def _parse_set_like_rocketmq(pattern: str) -> AddressPattern:
    """Parse an entry that ends with a set, such as `10.10.103.{1,5,9}`, as RocketMQ does.

    Empty members of the set are ignored. Raises ConfigurationError if the set is not the whole last
    part.
    """
    separator = ":" if ":" in pattern else "."
    last_part = pattern.rpartition(separator)[2]
    if not last_part.startswith("{"):
        raise pattern_error(pattern, _SET_NOT_LAST, _ROCKETMQ_FIX)
    before_set = pattern[: pattern.index("{")]
    addresses = [before_set + member for member in last_part[1:-1].split(",") if member]
    return _parse_addresses_like_rocketmq(pattern, addresses)


def _parse_addresses_like_rocketmq(pattern: str, addresses: list[str]) -> AddressPattern:
    """Return `pattern` as one that matches each of `addresses` and no other address."""
    # RocketMQ compares a mapped IPv4 address as IPv6, so it keeps its eight parts.
    alternatives = tuple(parse_address(address, pattern, unmap=False) for address in addresses)
    return AddressPattern(pattern, alternatives or (_MATCHES_NO_ADDRESS,))


def _parse_wild_ipv4_like_rocketmq(pattern: str) -> AddressPattern:
    """Parse an IPv4 entry with a star or a range as RocketMQ does.

    Only the first star or range and the numbers before it count. The parts after it may have any
    number. RocketMQ does not look for a star or range in the first part.
    """
    parts = [part for part in pattern.split(".") if part]
    for index in range(1, IPV4_PARTS):
        if index >= len(parts):
            raise pattern_error(pattern, f"it must have {IPV4_PARTS} parts", _ROCKETMQ_FIX)
        first_range = _parse_range_like_rocketmq(parts[index], _IPV4, pattern)
        if first_range is not None:
            break
    else:  # no star or range was found
        return AddressPattern(pattern, (_MATCHES_NO_ADDRESS,), is_incomparable=True)

    if len(parts) != IPV4_PARTS:
        raise pattern_error(pattern, f"it must have {IPV4_PARTS} parts", _ROCKETMQ_FIX)
    ranges_before = _parse_parts_before(parts[:index], pattern)
    ranges_after: list[Ranges] = [((0, 0xFF),)] * (IPV4_PARTS - 1 - index)
    return AddressPattern(pattern, ((*ranges_before, (first_range,), *ranges_after),))


def _parse_parts_before(parts: list[str], pattern: str) -> list[Ranges]:
    """Parse the parts of an IPv4 pattern before its first star or range, as RocketMQ does.

    Return the ranges of each part. If a part has leading zeros, the ranges match no address. Raises
    ConfigurationError if a part is not a number.
    """
    ranges_of_parts: list[Ranges] = []
    have_leading_zeros = False
    for part in parts:
        number = _parse_number_like_rocketmq(part, _IPV4, pattern)
        ranges_of_parts.append(_make_single_range(number))
        have_leading_zeros = have_leading_zeros or part != str(number)
    if have_leading_zeros:
        # Compared as text, and no address is written with leading zeros: nothing matches.
        ranges_of_parts[0] = ()
    return ranges_of_parts


def _parse_wild_ipv6_like_rocketmq(pattern: str) -> AddressPattern:
    """Parse an IPv6 entry with a star or a range as RocketMQ does.

    The first star or range applies to the part behind the numbers, and the parts after it may have
    any number. A `::` before it stands for as many zeros as are missing.
    """
    parts = pattern.split(":")
    last_part_count = _count_open_parts(pattern, parts)
    first_range = _find_first_range(parts[1:], pattern)
    if first_range is None:
        return AddressPattern(pattern, (_MATCHES_NO_ADDRESS,), is_incomparable=True)

    first_parts = _expand_gap(parts[:-last_part_count], IPV6_PARTS - last_part_count)
    if len(first_parts) >= IPV6_PARTS:
        raise pattern_error(pattern, f"it has more than {IPV6_PARTS} parts", _ROCKETMQ_FIX)
    ranges_before: list[Ranges] = []
    for part in first_parts:
        number = _parse_number_like_rocketmq(part or "0", _IPV6, pattern)
        ranges_before.append(_make_single_range(number))
    ranges_after: list[Ranges] = [((0, 0xFFFF),)] * (IPV6_PARTS - 1 - len(ranges_before))
    return AddressPattern(pattern, ((*ranges_before, (first_range,), *ranges_after),))


def _count_open_parts(pattern: str, parts: list[str]) -> int:
    """Count the parts at the end of an IPv6 pattern that RocketMQ reads as star or range: 1 or 2.

    Raises ConfigurationError if a star or a range is elsewhere.
    """
    star = pattern.find("*")
    has_star = star >= 0
    has_range = "-" in pattern
    count = 2 if has_star and has_range else 1
    is_star_misplaced = has_star and star != len(pattern) - 1
    is_range_misplaced = has_range and "-" not in parts[-count:][0]
    if is_star_misplaced or is_range_misplaced:
        raise pattern_error(
            pattern, "a star or a range is allowed only in the last parts", _ROCKETMQ_FIX
        )
    return count


def _find_first_range(parts: list[str], pattern: str) -> tuple[int, int] | None:
    """Return the (smallest, largest) number of the first star or range in `parts`, or None."""
    for part in parts:
        if part:
            part_range = _parse_range_like_rocketmq(part, _IPV6, pattern)
            if part_range is not None:
                return part_range
    return None


def _expand_gap(parts: list[str], count: int) -> list[str]:
    """Replace a `::` in the first parts of an IPv6 address by zeros.

    `parts` are the texts between colons. The result then has `count` parts, unless more of them are
    written. Without a `::` nothing changes.
    """
    left, gap, right = ":".join(parts).partition("::")
    expanded = left.split(":")
    if gap:
        parts_after_gap = right.split(":") if right else []
        zero_count = count - len(expanded) - len(parts_after_gap)
        expanded += ["0"] * zero_count + parts_after_gap
    return expanded


def _parse_range_like_rocketmq(
    part: str, notation: _Notation, pattern: str
) -> tuple[int, int] | None:
    """Parse a star or a range as RocketMQ does. Return (smallest number, largest number).

    Return None if RocketMQ does not recognise it as either, for example 0-0. Raises
    ConfigurationError for an invalid range.
    """
    if part.strip() == "*":
        return 0, notation.number_max
    if "-" not in part:
        return None
    # RocketMQ ignores what follows a second minus.
    low_text, high_text = part.split("-")[:2]
    low = _parse_number_like_rocketmq(low_text, notation, pattern)
    high = _parse_number_like_rocketmq(high_text, notation, pattern)
    if low > high:
        raise pattern_error(pattern, f"{part!r} is not a valid range", _ROCKETMQ_FIX)
    return (low, high) if high > 0 else None


def _parse_number_like_rocketmq(part: str, notation: _Notation, pattern: str) -> int:
    """Parse a part of `pattern` as a number. Leading zeros are allowed.

    Raises ConfigurationError if the notation does not allow it.
    """
    if notation is _IPV4:
        is_number = part.isascii() and part.isdigit()
    else:
        is_number = _GROUP.fullmatch(part) is not None
    base, number_max = notation
    if not is_number or int(part, base) > number_max:
        raise pattern_error(pattern, f"{part!r} is not a number up to {number_max}", _ROCKETMQ_FIX)
    return int(part, base)


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
    permission = _PERMISSIONS.get(word.strip())
    if permission is None:
        raise ConfigurationError(
            f"{word!r} is not a permission.",
            fix="Write DENY, PUB, SUB, PUB|SUB or ANY (PUB or SUB), in capitals, without spaces.",
        )
    return permission


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
        """Return (permission, is_explicit) of the account for a resource.

        `resource` is a topic, or `%RETRY%g` for the group g. If an entry of the account names the
        resource, its permission counts, and `is_explicit` is True. Otherwise the account's default
        counts, but for system topics with messages of other topics there is no permission.
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
    def merge(rules_of_files: Iterable["Rules"]) -> "Rules":
        """Merge the rules of several files, which are given in order of precedence.

        The white lists are joined. If several files have the same account, the first one counts.
        """
        accounts: dict[str, Account] = {}
        white_addresses: list[AddressPattern] = []
        for rules in rules_of_files:
            white_addresses += rules.white_addresses
            for access_key, account in rules.accounts.items():
                accounts.setdefault(access_key, account)
        return Rules(accounts, tuple(white_addresses))


# ------------------------------------------------------------------------- warnings about rules

SECRET_LENGTH_MIN: Final = 16
"""The number of characters of a secret key below which `lint` has a finding."""
_WEAK_PREFIXES: Final = ("12345678", "password", "rocketmq", "87654321", "secret")
"""Beginnings of secret keys that are easy to guess, in lower case."""
_DISTINCT_CHARACTERS_MIN: Final = 5
"""A secret key with fewer different characters is easy to guess."""


class LintFinding(NamedTuple):
    """A valid but risky or useless rule. `place` is a file and line, or a key of the file."""

    place: str
    text: str
    fix: str


def lint(
    rules_of_files: Iterable[Rules],
    *,
    secret_length_min: int = SECRET_LENGTH_MIN,
    topics: Collection[str] | None = None,
    groups: Collection[str] | None = None,
) -> list[LintFinding]:
    """Find rules that are valid, but risky or without effect.

    `rules_of_files` are the rules of each file, in order of precedence. A secret key with fewer
    than `secret_length_min` characters is a finding. `topics` and `groups` are the names that exist
    in a cluster, to find misspelled ones; None skips this check.
    """
    findings: list[LintFinding] = []
    first_origins: dict[str, str] = {}  # by access key: file and line of its first account
    for rules in rules_of_files:
        findings += _lint_white_addresses(rules)
        for account in rules.accounts.values():
            first_origin = first_origins.setdefault(account.access_key, account.origin)
            if first_origin != account.origin:
                fact = f"account {account.access_key} has no effect: {first_origin} has precedence"
                findings.append(LintFinding(account.origin, fact, "Remove one of the two."))
                continue
            for fact, fix in _lint_account(account, secret_length_min, topics, groups):
                findings.append(LintFinding(account.origin, fact, fix))
    return findings


def _lint_white_addresses(rules: Rules) -> list[LintFinding]:
    """Return a finding for each pattern of the global white list that matches every address."""
    findings = []
    for pattern in rules.white_addresses:
        if pattern.matches_all:
            fact = f"{pattern.text!r} allows every client to do everything"
            fix = "List only the addresses of your servers, or none."
            findings.append(LintFinding("globalWhiteRemoteAddresses", fact, fix))
    return findings


def _lint_account(
    account: Account,
    secret_length_min: int,
    topics: Collection[str] | None,
    groups: Collection[str] | None,
) -> Iterator[tuple[str, str]]:
    """Yield (fact, fix) for each finding about one account.

    A secret key with fewer than `secret_length_min` characters is a finding. `topics` and `groups`
    are the names that exist; None skips the check of names.
    """
    yield from _lint_secret(account, secret_length_min)
    name = account.access_key
    if account.white_addresses is not None and account.white_addresses.matches_all:
        fact = f"whiteRemoteAddress lets every client act as {name} without the secret"
        yield fact, "List addresses, or leave it empty."
    if not account.is_admin and account.topic_default and account.group_default:
        fact = f"the defaults of {name} give it access to every topic and group"
        yield fact, "Set the defaults to DENY and list the topics and groups that it needs."
    if account.is_admin and account.permissions:
        fact = f"{name} is an admin: its {len(account.permissions)} permissions have no effect"
        yield fact, "Remove them, or admin: true."
    yield from _lint_permissions(account, topics, groups)


def _lint_secret(account: Account, secret_length_min: int) -> Iterator[tuple[str, str]]:
    """Yield (fact, fix) if the secret key of an account is too short or easy to guess."""
    name = account.access_key
    secret = account.secret_key
    if len(secret) < secret_length_min:
        fact = f"the secret of {name} has {len(secret)} characters, fewer than {secret_length_min}"
        yield fact, "Use a long random one: openssl rand -base64 24."
        return

    has_weak_prefix = secret.lower().startswith(_WEAK_PREFIXES)
    is_repetitive = len(set(secret)) < _DISTINCT_CHARACTERS_MIN
    if has_weak_prefix or is_repetitive or secret == name:
        fact = f"the secret of {name} is easy to guess"
        yield fact, "Use a random one: openssl rand -base64 24."


def _lint_permissions(
    account: Account, topics: Collection[str] | None, groups: Collection[str] | None
) -> Iterator[tuple[str, str]]:
    """Yield (fact, fix) for each finding about the permissions of an account.

    First come entries that repeat the default of the account, then those whose topic or group does
    not exist. None as `topics` or `groups` skips the second check for them.
    """
    for resource, permission in account.permissions.items():
        is_group = resource.startswith(GROUP_PREFIX)
        default = account.group_default if is_group else account.topic_default
        if permission == default and not account.is_admin:
            yield f"{_describe_entry(account, resource)} repeats the default", "Remove it."

    for resource in account.permissions:
        existing_names = groups if resource.startswith(GROUP_PREFIX) else topics
        if existing_names is not None and resource.removeprefix(GROUP_PREFIX) not in existing_names:
            fact = f"{_describe_entry(account, resource)} does not exist"
            yield fact, "Correct the name, or create it."


def _describe_entry(account: Account, resource: str) -> str:
    """Return the name of an entry of topicPerms or groupPerms, for a finding about it."""
    kind = "group" if resource.startswith(GROUP_PREFIX) else "topic"
    return f"{kind} {resource.removeprefix(GROUP_PREFIX)} of {account.access_key}"
