"""What a replica keeps of the end of what is confirmed."""

import json
from pathlib import Path

from sluicemq.broker.replication.sides import CONFIRMED_NAME
from sluicemq.broker.server import Broker
from sluicemq.config import BrokerConfig, StoreConfig

CONFIG = BrokerConfig(
    broker_name="broker-a", bind_address="127.0.0.1", listen_port=0, metrics_enable=False
)


async def test_a_master_whose_log_lost_its_end_has_no_more_confirmed_than_it_has(
    tmp_path: Path,
) -> None:
    """Else what is stored in the place of what was lost is answered before a slave has it."""
    path = tmp_path / "config" / CONFIRMED_NAME
    path.parent.mkdir()
    path.write_text(json.dumps({"confirmed": 4096}))
    broker = Broker(CONFIG, StoreConfig(root=str(tmp_path), commit_log_file_bytes=1 << 20))
    await broker.start()
    assert broker.in_sync is not None
    assert (broker.in_sync.confirmed, broker.store.written_offset) == (0, 0)
    await broker.close()
    assert json.loads(path.read_text()) == {"confirmed": 0}, "nor the next time"
