"""Address patterns of white lists (spec/acl).

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

import ipaddress
import re
from typing import Final, NamedTuple

from sluicemq.errors import ConfigurationError

IPV4_PARTS, IPV6_PARTS = 4, 8
Ranges = tuple[tuple[int, int], ...]
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
        return Pattern(text, (_parse_set(text),))
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
    return tuple(((number, number),) for number in numbers)


def _split(text: str) -> tuple[list[str], int, int]:
    """Parts, the base of their numbers, the largest number. Only patterns in full."""
    is_six = ":" in text
    parts = text.split(":") if is_six else text.split(".")
    count = IPV6_PARTS if is_six else IPV4_PARTS
    if len(parts) != count or "" in parts:
        cure = (
            "Write all eight parts of an IPv6 pattern: RocketMQ reads :: before a star as one part."
            if is_six
            else "Write four parts, such as 10.10.103.*."
        )
        raise refused(text, f"it has not {count} parts", cure)
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


def _parse_set(text: str) -> tuple[Ranges, ...]:
    head, brace, rest = text.partition("{")
    if not brace or not rest.endswith("}") or "{" in rest or rest.count("}") != 1:
        raise refused(text, "a set {…} stands in the last part alone", "Write 10.10.103.{1,5,9}.")
    parts, base, limit = _split(head + "0")
    ranges = [_single(_number(part, base, limit, text)) for part in parts[:-1]]
    ends = [_number(part, base, limit, text) for part in rest[:-1].split(",")]
    return (*ranges, tuple((number, number) for number in ends))


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
            found.append((_range(part, base, limit, text),))
        elif part == "*":
            raise refused(text, "it begins with a star", 'Write "*" for every address.')
        else:
            found.append(_single(_number(part, base, limit, text)))
    return tuple(found)


def _range(part: str, base: int, limit: int, text: str) -> tuple[int, int]:
    low, _, high = part.partition("-")
    ends = _number(low, base, limit, text), _number(high, base, limit, text)
    if ends[0] > ends[1] or ends == (0, 0):
        raise refused(text, f"{part!r} is no range", "Write the smaller number first, such as 1-9.")
    return ends


def refused(text: str, why: str, cure: str) -> ConfigurationError:
    """The error of a pattern."""
    return ConfigurationError(f"The address pattern {text!r} is refused: {why}.", cure=cure)


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
            raise refused(text, "a set {…} stands in the last part alone", _OLD_CURE)
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
        ranges: list[Ranges] = [((number, number),) for number in head]
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
    return Pattern(text, ((*(((n, n),) for n in numbers), (found,), *rest),))


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
