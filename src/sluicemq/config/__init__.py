"""Settings: RocketMQ's files in, small frozen values out.

    settings.py     BrokerConfig, StoreConfig, NameServerConfig, ProxyConfig: a key for each field
    inert.py        keys that RocketMQ knows and that have no effect here
    load.py         text -> values with warnings; changes at run time; values -> text

Order of precedence: defaults, environment (`NAMESRV_ADDR`), file, command line.
"""

from sluicemq.config.keys import Key, Part
from sluicemq.config.load import (
    Change,
    Configs,
    change_settings,
    decode_properties_file,
    edit_properties,
    load_broker_config,
    load_local_proxy_config,
    load_name_server_config,
    load_proxy_config,
    parse_properties,
    reread_settings,
    settings_text,
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
