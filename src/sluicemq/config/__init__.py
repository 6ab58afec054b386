"""The settings of the servers, read from RocketMQ's configuration files into frozen dataclasses.

    keys.py         how a setting is declared, and the settings that all servers share
    settings.py     BrokerConfig, StoreConfig, NameServerConfig, ProxyConfig
    inert.py        keys of RocketMQ that have no effect in SluiceMQ
    properties.py   the syntax of a properties file
    load.py         load settings from text
    change.py       change settings at run time, and write them as text

A later source takes precedence over an earlier one: defaults, environment (`NAMESRV_ADDR`), file,
command line.
"""

from sluicemq.config.change import (
    Change,
    Configs,
    change_settings,
    reread_settings,
    settings_text,
)
from sluicemq.config.keys import Key, Part
from sluicemq.config.load import (
    load_broker_config,
    load_local_proxy_config,
    load_name_server_config,
    load_proxy_config,
)
from sluicemq.config.properties import (
    decode_properties_file,
    edit_properties,
    parse_properties,
)
from sluicemq.config.settings import (
    CHANGES_FILE,
    KEYS,
    BrokerConfig,
    NameServerConfig,
    ProxyConfig,
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
    "ProxyConfig",
    "StoreConfig",
    "change_settings",
    "decode_properties_file",
    "edit_properties",
    "load_broker_config",
    "load_local_proxy_config",
    "load_name_server_config",
    "load_proxy_config",
    "parse_properties",
    "reread_settings",
    "settings_text",
]
