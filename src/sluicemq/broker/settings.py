"""The settings of a running broker: immutable configurations that may be replaced while it runs.

With failover the role is not a setting; it comes with a term (`replication/`). A component that
computes values from the settings registers a listener, to compute them again after a change.
"""

from collections.abc import Callable

from sluicemq.config import BrokerConfig, Change, Configs, Part, StoreConfig, reread_settings
from sluicemq.model.ids import Host, encode_host


class Settings:
    """The present settings and the role of a broker.

    `broker` and `store` are replaced as a whole, so read them again each time.
    """

    __slots__ = (
        "_at_next_start",
        "_listeners",
        "broker",
        "host",
        "is_failover",
        "is_read_only",
        "is_slave",
        "store",
        "store_host",
    )

    def __init__(
        self, broker: BrokerConfig, store: StoreConfig, *, is_read_only: bool = False
    ) -> None:
        """Combine the configurations of the broker and of its store.

        With `is_read_only`, the broker is neither a slave nor part of a failover group, whatever
        `broker` says. The address in records is 127.0.0.1:10911 until `set_host` is called.
        """
        self.broker = broker
        self.store = store
        self.is_read_only = is_read_only
        """Whether the store must not change (`admin/readonly.py`)."""
        self.is_slave = broker.is_slave and not is_read_only
        """Whether a master writes the store. With failover, it changes with the role."""
        self.is_failover = bool(broker.consensus) and not is_read_only
        """Whether a consensus decides which replica is the master."""
        self._listeners: list[Callable[[], None]] = []
        self._at_next_start: Configs | None = None
        self.set_host(Host("127.0.0.1", 10911))

    def set_host(self, host: Host) -> None:
        """Use `host` as the address in records and message ids; `store_host` is its encoding."""
        self.host = host
        self.store_host = encode_host(host)

    @property
    def is_gated(self) -> bool:
        """Whether messages become visible only when enough replicas have them."""
        is_sync = self.broker.broker_role == "SYNC_MASTER"
        return (is_sync or self.is_failover) and not (self.is_slave or self.is_read_only)

    @property
    def registered_id(self) -> int:
        """The broker id for name servers: 0 for a master."""
        return self.broker.broker_id if self.is_slave else 0

    @property
    def in_force(self) -> Configs:
        """The present configurations, by part."""
        return {Part.BROKER: self.broker, Part.STORE: self.store}

    @property
    def at_next_start(self) -> Configs:
        """The configurations after a restart.

        They differ from `in_force` by the accepted changes that need a restart.
        """
        return self._at_next_start or self.in_force

    def apply(self, change: Change) -> None:
        """Apply a change, and call the listeners."""
        self._at_next_start = change.at_next_start
        self.replace(change.in_force[Part.BROKER], change.in_force[Part.STORE])

    def reread(self, content: str) -> Change:
        """Apply the edited configuration file with the text `content`, and return the change.

        Raises ConfigurationError, with nothing changed, if the text is invalid.
        """
        change = reread_settings(self.in_force, self.at_next_start, content)
        self.apply(change)
        return change

    def add_listener(self, listener: Callable[[], None]) -> None:
        """Call `listener` after each change of the settings."""
        self._listeners.append(listener)

    def clear_listeners(self) -> None:
        """Remove all listeners, because the components of another role replace them."""
        self._listeners.clear()

    def replace(self, broker: BrokerConfig, store: StoreConfig) -> None:
        """Replace both configurations, and call the listeners in the order of their addition."""
        self.broker = broker
        self.store = store
        for listener in self._listeners:
            listener()
