"""Changes at run time (requests 25 and 318), and what a server answers about its settings.

A change of a *live* key is in force at once. Any other is kept for the next start: it is written
to the file, and until then answers show it as pending, beside the value in force. Both are checked
as at the start. Texts are taken literally: variables belong to files (`load.py`).
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final, NamedTuple

from sluicemq.config.load import Settings, find_values, warnings_about, with_system_properties
from sluicemq.config.properties import parse_properties
from sluicemq.config.settings import Key, Kind, Part, StoreConfig, keys_of
from sluicemq.errors import ConfigurationError, PermissionDeniedError

NO_PERMISSION: Final = 16
ALWAYS_BLACK: Final = frozenset({"configBlackList", "rocketmqHome"})
PENDING: Final = "sluicePending."
"""Before a key in an answer: the value that it gets at the next start."""

Configs = Mapping[Part, Any]
"""The settings of one server, by their parts."""


class Change(NamedTuple):
    """What becomes of the settings. `entries` are for the file, `pending` names what waits for the
    next start, `warnings` are one sentence each."""

    in_force: Configs
    at_next_start: Configs
    entries: dict[str, str]
    pending: list[str]
    warnings: list[str]


def change_settings(
    in_force: Configs, at_next_start: Configs, text: str, black_list: Iterable[str]
) -> Change:
    """Settings changed by the text of a request; a key without a value gets its default.

    Raises PermissionDeniedError for a key in the black list, ConfigurationError for a bad value
    and for one that the next start would not take.
    """
    entries = with_system_properties(parse_properties(text))
    if (ALWAYS_BLACK | set(black_list)).intersection(entries):
        raise PermissionDeniedError(NO_PERMISSION, "Can not update config in black list.")
    keys = {name: key for key in keys_of(*in_force) for name in (key.name, *key.aliases)}
    changes = {
        name: value
        for name, value in entries.items()
        if name not in keys or value != _shown(keys[name], at_next_start)
    }
    found = find_values(changes, tuple(in_force), _literal)
    for name in changes.keys() & keys.keys():
        key = keys[name]
        if key.name in in_force[key.part].origin.command_line:
            raise ConfigurationError(
                f"{name} is set on the command line or in tls.config.file, which win over this "
                "file.",
                cure="Change it there and start the server anew.",
            )
        if changes[name] == "":
            default = key.default() if callable(key.default) else key.default
            found.values[key.part, key.field] = default
    later = {part: _changed(old, found.of(part)) for part, old in at_next_start.items()}
    live = {(key.part, key.field) for key in keys.values() if key.live}
    at_once = found._replace(values={at: v for at, v in found.values.items() if at in live})
    now = {part: _changed(old, at_once.of(part)) for part, old in in_force.items()}
    pending = [key.name for key in _pending(now, later)]
    return Change(
        now,
        later,
        {keys[name].name: value for name, value in changes.items() if name in keys},
        pending,
        found.warnings
        + [f"{name} takes effect at the next start." for name in pending]
        + warnings_about(found, *later.values()),
    )


def settings_text(in_force: Configs, at_next_start: Configs) -> str:
    """What requests 26 and 319 answer: a line `key=value` for each key in RocketMQ's names, then
    one for each that waits for the next start. Paths are shown as the file writes them."""
    lines = [f"{key.name}={_shown(key, in_force)}\n" for key in keys_of(*in_force)]
    lines += [
        f"{PENDING}{key.name}={_shown(key, at_next_start)}\n"
        for key in _pending(in_force, at_next_start)
    ]
    return "".join(lines)


def _pending(in_force: Configs, at_next_start: Configs) -> Iterator[Key]:
    for key in keys_of(*in_force):
        if getattr(in_force[key.part], key.field) != getattr(at_next_start[key.part], key.field):
            yield key


def _literal(name: str, text: str) -> str:
    if "$" in text or text.startswith("~"):
        raise ConfigurationError(
            f"{name} = {text}: a request cannot use variables, which show the environment.",
            cure="Write the path out, or write it in the file and start the server anew.",
        )
    return text


def _changed(settings: Settings, values: Mapping[str, Any]) -> Settings:
    if isinstance(settings, StoreConfig):
        return settings.changed(**values)
    return replace(settings, **values)


def _shown(key: Key, configs: Configs) -> str:
    settings = configs[key.part]
    if key.is_secret:
        return ""
    return value_text(key, getattr(settings, key.field), settings.origin.written)


def value_text(key: Key, value: Any, written: Mapping[str, str] = {}) -> str:
    """The text that reads as this value; empty when there is none."""
    if key.kind is Kind.CHOICE:
        return next(word for word, meaning in key.choices if meaning == value)
    if isinstance(value, tuple):
        return ";".join(written.get(part, part) for part in value)
    if key.kind is Kind.BOOLEAN:
        return "true" if value else "false"
    return "" if value is None else written.get(str(value), str(value))


def default_text(key: Key) -> str:
    """The default of a key as a file would say it, for the documentation."""
    return "" if callable(key.default) else value_text(key, key.default)
