"""Load settings from the text of configuration files.

Everything here follows from the keys in `settings.py`. RocketMQ silently ignores unknown keys and
invalid values (spec/config.md). SluiceMQ warns about an unknown key and suggests the nearest known
one, warns about a key of RocketMQ that has no effect, and raises an error for an invalid value.

`properties.py` has the syntax of the text.

Variables (`$NAME`, `~`) are replaced in paths.

RocketMQ has the TLS settings in other places: system properties of Java
(`-Dtls.server.mode=enforcing` in JAVA_OPT), and a properties file that takes precedence over those
(tls.config.file).
"""

import functools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, replace
from typing import Any, Final, NamedTuple

from sluicemq.config.inert import INERT, REFUSED
from sluicemq.config.keys import Key, Kind, Origin, Part, ServerConfig, TlsConfig
from sluicemq.config.properties import parse_properties
from sluicemq.config.proxying import ProxyLimits
from sluicemq.config.settings import (
    CHANGES_FILE,
    BrokerConfig,
    NameServerConfig,
    ProxyConfig,
    StoreConfig,
    keys_of,
)
from sluicemq.errors import ConfigurationError
from sluicemq.hints import did_you_mean
from sluicemq.numbers import natural

DEFAULT_TLS_FILE: Final = "/etc/rocketmq/tls.properties"
NAME_LENGTH_MAX: Final = 127
_PATTERNS: Final = {
    # There are topics with these names, and topics are directories.
    Kind.NAME: (
        re.compile(rf"(?!\.+$)[%|A-Za-z0-9_.-]{{1,{NAME_LENGTH_MAX}}}"),
        "Use only ASCII letters, digits and the characters % | . - and _ "
        f"(at most {NAME_LENGTH_MAX} characters in total).",
    ),
    Kind.HOST: (re.compile(r"[A-Za-z0-9_.:%-]+"), "Write an IP address or a host name."),
}
_UNITS: Final = {"hours": "hours", "ms": "milliseconds", "s": "seconds", "bytes": "bytes"}
"""The unit of a number by a word in the name of its field."""
SYSTEM_PROPERTIES: Final = {
    f"rocketmq.broker.{name}": name
    for name in ("diskSpaceWarningLevelRatio", "diskSpaceCleanForciblyRatio")
}
"""System properties of Java that take precedence over these keys. Their values are fractions."""

PROXY_NAMES: Final = {
    "tlsCertPath": "tls.server.certPath",
    "tlsKeyPath": "tls.server.keyPath",
    "tlsKeyPassword": "tls.server.keyPassword",
    "tlsTestModeEnable": "tls.test.mode.enable",
    "enableACL": "aclEnable",
}
"""Names of RocketMQ's proxy for keys that brokers have too, mapped to the names of brokers."""

Settings = BrokerConfig | StoreConfig | NameServerConfig | ProxyConfig
PathOf = Callable[[str, str], str]
"""A function (key, text) that returns the path that the text of a key means."""
# ------------------------------------------------------------------------------------- at the start


class LoadedValues(NamedTuple):
    """The values that a text sets, by part and field, and warnings for the user."""

    values: dict[tuple[Part, str], Any]
    warnings: list[str]
    without_effect: list[str]
    """The warnings about keys that have no effect: unknown ones and some of RocketMQ."""

    def values_of(self, part: Part) -> dict[str, Any]:
        """Return the values of one part of the settings by the name of the field.

        A part is, for example, the store.
        """
        values_of_part = {}
        for (owner, field), value in self.values.items():
            if owner is part:
                values_of_part[field] = value
        return values_of_part


def load_broker_config(
    text: str,
    *,
    overrides: Mapping[str, str] | None = None,
    environment: Mapping[str, str] | None = None,
) -> tuple[BrokerConfig, StoreConfig, list[str]]:
    """Return the settings of a broker, the settings of its store, and warnings.

    `text` is the text of a broker.conf. `overrides` are the values of the command line by key,
    which take precedence over the file. `environment` contains the environment variables; None
    means the environment of the process. Each warning is a sentence. Raises ConfigurationError for
    an invalid value.
    """
    environment = os.environ if environment is None else environment
    entries = _collect_broker_entries(text, environment) | dict(overrides or {})

    def build(path_of: PathOf) -> tuple[BrokerConfig, StoreConfig, LoadedValues]:
        """Return the settings of broker and store, and the values of keys they are made of.

        `path_of(key, text)` returns the path for the text of a setting that is a path.
        """
        loaded = find_values(entries, (Part.BROKER, Part.STORE), path_of)
        broker = BrokerConfig(**loaded.values_of(Part.BROKER))
        store = StoreConfig(**loaded.values_of(Part.STORE))
        config_path = broker.config_path or f"{store.root}/config/{CHANGES_FILE}"
        acl_files = _list_acl_files(config_path, f"{store.root}/conf", environment)
        # Clamped, not refused, as RocketMQ does (spec/namesrv.md §3).
        register_period_ms = min(max(broker.register_period_ms, 10_000), 60_000)
        broker = replace(
            broker,
            config_path=config_path,
            acl_files=broker.acl_files or acl_files,
            register_period_ms=register_period_ms,
        )
        return broker, store, loaded

    # Build the settings twice: with the variables in paths replaced, and as the file has them, so
    # that responses can show the text of the file.
    broker, store, loaded = build(functools.partial(_expand_path, environment))
    broker_as_written, store_as_written, _ = build(_return_as_written)
    paths_as_written = _map_paths_to_texts(broker, broker_as_written)
    paths_as_written |= _map_paths_to_texts(store, store_as_written)
    origin = Origin(paths_as_written, frozenset(overrides or ()))
    warnings = loaded.warnings + warnings_about(loaded, broker, store)
    return replace(broker, origin=origin), replace(store, origin=origin), warnings


def _collect_broker_entries(text: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the texts that the environment and the text of a broker.conf set, by key.

    If a key is set several times, Java's system properties (`-Dname=value` in $JAVA_OPT) take
    precedence over the file, and the file over $NAMESRV_ADDR.
    """
    options = java_options(environment)
    entries = parse_properties(text)
    entries |= {name: options[name] for name in SYSTEM_PROPERTIES if name in options}
    entries |= tls_entries(options, Part.BROKER)
    default_entries = {"namesrvAddr": environment.get("NAMESRV_ADDR", "")}
    return default_entries | with_system_properties(entries)


def load_name_server_config(
    text: str,
    *,
    overrides: Mapping[str, str] | None = None,
    environment: Mapping[str, str] | None = None,
) -> tuple[NameServerConfig, list[str]]:
    """Return the settings of a name server, and warnings.

    `text` is the text of a namesrv.conf. `overrides` are the values of the command line by key,
    which take precedence over the file. `environment` contains the environment variables; None
    means the environment of the process. Each warning is a sentence. Raises ConfigurationError for
    an invalid value.
    """
    environment = os.environ if environment is None else environment
    tls_options = tls_entries(java_options(environment), Part.NAME_SERVER)
    entries = parse_properties(text) | tls_options | dict(overrides or {})

    def build(path_of: PathOf) -> tuple[NameServerConfig, LoadedValues]:
        """Return the settings, and the values of keys that they are made of.

        `path_of(key, text)` returns the path for the text of a setting that is a path.
        """
        loaded = find_values(entries, (Part.NAME_SERVER,), path_of)
        config = NameServerConfig(**loaded.values_of(Part.NAME_SERVER))
        directory = _directory_of(config.kv_config_path)
        acl_files = _list_acl_files(config.config_path, directory, environment)
        return replace(config, acl_files=config.acl_files or acl_files), loaded

    # Build the settings twice: with the variables in paths replaced, and as the file has them.
    config, loaded = build(functools.partial(_expand_path, environment))
    config_as_written, _ = build(_return_as_written)
    paths_as_written = _map_paths_to_texts(config, config_as_written)
    origin = Origin(paths_as_written, frozenset(overrides or ()))
    return replace(config, origin=origin), loaded.warnings + warnings_about(loaded, config)


def load_proxy_config(
    text: str,
    *,
    overrides: Mapping[str, str] | None = None,
    environment: Mapping[str, str] | None = None,
    path: str = "",
) -> tuple[ProxyConfig, list[str]]:
    """Return the settings of a proxy, and warnings.

    `text` is the text of a rmq-proxy.json, and `path` the path of that file. plain_acl.yml is
    looked for in the same directory. `overrides` are the values of the command line by key, which
    take precedence over the file. `environment` contains the environment variables; None means the
    environment of the process. Each warning is a sentence. Raises ConfigurationError for an invalid
    value.
    """
    environment = os.environ if environment is None else environment
    entries = _parse_proxy_entries(text, path)
    entries |= tls_entries(java_options(environment), Part.PROXY) | dict(overrides or {})
    loaded = find_values(entries, (Part.PROXY,), functools.partial(_expand_path, environment))
    config = ProxyConfig(**loaded.values_of(Part.PROXY))
    acl_files = _list_acl_files(path, _directory_of(path), environment)
    config = replace(config, acl_files=config.acl_files or acl_files)
    return config, loaded.warnings + warnings_about(loaded, config)


def _parse_proxy_entries(text: str, path: str) -> dict[str, str]:
    """Return the keys and values of a rmq-proxy.json, under the names that brokers use.

    Raises ConfigurationError, which names the file `path`, if the text is not a flat JSON object.
    """
    value_by_name = parse_json(text, path)
    return {PROXY_NAMES.get(name, name): value for name, value in value_by_name.items()}


def load_local_proxy_config(
    text: str,
    broker: BrokerConfig,
    *,
    environment: Mapping[str, str] | None = None,
    path: str = "",
) -> tuple[BrokerConfig, ProxyLimits, list[str]]:
    """Read a rmq-proxy.json for a proxy that runs in the process of `broker`.

    `text` is the content of the file, and `path` its path, for errors. `environment` contains the
    environment variables; None means the environment of the process. Return

    - `broker` with the port, address, TLS settings and connection limits of the proxy's file
    - the limits of the proxy
    - warnings, which also name the keys that only the broker's own file can set

    Raises ConfigurationError for an invalid value, and if the file enables access control while the
    broker has none.
    """
    environment = os.environ if environment is None else environment
    entries = _parse_proxy_entries(text, path)
    entries.pop("brokerConfigPath", None)  # the caller has read it
    warnings = []
    if entries.pop("proxyMode", "LOCAL").upper() != "LOCAL":
        warnings.append(
            "proxyMode is taken as LOCAL, because this proxy runs in the process of a broker."
        )
    loaded = find_values(entries, (Part.PROXY,), functools.partial(_expand_path, environment))
    value_by_field = loaded.values_of(Part.PROXY)
    if value_by_field.pop("acl_enable", False) and not broker.acl_enable:
        raise ConfigurationError(
            "aclEnable (enableACL) is true for the proxy but not for the broker. A proxy in the "
            "process of a broker uses the broker's access control.",
            fix="Set aclEnable = true in the broker's file.",
        )

    limits = _take_limits(value_by_field)
    server_values, unused_keys = _choose_server_values(value_by_field, broker)
    if unused_keys:
        warnings.append(
            f"These keys have no effect, because only the broker's own file sets them: "
            f"{', '.join(unused_keys)}."
        )
    config = replace(broker, **server_values)
    warnings += loaded.warnings + warnings_about(loaded, config)
    return config, limits, warnings


def _take_limits(value_by_field: dict[str, Any]) -> ProxyLimits:
    """Remove the limits of the proxy from `value_by_field`, and return them as an object.

    `value_by_field` has the values of the proxy's file.
    """
    limits = {}
    for declared in fields(ProxyLimits):
        if declared.name in value_by_field:
            limits[declared.name] = value_by_field.pop(declared.name)
    return ProxyLimits(**limits)


def _choose_server_values(
    value_by_field: Mapping[str, Any], broker: BrokerConfig
) -> tuple[dict[str, Any], list[str]]:
    """Return the values of a proxy's file that replace fields of `broker`, and the ignored keys.

    `value_by_field` has the values of the file, without the limits of the proxy. A value is used if
    it is a setting of every server (`ServerConfig`), except settings of access control, and if the
    broker's command line has not set it. The ignored keys are all other settings, which only the
    broker's own file can set.
    """
    server_fields = {declared.name for declared in fields(ServerConfig)}
    server_fields -= {"acl_files", "acl_compatible"}
    server_values: dict[str, Any] = {}
    unused_keys: list[str] = []
    for key in keys_of(Part.PROXY):
        if key.field not in value_by_field:
            continue
        if key.field not in server_fields:
            unused_keys.append(key.name)
        elif key.name not in broker.origin.command_line:
            broker_field = "proxy_port" if key.field == "listen_port" else key.field
            server_values[broker_field] = value_by_field[key.field]
    return server_values, unused_keys


_JSON_ERRORS: Final = {
    "Expecting property name enclosed in double quotes": "expected a property name in double "
    "quotes",
    "Expecting value": "expected a value",
    "Expecting ':' delimiter": "expected a colon",
    "Expecting ',' delimiter": "expected a comma",
    "Extra data": "expected the end of the text",
}
"""The reasons of Python's JSON parser, mapped to the words of our errors."""


def parse_json(text: str, path: str = "") -> dict[str, str]:
    """Return the members of a flat JSON object as strings: `{"a": 1}` becomes {"a": "1"}.

    Members that are null are left out, and an empty text has no members. Raises ConfigurationError
    if the text is not such an object. The error names the file `path` if it is not "".
    """
    source_name = repr(path) if path else "the text of the settings"
    fix = 'Write a JSON object, as in {"grpcServerPort": 8081}.'
    try:
        document = json.loads(text.rstrip() or "{}")
    except json.JSONDecodeError as error:
        reason = _JSON_ERRORS.get(error.msg, error.msg[:1].lower() + error.msg[1:])
        raise ConfigurationError(
            f"{source_name} is not valid JSON (line {error.lineno}, column {error.colno}):"
            f" {reason}.",
            fix=fix,
        ) from error

    is_flat = isinstance(document, dict) and not any(
        isinstance(value, dict | list) for value in document.values()
    )
    if not is_flat:
        raise ConfigurationError(f"{source_name} is not a flat JSON object.", fix=fix)
    texts = {}
    for key, value in document.items():
        if value is not None:
            texts[key] = value if isinstance(value, str) else json.dumps(value)
    return texts


def _return_as_written(_name: str, path_text: str) -> str:
    """Return the text of a path without replacing variables (a `PathOf`)."""
    return path_text


def _map_paths_to_texts(settings: Settings, as_written: Settings) -> dict[str, str]:
    """Return a dict from paths in `settings` to the text that the file has for them.

    Only paths whose text differs, because it has variables, are returned. `as_written` has the same
    settings with the texts of the file, in which the variables are not replaced.
    """
    text_by_path: dict[str, str] = {}
    for setting in fields(settings):
        if not setting.compare:
            continue  # the origin of the settings
        value = getattr(settings, setting.name)
        text = getattr(as_written, setting.name)
        if isinstance(value, tuple) and isinstance(text, tuple):
            text_by_path |= dict(zip(value, text, strict=True))
        elif isinstance(value, str):
            text_by_path[value] = text
    return {path: text for path, text in text_by_path.items() if path != text}


def _list_acl_files(
    config_path: str, directory: str, environment: Mapping[str, str]
) -> tuple[str, ...]:
    """Return the paths where plain_acl.yml may be, in the order in which they are tried.

    It may be in the directory of the configuration file `config_path`, in $ROCKETMQ_HOME/conf, or
    in `directory`. The paths need not exist.
    """
    directories = [_directory_of(config_path)]
    home = environment.get("ROCKETMQ_HOME")
    if home:
        directories.append(f"{home}/conf")
    directories.append(directory)
    distinct_directories = dict.fromkeys(directories)
    return tuple(f"{acl_directory}/plain_acl.yml" for acl_directory in distinct_directories)


def _directory_of(path: str) -> str:
    """Return the directory of a path: "." if the path names none."""
    return path.rpartition("/")[0] or "."


# ------------------------------------------------- system properties of Java, and TLS settings


def java_options(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the system properties that a start script of RocketMQ would pass to Java.

    They are the options `-Dname=value` in $JAVA_OPT and $JAVA_OPT_EXT. The result maps name to
    value.
    """
    arguments = f"{environment.get('JAVA_OPT', '')} {environment.get('JAVA_OPT_EXT', '')}".split()
    properties = {}
    for argument in arguments:
        if argument.startswith("-D") and "=" in argument:
            name, _, value = argument.removeprefix("-D").partition("=")
            properties[name] = value
    return properties


def tls_entries(entries: Mapping[str, str], part: Part) -> dict[str, str]:
    """Return the entries that are TLS settings of `part`.

    A file may also contain the TLS settings of other parts, which are left out.
    """
    known_names = index_keys(part)
    return {
        name: text
        for name, text in entries.items()
        if name.startswith("tls.") and name in known_names
    }


def index_keys(*parts: Part) -> dict[str, Key]:
    """Return the keys of some parts of the settings, by their names and aliases."""
    key_by_name = {}
    for key in keys_of(*parts):
        for name in (key.name, *key.aliases):
            key_by_name[name] = key
    return key_by_name


def key_files(config: TlsConfig) -> list[str]:
    """Return the paths of the files that contain private keys, without duplicates.

    If no file is set for a key, it is in the file of its certificate.
    """
    paths = [config.tls_key or config.tls_certificate]
    if isinstance(config, BrokerConfig):
        paths.append(config.tls_client_key or config.tls_client_certificate)
        paths.append(config.consensus_key or config.consensus_certificate)
    return [path for path in dict.fromkeys(paths) if path]


def with_system_properties(entries: Mapping[str, str]) -> dict[str, str]:
    """Return the entries with Java's system properties for some keys replaced by these keys.

    `SYSTEM_PROPERTIES` maps the names of these properties to keys. A property has a fraction as its
    value, and the key has percents: `0.85` becomes `85`. Raises ConfigurationError for a value that
    is not a number.
    """
    renamed_entries = dict(entries)
    for property_name, key in SYSTEM_PROPERTIES.items():
        fraction = renamed_entries.pop(property_name, "")
        if not fraction:
            continue
        try:
            renamed_entries[key] = str(round(float(fraction) * 100))
        except (ValueError, OverflowError):
            raise _invalid_value_error(
                property_name, fraction, "Write a fraction, as in 0.85."
            ) from None
    return renamed_entries


# --------------------------------------------------------------------------- reading values

HINTED_MAX: Final = 5
"""The number of unknown keys for which a known key is suggested."""
HINTED_LENGTH_MAX: Final = 100


def _warn_about_unknown_keys(unknown_names: list[str], known_names: Iterable[str]) -> Iterator[str]:
    """Yield a warning for each of the first HINTED_MAX unknown keys, then one for all others.

    A warning suggests the most similar of `known_names`, if one is similar. A key without effect
    (`INERT`) is never suggested.
    """
    if not unknown_names:
        return
    candidates = list(known_names)
    # The number of hints is limited because each search takes 0.2 ms.
    for name in unknown_names[:HINTED_MAX]:
        is_short = len(name) <= HINTED_LENGTH_MAX
        hint = did_you_mean(name, candidates) if is_short else ""
        yield f"{name[:HINTED_LENGTH_MAX]} is not a known key and is ignored. {hint}".rstrip()
    if len(unknown_names) > HINTED_MAX:
        yield f"{len(unknown_names) - HINTED_MAX} more unknown keys are ignored."


def find_values(
    entries: Mapping[str, str], parts: tuple[Part, ...], path_of: PathOf
) -> LoadedValues:
    """Return the values that `entries` set for the keys of some parts, with warnings.

    `entries` maps keys or their aliases to texts. An empty text sets nothing. `path_of(key, text)`
    returns the path that a text means. There is a warning for each unknown key, for each key
    without effect (`INERT`), and for each alias that is ignored because the key itself is set too.

    Raises ConfigurationError for an invalid value, and for a key in `REFUSED` that is switched on.
    """
    key_by_name = index_keys(*parts)
    loaded = LoadedValues({}, [], [])
    inert_names: list[str] = []
    unknown_names: list[str] = []
    for name, text in entries.items():
        key = key_by_name.get(name)
        if key is None and name in INERT:
            _check_not_refused(name, text)
            inert_names.append(name)
        elif key is None:
            unknown_names.append(name)
        elif name != key.name and key.name in entries:
            loaded.warnings.append(f"{name} is ignored because {key.name} is set too.")
        elif any(character < " " for character in text):
            raise ConfigurationError(f"{name} contains control characters.", fix="Remove them.")
        elif text != "":
            loaded.values[key.part, key.field] = _parse_value(key, name, text, path_of)

    loaded.without_effect.extend(_warn_about_unknown_keys(unknown_names, key_by_name))
    loaded.without_effect.extend(_warn_about_inert_keys(inert_names))
    loaded.warnings.extend(loaded.without_effect)
    return loaded


def _check_not_refused(name: str, text: str) -> None:
    """Raise ConfigurationError if a key of RocketMQ is switched on that SluiceMQ refuses.

    "" and "false" mean that the key is off. Any other key is accepted here.
    """
    is_on = text.lower() not in ("", "false")
    if name in REFUSED and is_on:
        raise ConfigurationError(f"{name} = {text}: {REFUSED[name]}.", fix=f"Set {name} = false.")


def _warn_about_inert_keys(names: list[str]) -> Iterator[str]:
    """Yield one warning for each reason why some of these keys have no effect.

    `names` are keys in `INERT`, which maps each to its reason.
    """
    names_by_reason: dict[str, list[str]] = {}
    for name in names:
        names_by_reason.setdefault(INERT[name], []).append(name)
    for reason, names_of_reason in names_by_reason.items():
        yield f"These keys have no effect, because {reason}: {', '.join(names_of_reason)}."


def _parse_value(key: Key, name: str, text: str, path_of: PathOf) -> Any:
    """Return the value that `text` means for a key.

    `name` is the key or alias that the file uses. `path_of(name, text)` returns the path for a
    text. Raises ConfigurationError if the text is not valid.
    """
    match key.kind:
        case Kind.BOOLEAN:
            return _parse_choice(name, text.lower(), (("true", True), ("false", False)))
        case Kind.CHOICE:
            return _parse_choice(name, text, key.choices, dict(key.refused))
        case Kind.INTEGER:
            return _parse_integer(key, name, text)
        case Kind.LIST:
            return _split_list(text)
        case Kind.SERVERS:
            addresses = _split_list(text)
            for address in addresses:
                _check_address(name, text, address)
            return addresses
        case Kind.PATH:
            return path_of(name, text)
        case _:
            _check_text(key.kind, name, text, text)
            return text


def _parse_integer(key: Key, name: str, text: str) -> int:
    """Return the whole number that `text` means for a key.

    `name` is the key or alias that the file uses. Raises ConfigurationError if the text is not a
    number in the range of the key.
    """
    # int() alone would accept "1_000" and digits that Java does not accept.
    has_sign = text[0] in "+-"
    number = natural(text[1:] if has_sign else text)
    if number is not None:
        if text[0] == "-":
            number = -number
        if key.minimum <= number <= key.maximum:
            return number
    if key.minimum == key.maximum:
        fix = f"Write {key.minimum}: {key.doc}"
    else:
        unit = _find_unit(key)
        of_unit = f" of {unit}" if unit else ""
        example = f", as in {key.default}" if unit and isinstance(key.default, int) else ""
        fix = f"Write a whole number{of_unit} from {key.minimum} to {key.maximum}{example}."
    raise _invalid_value_error(name, text, fix)


def _find_unit(key: Key) -> str:
    """Return the unit of a number, such as "hours", by the name of its field; "" if it has none."""
    words = key.field.split("_")
    if "per" in words:
        return "bytes per second" if "bytes" in words else ""
    return next((unit for word, unit in _UNITS.items() if word in words), "")


def _split_list(text: str) -> tuple[str, ...]:
    """Return the items of a list that is separated by semicolons; empty items are left out."""
    items = (item.strip() for item in text.split(";"))
    return tuple(item for item in items if item)


def _check_address(name: str, text: str, address: str) -> None:
    """Raise ConfigurationError if `address` does not have the form host:port.

    `name` is the key of the setting, and `text` its whole value, which the error shows.
    """
    host, _, port = address.rpartition(":")
    if not natural(port, 65_535):
        raise ConfigurationError(
            f"{name} = {text:.80} is not valid: {address} is not host:port.",
            fix="Write addresses such as 10.0.0.1:9876;10.0.0.2:9876.",
        )
    _check_text(Kind.HOST, name, host.strip("[]"), address)


def _check_text(kind: Kind, name: str, text: str, shown: str) -> None:
    """Raise ConfigurationError if `text` is not a valid value of this kind.

    `text` may be a part of the value, such as the host of an address. The error names the key
    `name` and the whole value `shown`. It also names the first character that is not allowed, if
    there is one. Kinds without a pattern accept every text.
    """
    pattern, fix = _PATTERNS.get(kind, (None, ""))
    if pattern is None or pattern.fullmatch(text):
        return
    reason = ""
    for character in text:
        # Tested after a letter, because a name may contain dots, but not consist of them.
        is_allowed = pattern.fullmatch(f"a{character}")
        if not is_allowed:
            reason = "it contains a space" if character == " " else f"it contains {character!r}"
            break
    raise _invalid_value_error(name, shown, fix, reason)


def _invalid_value_error(name: str, text: str, fix: str, reason: str = "") -> ConfigurationError:
    """Return the error for an invalid value `text` of the key `name`. `reason` is a phrase."""
    explanation = f": {reason}" if reason else ""
    return ConfigurationError(f"{name} = {text:.80} is not valid{explanation}.", fix=fix)


def _parse_choice(
    name: str,
    text: str,
    choices: tuple[tuple[str, object], ...],
    refused: Mapping[str, str] = {},
) -> object:
    """Return the value that belongs to the word `text`.

    `choices` contains (word, value) pairs. Raises ConfigurationError if `text` is not one of the
    words. `refused` maps words that RocketMQ accepts, but SluiceMQ does not, to the fix in that
    error.
    """
    for word, meaning in choices:
        if word == text:
            return meaning
    *first_words, last_word = (word for word, _ in choices)
    fix = f"Write {last_word}."
    if first_words:
        fix = f"Write {', '.join(first_words)} or {last_word}."
    raise _invalid_value_error(name, text, refused.get(text, fix))


def _expand_path(environment: Mapping[str, str], name: str, path: str) -> str:
    """Return a path in which `~`, `$NAME`, `${NAME}` and Java's `${user.home}` are replaced.

    `environment` has the values of variables, and `name` is the key of the setting, for errors.
    Raises ConfigurationError if a variable is not set.
    """
    home = environment.get("HOME") or os.path.expanduser("~")  # noqa: PTH111 - text, not Path
    path = path.replace("${user.home}", home)
    if path == "~" or path.startswith("~/"):
        path = home + path[1:]

    def replace_variable(reference: re.Match[str]) -> str:
        """Return the value of the variable that `$NAME` or `${NAME}` refers to."""
        variable = reference[1] if reference[1] is not None else reference[2]
        if variable not in environment:
            raise ConfigurationError(
                f"{name} = {path:.80} is not valid: the variable {variable!r} is not set.",
                fix="Set it in the environment, or write the path without it.",
            )
        return environment[variable]

    return re.sub(r"\$(?:\{([^}]*)\}?|(\w*))", replace_variable, path)


# -------------------------------------------------------------------------------- warnings


def warnings_about(loaded: LoadedValues, *settings: Settings) -> list[str]:
    """Return warnings about settings that are valid but probably not what the user expects.

    `loaded` are the values that the file sets. `settings` are made of them.
    """
    warnings = list(_warn_about_clamped_values(loaded))
    for config in settings:
        if isinstance(config, StoreConfig):
            warnings.extend(_warn_about_store(config))
        else:
            warnings.extend(_warn_about_server_tls(config))
            if isinstance(config, BrokerConfig):
                warnings.extend(_warn_about_broker(config))
    return warnings


def _warn_about_clamped_values(loaded: LoadedValues) -> Iterator[str]:
    """Yield a warning for each value of the store that RocketMQ silently replaces by a limit.

    A value outside of the allowed range is replaced by the nearer end of the range.
    """
    for key in keys_of(Part.STORE):
        if key.clamped_to is None:
            continue
        low, high = key.clamped_to
        value = loaded.values.get((Part.STORE, key.field), low)
        if not low <= value <= high:
            yield f"{key.name} = {value} is taken as {min(max(value, low), high)}."


def _warn_about_store(store: StoreConfig) -> Iterator[str]:
    """Yield a warning if the largest message does not fit into a file of the commit log."""
    if store.message_bytes_max >= store.commit_log_file_bytes:  # each value is valid by itself
        yield (
            f"maxMessageSize = {store.message_bytes_max} is more than fits into a commit log "
            f"file of mappedFileSizeCommitLog = {store.commit_log_file_bytes} bytes; larger "
            "messages are refused."
        )


def _warn_about_server_tls(config: TlsConfig) -> Iterator[str]:
    """Yield warnings about TLS settings of a server that have no effect or do not protect."""
    if config.tls_auth_client and config.tls_client_auth == "none":
        yield (
            "tls.server.authClient = true has no effect, because tls.server.need.client.auth = "
            "none requests no certificates from clients. Set that to require."
        )
    if config.tls_mode == "enforcing" and not config.tls_certificate and config.tls_test_mode:
        yield (
            "tls.server.mode = enforcing without tls.server.certPath: the server creates a "
            "certificate that clients cannot verify. Set tls.server.certPath."
        )


def _warn_about_broker(broker: BrokerConfig) -> Iterator[str]:
    """Yield warnings about a master that waits for no slave, and about its TLS as a client."""
    if broker.broker_role == "SYNC_MASTER" and broker.in_sync_written == 1:
        yield (
            "inSyncReplicas = 1 with brokerRole = SYNC_MASTER: the master responds to sends "
            "and shows messages to consumers before a slave has them. Remove inSyncReplicas to "
            "wait for a slave."
        )
    if broker.tls_client_ca and not broker.tls_auth_server:
        yield (
            "tls.client.trustCertPath has no effect without tls.client.authServer = true: the "
            "certificates of name servers are not verified. Set tls.client.authServer = true."
        )
