"""Property text -> settings with warnings, settings -> text, and changes at run time.

All of it follows from the table in `keys.py`. RocketMQ ignores unknown keys and bad values without
a word (spec/config.md); here an unknown key is a warning with the nearest known name, a key that
RocketMQ knows and we do not use is a note, and a bad value is an error.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from typing import Any, NamedTuple

from sluicemq.config.inert import INERT, INERT_ALIASES, REFUSED
from sluicemq.config.keys import Key, Kind, Part, keys_of
from sluicemq.config.properties import parse_properties
from sluicemq.config.tls import about_tls, java_options, tls_entries
from sluicemq.config.values import RATIO_LIMITS, BrokerConfig, NameServerConfig, StoreConfig
from sluicemq.errors import ConfigurationError, PermissionDeniedError

NO_PERMISSION = 16
BROKER_BLACK_LIST = frozenset({"configBlackList", "brokerConfigPath"})
NAME_SERVER_BLACK_LIST = frozenset({"configBlackList", "configStorePath", "kvConfigPath"})
ALWAYS_BLACK = frozenset({"rocketmqHome"})
SYSTEM_PROPERTIES = {
    f"rocketmq.broker.{name}": name
    for name in ("diskSpaceWarningLevelRatio", "diskSpaceCleanForciblyRatio")
}
"""Java system properties that win over the keys of the file; their values are fractions."""

Settings = BrokerConfig | StoreConfig | NameServerConfig


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
    entries = {"namesrvAddr": environment.get("NAMESRV_ADDR", "")} | _with_system_properties(
        parse_properties(text)
        | _java_options(environment)
        | tls_entries(java_options(environment), Part.BROKER)
    )
    found = _find(entries | dict(overrides or {}), (Part.BROKER, Part.STORE), environment)
    broker, store = BrokerConfig(**found.of(Part.BROKER)), StoreConfig(**found.of(Part.STORE))
    config_path = broker.config_path or f"{store.root}/config/broker.properties"
    broker = replace(
        broker,
        config_path=config_path,
        acl_files=broker.acl_files or _acl_files(config_path, f"{store.root}/conf", environment),
        # Clamped, not refused, as the real one does (spec/namesrv.md §3).
        register_period_ms=min(max(broker.register_period_ms, 10_000), 60_000),
    )
    warnings = found.warnings + _about_ratios(found) + _about_sizes(store) + about_tls(broker)
    return broker, store, warnings


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
    found = _find(entries, (Part.NAME_SERVER,), environment)
    config = NameServerConfig(**found.of(Part.NAME_SERVER))
    files = _acl_files(config.config_path, _directory(config.kv_config_path), environment)
    config = replace(config, acl_files=config.acl_files or files)
    return config, found.warnings + about_tls(config)


def _acl_files(config_path: str, directory: str, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Where plain_acl.yml may be: beside the configuration, where RocketMQ has it, else there."""
    home = environment.get("ROCKETMQ_HOME")
    directories = [_directory(config_path), *([f"{home}/conf"] if home else []), directory]
    return tuple(f"{one}/plain_acl.yml" for one in dict.fromkeys(directories))


def _directory(path: str) -> str:
    return path.rpartition("/")[0] or "."


def broker_config_text(broker: BrokerConfig, store: StoreConfig) -> str:
    """What request 26 answers: a line `key=value` for each key, in RocketMQ's names."""
    return _text((broker, Part.BROKER), (store, Part.STORE))


def name_server_config_text(config: NameServerConfig) -> str:
    """What request 319 answers."""
    return _text((config, Part.NAME_SERVER))


def update_broker_config(
    broker: BrokerConfig, store: StoreConfig, text: str
) -> tuple[BrokerConfig, StoreConfig, list[str]]:
    """Settings changed by the text of request 25, and what the user should know.

    Raises PermissionDeniedError for a key in the black list, ConfigurationError for a bad value.
    """
    entries = _with_system_properties(parse_properties(text))
    _refuse(entries, BROKER_BLACK_LIST)
    found = _find(entries, (Part.BROKER, Part.STORE), os.environ)
    changed_store = replace(store, **found.of(Part.STORE))
    warnings = found.warnings + _at_next_start(found, (Part.BROKER, Part.STORE))
    return (
        replace(broker, **found.of(Part.BROKER)),
        changed_store,
        warnings + _about_ratios(found) + _about_sizes(changed_store),
    )


def update_name_server_config(
    config: NameServerConfig, text: str
) -> tuple[NameServerConfig, list[str]]:
    """Settings changed by the text of request 318; as `update_broker_config`."""
    entries = parse_properties(text)
    _refuse(entries, NAME_SERVER_BLACK_LIST | set(config.config_black_list))
    found = _find(entries, (Part.NAME_SERVER,), os.environ)
    warnings = found.warnings + _at_next_start(found, (Part.NAME_SERVER,))
    return replace(config, **found.of(Part.NAME_SERVER)), warnings


def known_entries(text: str, *parts: Part) -> dict[str, str]:
    """The entries of a change that set something, under the keys' own names: for the file."""
    names = {alias: key.name for key in keys_of(*parts) for alias in (*key.aliases, key.name)}
    entries = _with_system_properties(parse_properties(text))
    return {names[name]: value for name, value in entries.items() if name in names}


def _java_options(environment: Mapping[str, str]) -> dict[str, str]:
    options = java_options(environment)
    return {name: options[name] for name in SYSTEM_PROPERTIES if name in options}


def _with_system_properties(entries: Mapping[str, str]) -> dict[str, str]:
    """The entries with each of Java's system properties under the name of its key, in percent."""
    changed = dict(entries)
    for name, key in SYSTEM_PROPERTIES.items():
        text = changed.pop(name, "")
        if not text:
            continue
        try:
            changed[key] = str(round(float(text) * 100))
        except (ValueError, OverflowError):
            raise ConfigurationError(
                f"{name} = {text} is not valid.", cure="Write a fraction, as in 0.85."
            ) from None
    return changed


def _refuse(entries: Iterable[str], black_list: Iterable[str]) -> None:
    if (ALWAYS_BLACK | set(black_list)).intersection(entries):
        raise PermissionDeniedError(NO_PERMISSION, "Can not update config in black list.")


def _at_next_start(found: Found, parts: tuple[Part, ...]) -> list[str]:
    return [
        f"{key.name} takes effect at the next start."
        for key in keys_of(*parts)
        if (key.part, key.field) in found.values and not key.live
    ]


def _find(
    entries: Mapping[str, str], parts: tuple[Part, ...], environment: Mapping[str, str]
) -> Found:
    table = keys_of(*parts)
    known = {name: key for key in table for name in (key.name, *key.aliases)}
    found = Found({}, [])
    inert: dict[str, list[str]] = {}
    for name, text in entries.items():
        key = known.get(name)
        if key is None and INERT_ALIASES.get(name, name) in INERT:
            _check_refused(name, text)
            inert.setdefault(INERT[INERT_ALIASES.get(name, name)], []).append(name)
        elif key is None:
            found.warnings.append(_about_unknown(name, known))
        elif name != key.name and key.name in entries:
            found.warnings.append(f"{name} is ignored because {key.name} is set too.")
        elif text != "":
            found.values[key.part, key.field] = _read(key, name, text, environment)
    found.warnings.extend(
        f"Without effect here, because {reason}: {', '.join(names)}."
        for reason, names in inert.items()
    )
    return found


def _check_refused(name: str, text: str) -> None:
    refused = REFUSED.get(INERT_ALIASES.get(name, name))
    if refused is not None and text.lower() not in ("", "false"):
        raise ConfigurationError(f"{name} = {text}: {refused}.", cure=f"Set {name} = false.")


def _about_unknown(name: str, known: Iterable[str]) -> str:
    import difflib  # noqa: PLC0415 - only a file with a mistake pays for it

    near = difflib.get_close_matches(name, [*known, *INERT], n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    return f"{name} is not a known key and is ignored.{hint}"


def _read(key: Key, name: str, text: str, environment: Mapping[str, str]) -> Any:
    match key.kind:
        case Kind.BOOLEAN:
            return _read_choice(name, text.lower(), (("true", True), ("false", False)))
        case Kind.INTEGER:
            return _read_integer(key, name, text)
        case Kind.CHOICE:
            return _read_choice(name, text, key.choices)
        case Kind.LIST:
            return tuple(part.strip() for part in text.split(";") if part.strip())
        case Kind.PATH:
            return _expand(name, text, environment)
        case Kind.TEXT:
            return text


def _read_integer(key: Key, name: str, text: str) -> int:
    # int() alone would take "1_000" and other digits than Java's.
    digits = text[1:] if text[0] in "+-" else text
    value = int(text) if digits.isascii() and digits.isdigit() else None
    if value is None or not key.minimum <= value <= key.maximum:
        one = f"Write {key.minimum}: {key.doc}"
        several = f"Write a whole number from {key.minimum} to {key.maximum}."
        raise ConfigurationError(
            f"{name} = {text} is not valid.",
            cure=one if key.minimum == key.maximum else several,
        )
    return value


def _read_choice(name: str, text: str, choices: tuple[tuple[str, object], ...]) -> object:
    for word, value in choices:
        if word == text:
            return value
    words = " or ".join(word for word, _value in choices)
    raise ConfigurationError(f"{name} = {text} is not valid.", cure=f"Write {words}.")


def _expand(name: str, text: str, environment: Mapping[str, str]) -> str:
    """`~`, `$NAME` and `${NAME}` in a path, and Java's `${user.home}`."""
    home = environment.get("HOME") or os.path.expanduser("~")  # noqa: PTH111 - text, not Path
    text = text.replace("${user.home}", home)
    if text == "~" or text.startswith("~/"):
        text = home + text[1:]
    head, *rest = text.split("$")
    return head + "".join(_expand_variable(name, part, environment) for part in rest)


def _expand_variable(name: str, part: str, environment: Mapping[str, str]) -> str:
    if part.startswith("{"):
        variable, _brace, tail = part[1:].partition("}")
    else:
        end = next((i for i, c in enumerate(part) if not (c.isalnum() or c == "_")), len(part))
        variable, tail = part[:end], part[end:]
    value = environment.get(variable)
    if value is None:
        raise ConfigurationError(
            f"{name}: the variable {variable!r} in the path is not set.",
            cure="Set it in the environment or write the path out.",
        )
    return value + tail


def _about_ratios(found: Found) -> list[str]:
    """The real broker brings these into their limits without a word."""
    return [
        f"{key.name} = {value} is taken as {min(max(value, low), high)}."
        for key in keys_of(Part.STORE)
        if key.field in RATIO_LIMITS
        for low, high in (RATIO_LIMITS[key.field],)
        if not low <= (value := found.values.get((Part.STORE, key.field), low)) <= high
    ]


def _about_sizes(store: StoreConfig) -> list[str]:
    """What does not fit together, though each value is allowed."""
    if store.message_bytes_max < store.commit_log_file_bytes:
        return []
    return [
        f"maxMessageSize = {store.message_bytes_max} is more than a commit log file of "
        f"mappedFileSizeCommitLog = {store.commit_log_file_bytes} bytes can hold; "
        "larger messages are refused."
    ]


def _text(*owners: tuple[Settings, Part]) -> str:
    return "".join(
        f"{key.name}={'' if key.is_secret else _write(key, getattr(settings, key.field))}\n"
        for settings, part in owners
        for key in keys_of(part)
    )


def _write(key: Key, value: Any) -> str:
    """The text that `_read` turns into this value; empty when there is none."""
    if key.kind is Kind.CHOICE:
        return next(word for word, meaning in key.choices if meaning == value)
    if key.kind is Kind.LIST:
        return ";".join(value)
    if key.kind is Kind.BOOLEAN:
        return "true" if value else "false"
    return "" if value is None else str(value)


def default_text(key: Key) -> str:
    """The default of a key as a file would say it, for the documentation."""
    owner = {Part.BROKER: BrokerConfig, Part.STORE: StoreConfig, Part.NAME_SERVER: NameServerConfig}
    for item in fields(owner[key.part]):
        if item.name == key.field and isinstance(item.default, bool | int | str | tuple):
            return _write(key, item.default)
    return ""
