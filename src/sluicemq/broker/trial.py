"""Try to start a broker on a store without changing the store: for `sluice store verify`.

A verifier that reimplements what a start reads is outdated with each file that a broker adds. This
module opens the store with the broker's own code, over a copy-on-write overlay in memory. So
whatever a start reads is read here as well.
"""

import contextlib
import logging
from collections.abc import Iterator
from typing import Final

from sluicemq.broker.server import Broker
from sluicemq.config import BrokerConfig, StoreConfig
from sluicemq.errors import SluiceError
from sluicemq.files import SYSTEM_FILES, Files
from sluicemq.net.network import MemoryNetwork

_BROKER_LOGGER: Final = logging.getLogger("sluicemq")


async def find_start_error(
    store: StoreConfig, *, files: Files = SYSTEM_FILES
) -> SluiceError | None:
    """Start a read-only broker on the store in `store.root`, stop it, and return what failed.

    Return the SluiceError that prevents the start, or None if the broker starts. Other errors are
    raised. Nothing is written to disk, no port is opened and no lock is taken. The segment sizes
    are those of the files on disk, not those of `store`. Log lines of the trial are dropped,
    because `verify` reports what it finds itself.
    """
    config = BrokerConfig(
        listen_port=0, metrics_enable=False, bind_address="127.0.0.1", broker_ip1="127.0.0.1"
    )
    broker = Broker(config, store, files=files, network=MemoryNetwork(), read_only=True)
    with _silenced():
        try:
            await broker.start()
            await broker.close()
        except SluiceError as error:
            return error
    return None


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    """Keep log lines of this package from the handlers of the root logger.

    Handlers of the package's own loggers still get them.
    """
    drop = logging.NullHandler()
    propagates = _BROKER_LOGGER.propagate
    _BROKER_LOGGER.addHandler(drop)  # without a handler, logging prints warnings to stderr
    _BROKER_LOGGER.propagate = False
    try:
        yield
    finally:
        _BROKER_LOGGER.propagate = propagates
        _BROKER_LOGGER.removeHandler(drop)
