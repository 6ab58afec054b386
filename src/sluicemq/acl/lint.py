"""What is allowed and yet not wise in access rules. Findings name the place and never a secret."""

from collections.abc import Collection, Iterable, Iterator
from typing import Final, NamedTuple

from sluicemq.acl.rules import GROUP_PREFIX, Account, Rules

SECRET_LENGTH_MIN: Final = 16
_WEAK: Final = ("12345678", "password", "rocketmq", "87654321", "secret")


class Finding(NamedTuple):
    """`place` is a file and line, or a key of the file."""

    place: str
    text: str
    cure: str


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
                cure = "Name the addresses of your own servers, or none."
                found.append(Finding("globalWhiteRemoteAddresses", text, cure))
        for account in rules.accounts.values():
            first = seen.setdefault(account.access_key, account.origin)
            if first != account.origin:
                text = f"account {account.access_key} does not count: {first} comes first"
                found.append(Finding(account.origin, text, "Remove one of the two."))
                continue
            said = (*_account(account, secret_length_min), *_permissions(account, topics, groups))
            found += [Finding(account.origin, text, cure) for text, cure in said]
    return found


def _account(account: Account, secret_length_min: int) -> Iterator[tuple[str, str]]:
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


def _permissions(
    account: Account, topics: Collection[str] | None, groups: Collection[str] | None
) -> Iterator[tuple[str, str]]:
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
