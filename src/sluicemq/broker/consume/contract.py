"""The contract of a group: may its members want different things?

A group's attribute `sluice.contract` says so; RocketMQ keeps an attribute that it does not know.

    compatible   the default. As in RocketMQ while all members have the same subscription; members
                 with another one get a lane of their own (`lanes/`), and the log, a metric and
                 `sluice group show` warn
    lanes        the same, wanted: no warning
    strict       the second, different subscription is refused at its heartbeat, with both
                 expressions, the client ids and what differs

RocketMQ lets the last subscription win for the whole group: its members then filter by each other's
expressions and messages are lost (spec/filter.md §2).

A member whose connection breaks has not left: a stalled Java client closes its socket after 3 s and
sends its next heartbeat up to 30 s later. In a strict group its subscription stays *claimed* until
the client is back, says that it leaves (35), or would have been given up anyway: its expiry (120 s)
after its last heartbeat. So nobody takes a group over in a gap.
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

from sluicemq.broker.lanes.rules import parse_key
from sluicemq.broker.settings import Settings
from sluicemq.broker.topics import Groups
from sluicemq.clock import Clock
from sluicemq.model.topic import CONTRACT, CONTRACTS
from sluicemq.net.dispatch import Peer

log = logging.getLogger(__name__)

COMPATIBLE, STRICT, LANES = CONTRACTS
REFUSED_MAX: Final = 1024
CLAIMS_MAX: Final = 1024
"""Of a group."""
REMIND_S: Final = 600.0
"""The log names a client that goes on trying again after so long."""
WARNED_MAX: Final = 10_000


class ContractError(Exception):
    """A subscription that a strict group does not take."""


@dataclass(frozen=True, slots=True)
class Claim:
    """The subscription of a strict group's member that is away without having said so. It holds for
    so long after the last heartbeat as the member would have."""

    key: str
    seen_ms: int


@dataclass(slots=True)
class Refusal:
    """`logged_s`: when the log said so last."""

    why: str
    peer: Peer
    logged_s: float


@dataclass(slots=True, eq=False)
class Contracts:
    """What the groups' contracts say, and whom they refused."""

    groups: Groups
    settings: Settings
    clock: Clock
    conflicts: dict[str, int] = field(default_factory=dict)
    """Subscriptions that differed from their group's, by group."""
    refused: dict[tuple[str, str], Refusal] = field(default_factory=dict)
    """(group, client id) -> why it is not a member, until it is one or its connection ends."""
    _claims: dict[str, dict[str, Claim]] = field(default_factory=dict)
    _warned: set[tuple[str, str]] = field(default_factory=set)

    def of(self, group: str) -> str:
        """The group's contract; a value that nobody knows is the default."""
        config = self.groups.table.get(group)
        said = config.attributes.get(CONTRACT) if config is not None else None
        return said if said in CONTRACTS else COMPATIBLE

    # ------------------------------------------------------------------------------- claims

    def lost(self, group: str, client_id: str, key: str, seen_ms: int) -> None:
        """A member's connection is gone, and it has not said that it leaves."""
        if key and self.of(group) == STRICT:
            claims = self._claims.setdefault(group, {})
            if len(claims) < CLAIMS_MAX:
                claims[client_id] = Claim(key, seen_ms)

    def release(self, group: str, client_id: str) -> None:
        """The client is back, or has left."""
        claims = self._claims.get(group)
        if claims is not None and claims.pop(client_id, None) is not None and not claims:
            del self._claims[group]

    def claims(self, group: str) -> dict[str, Claim]:
        """Those that still hold, by client id."""
        held = self._claims.get(group)
        if held is None:
            return {}
        limit_ms = self.clock.now_ms() - self.settings.broker.client_expiry_ms
        for client_id in [client_id for client_id, c in held.items() if c.seen_ms < limit_ms]:
            del held[client_id]
        if not held or self.of(group) != STRICT:
            del self._claims[group]
            return {}
        return held

    # ------------------------------------------------------------------------------ refusals

    def refuse(
        self, group: str, client_id: str, key: str, others: Mapping[str, str], peer: Peer
    ) -> None:
        """Raises ContractError when a strict group has members (client id -> subscription) that
        want something else, or had them so lately that they are waited for."""
        different = {other: said for other, said in others.items() if said != key}
        if not different or self.of(group) != STRICT:
            self.refused.pop((group, client_id), None)
            return
        other, said = next(iter(different.items()))
        claims, where = self.claims(group), " that are online"
        if different.keys() <= claims.keys():  # all are away, and waited for
            seen_ms = max(claims[client_id].seen_ms for client_id in different)
            until_ms = seen_ms + self.settings.broker.client_expiry_ms
            until = datetime.fromtimestamp(until_ms / 1000, UTC)
            where = (
                " that lost the connection without saying that they leave and are waited for until "
                f"{until:%Y-%m-%dT%H:%M:%SZ}"
            )
        why = (
            f"group {group} has the contract strict, and {client_id} subscribes something else "
            f"than {len(different)} member(s){where}, {other} among "
            f"them: {difference(said, key)}. Give it another group, the same subscription, or set "
            f"the contract to lanes: sluice group update {group} --contract lanes"
        )
        known = self.refused.get((group, client_id))
        now_s = self.clock.monotonic_s()
        if known is None:
            self._count(group)
        if known is None or now_s - known.logged_s >= REMIND_S:
            log.warning("%s", why)
        else:
            now_s = known.logged_s
        if known is not None or len(self.refused) < REFUSED_MAX:
            self.refused[group, client_id] = Refusal(why, peer, now_s)
        raise ContractError(why)

    def why_refused(self, group: str, peer: Peer, client_id: str | None) -> str:
        """Why a request's client is not a member; "" when it was not refused."""
        for (name, refused_id), refusal in self.refused.items():
            if name == group and (refusal.peer is peer or refused_id == client_id):
                return refusal.why
        return ""

    def disconnect(self, peer: Peer) -> None:
        """Whom we refused on this connection is gone."""
        for item in [item for item, refusal in self.refused.items() if refusal.peer is peer]:
            del self.refused[item]

    def split(self, group: str, client_id: str, key: str, others: Mapping[str, str]) -> None:
        """A member with a subscription of its own comes into a group: it gets a lane."""
        if (group, key) in self._warned:
            return
        if len(self._warned) >= WARNED_MAX:
            self._warned.clear()
        self._warned.add((group, key))
        self._count(group)
        other, said = next(((o, s) for o, s in others.items() if s != key), ("", "[]"))
        if self.of(group) == COMPATIBLE:
            log.warning(
                "group %s: %s subscribes something else than %s: %s. Each subscription gets a "
                "lane of its own; with RocketMQ messages would be lost. If that is what you want, "
                "say so: sluice group update %s --contract lanes",
                group, client_id, other or "the members before it", difference(said, key), group,
            )  # fmt: skip

    def _count(self, group: str) -> None:
        self.conflicts[group] = self.conflicts.get(group, 0) + 1

    def forget(self, group: str) -> None:
        """The group's last member has left."""
        self._warned = {item for item in self._warned if item[0] != group}
        for item in [item for item in self.refused if item[0] == group]:
            del self.refused[item]


def difference(old: str, new: str) -> str:
    """Two subscriptions, topic by topic where they differ."""
    before, after = parse_key(old), parse_key(new)

    def show(atom: Iterable[str] | None) -> str:
        kind, text = atom or ("", "")
        return f"{kind} {text!r}" if kind else "nothing"

    return "; ".join(
        f"{topic}: {show(before.get(topic))} -> {show(after.get(topic))}"
        for topic in sorted({*before, *after})
        if before.get(topic) != after.get(topic)
    )
