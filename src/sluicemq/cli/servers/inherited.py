"""The settings that the proxy of `sluice up --brokers` and `--replicas` inherits from its parent.

A proxy in the process of its broker uses the broker's settings: TLS, limits of connections,
metrics. A proxy in its own process gets the same values in an environment variable, because some
of them are secrets. It removes the variable at once.

    SLUICE_INHERITED_SETTINGS    {"metricsExporterType": "DISABLE", …}
"""

import json
import os
from collections.abc import Mapping
from dataclasses import fields
from typing import Final

from sluicemq.config import BrokerConfig
from sluicemq.config.keys import Part, PushedConfig, value_text
from sluicemq.config.settings import keys_of
from sluicemq.errors import ConfigurationError

VARIABLE: Final = "SLUICE_INHERITED_SETTINGS"
_NOT_INHERITED: Final = {
    "bind_address",
    "listen_port",
    "metrics_port",  # these three are options of the command
    "acl_enable",
    "acl_files",
    "acl_compatible",  # these three are passed with the account of the run
    "tls_config_file",  # its values are already in the other settings
}


def inherited_environment(config: BrokerConfig) -> dict[str, str]:
    """Return the environment variable that passes a broker's settings to the proxy it starts.

    These are the settings that a proxy has too and whose value is not the default, as JSON. The
    result is {} if there are none.
    """
    shared_fields = {field.name for field in fields(PushedConfig)} - _NOT_INHERITED
    settings = {}
    for key in keys_of(Part.PROXY):
        if key.field not in shared_fields:
            continue
        value = getattr(config, key.field)
        if value != key.default:
            settings[key.name] = value_text(key, value)
    return {VARIABLE: json.dumps(settings)} if settings else {}


def inherited_settings() -> Mapping[str, str]:
    """Return name -> value of the settings that the parent process passed, {} if it passed none.

    The environment variable is removed. Raises ConfigurationError if it does not contain settings.
    """
    settings_json = os.environ.pop(VARIABLE, "")
    if not settings_json:
        return {}
    try:
        settings = dict(json.loads(settings_json))
        return {str(name): str(value) for name, value in settings.items()}
    except (ValueError, TypeError):
        raise ConfigurationError(
            f"the environment variable {VARIABLE} does not contain settings.",
            fix="Remove it: `sluice up` sets it for the proxy that it starts.",
        ) from None
