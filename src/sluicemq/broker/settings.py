"""The settings of a running broker: frozen values that may be exchanged while it runs.

Who precomputes something from them asks to be told (`on_change`).
"""

from collections.abc import Callable

from sluicemq.config import BrokerConfig, StoreConfig


class Settings:
    """`broker` and `store` are the values of now; read them anew each time. `is_read_only` says
    that nothing of the store may change (`readonly.py`)."""

    __slots__ = ("_listeners", "broker", "is_read_only", "store")

    def __init__(
        self, broker: BrokerConfig, store: StoreConfig, *, is_read_only: bool = False
    ) -> None:
        self.broker = broker
        self.store = store
        self.is_read_only = is_read_only
        self._listeners: list[Callable[[], None]] = []

    def on_change(self, listener: Callable[[], None]) -> None:
        self._listeners.append(listener)

    def replace(self, broker: BrokerConfig, store: StoreConfig) -> None:
        self.broker = broker
        self.store = store
        for listener in self._listeners:
            listener()
