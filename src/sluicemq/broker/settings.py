"""The settings of a running broker: frozen values that may be exchanged while it runs.

The role is no setting where a consensus decides it; then it comes with a term (`replicas/`).

Who precomputes something from them asks to be told (`on_change`).
"""

from collections.abc import Callable

from sluicemq.config import BrokerConfig, Change, Configs, Part, StoreConfig, reread_settings
from sluicemq.model.ids import Host, encode_host


class Settings:
    """`broker` and `store` are the values of now; read them anew each time. `is_read_only` says
    that nothing of the store may change (`readonly.py`); `is_slave` that a master writes it, and
    `is_failover` that the consensus says who that is."""

    __slots__ = (
        "_at_next_start", "_listeners", "broker", "host", "is_failover", "is_read_only",
        "is_slave", "store", "store_host",
    )  # fmt: skip

    def __init__(
        self, broker: BrokerConfig, store: StoreConfig, *, is_read_only: bool = False
    ) -> None:
        self.broker = broker
        self.store = store
        self.is_read_only = is_read_only
        self.is_slave = broker.is_slave and not is_read_only
        self.is_failover = bool(broker.consensus) and not is_read_only
        self._listeners: list[Callable[[], None]] = []
        self._at_next_start: Configs | None = None
        self.set_host(Host("127.0.0.1", 10911))

    def set_host(self, host: Host) -> None:
        """The address in records and message ids is this one; `store_host` when encoded."""
        self.host = host
        self.store_host = encode_host(host)

    @property
    def is_gated(self) -> bool:
        """Is something visible only when replicas have it?"""
        is_sync = self.broker.broker_role == "SYNC_MASTER"
        return (is_sync or self.is_failover) and not (self.is_slave or self.is_read_only)

    @property
    def registered_id(self) -> int:
        """The id that name servers are told: the master is 0."""
        return self.broker.broker_id if self.is_slave else 0

    @property
    def in_force(self) -> Configs:
        return {Part.BROKER: self.broker, Part.STORE: self.store}

    @property
    def at_next_start(self) -> Configs:
        """What a start would take now: other than `in_force` where accepted changes wait for it."""
        return self._at_next_start or self.in_force

    def apply(self, change: Change) -> None:
        """A change by request."""
        self._at_next_start = change.at_next_start
        self.replace(change.in_force[Part.BROKER], change.in_force[Part.STORE])

    def reread(self, text: str) -> Change:
        """Takes up what was edited in the file. Raises ConfigurationError, and then nothing has
        changed."""
        change = reread_settings(self.in_force, self.at_next_start, text)
        self.apply(change)
        return change

    def add_listener(self, listener: Callable[[], None]) -> None:
        self._listeners.append(listener)

    def clear_listeners(self) -> None:
        """The parts that asked are gone: another role begins."""
        self._listeners.clear()

    def replace(self, broker: BrokerConfig, store: StoreConfig) -> None:
        self.broker = broker
        self.store = store
        for listener in self._listeners:
            listener()
