"""Load settings from text, change them at run time, and write them as text.

Everything here follows from the keys in `settings.py`. RocketMQ silently ignores unknown keys and
invalid values (spec/config.md). SluiceMQ warns about an unknown key and suggests the nearest known
one, warns about a key of RocketMQ that has no effect, and raises an error for an invalid value.

`properties.py` has the syntax of the text.

Variables (`$NAME`, `~`) are replaced only in paths that are read when the server starts. Values in
a request are not expanded, because everyone who can connect could read the environment otherwise.

RocketMQ has the TLS settings in other places: system properties of Java
(`-Dtls.server.mode=enforcing` in JAVA_OPT), and a properties file that takes precedence over those
(tls.config.file).

A change of a *live* key (UPDATE_BROKER_CONFIG, 25, and UPDATE_NAMESRV_CONFIG, 318) is in force at
once. A change of another key is *pending*: it is written to the file and takes effect at the next
start. Until then, responses show both values. Both kinds of changes are validated at once.
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
from sluicemq.errors import ConfigurationError, PermissionDeniedError
from sluicemq.hints import did_you_mean
from sluicemq.numbers import natural

DEFAULT_TLS_FILE: Final = "/etc/rocketmq/tls.properties"
NAME_LENGTH_MAX: Final = 127
_PATTERNS: Final = {
    # There are topics with these names, and topics are directories.
    Kind.NAME: (
        re.compile(rf"(?!\.+$)[%|A-Za-z0-9_.-]{{1,{NAME_LENGTH_MAX}}}"),
        f"Use at most {NAME_LENGTH_MAX} characters, only ASCII letters, digits and % | . - and _.",
    ),
    Kind.HOST: (re.compile(r"[A-Za-z0-9_.:%-]+"), "Write an IP address or a host name."),
}
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
NO_PERMISSION: Final = 16
ALWAYS_BLACK: Final = frozenset({"configBlackList", "rocketmqHome"})
PENDING: Final = "sluicePending."
"""The prefix of a key in a response, if the value is the one at the next start."""

Configs = Mapping[Part, Any]
"""The settings of one server, by part."""

# ------------------------------------------------------------------------------------- at the start


class LoadedValues(NamedTuple):
    """The values that a text sets, by part and field, and warnings for the user."""

    values: dict[tuple[Part, str], Any]
    warnings: list[str]
    without_effect: list[str]
    """The warnings about keys that have no effect: unknown ones and some of RocketMQ."""

    def values_of(self, part: Part) -> dict[str, Any]:
        """Return the values of one part by field."""
        return {field: value for (owner, field), value in self.values.items() if owner is part}


def load_broker_config(
    text: str,
    *,
    overrides: Mapping[str, str] | None = None,
    environment: Mapping[str, str] | None = None,
) -> tuple[BrokerConfig, StoreConfig, list[str]]:
    """Return the settings of a broker and its store from the text of a broker.conf, and warnings.

    `overrides` are values by RocketMQ's keys that take precedence over the file (the command line).
    `environment` is that of the process unless given. Each warning is a sentence. Raises
    ConfigurationError for an invalid value.
    """
    environment = os.environ if environment is None else environment
    options = java_options(environment)
    entries = {"namesrvAddr": environment.get("NAMESRV_ADDR", "")} | with_system_properties(
        parse_properties(text)
        | {name: options[name] for name in SYSTEM_PROPERTIES if name in options}
        | tls_entries(options, Part.BROKER)
    )
    entries |= overrides or {}

    def build(path_of: PathOf) -> tuple[BrokerConfig, StoreConfig, LoadedValues]:
        found = find_values(entries, (Part.BROKER, Part.STORE), path_of)
        broker = BrokerConfig(**found.values_of(Part.BROKER))
        store = StoreConfig(**found.values_of(Part.STORE))
        config_path = broker.config_path or f"{store.root}/config/{CHANGES_FILE}"
        places = _acl_files(config_path, f"{store.root}/conf", environment)
        broker = replace(
            broker,
            config_path=config_path,
            acl_files=broker.acl_files or places,
            # Clamped, not refused, as RocketMQ does (spec/namesrv.md §3).
            register_period_ms=min(max(broker.register_period_ms, 10_000), 60_000),
        )
        return broker, store, found

    broker, store, found = build(functools.partial(_expand, environment))
    broker_text, store_text, _ = build(_as_written)
    written = _written(broker, broker_text) | _written(store, store_text)
    origin = Origin(written, frozenset(overrides or ()))
    warnings = found.warnings + warnings_about(found, broker, store)
    return replace(broker, origin=origin), replace(store, origin=origin), warnings


def load_name_server_config(
    text: str,
    *,
    overrides: Mapping[str, str] | None = None,
    environment: Mapping[str, str] | None = None,
) -> tuple[NameServerConfig, list[str]]:
    """Return the settings of a name server from the text of a namesrv.conf, and warnings.

    The arguments are those of `load_broker_config`.
    """
    environment = os.environ if environment is None else environment
    options = tls_entries(java_options(environment), Part.NAME_SERVER)
    entries = parse_properties(text) | options | dict(overrides or {})

    def build(path_of: PathOf) -> tuple[NameServerConfig, LoadedValues]:
        found = find_values(entries, (Part.NAME_SERVER,), path_of)
        config = NameServerConfig(**found.values_of(Part.NAME_SERVER))
        places = _acl_files(config.config_path, _directory(config.kv_config_path), environment)
        return replace(config, acl_files=config.acl_files or places), found

    config, found = build(functools.partial(_expand, environment))
    origin = Origin(_written(config, build(_as_written)[0]), frozenset(overrides or ()))
    return replace(config, origin=origin), found.warnings + warnings_about(found, config)


def load_proxy_config(
    text: str,
    *,
    overrides: Mapping[str, str] | None = None,
    environment: Mapping[str, str] | None = None,
    path: str = "",
) -> tuple[ProxyConfig, list[str]]:
    """Return the settings of a proxy from the text of a rmq-proxy.json, and warnings.

    `path` is the path of that file, next to which plain_acl.yml may be. The other arguments are
    those of `load_broker_config`.
    """
    environment = os.environ if environment is None else environment
    written = parse_json(text, path)
    entries = {PROXY_NAMES.get(name, name): value for name, value in written.items()}
    entries |= tls_entries(java_options(environment), Part.PROXY) | dict(overrides or {})
    found = find_values(entries, (Part.PROXY,), functools.partial(_expand, environment))
    config = ProxyConfig(**found.values_of(Part.PROXY))
    places = _acl_files(path, _directory(path), environment)
    config = replace(config, acl_files=config.acl_files or places)
    return config, found.warnings + warnings_about(found, config)


def load_local_proxy_config(
    text: str,
    broker: BrokerConfig,
    *,
    environment: Mapping[str, str] | None = None,
    path: str = "",
) -> tuple[BrokerConfig, ProxyLimits, list[str]]:
    """Read a rmq-proxy.json for the proxy in the process of `broker`.

    `text` is the content of the file, and `path` its path, for errors.

    Return the settings of the broker with the port, address, TLS settings and connection limits of
    the proxy's file; the limits of the proxy; and warnings. The warnings name keys that count only
    in the broker's own file. Raises ConfigurationError as `load_broker_config` does, and if the
    file enables access control while the broker has none.
    """
    environment = os.environ if environment is None else environment
    written = parse_json(text, path)
    entries = {PROXY_NAMES.get(name, name): value for name, value in written.items()}
    entries.pop("brokerConfigPath", None)  # the caller has read it
    warnings = []
    if entries.pop("proxyMode", "LOCAL").upper() != "LOCAL":
        warnings.append(
            "proxyMode is taken as LOCAL, because this proxy runs in the process of a broker."
        )
    found = find_values(entries, (Part.PROXY,), functools.partial(_expand, environment))
    values = found.values_of(Part.PROXY)
    if values.pop("acl_enable", False) and not broker.acl_enable:
        raise ConfigurationError(
            "aclEnable (enableACL) is true for the proxy but not for the broker. A proxy in the "
            "process of a broker uses the broker's access control.",
            fix="Set aclEnable = true in the broker's file.",
        )
    limits = {item.name for item in fields(ProxyLimits)}
    served = {item.name for item in fields(ServerConfig)} - {"acl_files", "acl_compatible"}
    own = dict[str, Any]()
    foreign = list[str]()
    for key in keys_of(Part.PROXY):
        if key.field not in values or key.field in limits:
            continue
        if key.field not in served:
            foreign.append(key.name)
        elif key.name not in broker.origin.command_line:
            field = "proxy_port" if key.field == "listen_port" else key.field
            own[field] = values[key.field]
    if foreign:
        warnings.append(
            f"These keys have no effect, because only the broker's own file sets them: "
            f"{', '.join(foreign)}."
        )
    config = replace(broker, **own)
    chosen = ProxyLimits(**{name: value for name, value in values.items() if name in limits})
    return config, chosen, warnings + found.warnings + warnings_about(found, config)


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
    """Return the keys and values of a flat JSON object, as a properties file would have them.

    Raises ConfigurationError if the text is not such an object. The error names the file `path`
    if it is given.
    """
    name = repr(path) if path else "the text of the settings"
    fix = 'Write a JSON object, as in {"grpcServerPort": 8081}.'
    try:
        values = json.loads(text.rstrip() or "{}")
    except json.JSONDecodeError as error:
        reason = _JSON_ERRORS.get(error.msg, error.msg[:1].lower() + error.msg[1:])
        raise ConfigurationError(
            f"{name} is not valid JSON (line {error.lineno}, column {error.colno}): {reason}.",
            fix=fix,
        ) from error
    if not isinstance(values, dict) or any(isinstance(it, dict | list) for it in values.values()):
        raise ConfigurationError(f"{name} is not a flat JSON object.", fix=fix)
    return {
        name: value if isinstance(value, str) else json.dumps(value)
        for name, value in values.items()
        if value is not None
    }


def _as_written(_name: str, text: str) -> str:
    """Return the text of a path without replacing variables (a `PathOf`)."""
    return text


def _written(settings: Settings, as_written: Settings) -> dict[str, str]:
    """Return the paths of `settings` that contain variables in the file, mapped to that text.

    The two arguments differ only in that variables are replaced in the first one.
    """
    found: dict[str, str] = {}
    for item in (one for one in fields(settings) if one.compare):
        value = getattr(settings, item.name)
        text = getattr(as_written, item.name)
        if isinstance(value, tuple) and isinstance(text, tuple):
            found |= dict(zip(value, text, strict=True))
        elif isinstance(value, str):
            found[value] = text
    return {value: text for value, text in found.items() if value != text}


def _acl_files(config_path: str, directory: str, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the paths where plain_acl.yml may be, in the order in which they are tried.

    It may be in the directory of the configuration file `config_path`, in $ROCKETMQ_HOME/conf, or
    in `directory`. The paths need not exist.
    """
    home = environment.get("ROCKETMQ_HOME")
    directories = [_directory(config_path), *([f"{home}/conf"] if home else []), directory]
    return tuple(f"{one}/plain_acl.yml" for one in dict.fromkeys(directories))


def _directory(path: str) -> str:
    return path.rpartition("/")[0] or "."


# ------------------------------------------------- system properties of Java, and TLS settings


def java_options(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the system properties that a start script would pass to Java (`-Dname=value`)."""
    words = f"{environment.get('JAVA_OPT', '')} {environment.get('JAVA_OPT_EXT', '')}".split()
    return dict(word[2:].split("=", 1) for word in words if word[:2] == "-D" and "=" in word)


def tls_entries(entries: Mapping[str, str], part: Part) -> dict[str, str]:
    """Return the entries that are TLS settings of the part. A file may have those of all parts."""
    names = {name for key in keys_of(part) for name in (key.name, *key.aliases)}
    return {
        name: value for name, value in entries.items() if name.startswith("tls.") and name in names
    }


def key_files(config: TlsConfig) -> list[str]:
    """Return the paths of the files that contain private keys."""
    paths = [config.tls_key or config.tls_certificate]
    if isinstance(config, BrokerConfig):
        paths.append(config.tls_client_key or config.tls_client_certificate)
        paths.append(config.consensus_key or config.consensus_certificate)
    return [path for path in dict.fromkeys(paths) if path]


def with_system_properties(entries: Mapping[str, str]) -> dict[str, str]:
    """Return the entries with `SYSTEM_PROPERTIES` under the names of their keys, in percent.

    Raises ConfigurationError for a value that is not a number.
    """
    changed = dict(entries)
    for name, key in SYSTEM_PROPERTIES.items():
        text = changed.pop(name, "")
        if not text:
            continue
        try:
            changed[key] = str(round(float(text) * 100))
        except (ValueError, OverflowError):
            raise _not_valid(name, text, "Write a fraction, as in 0.85.") from None
    return changed


# --------------------------------------------------------------------------- reading values

HINTED_MAX: Final = 5
"""The number of unknown keys for which a known key is suggested."""
HINTED_LENGTH_MAX: Final = 100


def _unknown_keys(names: list[str], known: Iterable[str]) -> Iterator[str]:
    """Yield a warning for each of the first HINTED_MAX unknown keys, then one for all others.

    A warning suggests the nearest of the `known` keys, if one is near. Searching it takes 0.2 ms.
    """
    candidates = [*known, *INERT] if names else []
    for name in names[:HINTED_MAX]:
        is_short = len(name) <= HINTED_LENGTH_MAX
        hint = did_you_mean(name, candidates) if is_short else ""
        yield f"{name[:HINTED_LENGTH_MAX]} is not a known key and is ignored. {hint}".rstrip()
    if len(names) > HINTED_MAX:
        yield f"{len(names) - HINTED_MAX} more unknown keys are ignored."


def find_values(
    entries: Mapping[str, str], parts: tuple[Part, ...], path_of: PathOf
) -> LoadedValues:
    """Return the values that the entries set, for the keys of some parts, and warnings.

    `path_of(key, text)` returns the path that a text means. Keys may be aliases; an alias is
    ignored, with a warning, if the key itself is set too. Empty texts set nothing. Unknown keys and
    keys without effect give warnings. Raises ConfigurationError for an invalid value, and for a key
    in `REFUSED` that is switched on.
    """
    known = {name: key for key in keys_of(*parts) for name in (key.name, *key.aliases)}
    found = LoadedValues({}, [], [])
    inert: dict[str, list[str]] = {}
    unknown: list[str] = []
    for name, text in entries.items():
        key = known.get(name)
        if key is None and name in INERT:
            if name in REFUSED and text.lower() not in ("", "false"):
                raise ConfigurationError(
                    f"{name} = {text}: {REFUSED[name]}.", fix=f"Set {name} = false."
                )
            inert.setdefault(INERT[name], []).append(name)
        elif key is None:
            unknown.append(name)
        elif name != key.name and key.name in entries:
            found.warnings.append(f"{name} is ignored because {key.name} is set too.")
        elif any(character < " " for character in text):
            raise ConfigurationError(f"{name} contains control characters.", fix="Remove them.")
        elif text != "":
            found.values[key.part, key.field] = _parse_value(key, name, text, path_of)
    found.without_effect.extend(_unknown_keys(unknown, known))
    found.without_effect.extend(
        f"These keys have no effect, because {reason}: {', '.join(names)}."
        for reason, names in inert.items()
    )
    found.warnings.extend(found.without_effect)
    return found


def _parse_value(key: Key, name: str, text: str, path_of: PathOf) -> Any:
    """Return the value that `text` means for a key, which the file calls `name`.

    Raises ConfigurationError if it is not valid.
    """
    match key.kind:
        case Kind.BOOLEAN:
            return _parse_choice(name, text.lower(), (("true", True), ("false", False)))
        case Kind.CHOICE:
            return _parse_choice(name, text, key.choices, dict(key.refused))
        case Kind.INTEGER:
            # int() alone would accept "1_000" and digits that Java does not accept.
            sign, digits = (text[0], text[1:]) if text[0] in "+-" else ("", text)
            number = natural(digits)
            if number is not None:
                number = -number if sign == "-" else number
                if key.minimum <= number <= key.maximum:
                    return number
            one = f"Write {key.minimum}: {key.doc}"
            several = f"Write a whole number from {key.minimum} to {key.maximum}."
            raise _not_valid(name, text, one if key.minimum == key.maximum else several)
        case Kind.LIST | Kind.SERVERS:
            words = tuple(part.strip() for part in text.split(";") if part.strip())
            for word in words if key.kind is Kind.SERVERS else ():
                host, _, port = word.rpartition(":")
                if not natural(port, 65_535):
                    raise ConfigurationError(
                        f"{name} = {text:.80} is not valid: {word} is not host:port.",
                        fix="Write addresses such as 10.0.0.1:9876;10.0.0.2:9876.",
                    )
                _check_text(Kind.HOST, name, host.strip("[]"), word)
            return words
        case Kind.PATH:
            return path_of(name, text)
        case _:
            _check_text(key.kind, name, text, text)
            return text


def _check_text(kind: Kind, name: str, text: str, shown: str) -> None:
    """Raise ConfigurationError if `text` is not a value of this kind.

    The error names the key `name` and the value `shown`, of which `text` may be a part. Kinds
    without a pattern accept every text.
    """
    pattern, fix = _PATTERNS.get(kind, (None, ""))
    if pattern is not None and not pattern.fullmatch(text):
        wrong = next((one for one in text if not pattern.fullmatch(f"a{one}")), None)
        reason = (
            "" if wrong is None else f"it contains {'a space' if wrong == ' ' else repr(wrong)}"
        )
        raise _not_valid(name, shown, fix, reason)


def _not_valid(name: str, text: str, fix: str, reason: str = "") -> ConfigurationError:
    """Return the error for an invalid value `text` of the key `name`. `reason` is a phrase."""
    because = f": {reason}" if reason else ""
    return ConfigurationError(f"{name} = {text:.80} is not valid{because}.", fix=fix)


def _parse_choice(
    name: str,
    text: str,
    choices: tuple[tuple[str, object], ...],
    refused: Mapping[str, str] = {},
) -> object:
    """Return the value that `choices`, pairs of (word, value), have for the word `text`.

    Raises ConfigurationError if there is none. `refused` has the fixes for words of RocketMQ that
    SluiceMQ does not support.
    """
    for word, value in choices:
        if word == text:
            return value
    *most, last = (word for word, _value in choices)
    fix = f"Write {', '.join(most)} or {last}." if most else f"Write {last}."
    raise _not_valid(name, text, refused.get(text, fix))


def _expand(environment: Mapping[str, str], name: str, text: str) -> str:
    """Return a path with `~`, `$NAME`, `${NAME}` and Java's `${user.home}` replaced.

    Raises ConfigurationError if a variable is not set.
    """
    home = environment.get("HOME") or os.path.expanduser("~")  # noqa: PTH111 - text, not Path
    text = text.replace("${user.home}", home)
    if text == "~" or text.startswith("~/"):
        text = home + text[1:]

    def value_of(match: re.Match[str]) -> str:
        variable = match[1] if match[1] is not None else match[2]
        value = environment.get(variable)
        if value is None:
            raise ConfigurationError(
                f"{name} = {text:.80} is not valid: the variable {variable!r} is not set.",
                fix="Set it in the environment, or write the path without it.",
            )
        return value

    return re.sub(r"\$(?:\{([^}]*)\}?|(\w*))", value_of, text)


# -------------------------------------------------------------------------------- warnings


def warnings_about(found: LoadedValues, *settings: Settings) -> list[str]:
    """Return warnings about settings that are valid but probably not what the user expects.

    `found` are the values of which the settings were made.
    """
    warnings = [  # RocketMQ clamps these values silently
        f"{key.name} = {value} is taken as {min(max(value, low), high)}."
        for key in keys_of(Part.STORE)
        if key.clamped_to is not None
        for low, high in (key.clamped_to,)
        if not low <= (value := found.values.get((Part.STORE, key.field), low)) <= high
    ]
    for one in settings:
        if isinstance(one, StoreConfig):
            if one.message_bytes_max >= one.commit_log_file_bytes:  # each value is valid by itself
                warnings.append(
                    f"maxMessageSize = {one.message_bytes_max} is more than fits into a commit log "
                    f"file of mappedFileSizeCommitLog = {one.commit_log_file_bytes} bytes; larger "
                    "messages are refused."
                )
            continue
        if one.tls_auth_client and one.tls_client_auth == "none":
            warnings.append(
                "tls.server.authClient = true has no effect, because tls.server.need.client.auth = "
                "none requests no certificates from clients. Set that to require."
            )
        if one.tls_mode == "enforcing" and not one.tls_certificate and one.tls_test_mode:
            warnings.append(
                "tls.server.mode = enforcing without tls.server.certPath: the server creates a "
                "certificate that clients cannot verify. Set tls.server.certPath."
            )
        if not isinstance(one, BrokerConfig):
            continue
        if one.broker_role == "SYNC_MASTER" and one.in_sync_written == 1:
            warnings.append(
                "inSyncReplicas = 1 with brokerRole = SYNC_MASTER: the master responds to sends "
                "and shows messages to consumers before a slave has them. Remove inSyncReplicas to "
                "wait for a slave."
            )
        if one.tls_client_ca and not one.tls_auth_server:
            warnings.append(
                "tls.client.trustCertPath has no effect without tls.client.authServer = true: the "
                "certificates of name servers are not verified. Set tls.client.authServer = true."
            )
    return warnings


# -------------------------------------------------------------------------------------- at run time


class Change(NamedTuple):
    """The result of changing settings. Nothing is applied or written yet: the caller does both.

    `in_force` are the settings to use from now on, and `at_next_start` those after a restart. Both
    are whole settings, by part. `entries` are the keys and texts that the caller must write to the
    file. `pending` are the keys that take effect at the next start. `warnings` are sentences, of
    which `without_effect` are about keys without effect.
    """

    in_force: Configs
    at_next_start: Configs
    entries: dict[str, str]
    pending: list[str]
    warnings: list[str]
    without_effect: list[str]

    @property
    def remark(self) -> str | None:
        """The remark of a successful response: pending keys, then keys without effect.

        None if the whole change is in force.
        """
        waits = [f"in effect at the next start: {', '.join(self.pending)}"] if self.pending else []
        return " ".join([*waits, *self.without_effect]) or None


CHANGE_LENGTH_MAX: Final = 65_536
"""Maximum length of a request that changes settings. All settings of a broker have 20,000."""


def change_settings(
    in_force: Configs, at_next_start: Configs, text: str, black_list: Iterable[str]
) -> Change:
    """Return the result of changing settings by the text of a request, in properties syntax.

    `in_force` are the present settings, and `at_next_start` those that pending changes lead to. A
    key without a value gets its default. Raises PermissionDeniedError for a key in `black_list`.
    Raises ConfigurationError for a value that is invalid or would be refused at the next start, and
    if no key has an effect, because RocketMQ's tools show only errors. If some keys have an effect,
    `Change.remark` names those that have none.
    """
    if len(text) > CHANGE_LENGTH_MAX:
        raise ConfigurationError(
            f"The change has {len(text)} characters; the limit is {CHANGE_LENGTH_MAX}.",
            fix="Send only the keys that change.",
        )
    entries = with_system_properties(parse_properties(text))
    if (ALWAYS_BLACK | set(black_list)).intersection(entries):
        raise PermissionDeniedError(NO_PERMISSION, "Can not update config in black list.")
    change = _change(in_force, at_next_start, entries)
    known = {name for key in keys_of(*in_force) for name in (key.name, *key.aliases)}
    if change.without_effect and not known.intersection(entries):
        raise ConfigurationError(
            f"Nothing was changed. {' '.join(change.without_effect)}",
            fix="Use a key that mqadmin getBrokerConfig or getNamesrvConfig lists.",
        )
    return change


def reread_settings(in_force: Configs, at_next_start: Configs, text: str) -> Change:
    """Return the result of reading the configuration file again while its server runs.

    `text` is the text of the file. Keys that the command line has set do not change. Keys that were
    removed from the file keep their value until the next start. Raises ConfigurationError for an
    invalid value.
    """
    fixed = ALWAYS_BLACK.union(*(config.origin.command_line for config in in_force.values()))
    entries = with_system_properties(parse_properties(text))
    entries = {name: value for name, value in entries.items() if name not in fixed}
    return _change(in_force, at_next_start, entries)


def _change(in_force: Configs, at_next_start: Configs, entries: Mapping[str, str]) -> Change:
    """Return the result of setting the keys in `entries`.

    Entries that have the value already, as a response shows it, are left out. An empty text means
    the default. Live keys change in both settings, other keys only in `at_next_start`. Raises
    ConfigurationError for an invalid value, and for a key that the command line has set.
    """
    keys = {name: key for key in keys_of(*in_force) for name in (key.name, *key.aliases)}
    changes = {
        name: value
        for name, value in entries.items()
        if name not in keys or value != _shown(keys[name], at_next_start)
    }
    found = find_values(changes, tuple(in_force), _literal)
    for name, key in ((name, keys[name]) for name in changes if name in keys):
        if key.name in in_force[key.part].origin.command_line:
            raise ConfigurationError(
                f"{name} is set on the command line or in tls.config.file, which take precedence "
                "over this file.",
                fix="Change it there, and restart the server.",
            )
        if changes[name] == "":
            default = key.default() if callable(key.default) else key.default
            found.values[key.part, key.field] = default
    later = {
        part: _replace_values(old, found.values_of(part)) for part, old in at_next_start.items()
    }
    live = {(key.part, key.field) for key in keys.values() if key.live}
    at_once = found._replace(values={at: v for at, v in found.values.items() if at in live})
    now = {part: _replace_values(old, at_once.values_of(part)) for part, old in in_force.items()}
    pending = [key.name for key in _pending(now, later)]
    return Change(
        now,
        later,
        {keys[name].name: value for name, value in changes.items() if name in keys},
        pending,
        found.warnings
        + [f"{name} takes effect at the next start." for name in pending]
        + warnings_about(found, *later.values()),
        found.without_effect,
    )


def settings_text(in_force: Configs, at_next_start: Configs) -> str:
    """Return the settings as GET_BROKER_CONFIG (26) and GET_NAMESRV_CONFIG (319) return them.

    There is a line `key=value` for each key, then one for each value that differs at the next
    start, with the prefix `PENDING`. Paths are shown as the file has them, with variables.
    """
    lines = [f"{key.name}={_shown(key, in_force)}\n" for key in keys_of(*in_force)]
    lines += [
        f"{PENDING}{key.name}={_shown(key, at_next_start)}\n"
        for key in _pending(in_force, at_next_start)
    ]
    return "".join(lines)


def _pending(in_force: Configs, at_next_start: Configs) -> Iterator[Key]:
    """Yield the keys whose value will change at the next start."""
    for key in keys_of(*in_force):
        if getattr(in_force[key.part], key.field) != getattr(at_next_start[key.part], key.field):
            yield key


def _literal(name: str, text: str) -> str:
    """Return the text of a path (a `PathOf`). Raises ConfigurationError if it has a variable."""
    if "$" in text or text.startswith("~"):
        raise ConfigurationError(
            f"{name} = {text} is not valid: a request must not use variables, because they would "
            "show the environment.",
            fix="Write the path without them, or set it in the file and restart the server.",
        )
    return text


def _replace_values(settings: Settings, values: Mapping[str, Any]) -> Settings:
    """Return a copy with some fields replaced; a store's derived fields are derived again."""
    if isinstance(settings, StoreConfig):
        return settings.with_changes(**values)
    return replace(settings, **values)


def _shown(key: Key, configs: Configs) -> str:
    """Return the value of a key as a response shows it: empty for a secret."""
    settings = configs[key.part]
    if key.is_secret:
        return ""
    return value_text(key, getattr(settings, key.field), settings.origin.written)


def value_text(key: Key, value: Any, written: Mapping[str, str] = {}) -> str:
    """Return the text that is parsed as `value`; "" for None.

    `written` maps paths to the text of the file, if that has variables.
    """
    if key.kind is Kind.CHOICE:
        return next(word for word, meaning in key.choices if meaning == value)
    if isinstance(value, tuple):
        return ";".join(written.get(part, part) for part in value)
    if key.kind is Kind.BOOLEAN:
        return "true" if value else "false"
    return "" if value is None else written.get(str(value), str(value))
