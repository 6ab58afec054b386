"""The check of one request, in RocketMQ's order (spec/acl):

    1  the address is in the global white list          allowed, whoever it is
    2  no AccessKey, or one that no account has         refused
    3  the address is in the account's white list       allowed, without signature
    4  the signature                                    compared in constant time
    5  a send to the trace or the staging topic         allowed: clients write there by themselves
    6  an admin account                                 allowed everything
    7  the request needs admin                          refused
    8  each topic and group: its entry, or the default

Requests are read only after the first three steps: who may do all needs no well-formed body here.
"""

import hmac
from collections.abc import Mapping
from typing import Final, NamedTuple

from sluicemq.acl.addresses import numbers_of
from sluicemq.acl.needs import Need, Resource, need_of
from sluicemq.acl.rules import GROUP_PREFIX, WORD_OF, Account, Permission, Rules
from sluicemq.protocol.bodies.epochs import STAGING_TOPIC
from sluicemq.protocol.signature import ACCESS_KEY, SIGNATURE, sign

FREE_TO_WRITE: Final = ("RMQ_SYS_TRACE_TOPIC", STAGING_TOPIC)
"""Topics that clients write to by themselves. What is staged is seen by nobody until a commit,
which needs PUB for the topics it goes to."""


class Verdict(NamedTuple):
    """`reason` is "" when allowed, else a sentence for the caller; `rule` is what decided, with the
    file and line, for `sluice acl check`. `account` is who asked, None for an address."""

    is_allowed: bool
    reason: str
    rule: str
    account: Account | None = None


class Request(NamedTuple):
    """What a verdict is about; `host` is the caller's address without port."""

    code: int
    fields: Mapping[str, str]
    body: bytes
    version: int
    host: str


def check(rules: Rules, request: Request) -> Verdict:
    """Raises ProtocolError when the body, which names topics and groups, cannot be read."""
    verdict = identify(rules, request)
    if not verdict.is_allowed or verdict.account is None:
        return verdict
    return authorize(verdict.account, request.code, need_of(request.code), request)


def identify(rules: Rules, request: Request) -> Verdict:
    """Steps 1 to 4: who is it? Allowed without an account: by address, to do anything."""
    numbers = numbers_of(request.host)
    for pattern in rules.white:
        if pattern.matches(numbers):
            return Verdict(True, "", f"globalWhiteRemoteAddresses {pattern.text}")
    access_key = request.fields.get(ACCESS_KEY)
    if access_key is None:
        return Verdict(False, "No accessKey is configured", "no AccessKey in the request")
    account = rules.accounts.get(access_key)
    if account is None:
        return Verdict(False, f"No acl config for {access_key}", "no such account")
    if account.white is not None and account.white.matches(numbers):
        rule = f"{account.origin} whiteRemoteAddress {account.white.text}"
        return Verdict(True, "", rule, None)
    if not _is_signed(account, request):
        return Verdict(
            False,
            f"Check signature failed for accessKey={access_key}",
            f"{account.origin} secretKey",
        )
    return Verdict(True, "", f"{account.origin} secretKey", account)


def _is_signed(account: Account, request: Request) -> bool:
    given = request.fields.get(SIGNATURE)
    if not given:
        return False
    expected = sign(request.fields, request.body, account.secret_key, version=request.version)
    return hmac.compare_digest(expected.encode(), given.encode("utf-8", "replace"))


def authorize(account: Account, code: int, need: Need, request: Request) -> Verdict:
    """Steps 5 to 8, for an account whose signature is right."""
    if account.is_admin:
        return Verdict(True, "", f"{account.origin} admin: true", account)
    if need.is_admin:
        return Verdict(
            False,
            f"Need admin permission for request code={code}, but accessKey={account.access_key}"
            " is not",
            f"{account.origin} admin: false",
            account,
        )
    if need.asks is None:
        return Verdict(True, "", f"request code {code} needs an account alone", account)
    rule = ""
    for resource in need.asks(request.fields, request.body):
        verdict = decide(account, resource)
        if not verdict.is_allowed:
            return verdict
        rule = verdict.rule
    return Verdict(True, "", rule or f"request code {code} names no topic or group", account)


def decide(account: Account, resource: Resource) -> Verdict:
    """One topic or group."""
    name, need = resource
    if account.is_admin:
        return Verdict(True, "", f"{account.origin} admin: true", account)
    if name in FREE_TO_WRITE and need & Permission.PUB:
        return Verdict(True, "", f"every account may write to {name}", account)
    owned, is_explicit = account.permission(name)
    kind = "group" if name.startswith(GROUP_PREFIX) else "topic"
    shown = name.removeprefix(GROUP_PREFIX)
    default = f"default{kind.capitalize()}Perm"
    entry = f"{kind}Perms {shown}" if is_explicit else f"{default} for {shown}"
    rule = f"{account.origin} {entry}={WORD_OF[owned]}"
    if owned & need:
        return Verdict(True, "", rule, account)
    what = "permission" if is_explicit else "default permission"
    return Verdict(False, f"No {what} for {kind}:{shown}", rule, account)
