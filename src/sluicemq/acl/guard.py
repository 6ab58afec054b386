"""The guard of a server: it checks each request against the access rules before the handler runs.

The rules in force are one attribute that is replaced as a whole, so no request sees half of a
change. A check costs one HMAC and a few dictionary look-ups; whether an address is in the global
white list is cached per address until the rules change.

Most requests are plain sends. They have a fast path: `admits_send` verifies only the signature of a
send whose account and topic were authorized before. `check` decides everything else.
"""

import logging
from binascii import b2a_base64
from collections.abc import Callable, Mapping
from dataclasses import replace
from hmac import compare_digest
from operator import itemgetter
from typing import Any, Final, NamedTuple, Protocol

from sluicemq.acl.loading import LoadedRules, RuleFiles, RuleSource
from sluicemq.acl.rules import (
    GROUP_PREFIX,
    Account,
    Permission,
    Rules,
    address_numbers,
)
from sluicemq.acl.verdict import (
    PUB,
    Request,
    Resource,
    Verdict,
    authorize,
    authorize_resource,
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
from sluicemq.record.codec import find_property, parse_head
from sluicemq.wire import fastjson
from sluicemq.wire.codes import ResponseCode
from sluicemq.wire.frames import Command, encode_response
from sluicemq.wire.signature import ACCESS_KEY, UNIQUE_KEY_QUERY, SigningKey, signed_names

log = logging.getLogger(__name__)

ADDRESSES_CACHED_MAX: Final = 10_000
EXCEPTION_NAME: Final = "org.apache.rocketmq.acl.common.AclException"
"""The first word of the remark of a refused request, as RocketMQ writes it; clients look for it."""
LOGGED_MAX: Final = 256
TOPICS_MAX: Final = 10_000
TOPIC_LENGTH_MAX: Final = 127
FIELDS_MAX: Final = 32
REASON_SHOWN_MAX: Final = 200
_WHITE: Final = Verdict(True, "", "globalWhiteRemoteAddresses")
Pick = Callable[[Any], tuple[Any, ...]]


class Caller(Protocol):
    """The part of a connection that the guard reads."""

    @property
    def remote(self) -> Host:
        """The address and port of the client."""
        ...


def refusal_remark(verdict: Verdict) -> str:
    """Return the remark of the answer to a refused request."""
    return f"{EXCEPTION_NAME}: {verdict.reason}"


class _SendVerifier(NamedTuple):
    """What `admits_send` needs to verify the signature of an account's sends to one topic."""

    copy_inner: Callable[[], Any]
    """Returns the inner hash of the HMAC, with the key already in it."""
    copy_outer: Callable[[], Any]
    """Returns the outer hash of the HMAC, with the key already in it."""
    signed_values: dict[int, Pick]
    """By number of header fields: a function that returns their values in the signed order."""


class Guard:
    """Checks the requests of one server against the access rules in force.

    All methods run on the thread of the server's event loop, except `check_files`, which blocks.
    """

    def __init__(
        self,
        source: RuleSource,
        clock: Clock | None = None,
        inner_account: InnerAccount | None = None,
    ) -> None:
        """Create a guard without rules. Call `load` before the first request.

        `source` reads the files of rules. `clock` gives the time of loading for `status`.
        `inner_account` is an account with all permissions that is in no file, and that `status` and
        `accounts` do not show: the servers of one `sluice up` use it among themselves.
        """
        self.source = source
        self._inner = (
            {}
            if inner_account is None
            else {inner_account.access_key: Account(*inner_account, is_admin=True, origin="inner")}
        )
        self._clock = clock
        self.loaded_ms = 0
        self.files: RuleFiles | None = None
        """The files whose rules are in force; None before `load`."""
        self._white_addresses: dict[str, bool] = {}
        """A cache: by address, whether it is in the global white list."""
        self._verifiers: dict[str, dict[str, _SendVerifier]] = {}
        """Verifiers by access key and topic, only of topics to which the account may send."""
        self.rules = Rules()
        self.warnings: tuple[str, ...] = ()
        self.error = ""
        """Why the newest files are not in force; "" if they are."""
        self.load_count = self.failed_load_count = 0
        self.refusal_counts: dict[str, int] = {}
        """The number of refused requests by access key: "" for requests without one, "?" for all
        unknown keys together."""
        self.account: Account | None = None
        """The account of the request that is being handled. None if its client may do everything,
        for example because of its address."""
        self._logged: set[int] = set()
        """The hashes of the reasons of refusals that were logged."""

    @classmethod
    def from_config(cls, files: Files, clock: Clock, config: ServerConfig) -> "Guard | None":
        """Create the guard of a server with these settings; None if `aclEnable` is false.

        Raises ConfigurationError if no file of rules exists.
        """
        if not config.acl_enable:
            return None
        return cls(RuleSource.from_config(files, config), clock, config.inner_account)

    # --- rules

    @property
    def path(self) -> str:
        """The path of the main file, `plain_acl.yml`."""
        return self.source.path

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of the files in force, in order of precedence; empty before `load`."""
        return tuple(path for path, _ in self.files.contents) if self.files is not None else ()

    def status(self) -> dict[str, Any]:
        """Return files, counters and errors of the rules as a dict, without secrets.

        `sluice acl status` shows them. The keys are the keys of the answer to SLUICE_ACCESS_STATUS.
        """
        return {
            "file": self.path,
            "files": list(self.paths),
            "sinceMs": self.loaded_ms,
            "accounts": len(self.accounts),
            "loads": self.load_count,
            "failedLoads": self.failed_load_count,
            "error": self.error,
            "warnings": list(self.warnings),
            "refused": dict(self.refusal_counts),
        }

    @property
    def accounts(self) -> Mapping[str, Account]:
        """The accounts of the files in force by access key, without the inner account."""
        return {
            access_key: account
            for access_key, account in self.rules.accounts.items()
            if access_key not in self._inner
        }

    def load(self) -> None:
        """Read the files and put their rules in force. Called when the server starts.

        Raises ConfigurationError if a file is invalid, and OSError if it cannot be read. A server
        must not start then: it would run without the rules it was configured with.
        """
        rule_files = self.source.read_files()
        self._put_in_force(rule_files, self.source.load(rule_files))

    def check_files(self) -> tuple[RuleFiles, LoadedRules] | ConfigurationError | None:
        """Read the files of rules again, and return the result for `apply_checked_files`.

        The result is (files, rules) if they have changed, None if not, and the error if they are
        invalid or cannot be read. Blocks, so call it on another thread than the event loop's.
        """
        try:
            rule_files = self.source.read_files()
            if rule_files == self.files:
                return None
            return rule_files, self.source.load(rule_files)
        except ConfigurationError as error:
            return error
        except OSError as error:
            return ConfigurationError(f"{self.source.path} cannot be read: {error}.", fix="")

    def apply_checked_files(
        self, check_result: tuple[RuleFiles, LoadedRules] | ConfigurationError | None
    ) -> None:
        """Put the rules in force that `check_files` has found to be changed.

        `check_result` is the result of `check_files`. If it is an error, the rules stay as they
        are, and the error is counted and logged, unless it is the same as before. None means that
        nothing has changed; an earlier error is then cleared.
        """
        if check_result is None:
            self.error = ""
            return

        if isinstance(check_result, ConfigurationError):
            # The files are checked every few seconds, so the same error is found again and again.
            error_text = str(check_result)
            if error_text != self.error:
                self.error = error_text
                self.failed_load_count += 1
                log.error(
                    "The access rules were not reloaded, the old ones remain in force: %s",
                    check_result,
                )
            return

        rule_files, loaded = check_result
        self._put_in_force(rule_files, loaded)

    def _put_in_force(self, rule_files: RuleFiles, loaded: LoadedRules) -> None:
        """Replace the rules by the rules that were loaded from `rule_files`.

        The inner account is added. The caches are cleared, because they depend on the rules. The
        change is counted and logged, with the warnings about the rules.
        """
        self.files = rule_files
        self.rules = loaded.rules
        self.warnings = loaded.warnings
        self.error = ""
        if self._inner:
            accounts = {**loaded.rules.accounts, **self._inner}
            self.rules = replace(loaded.rules, accounts=accounts)

        self._white_addresses.clear()
        self._verifiers.clear()

        self.load_count += 1
        self.loaded_ms = 0 if self._clock is None else self._clock.now_ms()
        _log_loaded(rule_files, loaded)

    # --- requests

    def check(
        self, code: int, fields: Mapping[str, str], body: bytes, version: int, host: str
    ) -> Verdict:
        """Decide whether a request is allowed, and set `account` for its handler.

        `host` is the address of the client without its port. `account` becomes None if the address
        alone allows the request. A refusal is counted. Raises ProtocolError if the body, which may
        name topics and groups, cannot be parsed.
        """
        self.account = None
        if self.is_white_address(host):
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
        """Decide whether a gRPC call comes from a known account; count a refusal.

        `authorization` and `date_time` are headers of the call, and `host` is the client's address.
        The call is refused if its date differs from `now_ms` by more than `age_s_max` seconds (0
        means no limit). The verdict has the account. The attribute `account` is not changed.
        """
        verdict = identify_call(
            self.rules, authorization, date_time, host, now_ms=now_ms, age_s_max=age_s_max
        )
        if not verdict.is_allowed:
            credential = authorization.partition("Credential=")[2].partition(",")[0]
            access_key = credential.partition("/")[0]
            self._count_refusal(access_key)
        return verdict

    def check_for_account(
        self, account: Account | None, code: int, fields: Mapping[str, str], body: bytes
    ) -> Verdict:
        """Decide whether `account` may make a request, which the proxy sends on its behalf.

        If `account` is None, every request is allowed. Sets the attribute `account` for the
        handler, and counts a refusal. Raises ProtocolError if the body, which may name topics and
        groups, cannot be parsed.
        """
        self.account = account
        if account is None:
            return _WHITE
        verdict = authorize(account, Request(code, fields, body, 0, ""))
        if not verdict.is_allowed:
            self._count_refusal(account.access_key)
        return verdict

    def admits_send(self, header: dict[str, Any], body: bytes, peer: Caller) -> bool:
        """Return True if a send is certainly authorized and correctly signed. HOT.

        `header` is the decoded header of a SEND_MESSAGE_V2 (310); its values may be of any type.
        False is not a refusal; the caller must then call `check`. The check needs a verifier
        (prepared signing key) for the account, topic and number of fields. If there is none, it is
        prepared for the next send.
        """
        try:
            fields = header["extFields"]
            copy_inner, copy_outer, signed_values = self._verifiers[fields["AccessKey"]][
                fields["b"]
            ]
            inner = copy_inner()
            outer = copy_outer()
            inner.update("".join(signed_values[len(fields)](fields)).encode() + body)
            outer.update(inner.digest())
            signature = b2a_base64(outer.digest(), newline=False)
            return compare_digest(signature, fields["Signature"].encode())
        except (KeyError, TypeError, ValueError, AttributeError):
            return self._learn_send(header.get("extFields"), peer)

    def _learn_send(self, fields: Any, peer: Caller) -> bool:
        """Prepare a verifier, so that `admits_send` can check the next send of this kind.

        `fields` are the header fields of the present send. Nothing is prepared if they are
        malformed, or if only `check` can decide: the account is unknown, has a white list, or may
        not send to the topic.

        Return True if the address of `peer` is in the global white list, which allows everything.
        Otherwise return False: the present send must pass `check`.
        """
        if self.is_white_address(peer.remote.address):
            return True

        # The request is not validated yet: its fields may have any type and size.
        if not isinstance(fields, dict) or len(fields) > FIELDS_MAX:
            return False
        access_key = fields.get(ACCESS_KEY)
        topic = fields.get("b")
        if not isinstance(access_key, str) or not isinstance(topic, str):
            return False

        account = self.rules.accounts.get(access_key)
        if account is None or not _can_learn_sends(account, topic):
            return False

        verifier = self._get_or_add_verifier(account, topic)
        if UNIQUE_KEY_QUERY not in fields:  # old clients do not sign it
            get_signed_values = itemgetter(*signed_names(tuple(fields)))
            verifier.signed_values[len(fields)] = get_signed_values
        return False

    def _get_or_add_verifier(self, account: Account, topic: str) -> _SendVerifier:
        """Return the verifier (prepared signing key) of an account's sends to a topic.

        If there is none, add one. The account's other verifiers are removed if there are
        TOPICS_MAX.
        """
        verifiers_by_topic = self._verifiers.setdefault(account.access_key, {})
        verifier = verifiers_by_topic.get(topic)
        if verifier is None:
            if len(verifiers_by_topic) >= TOPICS_MAX:
                verifiers_by_topic.clear()
            key = SigningKey(account.secret_key)
            verifier = _SendVerifier(key.copy_inner, key.copy_outer, {})
            verifiers_by_topic[topic] = verifier
        return verifier

    def refuse_command(self, command: Command, peer: Caller) -> bytes | None:
        """Return the encoded refusal of a request; None if it may be handled.

        A Dispatcher calls it before each handler. Sets `account` for the handler. A refusal is
        counted, and logged if its reason is new (up to LOGGED_MAX reasons). Raises ProtocolError if
        the body, which may name topics and groups, cannot be parsed.
        """
        verdict = self.check(
            command.code,
            command.fields or {},
            bytes(command.body),
            command.version,
            peer.remote.address,
        )
        if verdict.is_allowed:
            return None
        reason_hash = hash(verdict.reason)
        if reason_hash not in self._logged and len(self._logged) < LOGGED_MAX:
            self._logged.add(reason_hash)
            reason = verdict.reason[:REASON_SHOWN_MAX]
            log.warning("Refused request %d from %s: %r", command.code, peer.remote, reason)
        return encode_response(command, ResponseCode.SYSTEM_ERROR, remark=refusal_remark(verdict))

    def check_topic(self, topic: str, need: Permission) -> Verdict:
        """Decide whether the account of the current request has the permission `need` for a topic.

        Handlers call this if they learn the topic only while they run. A refusal is counted.
        """
        if self.account is None:
            return _WHITE
        verdict = authorize_resource(self.account, Resource(topic, need))
        if not verdict.is_allowed:
            self._count_refusal(self.account.access_key)
        return verdict

    def is_white_address(self, host: str) -> bool:
        """Return whether `host`, an address without port, is in the global white list."""
        is_white = self._white_addresses.get(host)
        if is_white is None:
            if len(self._white_addresses) >= ADDRESSES_CACHED_MAX:
                self._white_addresses.clear()
            address = address_numbers(host)
            is_white = any(pattern.matches(address) for pattern in self.rules.white_addresses)
            self._white_addresses[host] = is_white
        return is_white

    def _count_refusal(self, access_key: str) -> None:
        """Count a refused request in `refusal_counts`; "" means that it has no access key."""
        if access_key and access_key not in self.rules.accounts:
            access_key = "?"  # a client that invents keys must not fill memory and metrics
        self.refusal_counts[access_key] = self.refusal_counts.get(access_key, 0) + 1


def _log_loaded(rule_files: RuleFiles, loaded: LoadedRules) -> None:
    """Log the warnings about loaded rules and their number.

    Also warn about a global white address that admits every client.
    """
    for warning in loaded.warnings:
        log.warning("%s", warning)
    log.info(
        "Loaded access rules: %d accounts from %d files.",
        len(loaded.rules.accounts),
        len(rule_files.contents),
    )
    for pattern in loaded.rules.white_addresses:
        if pattern.matches_all:
            log.warning(
                "globalWhiteRemoteAddresses has %r: every client may do everything. Replace it by "
                "the addresses of your servers.",
                pattern.text,
            )
            return


def _can_learn_sends(account: Account, topic: str) -> bool:
    """Return whether a right signature of the account is enough for a send to the topic.

    The signature is not enough in these cases: an account with a white list may need no signature,
    a send to a retry topic requires SUB on the group instead of PUB, the topic is too long, or the
    account lacks PUB on the topic.
    """
    if account.white_addresses is not None or topic.startswith(GROUP_PREFIX):
        return False
    if len(topic) > TOPIC_LENGTH_MAX:
        return False
    return authorize_resource(account, Resource(topic, PUB)).is_allowed


def access_status(guard: Guard | None) -> Command:
    """Return the answer to SLUICE_ACCESS_STATUS for a server with this guard, or without one."""
    body = {"enabled": False} if guard is None else {"enabled": True, **guard.status()}
    return Command(ResponseCode.SUCCESS, body=fastjson.dumps_strict(body))


class Access:
    """Checks permissions in handlers that learn only while they run which topic a request concerns.

    VIEW_MESSAGE_BY_ID (33), CONSUMER_SEND_MSG_BACK (36) and END_TRANSACTION (37) name a position of
    the log, and only the message at that position has the topic. Delayed, timed and prepared
    messages are stored in system topics; for them the topic of destination is checked as well.
    Without a guard everything is allowed.
    """

    def __init__(self, guard: Guard | None = None) -> None:
        """Create the checks of a server with this guard; None means without access control."""
        self.guard = guard

    @property
    def is_open(self) -> bool:
        """Whether the client of the current request may do everything."""
        return self.guard is None or self.guard.account is None

    @property
    def account(self) -> str:
        """The access key of the current request's account; "" if the client may do everything."""
        if self.guard is None or self.guard.account is None:
            return ""
        return self.guard.account.access_key

    def require(self, topic: str, need: Permission) -> None:
        """Raise RequestError unless the request's account has permission `need` for a topic."""
        if self.guard is None:
            return
        verdict = self.guard.check_topic(topic, need)
        if not verdict.is_allowed:
            raise RequestError(ResponseCode.SYSTEM_ERROR, refusal_remark(verdict))

    def require_record(self, record: bytes, need: Permission) -> None:
        """Raise RequestError unless the request may use the topic of a stored `record`.

        If the record is in a system topic, the topic for which it is meant is checked too. Also
        raises RequestError if the record cannot be parsed.
        """
        if self.is_open:
            return
        try:
            head = parse_head(record)
        except ProtocolError as error:
            raise RequestError(ResponseCode.SYSTEM_ERROR, str(error)) from error
        topic = bytes(record[head.topic]).decode("utf-8", "replace")
        self.require(topic, need)
        destination = find_property(bytes(record[head.properties]), REAL_TOPIC.encode())
        # In other topics any producer can write this property, so it proves nothing there.
        if destination and stores_other_topics_messages(topic):
            self.require(destination.decode("utf-8", "replace"), need)
