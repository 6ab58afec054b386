"""The frozen settings of each server: what the rest of the code reads.

Field names are ours: whole words, unit last. RocketMQ's names for them, the ranges and the
documentation stand in `keys.py`; a field without a key there cannot be set from a file. A change
at run time makes a new value, nobody changes one.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple, Self

from sluicemq.config.delays import DEFAULT_LEVELS, parse_delay_levels
from sluicemq.errors import ConfigurationError

CONSUME_QUEUE_UNIT_BYTES = 20
INDEX_SLOTS = 5_000_000
INDEX_ENTRIES_PER_SLOT = 4
SMALL_LOG_FILE_BYTES = 64 * 1024 * 1024
"""Log files below this size are those of tests: index files of 420 MB would be too much there."""


_DERIVED = ("commit_log_path", "consume_queue_path", "index_slots", "index_entries")
"""Fields of the store that are filled in from others when they are empty."""

RATIO_LIMITS = {
    "disk_used_ratio_max": (10, 95),
    "disk_forced_ratio": (30, 85),
    "disk_warning_ratio": (35, 90),
}
"""Percentages that are brought into their limits, as the real broker does (spec/store.md §9)."""


class Origin(NamedTuple):
    """Where settings come from: nothing that the settings themselves depend on."""

    written: Mapping[str, str] = MappingProxyType({})
    """Path with its variables replaced -> as the file writes it, which is what answers show."""
    command_line: frozenset[str] = frozenset()
    """Keys that the command line set, which wins over the file."""


_UNKNOWN = Origin()


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
    return _under_home("namesrv", "sluice.properties")


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsConfig:
    """What brokers and name servers serve TLS with."""

    tls_mode: str = "permissive"
    tls_certificate: str = ""
    tls_key: str = ""
    tls_key_password: str = field(default="", repr=False)
    tls_client_auth: str = "none"
    tls_auth_client: bool = False
    tls_ca: str = ""
    tls_test_mode: bool = True
    tls_config_file: str = ""
    origin: Origin = field(default=_UNKNOWN, compare=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig(TlsConfig):
    """Where brokers and name servers listen, and to whom."""

    bind_address: str = ""
    listen_port: int = 0
    protected_mode: bool = True
    acl_enable: bool = False
    acl_files: tuple[str, ...] = ()
    """Where the main file may be; the first that is there."""
    acl_compatible: bool = False
    idle_timeout_s: int = 120
    connections_max: int = 16_384
    connections_per_address_max: int = 1000
    frame_timeout_s: int = 60

    @property
    def listen_address(self) -> str:
        return self.bind_address or "0.0.0.0"

    @property
    def is_protected(self) -> bool:
        """Serves this machine alone: nobody has said who else may come."""
        is_mutual = self.tls_mode == "enforcing" and self.tls_client_auth == "require"
        return self.protected_mode and not (self.bind_address or self.acl_enable or is_mutual)


@dataclass(frozen=True, slots=True)
class BrokerConfig(ServerConfig):
    """The settings of a broker without its store."""

    broker_name: str = field(default_factory=host_name)
    cluster_name: str = "DefaultCluster"
    broker_id: int = 0
    broker_role: str = "ASYNC_MASTER"
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
    filter_groups_expected: int = 32
    filter_error_percent: int = 20
    filter_kept_ms: int = 24 * 3600 * 1000
    long_polling_enable: bool = True
    short_polling_ms: int = 1000
    notify_consumer_changes: bool = True
    server_side_reset: bool = True
    store_replies: bool = True
    recall_enable: bool = False
    recall_when_read_only: bool = True
    reject_transactions: bool = False
    transaction_timeout_ms: int = 6000
    transaction_check_interval_ms: int = 30_000
    transaction_check_max: int = 15
    transactions_open_max: int = 250_000
    consumer_offset_flush_interval_ms: int = 5000
    register_period_ms: int = 30_000
    register_timeout_ms: int = 24_000
    client_expiry_ms: int = 120_000
    metrics_enable: bool = True
    metrics_host: str = ""
    metrics_port: int = 5557
    pending_bytes_max: int = 256 * 1024 * 1024
    auto_topics_max: int = 50_000
    auto_groups_max: int = 50_000
    parked_pulls_max: int = 100_000
    write_buffer_bytes_max: int = 4 * 1024 * 1024
    bulk_pull_bytes_max: int = 8 * 1024 * 1024
    config_path: str = ""
    inner_credentials: str = field(default="", repr=False)
    tls_dials: str = "auto"
    tls_auth_server: bool = False
    tls_client_ca: str = ""
    tls_client_certificate: str = ""
    tls_client_key: str = ""
    tls_client_key_password: str = field(default="", repr=False)


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
    checksum_property: bool = False
    checksum_property_required: bool = False
    memory_ratio: int = 40
    max_transfer_bytes_memory: int = 262_144
    max_transfer_count_memory: int = 32
    max_transfer_bytes_disk: int = 65_536
    max_transfer_count_disk: int = 8
    version_by_topic_length: bool = True
    index_enable: bool = True
    index_slots: int = 0
    index_entries: int = 0
    query_count: int = 32
    query_count_max: int = 64
    file_reserved_hours: int = 72
    delete_hours: tuple[str, ...] = ("04",)
    disk_used_ratio_max: int = 75
    disk_forced_ratio: int = 85
    disk_warning_ratio: int = 90
    clean_forcibly: bool = True
    clean_interval_ms: int = 10_000
    delete_files_max: int = 10
    delete_file_interval_ms: int = 100
    delete_queue_file_interval_ms: int = 100
    retention_warning_percent: int = 80
    filter_scan_units_max: int = 1_000_000
    columns_mode: str = "auto"
    columns_max: int = 64
    columns_disk_percent: int = 10
    columns_memory_bytes: int = 256 * 1024 * 1024
    delay_levels: str = DEFAULT_LEVELS
    delay_offset_flush_interval_ms: int = 10_000
    timer_enable: bool = True
    timer_delay_max_s: int = 259_200
    timer_precision_ms: int = 1000
    timer_roll_window_slots: int = 172_800
    timer_slot_messages_max: int = 2**31 - 1
    timer_flush_interval_ms: int = 1000
    timer_log_file_bytes: int = 100 * 1024 * 1024
    origin: Origin = field(default=_UNKNOWN, compare=False, repr=False)

    @property
    def delay_levels_ms(self) -> tuple[int, ...]:
        """The delay of level 1, 2, …"""
        return parse_delay_levels(self.delay_levels)

    def changed(self, **changes: Any) -> Self:
        """With other settings; what was not given but follows from them follows anew."""
        unset: dict[str, Any] = {
            name: type(getattr(self, name))() for name in _DERIVED if name not in changes
        }
        derived = replace(self, **unset)
        follows = {
            name: empty
            for name, empty in unset.items()
            if getattr(derived, name) == getattr(self, name)
        }
        return replace(self, **follows, **changes)

    def __post_init__(self) -> None:
        root = self.root.rstrip("/") or "/"
        unit = CONSUME_QUEUE_UNIT_BYTES
        put = object.__setattr__
        put(self, "root", root)
        parse_delay_levels(self.delay_levels)
        if "," in self.commit_log_path:
            raise ConfigurationError(
                f"storePathCommitLog={self.commit_log_path} names several directories.",
                cure="Name one: a log over several paths is not supported.",
            )
        if self.checksum_property_required and not self.checksum_property:
            raise ConfigurationError(
                "forceVerifyPropCRC = true without enabledAppendPropCRC = true: a recovery would"
                " throw away every message that is stored from now on.",
                cure="Set enabledAppendPropCRC = true too.",
            )
        put(self, "commit_log_path", self.commit_log_path or f"{root}/commitlog")
        put(self, "consume_queue_path", self.consume_queue_path or f"{root}/consumequeue")
        # Rounded up to whole units, as the real one does (spec/config.md).
        put(self, "consume_queue_file_bytes", -(-self.consume_queue_file_bytes // unit) * unit)
        if not self.index_slots:
            log_bytes = self.commit_log_file_bytes
            small = max(log_bytes // 200, 100)
            put(self, "index_slots", small if log_bytes < SMALL_LOG_FILE_BYTES else INDEX_SLOTS)
        if not self.index_entries:
            put(self, "index_entries", INDEX_ENTRIES_PER_SLOT * self.index_slots)
        for name, (low, high) in RATIO_LIMITS.items():
            put(self, name, min(max(getattr(self, name), low), high))
        for hour in self.delete_hours:
            if not (hour.isascii() and hour.isdigit() and int(hour) < 24):
                raise ConfigurationError(
                    f"deleteWhen = {';'.join(self.delete_hours)} is not valid: {hour} is no hour.",
                    cure="Write hours from 00 to 23, separated by ; as in 04;16.",
                )


@dataclass(frozen=True, slots=True)
class NameServerConfig(ServerConfig):
    """The settings of a name server."""

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
    reachable_addresses: bool = True
    config_black_list: tuple[str, ...] = ("configBlackList", "configStorePath", "kvConfigPath")
