"""Change settings while a server runs, and write them as text.

A change of a *live* key (UPDATE_BROKER_CONFIG, 25, and UPDATE_NAMESRV_CONFIG, 318) is in force at
once. A change of another key is *pending*: it is written to the file and takes effect at the next
start. Until then, responses show both values. Both kinds of changes are validated at once.

Variables (`$NAME`, `~`) are replaced only in paths that are read when the server starts. Values in
a request are not expanded, because everyone who can connect could read the environment otherwise.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final, NamedTuple

from sluicemq.config.keys import Key, Part, value_text
from sluicemq.config.load import (
    LoadedValues,
    Settings,
    find_values,
    index_keys,
    warnings_about,
    with_system_properties,
)
from sluicemq.config.properties import parse_properties
from sluicemq.config.settings import StoreConfig, keys_of
from sluicemq.errors import ConfigurationError, PermissionDeniedError

NO_PERMISSION: Final = 16
ALWAYS_BLACK: Final = frozenset({"configBlackList", "rocketmqHome"})
PENDING: Final = "sluicePending."
"""The prefix of a key in a response, if the value is the one at the next start."""

Configs = Mapping[Part, Any]
"""The settings of one server, by part."""


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
        """The remark of a successful response, or None if the whole change has taken effect.

        It names the keys that take effect at the next start, then the keys that have no effect.
        """
        sentences = list(self.without_effect)
        if self.pending:
            sentences.insert(0, f"in effect at the next start: {', '.join(self.pending)}")
        return " ".join(sentences) or None


CHANGE_LENGTH_MAX: Final = 65_536
"""Maximum length of a request that changes settings. All settings of a broker have 20,000."""


def change_settings(
    in_force: Configs, at_next_start: Configs, text: str, black_list: Iterable[str]
) -> Change:
    """Return the result of changing settings by the text of a request, in properties syntax.

    `in_force` are the settings that the server uses now. `at_next_start` are the settings that it
    will use after a restart. A key without a value gets its default.

    Raises PermissionDeniedError for a key in `black_list`. Raises ConfigurationError for an invalid
    value, and if no key has an effect, because RocketMQ's tools show only errors. If some keys have
    an effect, the others are only named in `Change.remark`.
    """
    if len(text) > CHANGE_LENGTH_MAX:
        raise ConfigurationError(
            f"The change has {len(text)} characters; the limit is {CHANGE_LENGTH_MAX}.",
            fix="Send only the keys that change.",
        )
    entries = with_system_properties(parse_properties(text))
    if (ALWAYS_BLACK | set(black_list)).intersection(entries):
        raise PermissionDeniedError(NO_PERMISSION, "Can not update config in black list.")
    change = _apply_entries(in_force, at_next_start, entries)
    sets_known_key = not index_keys(*in_force).keys().isdisjoint(entries)
    if change.without_effect and not sets_known_key:
        raise ConfigurationError(
            f"Nothing was changed. {' '.join(change.without_effect)}",
            fix="Use a key that mqadmin getBrokerConfig or getNamesrvConfig lists.",
        )
    return change


def reread_settings(in_force: Configs, at_next_start: Configs, text: str) -> Change:
    """Return the result of reading the configuration file again while its server runs.

    `text` is the text of the file. `in_force` are the settings that the server uses now, and
    `at_next_start` those after a restart. Keys that the command line has set do not change. A key
    that was removed from the file keeps its value until the next start. Raises ConfigurationError
    for an invalid value.
    """
    fixed_names = set(ALWAYS_BLACK)  # keys that a running server never changes
    for config in in_force.values():
        fixed_names |= config.origin.command_line
    file_entries = with_system_properties(parse_properties(text))
    entries = {name: value for name, value in file_entries.items() if name not in fixed_names}
    return _apply_entries(in_force, at_next_start, entries)


def _apply_entries(in_force: Configs, at_next_start: Configs, entries: Mapping[str, str]) -> Change:
    """Return the result of setting the keys in `entries`, which maps keys to texts.

    An entry is skipped if the key has this value already. An empty text means the default. A live
    key, which takes effect at once, changes in both settings. Any other key changes only in
    `at_next_start`. Neither argument is modified.

    Raises ConfigurationError for an invalid value, and for a key that the command line has set.
    """
    changed_entries = _select_changes(entries, at_next_start)
    loaded = find_values(changed_entries, tuple(in_force), _refuse_variables)
    key_by_name = index_keys(*in_force)
    written_entries = {}
    for name, text in changed_entries.items():
        if name not in key_by_name:
            continue
        key = key_by_name[name]
        _check_not_fixed(name, key, in_force)
        if text == "":
            default = key.default() if callable(key.default) else key.default
            loaded.values[key.part, key.field] = default
        written_entries[key.name] = text

    new_in_force, new_at_next_start = _replace_settings(in_force, at_next_start, loaded)
    pending = [key.name for key in _find_pending_keys(new_in_force, new_at_next_start)]
    warnings = [
        *loaded.warnings,
        *(f"{name} takes effect at the next start." for name in pending),
        *warnings_about(loaded, *new_at_next_start.values()),
    ]
    return Change(
        in_force=new_in_force,
        at_next_start=new_at_next_start,
        entries=written_entries,
        pending=pending,
        warnings=warnings,
        without_effect=loaded.without_effect,
    )


def _select_changes(entries: Mapping[str, str], configs: Configs) -> dict[str, str]:
    """Return the entries that would change a setting, and the entries with an unknown key.

    `entries` maps the names of keys or aliases to texts. An entry is left out if its text equals
    the text in which a response shows the present value.
    """
    key_by_name = index_keys(*configs)
    return {
        name: text
        for name, text in entries.items()
        if name not in key_by_name or text != _show_value(key_by_name[name], configs)
    }


def _check_not_fixed(name: str, key: Key, in_force: Configs) -> None:
    """Raise ConfigurationError if the command line or tls.config.file has set a key.

    `name` is the key or the alias that the request or file uses.
    """
    if key.name in in_force[key.part].origin.command_line:
        raise ConfigurationError(
            f"{name} is set on the command line or in tls.config.file, which take precedence "
            "over this file.",
            fix="Change it there, and restart the server.",
        )


def _replace_settings(
    in_force: Configs, at_next_start: Configs, loaded: LoadedValues
) -> tuple[Configs, Configs]:
    """Return both settings with the loaded values, as (in force, at next start).

    The settings in force change only in live keys, which take effect at once. Raises
    ConfigurationError if the values contradict each other.
    """
    new_at_next_start = {}
    for part, settings in at_next_start.items():
        new_at_next_start[part] = _replace_values(settings, loaded.values_of(part))

    live_fields = {(key.part, key.field) for key in keys_of(*in_force) if key.live}
    new_in_force = {}
    for part, settings in in_force.items():
        live_values = {
            field: value
            for field, value in loaded.values_of(part).items()
            if (part, field) in live_fields
        }
        new_in_force[part] = _replace_values(settings, live_values)
    return new_in_force, new_at_next_start


def settings_text(in_force: Configs, at_next_start: Configs) -> str:
    """Return the settings as text, as requests for the settings of a server return them.

    There is a line `key=value` for each key, in the settings in force. Then comes a line with the
    prefix `PENDING` for each value that differs at the next start. Paths are shown as the file has
    them, with variables. Secrets are empty.
    """
    lines = [f"{key.name}={_show_value(key, in_force)}\n" for key in keys_of(*in_force)]
    lines += [
        f"{PENDING}{key.name}={_show_value(key, at_next_start)}\n"
        for key in _find_pending_keys(in_force, at_next_start)
    ]
    return "".join(lines)


def _find_pending_keys(in_force: Configs, at_next_start: Configs) -> Iterator[Key]:
    """Yield the keys whose value will change at the next start."""
    for key in keys_of(*in_force):
        if getattr(in_force[key.part], key.field) != getattr(at_next_start[key.part], key.field):
            yield key


def _refuse_variables(name: str, path: str) -> str:
    """Return `path` unchanged if it has no variable such as `$HOME` and does not begin with `~`.

    Otherwise raise ConfigurationError. `name` is the key of the setting.
    """
    if "$" in path or path.startswith("~"):
        raise ConfigurationError(
            f"{name} = {path} is not valid: a request must not use variables, because they would "
            "show the environment.",
            fix="Write the path without them, or set it in the file and restart the server.",
        )
    return path


def _replace_values(settings: Settings, values: Mapping[str, Any]) -> Settings:
    """Return a copy with some fields replaced; a store's derived fields are derived again."""
    if isinstance(settings, StoreConfig):
        return settings.with_changes(**values)
    return replace(settings, **values)


def _show_value(key: Key, configs: Configs) -> str:
    """Return the value of a key as a response shows it; "" for a secret."""
    settings = configs[key.part]
    if key.is_secret:
        return ""
    return value_text(key, getattr(settings, key.field), settings.origin.written)
