"""Settings: RocketMQ's property files in, small frozen values out.

    properties.py   the syntax of java.util.Properties
    values.py       BrokerConfig, StoreConfig, NameServerConfig
    keys.py         the declared table: RocketMQ's key -> field, type, range, meaning
    inert.py        keys that RocketMQ knows and that have no effect here
    load.py         text -> values with warnings, values -> text, updates at run time

Order of precedence: defaults, environment (`NAMESRV_ADDR`), file, command line.
"""

from sluicemq.config.keys import KEYS, Key, Part
from sluicemq.config.load import (
    broker_config_text,
    known_entries,
    load_broker_config,
    load_name_server_config,
    name_server_config_text,
    update_broker_config,
    update_name_server_config,
)
from sluicemq.config.properties import decode_properties_file, edit_properties, parse_properties
from sluicemq.config.values import BrokerConfig, NameServerConfig, StoreConfig

__all__ = [
    "KEYS",
    "BrokerConfig",
    "Key",
    "NameServerConfig",
    "Part",
    "StoreConfig",
    "broker_config_text",
    "decode_properties_file",
    "edit_properties",
    "known_entries",
    "load_broker_config",
    "load_name_server_config",
    "name_server_config_text",
    "parse_properties",
    "update_broker_config",
    "update_name_server_config",
]
