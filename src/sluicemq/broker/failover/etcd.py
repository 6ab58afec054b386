"""The consensus service etcd, 3.4 or later, through its HTTP/JSON gateway.

The adapter uses four requests (`/v3/kv/range`, `/v3/kv/txn`, `/v3/lease/…`, `/v3/watch`), and
`/v3/auth/authenticate` to get a token if etcd has accounts. Keys and values are sent in base64. The
version of a key is its `mod_revision`, which etcd never gives twice.

- Reads are linearizable, which is etcd's default: a member that cannot reach the majority does not
  answer.
- A transaction is sent once. An error after it may have reached etcd becomes a `ConsensusError`.
  Only if no connection can be made, the request is sent to the next address.
- etcd refuses a token that it has forgotten, or that is older than a change of its accounts, before
  it does anything. Then the adapter gets a new token and sends the request again.
- A watch only signals that something has changed. The adapter then reads all keys of the prefix, so
  that it always reports the keys of one moment and need not handle compacted revisions. It also
  reads them after `QUIET_S` without a signal, because a broken connection may look like silence.

The adapter uses httpx rather than aetcd, whose last release is of 2022 and needs the compiled
library grpcio.
"""

import asyncio
import base64
import contextlib
import logging
import ssl
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import httpx
import orjson

from sluicemq.broker.failover.consensus import (
    NO_CONDITIONS,
    Entries,
    Entry,
    KeepAliveLease,
    Swap,
)
from sluicemq.config import BrokerConfig
from sluicemq.errors import ConfigurationError, ConsensusError

# The name is published: users configure logging by it. So it does not follow the module's name.
log = logging.getLogger("sluicemq.replication")

SCHEMES: Final = {"etcd": "http", "etcds": "https"}
"""The scheme of a sluiceConsensus URL, and the scheme of its HTTP requests."""

CONNECT_S: Final = 0.5
"""The timeout of a connection attempt, in seconds."""

ANSWER_S: Final = 2.0
"""The timeout of a response, in seconds."""

QUIET_S: Final = 5.0
"""The time without events after which a watch reads all keys again, in seconds."""

PAUSE_S: Final = 0.2
"""The pause before a failed or canceled watch is started again, in seconds."""

LEASE_NOT_FOUND: Final = 5
"""gRPC's status NOT_FOUND. A lease is the only thing that etcd can miss in these requests."""

OLD_TOKEN: Final = ("invalid auth token", "revision of auth store is old", "user name is empty")
"""Parts of etcd's error messages that ask for a new token."""

_UNSENT: Final = (httpx.ConnectError, httpx.ConnectTimeout)


class Account(NamedTuple):
    """The name and password of an etcd user."""

    name: str
    password: str


class Certificates(NamedTuple):
    """Paths of PEM files for TLS; an empty path means that the file is not used."""

    ca: str = ""
    """The certificates of the authorities that sign etcd's certificate."""
    certificate: str = ""
    """The client's certificate, if etcd asks for one."""
    key: str = ""
    """The private key of `certificate`, without a password."""

    def context(self) -> ssl.SSLContext:
        """Return a client's TLS context that trusts `ca`, and presents `certificate` if it is set.

        If `ca` is "", the system's authorities are trusted. Raises ConfigurationError if a file
        cannot be used.
        """
        try:
            context = ssl.create_default_context(cafile=self.ca or None)
            if self.certificate:
                context.load_cert_chain(self.certificate, self.key or None)
        except (OSError, ValueError) as error:  # an SSLError is an OSError
            raise ConfigurationError(
                f"The certificates for sluiceConsensus cannot be used: {error}.",
                fix="Correct sluiceConsensusTrustCertPath, sluiceConsensusCertPath and "
                "sluiceConsensusKeyPath; the key must not have a password.",
            ) from error
        return context


class Etcd:
    """The `Consensus` of one process, kept by etcd. It connects with its first request."""

    def __init__(
        self,
        url: str,
        *,
        account: Account | None = None,
        certificates: Certificates | None = None,
        quiet_s: float = QUIET_S,
    ) -> None:
        """Prepare an HTTP client for the etcd servers of `url`, without connecting.

        `url` is `etcd://host:port,host:port`, or begins with `etcds://` for TLS. With TLS, None as
        `certificates` means that the system's authorities are trusted. None as `account` means
        that etcd has no accounts. A watch that gets no report for `quiet_s` seconds reads all
        entries again.

        Raises ConfigurationError if the URL or the certificates are not valid.
        """
        scheme, hosts = _parse_url(url)
        self._bases = [f"{SCHEMES[scheme]}://{host}/v3/" for host in hosts]
        if certificates is not None and scheme != "etcds":
            raise ConfigurationError(
                f"sluiceConsensus = {url} does not use TLS, but certificates are configured for "
                "it.",
                fix="Write etcds://host:port,host:port.",
            )
        self._account = account
        self._current = 0
        """The index in `_bases` of the address to which the next request is sent."""
        self._quiet_s = quiet_s
        verify: ssl.SSLContext | bool = scheme == "etcds"
        if certificates is not None:
            verify = certificates.context()
        # trust_env=False: a proxy of the environment would be one more process that can fail.
        self._http = httpx.AsyncClient(
            timeout=httpx.Timeout(ANSWER_S, connect=CONNECT_S),
            limits=httpx.Limits(max_connections=None, keepalive_expiry=30.0),
            trust_env=False,
            verify=verify,
        )
        self._watches: set[asyncio.Task[None]] = set()
        self._leases: list[KeepAliveLease] = []

    @classmethod
    def from_config(cls, config: BrokerConfig) -> "Etcd":
        """Return an Etcd for the URL, account and certificates in the configuration of a broker.

        Raises ConfigurationError if the URL or the certificates are not valid.
        """
        account = Account(config.consensus_user, config.consensus_password)
        paths = config.consensus_ca, config.consensus_certificate, config.consensus_key
        return cls(
            config.consensus,
            account=account if account.name else None,
            certificates=Certificates(*paths) if any(paths) else None,
        )

    async def read(self, prefix: str) -> Entries:
        """Return all entries whose keys begin with `prefix`; see `Consensus.read`."""
        entries, _revision = await self._read(prefix)
        return entries

    async def swap(
        self, changes: Sequence[Swap], conditions: Mapping[str, int] = NO_CONDITIONS
    ) -> bool:
        """Make all of `changes` in one etcd transaction, or none. Return whether they were made.

        They are made if each key that `conditions` names, and each changed key with an expected
        version, has the expected version. A version is the key's `mod_revision` in etcd, which is 0
        for a missing key. False also means that a lease that a change names has ended. Raises
        ConsensusError if the outcome is unknown or etcd cannot be reached.
        """
        expected_versions = dict(conditions)
        for change in changes:
            if change.expected_version is not None:
                expected_versions[change.key] = change.expected_version
        comparisons = [
            {"key": _encode(key), "target": "MOD", "result": "EQUAL", "mod_revision": version}
            for key, version in expected_versions.items()
        ]
        operations = [_operation(change) for change in changes]

        answer = await self._request("kv/txn", {"compare": comparisons, "success": operations})
        return answer is not None and bool(answer.get("succeeded"))

    def watch(self, prefix: str, on_change: Callable[[Entries], object]) -> Callable[[], None]:
        """Start a task that calls `on_change` with all entries whose keys begin with `prefix`.

        It is called at the start, after each change, and when nothing was reported for a while.
        Return a function without arguments that cancels the task.
        """
        task = asyncio.get_running_loop().create_task(self._watch(prefix, on_change))
        self._watches.add(task)
        task.add_done_callback(self._watches.discard)

        def end_watch() -> None:
            task.cancel()

        return end_watch

    async def lease(self, ttl_s: float, on_lost: Callable[[], None]) -> KeepAliveLease:
        """Return a new lease, which is renewed in the background until it is closed.

        etcd deletes the entries of a lease when it ends. The time to live is `ttl_s` rounded to
        whole seconds, at least one. `on_lost` is called if the lease ends by itself. Raises
        ConsensusError if etcd grants no lease.
        """
        answer = await self._request("lease/grant", {"TTL": max(round(ttl_s), 1)})
        if answer is None:
            raise ConsensusError("etcd has granted no lease.")
        lease_id = int(answer["ID"])

        async def renew() -> bool:
            renewal = await self._request("lease/keepalive", {"ID": lease_id})
            if renewal is None:
                return False
            # etcd answers without a time to live if the lease has ended.
            return int(renewal["result"].get("TTL", 0)) > 0

        async def revoke() -> None:
            await self._request("lease/revoke", {"ID": lease_id})

        lease = KeepAliveLease(lease_id, float(answer["TTL"]), on_lost, renew, revoke)
        self._leases.append(lease)
        return lease

    async def close(self) -> None:
        """End all watches, the renewal of leases, and the connections."""
        for lease in self._leases:
            lease.abandon()
        watches = list(self._watches)
        for watch in watches:
            watch.cancel()
        await asyncio.gather(*watches, return_exceptions=True)
        await self._http.aclose()

    # ------------------------------------------------------------------------------------ HTTP

    async def _read(self, prefix: str) -> tuple[Entries, int]:
        """Return the entries whose keys begin with `prefix`, and etcd's revision at that moment."""
        answer = await self._request("kv/range", _key_range(prefix)) or {}
        entries: Entries = {}
        for pair in answer.get("kvs", ()):
            key = base64.b64decode(pair["key"]).decode()
            # The gateway leaves fields out that are empty or 0.
            value = base64.b64decode(pair.get("value", ""))
            entries[key] = Entry(value, int(pair["mod_revision"]), int(pair.get("lease", 0)))
        return entries, int(answer["header"]["revision"])

    async def _request(self, path: str, request: Mapping[str, Any]) -> dict[str, Any] | None:
        """Send a request to etcd, and return the JSON object of the response.

        `path` is the path of the etcd API, such as "kv/range". Return None if etcd does not know
        the lease that the request names. If etcd refuses the access token, which it does after some
        time, a new one is requested and the request is sent again. Raises ConsensusError if etcd
        cannot be reached or refuses the request.
        """
        try:
            return await self._request_once(path, request)
        except _OldTokenError:
            await self._authenticate()
            return await self._request_once(path, request)

    async def _authenticate(self) -> None:
        """Request an access token with the account, and use it for the following requests.

        Raises ConsensusError if etcd cannot be reached or refuses the account.
        """
        assert self._account is not None, "etcd refuses tokens only if it has accounts"
        name, password = self._account
        self._http.headers.pop("Authorization", None)
        answer = await self._request_once("auth/authenticate", {"name": name, "password": password})
        if answer is not None:
            self._http.headers["Authorization"] = str(answer["token"])

    async def _request_once(self, path: str, request: Mapping[str, Any]) -> dict[str, Any] | None:
        """Send a request to the first etcd server that accepts a connection.

        The servers are tried in order, beginning with the current one. The server that accepts
        becomes the current one. Return the JSON object of the response, or None if etcd does not
        know the lease that the request names.

        Raises _OldTokenError if etcd refuses the access token. Raises ConsensusError if no server
        accepts a connection, and after any other failure. After such a failure the request may have
        reached etcd. So it is not sent to another server, but the next request will be.
        """
        first_index = self._current
        last_error = ""
        for attempt in range(len(self._bases)):
            self._current = (first_index + attempt) % len(self._bases)
            try:
                response = await self._http.post(self._base + path, content=orjson.dumps(request))
                content: dict[str, Any] = orjson.loads(response.content)
            except _UNSENT as error:
                # There is no connection, so etcd has not seen the request: try the next address.
                last_error = f"{type(error).__name__} {error}"
                continue
            except (httpx.HTTPError, orjson.JSONDecodeError) as error:
                self._move_to_next_address()
                raise self._failure(f"{type(error).__name__} {error}".strip()) from error

            if response.status_code == httpx.codes.OK:
                return content
            if content.get("code") == LEASE_NOT_FOUND:
                return None
            raise self._refusal(str(content.get("message", response.status_code)))
        raise self._failure(last_error)

    def _refusal(self, reason: str) -> ConsensusError:
        """Return the error for a request that etcd refused, where `reason` is etcd's message.

        It is an _OldTokenError if etcd refused the access token. Otherwise it is a ConsensusError,
        and the next server becomes the current one.
        """
        needs_new_token = any(phrase in reason for phrase in OLD_TOKEN)
        if self._account is not None and needs_new_token:
            return _OldTokenError(reason)
        self._move_to_next_address()
        return self._failure(reason)

    @property
    def _base(self) -> str:
        """The URL with which requests to the current address begin."""
        return self._bases[self._current]

    def _move_to_next_address(self) -> None:
        """Send the next request to another member of etcd."""
        self._current = (self._current + 1) % len(self._bases)

    def _failure(self, reason: str) -> ConsensusError:
        """Return the error for a request that etcd did not carry out, or did not answer."""
        return ConsensusError(
            f"etcd at {', '.join(self._bases)} does not respond ({reason}).",
            fix="Start it, or correct sluiceConsensus; trying again.",
        )

    async def _watch(self, prefix: str, on_change: Callable[[Entries], object]) -> None:
        """Call `on_change` with all entries whose keys begin with `prefix`, until cancelled.

        It is called at the start, after each change, and when `quiet_s` seconds have passed without
        a change. If etcd cannot be reached, the watch starts again with the next server after
        PAUSE_S seconds. Only the first error of an outage is logged.
        """
        is_reached = True
        while True:
            try:
                entries, revision = await self._read(prefix)
                is_reached = True
                on_change(entries)
                # A read timeout means `quiet_s` without a change: read the entries again.
                with contextlib.suppress(httpx.ReadTimeout):
                    async for _ in self._iter_changes(prefix, revision + 1):
                        on_change(await self.read(prefix))
            except (httpx.HTTPError, orjson.JSONDecodeError, ConsensusError) as error:
                if is_reached:
                    log.warning("%s", error)
                is_reached = False
                self._move_to_next_address()
                await asyncio.sleep(PAUSE_S)

    async def _iter_changes(self, prefix: str, revision: int) -> AsyncIterator[None]:
        """Yield None each time etcd reports that keys with `prefix` have changed.

        Changes from etcd's revision `revision` on are reported. If etcd cancels the watch, the
        iterator ends after PAUSE_S seconds. Raises httpx.ReadTimeout after `quiet_s` seconds
        without a report.
        """
        request = {"create_request": _key_range(prefix) | {"start_revision": revision}}
        timeout = httpx.Timeout(ANSWER_S, connect=CONNECT_S, read=self._quiet_s)
        url = f"{self._base}watch"
        async with self._http.stream(
            "POST", url, content=orjson.dumps(request), timeout=timeout
        ) as answer:
            async for line in answer.aiter_lines():
                # A line without a result is an error, after which the watch has ended too.
                report = orjson.loads(line).get("result", {"canceled": True})
                if report.get("canceled"):
                    await asyncio.sleep(PAUSE_S)
                    return
                if report.get("events"):
                    yield


def _parse_url(url: str) -> tuple[str, list[str]]:
    """Split a URL: "etcd://a:2379,b:2379" becomes ("etcd", ["a:2379", "b:2379"]).

    Raises ConfigurationError if the scheme is not a key of SCHEMES, or if an address has no port.
    """
    scheme, _, host_list = url.partition("://")
    hosts = [host.strip() for host in host_list.rstrip("/").split(",")]
    have_ports = all(host.rpartition(":")[2].isdigit() for host in hosts)
    if scheme not in SCHEMES or not have_ports:
        raise ConfigurationError(
            f"sluiceConsensus = {url} is not valid.", fix="Write etcd://host:port,host:port."
        )
    return scheme, hosts


class _OldTokenError(ConsensusError):
    """etcd has refused the token and has done nothing.

    When: etcd has forgotten the token, as it does after some time.
    Then: nothing was done; the broker gets a new token and repeats the request.
    Fix: none is needed.
    """


def _operation(change: Swap) -> dict[str, Any]:
    """Return the operation of an etcd transaction that makes one change.

    It is `{"request_put": …}`, or `{"request_delete_range": …}` if the new value is None.
    """
    key = _encode(change.key)
    if change.value is None:
        return {"request_delete_range": {"key": key}}
    put = {"key": key, "value": _encode(change.value), "lease": change.lease_id}
    return {"request_put": put}


def _encode(key: str | bytes) -> str:
    """Return a key or value in base64."""
    return base64.b64encode(key.encode() if isinstance(key, str) else key).decode()


def _key_range(prefix: str) -> dict[str, Any]:
    """Return the request fields for all keys that begin with `prefix`, which must not be empty."""
    first_key = prefix.encode()
    # The first key that does not begin with the prefix: its last byte is greater by one.
    end_key = first_key[:-1] + bytes([first_key[-1] + 1])
    return {"key": _encode(first_key), "range_end": _encode(end_key)}
