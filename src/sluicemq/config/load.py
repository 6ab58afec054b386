"""Property text -> settings with warnings.

All of it follows from the keys in `settings.py`. RocketMQ ignores unknown keys and bad values
without a word (spec/config.md); here an unknown key is a warning with the nearest known name, a key
that RocketMQ knows and we do not use is a note, and a bad value is an error.

Variables (`$NAME`, `~`) are replaced in paths that are read at the start, and nowhere else: what
comes by a request is taken literally, or whoever reaches the port could read the environment.

Settings of TLS RocketMQ has elsewhere: system properties of Java (`-Dtls.server.mode=enforcing` in
JAVA_OPT), and a properties file that wins over those (tls.config.file).
"""

import functools
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any, Final, NamedTuple

from sluicemq.config.inert import INERT, INERT_ALIASES, REFUSED, REFUSED_VALUES, WARNED_VALUES
from sluicemq.config.properties import parse_properties
from sluicemq.config.settings import (
    CHANGES_FILE,
    BrokerConfig,
    Key,
    Kind,
    NameServerConfig,
    Origin,
    Part,
    StoreConfig,
    TlsConfig,
    keys_of,
)
from sluicemq.errors import ConfigurationError

DEFAULT_TLS_FILE: Final = "/etc/rocketmq/tls.properties"
NAME_LENGTH_MAX: Final = 127
# Topics bear these names, and topics are directories.
_NAME: Final = re.compile(rf"(?!\.+$)[%|A-Za-z0-9_.-]{{1,{NAME_LENGTH_MAX}}}")
_HOST: Final = re.compile(r"[A-Za-z0-9_.:%-]+")
SYSTEM_PROPERTIES: Final = {
    f"rocketmq.broker.{name}": name
    for name in ("diskSpaceWarningLevelRatio", "diskSpaceCleanForciblyRatio")
}
"""Java system properties that win over the keys of the file; their values are fractions."""

Settings = BrokerConfig | StoreConfig | NameServerConfig
PathOf = Callable[[str, str], str]
"""Key and text of a path -> the path."""


class Found(NamedTuple):
    """What a text says: values by part and field, and what the user should know."""

    values: dict[tuple[Part, str], Any]
    warnings: list[str]

    def of(self, part: Part) -> dict[str, Any]:
        return {field: value for (owner, field), value in self.values.items() if owner is part}


def load_broker_config(
    text: str,
    *,
    overrides: Mapping[str, str] | None = None,
    environment: Mapping[str, str] | None = None,
) -> tuple[BrokerConfig, StoreConfig, list[str]]:
    """The text of a broker.conf -> settings and warnings (one sentence each).

    `overrides` are keys in RocketMQ's names that win over the file (command line); `environment`
    is the process' own unless given. Raises ConfigurationError for a bad value.
    """
    environment = os.environ if environment is None else environment
    options = java_options(environment)
    entries = {"namesrvAddr": environment.get("NAMESRV_ADDR", "")} | with_system_properties(
        parse_properties(text)
        | {name: options[name] for name in SYSTEM_PROPERTIES if name in options}
        | tls_entries(options, Part.BROKER)
    )
    entries |= overrides or {}

    def build(path_of: PathOf) -> tuple[BrokerConfig, StoreConfig, Found]:
        found = find_values(entries, (Part.BROKER, Part.STORE), path_of)
        broker, store = BrokerConfig(**found.of(Part.BROKER)), StoreConfig(**found.of(Part.STORE))
        config_path = broker.config_path or f"{store.root}/config/{CHANGES_FILE}"
        places = _acl_files(config_path, f"{store.root}/conf", environment)
        broker = replace(
            broker,
            config_path=config_path,
            acl_files=broker.acl_files or places,
            # Clamped, not refused, as the real one does (spec/namesrv.md §3).
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
    """The text of a namesrv.conf -> settings and warnings; as `load_broker_config`."""
    environment = os.environ if environment is None else environment
    options = tls_entries(java_options(environment), Part.NAME_SERVER)
    entries = parse_properties(text) | options | dict(overrides or {})

    def build(path_of: PathOf) -> tuple[NameServerConfig, Found]:
        found = find_values(entries, (Part.NAME_SERVER,), path_of)
        config = NameServerConfig(**found.of(Part.NAME_SERVER))
        places = _acl_files(config.config_path, _directory(config.kv_config_path), environment)
        return replace(config, acl_files=config.acl_files or places), found

    config, found = build(functools.partial(_expand, environment))
    origin = Origin(_written(config, build(_as_written)[0]), frozenset(overrides or ()))
    return replace(config, origin=origin), found.warnings + warnings_about(found, config)


def _as_written(_name: str, text: str) -> str:
    return text


def _written(settings: Settings, as_written: Settings) -> dict[str, str]:
    """Of two that differ in the variables of their paths alone: value -> as it was written."""
    found: dict[str, str] = {}
    for item in (one for one in fields(settings) if one.compare):
        value, text = getattr(settings, item.name), getattr(as_written, item.name)
        if isinstance(value, tuple) and isinstance(text, tuple):
            found |= dict(zip(value, text, strict=True))
        elif isinstance(value, str):
            found[value] = text
    return {value: text for value, text in found.items() if value != text}


def _acl_files(config_path: str, directory: str, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Where plain_acl.yml may be: beside the configuration, where RocketMQ has it, else there."""
    home = environment.get("ROCKETMQ_HOME")
    directories = [_directory(config_path), *([f"{home}/conf"] if home else []), directory]
    return tuple(f"{one}/plain_acl.yml" for one in dict.fromkeys(directories))


def _directory(path: str) -> str:
    return path.rpartition("/")[0] or "."


# ------------------------------------------------------------------- Java's other places


def java_options(environment: Mapping[str, str]) -> dict[str, str]:
    """The system properties that a start script would hand to Java (`-Dname=value`)."""
    words = f"{environment.get('JAVA_OPT', '')} {environment.get('JAVA_OPT_EXT', '')}".split()
    return dict(word[2:].split("=", 1) for word in words if word[:2] == "-D" and "=" in word)


def tls_entries(entries: Mapping[str, str], part: Part) -> dict[str, str]:
    """Those of the entries that are settings of TLS of this server: a file serves all of them."""
    names = {name for key in keys_of(part) for name in (key.name, *key.aliases)}
    return {
        name: value for name, value in entries.items() if name.startswith("tls.") and name in names
    }


def key_files(config: TlsConfig) -> list[str]:
    """The files that hold private keys."""
    paths = [config.tls_key or config.tls_certificate]
    if isinstance(config, BrokerConfig):
        paths.append(config.tls_client_key or config.tls_client_certificate)
    return [path for path in dict.fromkeys(paths) if path]


def with_system_properties(entries: Mapping[str, str]) -> dict[str, str]:
    """The entries with each of Java's system properties under the name of its key, in percent."""
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


def find_values(entries: Mapping[str, str], parts: tuple[Part, ...], path_of: PathOf) -> Found:
    """What the entries set. Raises ConfigurationError for a value that cannot be."""
    known = {name: key for key in keys_of(*parts) for name in (key.name, *key.aliases)}
    found = Found({}, [])
    inert: dict[str, list[str]] = {}
    for name, text in entries.items():
        key = known.get(name)
        if key is None and (here := INERT_ALIASES.get(name, name)) in INERT:
            if here in REFUSED and text.lower() not in ("", "false"):
                raise ConfigurationError(
                    f"{name} = {text}: {REFUSED[here]}.", cure=f"Set {name} = false."
                )
            inert.setdefault(INERT[here], []).append(name)
        elif key is None:
            import difflib  # noqa: PLC0415 - only a file with a mistake pays for it

            near = difflib.get_close_matches(name, [*known, *INERT], n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            found.warnings.append(f"{name} is not a known key and is ignored.{hint}")
        elif name != key.name and key.name in entries:
            found.warnings.append(f"{name} is ignored because {key.name} is set too.")
        elif any(character < " " for character in text):
            raise ConfigurationError(f"{name} has control characters.", cure="Leave them out.")
        elif text != "":
            found.values[key.part, key.field] = _read(key, name, text, path_of)
            if (key.name, text) in WARNED_VALUES:
                found.warnings.append(f"{name} = {text}: {WARNED_VALUES[key.name, text]}.")
    found.warnings.extend(
        f"Without effect here, because {reason}: {', '.join(names)}."
        for reason, names in inert.items()
    )
    return found


def _read(key: Key, name: str, text: str, path_of: PathOf) -> Any:
    match key.kind:
        case Kind.BOOLEAN:
            return _read_choice(name, text.lower(), (("true", True), ("false", False)))
        case Kind.INTEGER:
            return _read_integer(key, name, text)
        case Kind.CHOICE:
            return _read_choice(name, text, key.choices)
        case Kind.LIST | Kind.SERVERS:
            words = tuple(part.strip() for part in text.split(";") if part.strip())
            for word in words if key.kind is Kind.SERVERS else ():
                _check_server(name, word)
            return words
        case Kind.PATH:
            return path_of(name, text)
        case Kind.NAME if not _NAME.fullmatch(text):
            raise _not_valid(
                name, text, f"Write a name of at most {NAME_LENGTH_MAX} letters, digits and the "
                "characters % | _ . and - of ASCII.",
            )  # fmt: skip
        case Kind.HOST if not _HOST.fullmatch(text):
            raise _not_valid(name, text, "Write an IP address or a host name.")
    return text


def _not_valid(name: str, text: str, cure: str) -> ConfigurationError:
    return ConfigurationError(f"{name} = {text} is not valid.", cure=cure)


def _check_server(name: str, text: str) -> None:
    host, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise ConfigurationError(
            f"{name}: {text} is no address of a server.", cure="Write host:port;host:port."
        )
    if not _HOST.fullmatch(host.strip("[]")):
        raise _not_valid(name, text, "Write an IP address or a host name.")


def _read_integer(key: Key, name: str, text: str) -> int:
    # int() alone would take "1_000" and other digits than Java's.
    digits = text[1:] if text[0] in "+-" else text
    value = int(text) if digits.isascii() and digits.isdigit() else None
    if value is None or not key.minimum <= value <= key.maximum:
        one = f"Write {key.minimum}: {key.doc}"
        several = f"Write a whole number from {key.minimum} to {key.maximum}."
        raise _not_valid(name, text, one if key.minimum == key.maximum else several)
    return value


def _read_choice(name: str, text: str, choices: tuple[tuple[str, object], ...]) -> object:
    for word, value in choices:
        if word == text:
            return value
    cure = f"Write {' or '.join(word for word, _value in choices)}."
    if (name, text) in REFUSED_VALUES:
        raise ConfigurationError(f"{name} = {text}: {REFUSED_VALUES[name, text]}.", cure=cure)
    raise _not_valid(name, text, cure)


def _expand(environment: Mapping[str, str], name: str, text: str) -> str:
    """`~`, `$NAME` and `${NAME}` in a path, and Java's `${user.home}`."""
    home = environment.get("HOME") or os.path.expanduser("~")  # noqa: PTH111 - text, not Path
    text = text.replace("${user.home}", home)
    if text == "~" or text.startswith("~/"):
        text = home + text[1:]

    def value_of(match: re.Match[str]) -> str:
        variable = match[1] if match[1] is not None else match[2]
        value = environment.get(variable)
        if value is None:
            raise ConfigurationError(
                f"{name}: the variable {variable!r} in the path is not set.",
                cure="Set it in the environment or write the path out.",
            )
        return value

    return re.sub(r"\$(?:\{([^}]*)\}?|(\w*))", value_of, text)


# -------------------------------------------------------------------------------- warnings


def warnings_about(found: Found, *settings: Settings) -> list[str]:
    """What is allowed and yet not what it looks like, of settings that were made of `found`."""
    warnings = [  # the real broker brings these into their limits without a word
        f"{key.name} = {value} is taken as {min(max(value, low), high)}."
        for key in keys_of(Part.STORE)
        if key.taken_as is not None
        for low, high in (key.taken_as,)
        if not low <= (value := found.values.get((Part.STORE, key.field), low)) <= high
    ]
    for one in settings:
        if not isinstance(one, StoreConfig):
            warnings += _about_tls(one)
        elif one.message_bytes_max >= one.commit_log_file_bytes:  # each is allowed by itself
            warnings.append(
                f"maxMessageSize = {one.message_bytes_max} is more than a commit log file of "
                f"mappedFileSizeCommitLog = {one.commit_log_file_bytes} bytes can hold; "
                "larger messages are refused."
            )
    return warnings


def _about_tls(config: TlsConfig) -> list[str]:
    """What is less safe than it looks."""
    warnings = []
    if config.tls_auth_client and config.tls_client_auth == "none":
        warnings.append(
            "tls.server.authClient = true has no effect: tls.server.need.client.auth = none asks "
            "no client for a certificate. Set it to require."
        )
    if config.tls_mode == "enforcing" and not config.tls_certificate and config.tls_test_mode:
        warnings.append(
            "tls.server.mode = enforcing without tls.server.certPath: the server makes a "
            "certificate that nobody can verify."
        )
    if isinstance(config, BrokerConfig) and config.tls_client_ca and not config.tls_auth_server:
        warnings.append(
            "tls.client.trustCertPath has no effect without tls.client.authServer = true: "
            "certificates of name servers are not verified."
        )
    return warnings
