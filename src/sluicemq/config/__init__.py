"""Settings: RocketMQ's property files in, small frozen values out.

    properties.py   the syntax of java.util.Properties
    settings.py     BrokerConfig, StoreConfig, NameServerConfig; each field declares its key
    inert.py        keys that RocketMQ knows and that have no effect here
    load.py         text -> values with warnings
    changes.py      changes at run time, and values -> text

Order of precedence: defaults, environment (`NAMESRV_ADDR`), file, command line.
"""

from sluicemq.config.changes import Change, Configs, change_settings, settings_text
from sluicemq.config.load import load_broker_config, load_name_server_config
from sluicemq.config.properties import decode_properties_file, edit_properties, parse_properties
from sluicemq.config.settings import (
    CHANGES_FILE,
    KEYS,
    BrokerConfig,
    Key,
    NameServerConfig,
    Part,
    StoreConfig,
)

__all__ = [
    "CHANGES_FILE",
    "KEYS",
    "BrokerConfig",
    "Change",
    "Configs",
    "Key",
    "NameServerConfig",
    "Part",
    "StoreConfig",
    "change_settings",
    "decode_properties_file",
    "edit_properties",
    "load_broker_config",
    "load_name_server_config",
    "parse_properties",
    "settings_text",
]
