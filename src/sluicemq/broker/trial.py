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
    """Try to start a read-only broker on the store in `store.root`, and stop it again.

    Return the SluiceError that prevents the start or the stop, or None if both succeed. Other
    errors are raised. Nothing is written to disk, no port is opened and no lock is taken. The sizes
    of the store's files are taken from the files on disk, not from `store`. The log lines of the
    broker are dropped, because the caller, `sluice store verify`, reports the error itself.
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
    """Drop the log lines of the broker package inside the `with` block.

    The handlers of the root logger do not get them. Handlers that were added to the loggers of the
    package itself still do. The previous state is restored at the end.
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
