"""The confirmed end of the log that a replica keeps on disk."""

import json
from pathlib import Path

from sluicemq.broker.replication.sides import CONFIRMED_NAME
from sluicemq.broker.server import Broker
from sluicemq.config import BrokerConfig, StoreConfig

CONFIG = BrokerConfig(
    broker_name="broker-a", bind_address="127.0.0.1", listen_port=0, metrics_enable=False
)


async def test_the_confirmed_end_is_limited_to_the_log_after_a_power_failure(
    tmp_path: Path,
) -> None:
    """Otherwise new messages at the lost positions would be answered before a slave has them."""
    path = tmp_path / "config" / CONFIRMED_NAME
    path.parent.mkdir()
    path.write_text(json.dumps({"confirmed": 4096}))
    broker = Broker(CONFIG, StoreConfig(root=str(tmp_path), commit_log_file_bytes=1 << 20))
    await broker.start()
    assert broker.in_sync is not None
    assert (broker.in_sync.confirmed, broker.store.written_offset) == (0, 0)
    await broker.close()
    assert json.loads(path.read_text()) == {"confirmed": 0}, "nor the next time"
