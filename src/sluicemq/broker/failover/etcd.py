"""etcd 3.4 and later as the consensus service, through its HTTP/JSON gateway.

Four requests are all there is (`/v3/kv/range`, `/v3/kv/txn`, `/v3/lease/…`, `/v3/watch`), and one
by which an account gets the token that they bear (`/v3/auth/authenticate`); keys and values travel
in base64. A key's version is its `mod_revision`, so it is never given twice.

- Reads are linearizable, etcd's default: a member that has lost its majority does not answer.
- A transaction is sent once. Whatever goes wrong once it may have left is a `ConsensusError`; only
  an address that nobody answers at is passed over for the next one.
- A token that etcd does not know any more, or that is older than a change of its accounts, is
  refused before anything is done: then there is a new one, and the request is sent once more.
- A watch is a door bell. When it rings, the whole prefix is read again: a few keys, always of one
  moment, and nothing to do for revisions that etcd has compacted. It is also read after `QUIET_S`
  without a ring, because half of a broken connection looks like silence.

Why httpx and not aetcd: that one's last release is of 2022 and needs gRPC's compiled core; this is
a page on a client that is kept.
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

from sluicemq.broker.failover.consensus import NO_CONDITION, Entries, Entry, KeptLease, Swap
from sluicemq.config import BrokerConfig
from sluicemq.errors import ConfigurationError, ConsensusError

log = logging.getLogger("sluicemq.broker.failover")

SCHEMES: Final = {"etcd": "http", "etcds": "https"}
CONNECT_S: Final = 0.5
ANSWER_S: Final = 2.0
QUIET_S: Final = 5.0
PAUSE_S: Final = 0.2
LEASE_NOT_FOUND: Final = 5
"""gRPC's NOT_FOUND: the only thing that a transaction or a lease of ours can miss is a lease."""
OLD_TOKEN: Final = ("invalid auth token", "revision of auth store is old", "user name is empty")
"""What etcd says to who has to show itself anew."""
_UNSENT: Final = (httpx.ConnectError, httpx.ConnectTimeout)


class Account(NamedTuple):
    """One of etcd's users."""

    name: str
    password: str


class Certificates(NamedTuple):
    """Paths of PEM files, "": none. `ca`: who signs etcd's; the others are shown to it."""

    ca: str = ""
    certificate: str = ""
    key: str = ""

    def context(self) -> ssl.SSLContext:
        """Raises ConfigurationError."""
        try:
            context = ssl.create_default_context(cafile=self.ca or None)
            if self.certificate:
                context.load_cert_chain(self.certificate, self.key or None)
        except (OSError, ValueError) as error:  # an SSLError is an OSError
            raise ConfigurationError(
                f"the certificates for sluiceConsensus cannot be used: {error}.",
                fix="Correct sluiceConsensusTrustCertPath, sluiceConsensusCertPath and "
                "sluiceConsensusKeyPath; a key has no password.",
            ) from error
        return context


class Etcd:
    """A `Consensus`. Connects when it is asked something."""

    def __init__(
        self, url: str, *, account: Account | None = None, certificates: Certificates | None = None,
        quiet_s: float = QUIET_S,
    ) -> None:  # fmt: skip
        """`url`: `etcd://host:port,host:port`; `etcds://` for TLS by `certificates`, or those that
        the system trusts. `account`: None where etcd has none. Raises ConfigurationError."""
        scheme, _, rest = url.partition("://")
        hosts = [host.strip() for host in rest.rstrip("/").split(",")]
        if scheme not in SCHEMES or not all(host.rpartition(":")[2].isdigit() for host in hosts):
            raise ConfigurationError(
                f"sluiceConsensus = {url} is not valid.", fix="Write etcd://host:port,host:port."
            )
        self._bases = [f"{SCHEMES[scheme]}://{host}/v3/" for host in hosts]
        if certificates is not None and scheme != "etcds":
            raise ConfigurationError(
                f"sluiceConsensus = {url} is without TLS, and certificates are given for it.",
                fix="Write etcds://host:port,host:port.",
            )
        self._account = account
        self._current = 0
        self._quiet_s = quiet_s
        timeout = httpx.Timeout(ANSWER_S, connect=CONNECT_S)
        limits = httpx.Limits(max_connections=None, keepalive_expiry=30.0)
        # No proxy of the environment: it would be one more that can fail.
        self._http = httpx.AsyncClient(
            timeout=timeout, limits=limits, trust_env=False,
            verify=scheme == "etcds" if certificates is None else certificates.context(),
        )  # fmt: skip
        self._watches: set[asyncio.Task[None]] = set()
        self._leases: list[KeptLease] = []

    @classmethod
    def of(cls, config: BrokerConfig) -> "Etcd":
        """That of a broker. Raises ConfigurationError."""
        account = Account(config.consensus_user, config.consensus_password)
        paths = config.consensus_ca, config.consensus_certificate, config.consensus_key
        return cls(
            config.consensus,
            account=account if account.name else None,
            certificates=Certificates(*paths) if any(paths) else None,
        )

    async def read(self, prefix: str) -> Entries:
        return (await self._read(prefix))[0]

    async def swap(self, changes: Sequence[Swap], given: Mapping[str, int] = NO_CONDITION) -> bool:
        conditions = {**given, **{c.key: c.expected for c in changes if c.expected is not None}}
        request = {
            "compare": [
                {"key": _encode(key), "target": "MOD", "result": "EQUAL", "mod_revision": version}
                for key, version in conditions.items()
            ],
            "success": [
                {"request_delete_range": {"key": _encode(key)}} if value is None
                else {"request_put": {"key": _encode(key), "value": _encode(value), "lease": lease}}
                for key, value, _, lease in changes
            ],
        }  # fmt: skip
        answer = await self._ask("kv/txn", request)
        return answer is not None and bool(answer.get("succeeded"))

    def watch(self, prefix: str, on_change: Callable[[Entries], None]) -> Callable[[], None]:
        task = asyncio.get_running_loop().create_task(self._watch(prefix, on_change))
        self._watches.add(task)
        task.add_done_callback(self._watches.discard)

        def end() -> None:
            task.cancel()

        return end

    async def lease(self, ttl_s: float, on_lost: Callable[[], None]) -> KeptLease:
        answer = await self._ask("lease/grant", {"TTL": max(round(ttl_s), 1)})
        if answer is None:
            raise ConsensusError("etcd has granted no lease.")
        lease_id = int(answer["ID"])

        async def keep() -> bool:
            found = await self._ask("lease/keepalive", {"ID": lease_id})
            return found is not None and int(found["result"].get("TTL", 0)) > 0

        async def end() -> None:
            await self._ask("lease/revoke", {"ID": lease_id})

        lease = KeptLease(lease_id, float(answer["TTL"]), on_lost, keep, end)
        self._leases.append(lease)
        return lease

    async def close(self) -> None:
        for lease in self._leases:
            lease.abandon()
        watches = list(self._watches)
        for watch in watches:
            watch.cancel()
        await asyncio.gather(*watches, return_exceptions=True)
        await self._http.aclose()

    # ------------------------------------------------------------------------------------ HTTP

    async def _read(self, prefix: str) -> tuple[Entries, int]:
        """What is there, and at which revision."""
        answer = await self._ask("kv/range", _range(prefix)) or {}
        entries = {
            base64.b64decode(found["key"]).decode(): Entry(
                base64.b64decode(found.get("value", "")),
                int(found["mod_revision"]),
                int(found.get("lease", 0)),
            )
            for found in answer.get("kvs", ())
        }
        return entries, int(answer["header"]["revision"])

    async def _ask(self, path: str, request: Mapping[str, Any]) -> dict[str, Any] | None:
        """The answer; None when a lease is not there. Raises ConsensusError."""
        try:
            return await self._ask_once(path, request)
        except _OldTokenError:
            await self._authenticate()
            return await self._ask_once(path, request)

    async def _authenticate(self) -> None:
        """A new token. Raises ConsensusError."""
        assert self._account is not None, "who has no account is asked for no token"
        name, password = self._account
        self._http.headers.pop("Authorization", None)
        answer = await self._ask_once("auth/authenticate", {"name": name, "password": password})
        if answer is not None:
            self._http.headers["Authorization"] = str(answer["token"])

    async def _ask_once(self, path: str, request: Mapping[str, Any]) -> dict[str, Any] | None:
        first, error = self._current, ""
        for step in range(len(self._bases)):
            self._current = (first + step) % len(self._bases)
            try:
                answer = await self._http.post(self._base + path, content=orjson.dumps(request))
                found: dict[str, Any] = orjson.loads(answer.content)
            except _UNSENT as unsent:
                error = f"{type(unsent).__name__} {unsent}"
                continue
            except (httpx.HTTPError, orjson.JSONDecodeError) as failed:
                self._pass_over()
                raise self._unanswered(f"{type(failed).__name__} {failed}".strip()) from failed
            if answer.status_code == httpx.codes.OK:
                return found
            if found.get("code") == LEASE_NOT_FOUND:
                return None
            reason = str(found.get("message", answer.status_code))
            if self._account is not None and any(text in reason for text in OLD_TOKEN):
                raise _OldTokenError(reason)
            self._pass_over()
            raise self._unanswered(reason)
        raise self._unanswered(error)

    @property
    def _base(self) -> str:
        return self._bases[self._current]

    def _pass_over(self) -> None:
        """Ask another member the next time."""
        self._current = (self._current + 1) % len(self._bases)

    def _unanswered(self, reason: str) -> ConsensusError:
        return ConsensusError(
            f"etcd at {', '.join(self._bases)} does not answer ({reason}).",
            fix="Start it, or correct sluiceConsensus; trying again.",
        )

    async def _watch(self, prefix: str, on_change: Callable[[Entries], None]) -> None:
        is_reached = True
        while True:
            try:
                entries, revision = await self._read(prefix)
                is_reached = True
                on_change(entries)
                with contextlib.suppress(httpx.ReadTimeout):
                    async for _ in self._rings(prefix, revision + 1):
                        on_change(await self.read(prefix))
            except (httpx.HTTPError, orjson.JSONDecodeError, ConsensusError) as error:
                if is_reached:
                    log.warning("%s", error)
                is_reached = False
                self._pass_over()
                await asyncio.sleep(PAUSE_S)

    async def _rings(self, prefix: str, revision: int) -> AsyncIterator[None]:
        """Yields when something has changed from that revision on. Raises httpx.ReadTimeout after
        a silence; ends when etcd ends the watch."""
        create = orjson.dumps({"create_request": _range(prefix) | {"start_revision": revision}})
        timeout = httpx.Timeout(ANSWER_S, connect=CONNECT_S, read=self._quiet_s)
        url = f"{self._base}watch"
        async with self._http.stream("POST", url, content=create, timeout=timeout) as answer:
            async for line in answer.aiter_lines():
                result = orjson.loads(line).get("result", {"canceled": True})
                if result.get("canceled"):
                    await asyncio.sleep(PAUSE_S)
                    return
                if result.get("events"):
                    yield


class _OldTokenError(ConsensusError):
    """Refused, and nothing was done.

    When: etcd has forgotten our sign-in, as it does after a while.
    Then: nothing was done; we sign in again and ask once more.
    Fix: none is needed.
    """


def _encode(key: str | bytes) -> str:
    return base64.b64encode(key.encode() if isinstance(key, str) else key).decode()


def _range(prefix: str) -> dict[str, Any]:
    """All keys that begin so: up to the next text of its length."""
    first = prefix.encode()
    return {"key": _encode(first), "range_end": _encode(first[:-1] + bytes([first[-1] + 1]))}
