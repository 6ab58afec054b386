"""The guard at the door of a server: every request passes `check` before its handler.

The rules in force are one attribute, assigned as a whole. What a verdict costs is the signature
(one HMAC) and a few dict look-ups: whether an address is white is kept for each address until the
rules change.
"""

import logging
from collections.abc import Mapping
from typing import Final

from sluicemq.acl.addresses import numbers_of
from sluicemq.acl.needs import Resource, need_of
from sluicemq.acl.rules import Account, Permission, Rules
from sluicemq.acl.source import Read, Source, Texts, read_rules
from sluicemq.acl.verdict import Request, Verdict, authorize, decide, identify
from sluicemq.errors import ConfigurationError

log = logging.getLogger(__name__)

HOSTS_MAX: Final = 10_000
_WHITE: Final = Verdict(True, "", "globalWhiteRemoteAddresses")


class Guard:
    """Who may do what on one server. All in the thread of its loop, except `look`."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._texts: Texts | None = None
        self._hosts: dict[str, bool] = {}
        self.rules = Rules()
        self.warnings: tuple[str, ...] = ()
        self.error = ""
        """Why the newest files are not in force; "" when they are."""
        self.loads = self.loads_failed = 0
        self.allowed = 0
        self.denied: dict[str, int] = {}
        """Refused requests by access key ("" without one); of unknown keys all under "?"."""
        self.account: Account | None = None
        """Who the request that is handled now comes from; None: somebody who may do all."""

    # --- rules

    def load(self) -> None:
        """At the start. Raises ConfigurationError and OSError: a server does not run without
        the rules it was told to have."""
        texts = self._source.texts()
        self._adopt(texts, read_rules(texts))

    def look(self) -> tuple[Texts, Read] | ConfigurationError | None:
        """Blocking, for another thread: what is new in the files, or what is wrong with them."""
        try:
            texts = self._source.texts()
            return None if texts == self._texts else (texts, read_rules(texts))
        except ConfigurationError as error:
            return error
        except OSError as error:
            return ConfigurationError(f"{self._source.path} cannot be read: {error}.", cure="")

    def settle(self, found: tuple[Texts, Read] | ConfigurationError | None) -> None:
        """What `look` found: new rules are in force from here on; a wrong file changes nothing."""
        if isinstance(found, ConfigurationError):
            if str(found) != self.error:
                self.error = str(found)
                self.loads_failed += 1
                log.error("the access rules stay as they were: %s", found)
        elif found is not None:
            self._adopt(*found)
        else:
            self.error = ""

    def _adopt(self, texts: Texts, read: Read) -> None:
        self._texts = texts
        self.rules, self.warnings, self.error = read.rules, read.warnings, ""
        self._hosts.clear()
        self.loads += 1
        for warning in read.warnings:
            log.warning("%s", warning)
        log.info(
            "access rules: %d accounts from %d files", len(read.rules.accounts), len(texts.items)
        )
        everybody = [one.text for one in read.rules.white if one.is_everybody]
        if everybody:
            log.warning(
                "globalWhiteRemoteAddresses has %r: everybody may do everything", everybody[0]
            )

    # --- requests

    def check(
        self, code: int, fields: Mapping[str, str], body: bytes, version: int, host: str
    ) -> Verdict:
        """The verdict on one request; `account` is set for its handler.

        Raises ProtocolError when its body, which names topics and groups, cannot be read.
        """
        self.account = None
        if self.is_white(host):
            verdict = _WHITE
        else:
            request = Request(code, fields, body, version, host)
            verdict = identify(self.rules, request)
            if verdict.is_allowed and verdict.account is not None:
                self.account = verdict.account
                verdict = authorize(verdict.account, code, need_of(code), request)
        if verdict.is_allowed:
            self.allowed += 1
        else:
            self._count_refusal(verdict)
        return verdict

    def may(self, topic: str, need: Permission) -> Verdict:
        """For a handler that learns the topic on its way: may who asks now do that?"""
        if self.account is None:
            return _WHITE
        verdict = decide(self.account, Resource(topic, need))
        if not verdict.is_allowed:
            self._count_refusal(verdict)
        return verdict

    def is_white(self, host: str) -> bool:
        """Whether everything is allowed from an address."""
        known = self._hosts.get(host)
        if known is None:
            if len(self._hosts) >= HOSTS_MAX:
                self._hosts.clear()
            numbers = numbers_of(host)
            known = any(pattern.matches(numbers) for pattern in self.rules.white)
            self._hosts[host] = known
        return known

    def _count_refusal(self, verdict: Verdict) -> None:
        key = "?" if verdict.account is None else verdict.account.access_key
        self.denied[key] = self.denied.get(key, 0) + 1
