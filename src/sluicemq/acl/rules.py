"""The rules of access: accounts, their permissions, white lists. Frozen, so that a change of rules
is one assignment: no request ever sees half of a new file.

A group g is the resource `%RETRY%g`, as in RocketMQ: sends to the retry topic and the group itself
have one permission, and an entry of topicPerms for that name overrides groupPerms. The dead letters
of a group (`%DLQ%g`) are a topic like any other: they come from all topics that the group reads.
Names are exact; there are no wildcards.

Address patterns of white lists (spec/acl):

    *                    every address, IPv4 and IPv6
    10.10.103.5          one address; a comma list of them
    10.10.103.{1,5,9}    a set in the last part
    10.10.*.*            stars at the end
    10.10.103.20-30      a range; what follows it must be stars
    2001:db8::1          IPv6, any spelling; sets, stars and ranges need all eight parts

A pattern is a tuple of parts, each a set of ranges; an address is the tuple of its numbers.

RocketMQ ignores what follows the first star or range (`10.*.1.1` is `10.*.*.*` there) and reads
`::` before a star as one part: such patterns match more than they say and are refused, as are those
that make every later request fail there (`10.0.0.0-0`, `*.168.1.1`). IPv6 patterns, which never
match there, do here.

`parse_compatible` reads as RocketMQ does, for `sluiceAclCompatible = true` (spec/acl):

    10.*.1.1, 10.1-5.1.2-9                           what follows the first star or range is ignored
    10.0.0.0-0, *.168.1.1, 1.2.3.4.*                 every request that is compared with it fails
    2001:db8::*                                      2001:db8:0:*:… (:: is one part)
    10.10.103.{}                                     nobody

And it refuses what RocketMQ refuses: blanks before an address, for instance.
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
_NO_SET: Final = "a set {…} stands in the last part alone"
EVERY: Final = ("*", "*.*.*.*", ":".join("*" * IPV6_PARTS))


class Pattern(NamedTuple):
    """What one entry of a white list matches; `parts` is empty for every address. What `breaks`
    cannot be compared: such patterns of RocketMQ fail each request."""

    text: str
    parts: tuple[tuple[Ranges, ...], ...]
    breaks: bool = False

    def matches(self, address: tuple[int, ...]) -> bool:
        """Whether the address (`numbers_of`) is meant. Raises ConfigurationError when that cannot
        be said."""
        if self.breaks and address:
            raise refused(self.text, "no address can be compared with it", "Correct or remove it.")
        if not self.parts:
            return True
        return any(
            len(parts) == len(address)
            and all(
                any(low <= number <= high for low, high in ranges)
                for number, ranges in zip(address, parts, strict=True)
            )
            for parts in self.parts
        )

    @property
    def is_everybody(self) -> bool:
        """Whether every address matches."""
        return not self.parts


def numbers_of(host: str, *, maps: bool = True) -> tuple[int, ...]:
    """The parts of an address as numbers; () for what is no address. IPv4 in IPv6 is IPv4, when
    it `maps`."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0].strip("[]"))
    except ValueError:
        return ()
    if maps and isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    packed = address.packed
    if len(packed) == IPV4_PARTS:
        return tuple(packed)
    return tuple(int.from_bytes(packed[at : at + 2], "big") for at in range(0, len(packed), 2))


def parse_pattern(text: str) -> Pattern:
    """Blanks around it do not count. Raises ConfigurationError with the cure."""
    text = text.strip()
    if text in EVERY:
        return Pattern(text, ())
    if "{" in text or "}" in text:
        head, brace, rest = text.partition("{")
        if not brace or not rest.endswith("}") or "{" in rest or rest.count("}") != 1:
            raise refused(text, _NO_SET, "Write 10.10.103.{1,5,9}.")
        words, base, limit = _split(head + "0")
        numbers = [_number(word, base, limit, text) for word in words[:-1]]
        ends = [_number(word, base, limit, text) for word in rest[:-1].split(",")]
        return Pattern(text, ((*map(_single, numbers), tuple((end, end) for end in ends)),))
    if "," in text:
        return Pattern(text, tuple(exact_ranges(part, text) for part in text.split(",")))
    if "*" in text or "-" in text:
        return Pattern(text, (_parse_wild(text),))
    return Pattern(text, (exact_ranges(text, text),))


def exact_ranges(address: str, whole: str, *, maps: bool = True) -> tuple[Ranges, ...]:
    """One address of the pattern `whole`. `maps`: IPv4 in IPv6 is IPv4. Raises
    ConfigurationError."""
    is_odd = "%" in address or "[" in address or address != address.strip()
    numbers = () if is_odd else numbers_of(address, maps=maps)
    if not numbers:
        raise refused(
            whole,
            f"{address!r} is no IP address",
            "Write addresses such as 10.10.103.5 or 2001:db8::1, without port, host name, blanks,"
            " leading zeros or a /mask.",
        )
    return tuple(map(_single, numbers))


def _split(text: str) -> tuple[list[str], int, int]:
    """Parts, the base of their numbers, the largest number. Only patterns in full."""
    is_six = ":" in text
    parts = text.split(":") if is_six else text.split(".")
    count = IPV6_PARTS if is_six else IPV4_PARTS
    if len(parts) != count or "" in parts:
        fix = (
            "Write all eight parts of an IPv6 pattern: RocketMQ reads :: before a star as one part."
            if is_six
            else "Write four parts, such as 10.10.103.*."
        )
        raise refused(text, f"it has not {count} parts", fix)
    return parts, 16 if is_six else 10, 0xFFFF if is_six else 0xFF


def _number(part: str, base: int, limit: int, text: str) -> int:
    try:
        value = int(part, base) if part.isascii() and part.isalnum() else -1
    except ValueError:
        value = -1
    if not 0 <= value <= limit or (base == 10 and part != str(value)):
        shown = f"{limit:x}" if base == 16 else str(limit)
        raise refused(text, f"{part!r} is no number from 0 to {shown}", "Write it so.")
    return value


def _single(number: int) -> Ranges:
    return ((number, number),)


def _parse_wild(text: str) -> tuple[Ranges, ...]:
    parts, base, limit = _split(text)
    found: list[Ranges] = []
    is_open = False
    for index, part in enumerate(parts):
        if part == "*" and index:
            is_open = True
            found.append(((0, limit),))
        elif is_open:
            raise refused(
                text,
                f"{part!r} stands behind a star or a range, and RocketMQ would ignore it",
                "Write stars in all parts that follow.",
            )
        elif "-" in part:
            is_open = True
            low, _, high = part.partition("-")
            ends = _number(low, base, limit, text), _number(high, base, limit, text)
            if ends[0] > ends[1] or ends == (0, 0):
                fix = "Write the smaller number first, such as 1-9."
                raise refused(text, f"{part!r} is no range", fix)
            found.append((ends,))
        elif part == "*":
            raise refused(text, "it begins with a star", 'Write "*" for every address.')
        else:
            found.append(_single(_number(part, base, limit, text)))
    return tuple(found)


def refused(text: str, why: str, fix: str) -> ConfigurationError:
    """The error of a pattern."""
    return ConfigurationError(f"The address pattern {text!r} is refused: {why}.", fix=fix)


# --------------------------------------------------------- as RocketMQ 5 reads them

_GROUP: Final = re.compile(r"[0-9A-Fa-f]{1,4}")
_OLD_CURE: Final = "RocketMQ refuses it too."


def parse_compatible(text: str) -> Pattern | None:
    """None for blanks, which match nobody. Raises ConfigurationError."""
    if not text.strip():
        return None
    if text in EVERY:
        return Pattern(text, ())
    if text.endswith("}"):
        last = re.split("[:.]" if ":" not in text else ":", text)[-1]
        if not last.startswith("{"):
            raise refused(text, _NO_SET, _OLD_CURE)
        head = text[: text.index("{")]
        items = [head + item for item in last[1:-1].split(",") if item]
        return _exact(text, items)
    if "," in text:
        return _exact(text, [item for item in text.split(",") if item])
    if "*" in text or "-" in text:
        return _wild6(text) if ":" in text else _wild4(text)
    return _exact(text, [text])


def _exact(text: str, addresses: list[str]) -> Pattern:
    # An IPv4 address written as IPv6 is never met as such: it stays one of eight parts.
    parts = tuple(exact_ranges(address, text, maps=False) for address in addresses)
    return Pattern(text, parts or ((),))


def _wild4(text: str) -> Pattern:
    words = [word for word in text.split(".") if word]
    for index in range(1, IPV4_PARTS):
        if index >= len(words):
            raise refused(text, f"it has not {IPV4_PARTS} parts", _OLD_CURE)
        found = _old_range(words[index], 10, 0xFF, text)
        if found is None:
            continue
        if len(words) != IPV4_PARTS:
            raise refused(text, f"it has not {IPV4_PARTS} parts", _OLD_CURE)
        head = [_old_number(word, 10, 0xFF, text) for word in words[:index]]
        ranges = [_single(number) for number in head]
        if any(word != str(number) for word, number in zip(words, head, strict=False)):
            ranges[0] = ()  # compared as text, and no address is written with leading zeros
        rest: list[Ranges] = [((0, 0xFF),)] * (IPV4_PARTS - 1 - index)
        return Pattern(text, ((*ranges, (found,), *rest),))
    return Pattern(text, ((),), breaks=True)


def _wild6(text: str) -> Pattern:
    star, minus = text.find("*"), text.find("-")
    has_both = star >= 0 and minus >= 0
    words = text.split(":")
    tail = words[-2:] if has_both else words[-1:]
    if (star >= 0 and star != len(text) - 1) or (minus >= 0 and "-" not in tail[0]):
        raise refused(text, "a star or a range stands in the last parts alone", _OLD_CURE)
    found = next(
        (one for word in words[1:] if word and (one := _old_range(word, 16, 0xFFFF, text))), None
    )
    if found is None:
        return Pattern(text, ((),), breaks=True)
    count = IPV6_PARTS - len(tail)
    head = ":".join(words[: -len(tail)])
    left, gap, right = head.partition("::")
    groups = left.split(":")
    if gap:
        after = right.split(":") if right else []
        groups += ["0"] * (count - len(groups) - len(after)) + after
    if len(groups) >= IPV6_PARTS:
        raise refused(text, f"it has more than {IPV6_PARTS} parts", _OLD_CURE)
    numbers = [_old_number(group or "0", 16, 0xFFFF, text) for group in groups]
    rest: list[Ranges] = [((0, 0xFFFF),)] * (IPV6_PARTS - 1 - len(numbers))
    return Pattern(text, ((*map(_single, numbers), (found,), *rest),))


def _old_range(word: str, base: int, limit: int, text: str) -> tuple[int, int] | None:
    """A star or a range; None for what is not recognised as one, 0-0 among it."""
    if word.strip() == "*":
        return 0, limit
    if "-" not in word:
        return None
    ends = [_old_number(end, base, limit, text) for end in word.split("-")[:2]]
    if ends[0] > ends[1]:
        raise refused(text, f"{word!r} is no range", _OLD_CURE)
    return (ends[0], ends[1]) if ends[1] > 0 else None


def _old_number(word: str, base: int, limit: int, text: str) -> int:
    is_number = word.isascii() and word.isdigit() if base == 10 else _GROUP.fullmatch(word)
    if not is_number or not 0 <= int(word, base) <= limit:
        raise refused(text, f"{word!r} is no number up to {limit}", _OLD_CURE)
    return int(word, base)


# ---------------------------------------------------------------------------------------- accounts


class Permission(enum.Flag):
    """What an account may do with a topic or group; NOTHING is DENY."""

    NOTHING = 0
    PUB = enum.auto()
    SUB = enum.auto()
    ANY = PUB | SUB


_WORDS: Final = {
    "DENY": Permission.NOTHING,
    "PUB": Permission.PUB,
    "SUB": Permission.SUB,
    "PUB|SUB": Permission.ANY,
    "SUB|PUB": Permission.ANY,
    "ANY": Permission.ANY,
}
WORD_OF: Final = {
    Permission.NOTHING: "DENY",
    Permission.PUB: "PUB",
    Permission.SUB: "SUB",
    Permission.ANY: "PUB|SUB",
}


def parse_permission(word: str) -> Permission:
    """One of RocketMQ's words. Raises ConfigurationError: there, any other word means DENY in
    silence."""
    found = _WORDS.get(word.strip())
    if found is None:
        raise ConfigurationError(
            f"{word!r} is no permission.",
            fix="Write DENY, PUB, SUB, PUB|SUB or ANY (PUB or SUB), in capitals, without blanks.",
        )
    return found


@dataclass(frozen=True, slots=True)
class Account:
    """One entry of `accounts`. `origin` is the file and line; the secret is in no text."""

    access_key: str
    secret_key: str = field(repr=False)
    white: Pattern | None = None
    is_admin: bool = False
    topic_default: Permission = Permission.NOTHING
    group_default: Permission = Permission.NOTHING
    permissions: Mapping[str, Permission] = field(default_factory=dict)
    origin: str = ""

    def permission(self, resource: str) -> tuple[Permission, bool]:
        """What may be done with a topic, or with the group g as `%RETRY%g`; and whether an entry
        says so, not a default."""
        explicit = self.permissions.get(resource)
        if explicit is not None:
            return explicit, True
        if stores_other_topics_messages(resource) or is_revive_topic(resource):
            return Permission.NOTHING, False
        is_group = resource.startswith(GROUP_PREFIX)
        return (self.group_default if is_group else self.topic_default), False


@dataclass(frozen=True, slots=True)
class Rules:
    """Everything that is in force at one moment."""

    accounts: Mapping[str, Account] = field(default_factory=dict)
    white: tuple[Pattern, ...] = ()

    @staticmethod
    def merged(several: Iterable["Rules"]) -> "Rules":
        """Of several files, in their order: white lists add up, an account's first file counts."""
        accounts: dict[str, Account] = {}
        white: list[Pattern] = []
        for rules in several:
            white += rules.white
            for access_key, account in rules.accounts.items():
                accounts.setdefault(access_key, account)
        return Rules(accounts, tuple(white))


# ---------------------------------------------------------------- what is allowed and yet not wise

SECRET_LENGTH_MIN: Final = 16
_WEAK: Final = ("12345678", "password", "rocketmq", "87654321", "secret")


class Finding(NamedTuple):
    """`place` is a file and line, or a key of the file."""

    place: str
    text: str
    fix: str


def lint(
    several: Iterable[Rules],
    *,
    secret_length_min: int = SECRET_LENGTH_MIN,
    topics: Collection[str] | None = None,
    groups: Collection[str] | None = None,
) -> list[Finding]:
    """Findings in the rules of several files, in their order. `topics` and `groups` are those of a
    cluster; None when nobody asked one."""
    found: list[Finding] = []
    seen: dict[str, str] = {}
    for rules in several:
        for pattern in rules.white:
            if pattern.is_everybody:
                text = f"{pattern.text!r} lets everybody do everything"
                fix = "Name the addresses of your own servers, or none."
                found.append(Finding("globalWhiteRemoteAddresses", text, fix))
        for account in rules.accounts.values():
            first = seen.setdefault(account.access_key, account.origin)
            if first != account.origin:
                text = f"account {account.access_key} does not count: {first} comes first"
                found.append(Finding(account.origin, text, "Remove one of the two."))
                continue
            said = _said(account, secret_length_min, topics, groups)
            found += [Finding(account.origin, text, fix) for text, fix in said]
    return found


def _said(
    account: Account,
    secret_length_min: int,
    topics: Collection[str] | None,
    groups: Collection[str] | None,
) -> Iterator[tuple[str, str]]:
    name, secret = account.access_key, account.secret_key
    if len(secret) < secret_length_min:
        text = f"the secret of {name} has {len(secret)} characters, fewer than {secret_length_min}"
        yield text, "Take a long random one: openssl rand -base64 24."
    elif secret.lower().startswith(_WEAK) or len(set(secret)) < 5 or secret == name:
        text = f"the secret of {name} is easily guessed"
        yield text, "Take a random one: openssl rand -base64 24."
    if account.white is not None and account.white.is_everybody:
        text = f"whiteRemoteAddress lets everybody be {name} without the secret"
        yield text, "Name addresses, or leave it empty."
    if not account.is_admin and account.topic_default and account.group_default:
        text = f"{name} may do something with every topic and group by its defaults"
        yield text, "Set the defaults to DENY and name what it needs."
    if account.is_admin and account.permissions:
        text = f"{name} is an admin: its {len(account.permissions)} permissions do not count"
        yield text, "Remove them, or admin: true."
    missing = []
    for resource, permission in account.permissions.items():
        is_group = resource.startswith(GROUP_PREFIX)
        name = resource.removeprefix(GROUP_PREFIX)
        shown = f"{'group' if is_group else 'topic'} {name} of {account.access_key}"
        default = account.group_default if is_group else account.topic_default
        if permission == default and not account.is_admin:
            yield f"{shown} says what the default says", "Remove it."
        known = groups if is_group else topics
        if known is not None and name not in known:
            missing.append((f"{shown} does not exist", "Correct the name, or create it."))
    yield from missing
