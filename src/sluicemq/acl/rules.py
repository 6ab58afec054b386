"""The rules of access: accounts, their permissions, white lists. Frozen, so that a change of rules
is one assignment: no request ever sees half of a new file.

A group g is the resource `%RETRY%g`, as in RocketMQ: sends to the retry topic and the group itself
have one permission, and an entry of topicPerms for that name overrides groupPerms. The dead letters
of a group (`%DLQ%g`) are a topic like any other: they come from all topics that the group reads.
Names are exact; there are no wildcards.
"""

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from sluicemq.acl.addresses import Pattern
from sluicemq.errors import ConfigurationError

GROUP_PREFIX: Final = "%RETRY%"


INNER_TOPICS: Final = frozenset({
    "SCHEDULE_TOPIC_XXXX", "rmq_sys_wheel_timer", "RMQ_SYS_TRANS_HALF_TOPIC",
    "RMQ_SYS_TRANS_OP_HALF_TOPIC", "TRANS_CHECK_MAX_TIME_TOPIC",
})  # fmt: skip
"""Where messages of all topics wait: no default opens them, only an entry of their own."""


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
            cure="Write DENY, PUB, SUB, PUB|SUB or ANY (PUB or SUB), in capitals, without blanks.",
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
        if resource in INNER_TOPICS:
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
