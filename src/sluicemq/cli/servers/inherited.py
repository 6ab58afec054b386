"""The settings that the proxy of `sluice up --brokers` and `--replicas` takes from the broker's
file.

In one process, the proxy is served with the settings of its broker: TLS, limits of connections,
metrics. As a process of its own it gets the same values in an environment variable, since some of
them are secrets, and removes the variable at once.

    SLUICE_INHERITED_SETTINGS    {"metricsExporterType": "DISABLE", …}
"""

import json
import os
from collections.abc import Mapping
from dataclasses import fields
from typing import Final

from sluicemq.config import BrokerConfig
from sluicemq.config.keys import Part, PushedConfig
from sluicemq.config.load import value_text
from sluicemq.config.settings import keys_of
from sluicemq.errors import ConfigurationError

VARIABLE: Final = "SLUICE_INHERITED_SETTINGS"
_OF_EACH_SERVER: Final = {
    "bind_address", "listen_port", "metrics_port",  # options of the command
    "acl_enable", "acl_files", "acl_compatible",  # part of the account of the run
    "tls_config_file",  # its values are in the other keys already
}  # fmt: skip


def inherited_environment(config: BrokerConfig) -> dict[str, str]:
    """Return the environment variable that passes the settings of `config` which a proxy has too
    and which differ from their defaults; none if there are no such settings."""
    shared = {item.name for item in fields(PushedConfig)} - _OF_EACH_SERVER
    values = {}
    for key in keys_of(Part.PROXY):
        if key.field in shared and getattr(config, key.field) != key.default:
            values[key.name] = value_text(key, getattr(config, key.field))
    return {VARIABLE: json.dumps(values)} if values else {}


def inherited_settings() -> Mapping[str, str]:
    """Return the settings that the parent process passed in the environment, and remove them there.
    Raises ConfigurationError if the variable does not hold settings."""
    text = os.environ.pop(VARIABLE, "")
    if not text:
        return {}
    try:
        return {str(name): str(value) for name, value in dict(json.loads(text)).items()}
    except (ValueError, TypeError):
        raise ConfigurationError(
            f"the environment variable {VARIABLE} does not hold settings.",
            fix="Remove it: `sluice up` sets it for the proxy that it starts.",
        ) from None
