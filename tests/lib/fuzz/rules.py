"""Files that nearly are `plain_acl.yml`: reading one ends in rules or in a ConfigurationError."""

from random import Random
from typing import Final, NamedTuple

from sluicemq.acl.loading import load_rules
from sluicemq.clock import SYSTEM_CLOCK
from sluicemq.errors import ConfigurationError

SAMPLE: Final = """globalWhiteRemoteAddresses:
  - 10.10.103.*
  - 192.168.0.{1,2,3}
  - 2001:db8::1-9
accounts:
  - accessKey: orders-service
    secretKey: 12345678
    whiteRemoteAddress: 192.168.0.1-99
    admin: false
    defaultTopicPerm: DENY
    defaultGroupPerm: SUB
    topicPerms:
      - orders=PUB|SUB
      - b=DENY
    groupPerms:
      - billing=SUB
  - accessKey: operations
    secretKey: 87654321
    admin: true
"""
_WORDS: Final = (
    "accounts:", "- ", "  ", "\t", "&a ", "*a", "<<: *a", "[", "]", "{", "}", "{}", "[]", "|", ">",
    "!!python/object/apply:os.system [true]", "!!binary aGk=", "!x ", "%YAML 1.1\n", "---\n", "...",
    "null", "~", "yes", "0x1f", "0777", "1e999", ".nan", "2001-01-01", "'", '"', "? ", ": ", "#",
    "*", "10.*.1.1", "::", "::/0", "0.0.0.0-0", "1.2.3.{1,2", "{1-9999999999}", "=", "=PUB",
    "a=b=c",
    "\0", "\ud800", "\x85", "é", "😀", "- *\n", "accessKey: ", "admin: maybe", "x" * 3000,
    "[" * 1200, "{a: " * 300, "- " * 800, "9" * 5000,
)  # fmt: skip
SECONDS_MAX: Final = 2.0


class RulesFinding(NamedTuple):
    """A text that was read wrongly, and how."""

    text: str
    what: str


def text(rng: Random) -> str:
    """The sample with a few lines or words changed."""
    lines = SAMPLE.splitlines(keepends=True)
    for _ in range(1 + int(rng.random() * 3)):
        at = int(rng.random() * len(lines))
        kind = rng.random()
        line, word = lines[at], rng.choice(_WORDS)
        column = int(rng.random() * (len(line) + 1))
        if kind < 0.55:
            lines[at] = line[:column] + word + line[column:]
        elif kind < 0.7:
            lines[at] = line[:column] + word + "\n"
        elif kind < 0.8:
            lines[at] = ""
        elif kind < 0.9:
            lines.insert(at, rng.choice(lines))
        else:
            lines[at] = line[column:]
    return "".join(lines)


def check(rng: Random, inputs: int) -> RulesFinding | None:
    """Reads so many texts; the first that is read wrongly."""
    for _ in range(inputs):
        tried = text(rng).encode("utf-8", "replace").decode()
        begin_s = SYSTEM_CLOCK.monotonic_s()
        try:
            load_rules(tried, "plain_acl.yml")
        except ConfigurationError:
            pass
        except Exception as error:
            return RulesFinding(tried, f"{type(error).__name__}: {error}")
        if SYSTEM_CLOCK.monotonic_s() - begin_s > SECONDS_MAX:
            return RulesFinding(tried, f"took more than {SECONDS_MAX} s")
    return None
