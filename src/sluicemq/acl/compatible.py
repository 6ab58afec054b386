"""How RocketMQ 5 reads `plain_acl.yml`, for `sluiceAclCompatible = true` (spec/acl).

What `loading.py` and `addresses.py` refuse means this there:

    a word that is no permission, ANY among them     DENY
    =a=PUB, a==PUB                                   a=PUB: empty parts do not count
    10.*.1.1, 10.1-5.1.2-9                           what follows the first star or range is ignored
    10.0.0.0-0, *.168.1.1, 1.2.3.4.*                 every request that is compared with it fails
    2001:db8::*                                      2001:db8:0:*:… (:: is one part)
    10.10.103.{}                                     nobody
    aliases and merge keys                           are followed

And it refuses what they take: tabs, blanks before an address, an odd dataVersion.
"""

import re
from typing import Final

from sluicemq.acl.addresses import (
    EVERY,
    IPV4_PARTS,
    IPV6_PARTS,
    Pattern,
    Ranges,
    exact_ranges,
    refused,
)
from sluicemq.acl.rules import WORD_OF, Permission

_GROUP: Final = re.compile(r"[0-9A-Fa-f]{1,4}")
_CURE: Final = "RocketMQ refuses it too."
_WORDS: Final = {word: permission for permission, word in WORD_OF.items()} | {
    "SUB|PUB": Permission.ANY
}


def parse_word(word: str) -> Permission:
    """Whatever is none of the words is DENY."""
    return _WORDS.get(word.strip(), Permission.NOTHING)


def split_entry(text: str) -> tuple[str, str] | None:
    """The name and the word of name=permission; None when it is no such entry."""
    parts = [part for part in text.split("=") if part]
    return (parts[0].strip(), parts[1]) if len(parts) == 2 else None


def parse_address(text: str) -> Pattern | None:
    """None for blanks, which match nobody. Raises ConfigurationError."""
    if not text.strip():
        return None
    if text in EVERY:
        return Pattern(text, ())
    if text.endswith("}"):
        last = re.split("[:.]" if ":" not in text else ":", text)[-1]
        if not last.startswith("{"):
            raise refused(text, "a set {…} stands in the last part alone", _CURE)
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
            raise refused(text, f"it has not {IPV4_PARTS} parts", _CURE)
        found = _range(words[index], 10, 0xFF, text)
        if found is None:
            continue
        if len(words) != IPV4_PARTS:
            raise refused(text, f"it has not {IPV4_PARTS} parts", _CURE)
        head = [_number(word, 10, 0xFF, text) for word in words[:index]]
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
        raise refused(text, "a star or a range stands in the last parts alone", _CURE)
    found = next(
        (one for word in words[1:] if word and (one := _range(word, 16, 0xFFFF, text))), None
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
        raise refused(text, f"it has more than {IPV6_PARTS} parts", _CURE)
    numbers = [_number(group or "0", 16, 0xFFFF, text) for group in groups]
    rest: list[Ranges] = [((0, 0xFFFF),)] * (IPV6_PARTS - 1 - len(numbers))
    return Pattern(text, ((*(((n, n),) for n in numbers), (found,), *rest),))


def _range(word: str, base: int, limit: int, text: str) -> tuple[int, int] | None:
    """A star or a range; None for what is not recognised as one, 0-0 among it."""
    if word.strip() == "*":
        return 0, limit
    if "-" not in word:
        return None
    ends = [_number(end, base, limit, text) for end in word.split("-")[:2]]
    if ends[0] > ends[1]:
        raise refused(text, f"{word!r} is no range", _CURE)
    return (ends[0], ends[1]) if ends[1] > 0 else None


def _number(word: str, base: int, limit: int, text: str) -> int:
    is_number = word.isascii() and word.isdigit() if base == 10 else _GROUP.fullmatch(word)
    if not is_number or not 0 <= int(word, base) <= limit:
        raise refused(text, f"{word!r} is no number up to {limit}", _CURE)
    return int(word, base)
