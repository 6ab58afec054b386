"""The settings of a server command: its options, on top of its configuration file.

Options that are settings have the name of the setting as their parameter name, so that `options`
here is a mapping of such names to values; None means that an option is not given.
"""

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sluicemq.config import (
    CHANGES_FILE,
    BrokerConfig,
    StoreConfig,
    decode_properties_file,
    load_broker_config,
    load_name_server_config,
    parse_properties,
)
from sluicemq.config.change import settings_text
from sluicemq.config.keys import Part
from sluicemq.config.load import (
    DEFAULT_TLS_FILE,
    java_options,
    parse_json,
    tls_entries,
)
from sluicemq.config.settings import KEYS
from sluicemq.errors import ConfigurationError
from sluicemq.files import SYSTEM_FILES, exposure_warning

METRICS_KEY = "metricsPromExporterPort"
_PATH_KEYS = ("storePathRootDir", "brokerConfigPath", "configStorePath")
log = logging.getLogger("sluicemq.cli")


def format_settings(part: Part, path: str | None, name_servers: str | None = None) -> str:
    """Return all settings that a server would have, as lines `key=value`.

    `part` is Part.NAME_SERVER or Part.BROKER. `path` is the configuration file; None means no file.
    `name_servers` are those on a broker's command line. Warnings about the file are logged. Raises
    ConfigurationError if the file is invalid or cannot be read.
    """
    file_text = read_config_file(path)
    configs: dict[Part, Any]
    if part is Part.NAME_SERVER:
        name_server, warnings = load_name_server_config(file_text)
        configs = {Part.NAME_SERVER: name_server}
    else:
        overrides = given_settings({"namesrvAddr": name_servers})
        broker, store, warnings = load_broker_config(file_text, overrides=overrides)
        configs = {Part.BROKER: broker, Part.STORE: store}
    log_warnings(path, warnings)
    return settings_text(configs, configs)


def load_broker_settings(
    path: str | None, options: dict[str, Any], *, defaults: str = ""
) -> tuple[BrokerConfig, StoreConfig]:
    """Return the configuration of a broker and that of its store, and log warnings.

    `options` override the file at `path`, and the file overrides `defaults`, a text in the format
    of the file. `path` None means the file with settings that were changed at run time, if it
    exists. Raises ConfigurationError.
    """
    root = options["storePathRootDir"] or StoreConfig().root
    path = path or existing_file(f"{root}/config/{CHANGES_FILE}")
    settings_with_defaults = defaults + read_config_file(path)
    options = with_metrics_port(options, settings_with_defaults)
    overrides = load_tls_settings(settings_with_defaults, Part.BROKER)
    overrides |= given_settings(options | {"brokerConfigPath": path})
    config, store, warnings = load_broker_config(settings_with_defaults, overrides=overrides)
    log_warnings(path, warnings)
    return config, store


def find_broker_file(
    path: str | None, proxy_path: str | None, proxy_text: str | None
) -> str | None:
    """Return the configuration file of a broker; None if none is named.

    This is `path`, or else the file that brokerConfigPath in the proxy's file names. If both are
    named and differ, a warning is logged. `proxy_text` is the content of the proxy's file, and
    `proxy_path` its path.
    """
    named = None
    if proxy_text:
        named = parse_json(proxy_text, proxy_path or "").get("brokerConfigPath")
    if not named or path is None:
        return path or named or None
    if Path(named).expanduser() != Path(path).expanduser():
        warning = f"brokerConfigPath = {named} is ignored: the broker's file is {path}, from -c."
        log_warnings(proxy_path, [warning])
    return path


def read_config_file(path: str | None, option: str = "-c") -> str:
    """Return the text of a configuration file, "" if `path` is None.

    If it contains a secret and other users can read it, a warning is logged. Raises
    ConfigurationError if it cannot be read; the error names `option`, which sets the path.
    """
    if path is None:
        return ""
    file_text = read_properties_file(path, option)
    settings = parse_properties(file_text)
    has_secret = any(settings.get(key.name) for key in KEYS if key.is_secret)
    if has_secret:
        warn_if_exposed(path)
    return file_text


def read_properties_file(path: str, option: str = "-c") -> str:
    """Return the text of a file, decoded as Java decodes its properties.

    Raises ConfigurationError, which names `option`, if the file cannot be read.
    """
    try:
        return decode_properties_file(Path(path).read_bytes())
    except OSError as error:
        raise ConfigurationError(
            f"{path} cannot be read: {error.strerror}.", fix=f"Name a readable file with {option}."
        ) from error


def warn_if_exposed(*paths: str) -> None:
    """Log a warning for each file with secrets that other users can read."""
    for path in paths:
        warning = exposure_warning(SYSTEM_FILES, path)
        if warning is not None:
            log.warning("%s", warning)


def existing_file(path: str) -> str | None:
    """Return `path` if it is the path of a file, else None."""
    return path if Path(path).is_file() else None


def load_tls_settings(config_text: str, part: Part) -> dict[str, str]:
    """Return the settings in the file for TLS, which `tls.config.file` names; {} without a file.

    `config_text` is the server's configuration file, and `part` the server. The TLS file overrides
    the configuration file, as with RocketMQ. Raises ConfigurationError if a named file cannot be
    read.
    """
    named_path = parse_properties(config_text).get("tls.config.file")
    named_path = named_path or java_options(os.environ).get("tls.config.file")
    path = named_path or DEFAULT_TLS_FILE
    if named_path is None and not Path(path).is_file():
        return {}
    tls_settings = parse_properties(read_config_file(path, "tls.config.file"))
    return tls_entries(tls_settings, part)


def given_settings(options: Mapping[str, Any]) -> dict[str, str]:
    """Return the options that are not None as settings, which are texts.

    Paths of the store and of configuration files become absolute.
    """
    settings = {}
    for name, value in options.items():
        if value is None:
            continue
        if name in _PATH_KEYS:
            settings[name] = str(Path(value).expanduser().absolute())
        else:
            settings[name] = str(value)
    return settings


def with_metrics_port(
    options: dict[str, Any], config_text: str, *, port_key: str = "listenPort"
) -> dict[str, Any]:
    """Return the options, with a free port for metrics if the server itself uses a free port.

    Several such servers may run on one machine, and only one could use the default port for
    metrics. `port_key` is the option for the port of the server. The options are unchanged if an
    option or the configuration file sets the port for metrics.
    """
    is_metrics_port_set = options[METRICS_KEY] is not None or METRICS_KEY in config_text
    if options[port_key] == 0 and not is_metrics_port_set:
        return options | {METRICS_KEY: 0}
    return options


def log_warnings(path: str | None, warnings: list[str]) -> None:
    """Log each of the warnings about a configuration file; `path` None means the options."""
    for warning in warnings:
        log.warning("%s: %s", path or "configuration", warning)
