"""The frozen settings of each server: what the rest of the code reads.

Field names are ours: whole words, unit last. RocketMQ's names for them, the ranges and the
documentation stand in `keys.py`; a field without a key there cannot be set from a file. A change
at run time makes a new value, nobody changes one.
"""

import os
from dataclasses import dataclass, field

from sluicemq.errors import ConfigurationError

CONSUME_QUEUE_UNIT_BYTES = 20


def host_name() -> str:
    """The name of this machine, which names a broker that has no name."""
    return os.uname().nodename or "broker"


def _under_home(*parts: str) -> str:
    return os.path.join(os.path.expanduser("~"), *parts)  # noqa: PTH111, PTH118 - text, not Path


def _default_root() -> str:
    return _under_home("store")


def _default_kv_path() -> str:
    return _under_home("namesrv", "kvConfig.json")


def _default_name_server_config_path() -> str:
    return _under_home("namesrv", "namesrv.properties")


@dataclass(frozen=True, slots=True)
class BrokerConfig:
    """The settings of a broker without its store."""

    broker_name: str = field(default_factory=host_name)
    cluster_name: str = "DefaultCluster"
    broker_id: int = 0
    broker_role: str = "ASYNC_MASTER"
    bind_address: str = "0.0.0.0"
    listen_port: int = 10911
    name_server_addresses: tuple[str, ...] = ()
    broker_ip1: str | None = None
    broker_ip2: str | None = None
    broker_permission: int = 6
    default_topic_queues: int = 8
    auto_create_topic: bool = True
    auto_create_group: bool = True
    cluster_topic_enable: bool = True
    broker_topic_enable: bool = True
    validate_system_topic: bool = True
    topic_length_max: int = 127
    properties_length_max: int = 32767
    trace_topic_enable: bool = False
    trace_topic_name: str = "RMQ_SYS_TRACE_TOPIC"
    trace_on: bool = True
    region: str = "DefaultRegion"
    enable_property_filter: bool = True
    long_polling_enable: bool = True
    short_polling_ms: int = 1000
    notify_consumer_changes: bool = True
    server_side_reset: bool = True
    consumer_offset_flush_interval_ms: int = 5000
    register_period_ms: int = 30_000
    register_timeout_ms: int = 24_000
    idle_timeout_s: int = 120
    client_expiry_ms: int = 120_000
    metrics_enable: bool = True
    metrics_host: str = ""
    metrics_port: int = 5557
    connections_max: int = 16_384
    parked_pulls_max: int = 100_000
    write_buffer_bytes_max: int = 4 * 1024 * 1024
    bulk_pull_bytes_max: int = 8 * 1024 * 1024
    config_path: str = ""


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """The settings of the message store. Empty paths are filled in below `root`."""

    root: str = field(default_factory=_default_root)
    commit_log_path: str = ""
    consume_queue_path: str = ""
    commit_log_file_bytes: int = 1 << 30
    consume_queue_file_bytes: int = 6_000_000
    flush_sync: bool = False
    flush_interval_ms: int = 500
    flush_pages_min: int = 4
    flush_thorough_interval_ms: int = 10_000
    consume_queue_flush_interval_ms: int = 1000
    consume_queue_flush_pages_min: int = 2
    consume_queue_flush_thorough_interval_ms: int = 60_000
    sync_flush_timeout_ms: int = 5000
    message_bytes_max: int = 4 * 1024 * 1024
    check_crc_on_recover: bool = True
    memory_ratio: int = 40
    max_transfer_bytes_memory: int = 262_144
    max_transfer_count_memory: int = 32
    max_transfer_bytes_disk: int = 65_536
    max_transfer_count_disk: int = 8
    version_by_topic_length: bool = True
    disk_used_ratio_max: int = 75
    disk_warning_ratio: int = 90
    filter_scan_units_max: int = 1_000_000

    def __post_init__(self) -> None:
        root = self.root.rstrip("/") or "/"
        unit = CONSUME_QUEUE_UNIT_BYTES
        put = object.__setattr__
        put(self, "root", root)
        if "," in self.commit_log_path:
            raise ConfigurationError(
                f"storePathCommitLog={self.commit_log_path} names several directories.",
                cure="Name one: a log over several paths is not supported.",
            )
        put(self, "commit_log_path", self.commit_log_path or f"{root}/commitlog")
        put(self, "consume_queue_path", self.consume_queue_path or f"{root}/consumequeue")
        # Rounded up to whole units, as the real one does (spec/config.md).
        put(self, "consume_queue_file_bytes", -(-self.consume_queue_file_bytes // unit) * unit)


@dataclass(frozen=True, slots=True)
class NameServerConfig:
    """The settings of a name server."""

    bind_address: str = "0.0.0.0"
    listen_port: int = 9876
    kv_config_path: str = field(default_factory=_default_kv_path)
    config_path: str = field(default_factory=_default_name_server_config_path)
    scan_interval_ms: int = 5000
    order_message_enable: bool = False
    return_order_config_to_broker: bool = True
    all_topic_list_enable: bool = True
    topic_list_enable: bool = True
    acting_master_support: bool = False
    wait_for_service: bool = False
    wait_for_service_s: int = 45
    delete_topic_with_registration: bool = False
    idle_timeout_s: int = 120
    connections_max: int = 16_384
    reachable_addresses: bool = True
    config_black_list: tuple[str, ...] = ("configBlackList", "configStorePath", "kvConfigPath")
