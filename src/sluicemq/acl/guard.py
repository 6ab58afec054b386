"""The guard of a server: every request passes `check` before its handler.

The rules in force are one attribute, assigned as a whole. What a verdict costs is the signature
(one HMAC) and a few dict look-ups: whether an address is white is kept for each address until the
rules change.

Plain sends, which are most requests, have a way of their own: `admit` says yes or no to one without
making anything of it but its signature. What it does not know goes through `check`.
"""

import logging
from binascii import b2a_base64
from collections.abc import Callable, Mapping
from dataclasses import replace
from hmac import compare_digest
from operator import itemgetter
from typing import Any, Final, NamedTuple, Protocol

from sluicemq.acl.loading import Read, Source, Texts
from sluicemq.acl.rules import GROUP_PREFIX, Account, Permission, Rules, numbers_of
from sluicemq.acl.verdict import (
    PUB,
    Request,
    Resource,
    Verdict,
    authorize,
    decide,
    identify,
    identify_call,
)
from sluicemq.clock import Clock
from sluicemq.config.keys import InnerAccount, ServerConfig
from sluicemq.errors import ConfigurationError, ProtocolError, RequestError
from sluicemq.files import Files
from sluicemq.model.ids import Host
from sluicemq.model.message import REAL_TOPIC
from sluicemq.model.system_names import stores_other_topics_messages
from sluicemq.record.codec import parse_head, value_of
from sluicemq.wire import fastjson
from sluicemq.wire.codes import ResponseCode
from sluicemq.wire.frames import Command, encode_answer
from sluicemq.wire.signature import ACCESS_KEY, UNIQUE_KEY_QUERY, Key, signed_names

log = logging.getLogger(__name__)

HOSTS_MAX: Final = 10_000
EXCEPTION: Final = "org.apache.rocketmq.acl.common.AclException"
"""What the remark of a refusal begins with: clients and their logs know it by this name."""
LOGGED_MAX: Final = 256
TOPICS_MAX: Final = 10_000
TOPIC_LENGTH_MAX: Final = 127
FIELDS_MAX: Final = 32
REASON_SHOWN_MAX: Final = 200
_WHITE: Final = Verdict(True, "", "globalWhiteRemoteAddresses")
Pick = Callable[[Any], tuple[Any, ...]]


class Caller(Protocol):
    """Who asks: the part of a connection that is looked at here."""

    @property
    def remote(self) -> Host: ...


def refusal(verdict: Verdict) -> str:
    """The remark of a refused request."""
    return f"{EXCEPTION}: {verdict.reason}"


class _Sender(NamedTuple):
    """What a send of an account is checked with: the beginning and end of its HMAC, and in which
    order fields are signed, by their number."""

    begin: Callable[[], Any]
    finish: Callable[[], Any]
    orders: dict[int, Pick]


class Guard:
    """Who may do what on one server. All in the thread of its loop, except `look`."""

    def __init__(
        self,
        source: Source,
        clock: Clock | None = None,
        inner_account: InnerAccount | None = None,
    ) -> None:
        """`clock` tells since when rules are in force. `inner_account` may do everything, is in no
        file, and is shown to nobody."""
        self.source = source
        self._inner = (
            {}
            if inner_account is None
            else {inner_account.access_key: Account(*inner_account, is_admin=True, origin="inner")}
        )
        self._clock = clock
        self.since_ms = 0
        self.texts: Texts | None = None
        """The files that are in force."""
        self._hosts: dict[str, bool] = {}
        self._senders: dict[str, dict[str, _Sender]] = {}
        """By access key and topic; only where a send is allowed."""
        self.rules = Rules()
        self.warnings: tuple[str, ...] = ()
        self.error = ""
        """Why the newest files are not in force; "" when they are."""
        self.loads = self.loads_failed = 0
        self.denied: dict[str, int] = {}
        """Refused requests by access key ("" without one); of unknown keys all under "?"."""
        self.account: Account | None = None
        """Who the request that is handled now comes from; None: somebody who may do all."""
        self._logged: set[int] = set()

    @classmethod
    def of(cls, files: Files, clock: Clock, config: ServerConfig) -> "Guard | None":
        """That of a server with these settings. Raises ConfigurationError without a file."""
        if not config.acl_enable:
            return None
        return cls(Source.of(files, config), clock, config.inner_account)

    # --- rules

    @property
    def path(self) -> str:
        """The main file."""
        return self.source.path

    @property
    def paths(self) -> tuple[str, ...]:
        """All files, in the order in which they count."""
        return tuple(path for path, _ in self.texts.items) if self.texts is not None else ()

    def status(self) -> dict[str, Any]:
        """How the rules stand, for `sluice acl status`: nothing secret."""
        return {
            "file": self.path,
            "files": list(self.paths),
            "sinceMs": self.since_ms,
            "accounts": len(self.accounts),
            "loads": self.loads,
            "failedLoads": self.loads_failed,
            "error": self.error,
            "warnings": list(self.warnings),
            "refused": dict(self.denied),
        }

    @property
    def accounts(self) -> Mapping[str, Account]:
        """The accounts of the files that are in force."""
        known = self.rules.accounts
        return {name: one for name, one in known.items() if name not in self._inner}

    def load(self) -> None:
        """At the start. Raises ConfigurationError and OSError: a server does not run without
        the rules it was told to have."""
        texts = self.source.texts()
        self._adopt(texts, self.source.read(texts))

    def look(self) -> tuple[Texts, Read] | ConfigurationError | None:
        """Blocking, for another thread: what is new in the files, or what is wrong with them."""
        try:
            texts = self.source.texts()
            return None if texts == self.texts else (texts, self.source.read(texts))
        except ConfigurationError as error:
            return error
        except OSError as error:
            return ConfigurationError(f"{self.source.path} cannot be read: {error}.", fix="")

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
        self.texts = texts
        self.rules, self.warnings, self.error = read.rules, read.warnings, ""
        if self._inner:
            accounts = {**read.rules.accounts, **self._inner}
            self.rules = replace(read.rules, accounts=accounts)
        self._hosts.clear()
        self._senders.clear()
        self.loads += 1
        self.since_ms = 0 if self._clock is None else self._clock.now_ms()
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
                verdict = authorize(verdict.account, request)
        if not verdict.is_allowed:
            self._count_refusal(fields.get(ACCESS_KEY, ""))
        return verdict

    def identify_call(
        self, authorization: str, date_time: str, host: str, *, now_ms: int, age_s_max: int
    ) -> Verdict:
        """Return the account of a gRPC call (`verdict.identify_call`), and count a refusal."""
        verdict = identify_call(
            self.rules, authorization, date_time, host, now_ms=now_ms, age_s_max=age_s_max
        )
        if not verdict.is_allowed:
            key = authorization.partition("Credential=")[2].partition(",")[0].partition("/")[0]
            self._count_refusal(key)
        return verdict

    def check_as(
        self, account: Account | None, code: int, fields: Mapping[str, str], body: bytes
    ) -> Verdict:
        """The verdict on a request that the proxy makes in the name of an account; None may do all.
        `account` is set for its handler. Raises ProtocolError as `check` does."""
        self.account = account
        if account is None:
            return _WHITE
        verdict = authorize(account, Request(code, fields, body, 0, ""))
        if not verdict.is_allowed:
            self._count_refusal(account.access_key)
        return verdict

    def admit(self, header: dict[str, Any], body: bytes, peer: Caller) -> bool:
        """May this plain send (310, fields by letter, of any type) pass? HOT.

        False is no refusal: `check` decides then.
        """
        try:
            fields = header["extFields"]
            begin, finish, orders = self._senders[fields["AccessKey"]][fields["b"]]
            inner, outer = begin(), finish()
            inner.update("".join(orders[len(fields)](fields)).encode() + body)
            outer.update(inner.digest())
            signature = b2a_base64(outer.digest(), newline=False)
            return compare_digest(signature, fields["Signature"].encode())
        except (KeyError, TypeError, ValueError, AttributeError):
            return self._admit_first(header.get("extFields"), peer)

    def _admit_first(self, fields: Any, peer: Caller) -> bool:
        """A send of somebody, to a topic or with fields that `admit` has not met: it knows them
        the next time. Now True only for a white address."""
        if self.is_white(peer.remote.address):
            return True
        if not isinstance(fields, dict) or len(fields) > FIELDS_MAX:
            return False
        access_key, topic = fields.get(ACCESS_KEY), fields.get("b")
        if not isinstance(access_key, str) or not isinstance(topic, str):
            return False
        account = self.rules.accounts.get(access_key)
        if account is None or account.white is not None or len(topic) > TOPIC_LENGTH_MAX:
            return False
        if topic.startswith(GROUP_PREFIX) or not decide(account, Resource(topic, PUB)).is_allowed:
            return False
        topics = self._senders.setdefault(access_key, {})
        if topic not in topics:
            if len(topics) >= TOPICS_MAX:
                topics.clear()
            key = Key(account.secret_key)
            topics[topic] = _Sender(key.begin, key.finish, {})
        if UNIQUE_KEY_QUERY not in fields:  # old clients do not sign it
            topics[topic].orders[len(fields)] = itemgetter(*signed_names(tuple(fields)))
        return False

    def before(self, command: Command, peer: Caller) -> bytes | None:
        """For a Dispatcher: the answer to a request that is refused, as RocketMQ words it; None
        lets it pass. Raises ProtocolError as `check` does."""
        verdict = self.check(
            command.code,
            command.fields or {},
            bytes(command.body),
            command.version,
            peer.remote.address,
        )
        if verdict.is_allowed:
            return None
        told = hash(verdict.reason)
        if told not in self._logged and len(self._logged) < LOGGED_MAX:
            self._logged.add(told)
            reason = verdict.reason[:REASON_SHOWN_MAX]
            log.warning("refused request %d of %s: %r", command.code, peer.remote, reason)
        return encode_answer(command, ResponseCode.SYSTEM_ERROR, remark=refusal(verdict))

    def may(self, topic: str, need: Permission) -> Verdict:
        """For a handler that learns the topic on its way: may who asks now do that?"""
        if self.account is None:
            return _WHITE
        verdict = decide(self.account, Resource(topic, need))
        if not verdict.is_allowed:
            self._count_refusal(self.account.access_key)
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

    def _count_refusal(self, access_key: str) -> None:
        if access_key and access_key not in self.rules.accounts:
            access_key = "?"  # else whoever invents keys fills memory and metrics
        self.denied[access_key] = self.denied.get(access_key, 0) + 1


def access_status(guard: Guard | None) -> Command:
    """Return the answer to SLUICE_ACCESS_STATUS of a server with this guard."""
    body = {"enabled": False} if guard is None else {"enabled": True, **guard.status()}
    return Command(ResponseCode.SUCCESS, body=fastjson.dumps_strict(body))


class Access:
    """What handlers ask that learn on their way which topic a request is about. Without a guard
    everything is allowed.

    A request names a place in the log (33, 36, 37), and only the message there says whose it is.
    The topics in which messages wait (delayed, timed, in a transaction) hold those of all topics:
    there the topic that a message is bound for counts too.
    """

    def __init__(self, guard: Guard | None = None) -> None:
        self.guard = guard

    @property
    def is_open(self) -> bool:
        """Whether whoever asks now may do everything."""
        return self.guard is None or self.guard.account is None

    @property
    def account(self) -> str:
        """The access key of the account that asks now; "" without one, for a client that may do
        everything."""
        found = self.guard.account if self.guard is not None else None
        return "" if found is None else found.access_key

    def require(self, topic: str, need: Permission) -> None:
        """Raises RequestError as a refusal at the door would be answered."""
        if self.guard is None:
            return
        verdict = self.guard.may(topic, need)
        if not verdict.is_allowed:
            raise RequestError(ResponseCode.SYSTEM_ERROR, refusal(verdict))

    def require_record(self, data: bytes, need: Permission) -> None:
        """For the message in a stored record: its topic, and the one that it is bound for."""
        if self.is_open:
            return
        try:
            head = parse_head(data)
        except ProtocolError as error:
            raise RequestError(ResponseCode.SYSTEM_ERROR, str(error)) from error
        topic = bytes(data[head.topic]).decode("utf-8", "replace")
        self.require(topic, need)
        bound_for = value_of(bytes(data[head.properties]), REAL_TOPIC.encode())
        if bound_for and stores_other_topics_messages(topic):  # elsewhere any producer can write it
            self.require(bound_for.decode("utf-8", "replace"), need)
