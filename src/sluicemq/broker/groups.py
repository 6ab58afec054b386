"""The consumer groups of a broker and their file (config/subscriptionGroup.json).

A group that connects and is not known is made with the defaults when
autoCreateSubscriptionGroup=true; RocketMQ's own groups are always there.
"""

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final

from sluicemq.broker.documents import Document
from sluicemq.broker.settings import Settings
from sluicemq.clock import Clock
from sluicemq.files import Files
from sluicemq.model.topic import GROUP_LENGTH_MAX, PERM_READ, DataVersion, GroupConfig
from sluicemq.wire import tables
from sluicemq.wire.tables import Texts, Unknown, group_from, group_object

log = logging.getLogger(__name__)

_NAME: Final = re.compile(r"[%|a-zA-Z0-9_-]+")
SYSTEM_GROUPS: Final = (
    "TOOLS_CONSUMER", "FILTERSRV_CONSUMER", "SELF_TEST_C_GROUP", "CID_ONS-HTTP-PROXY",
    "CID_ONSAPI_PULL", "CID_ONSAPI_PERMISSION", "CID_ONSAPI_OWNER", "CID_RMQ_SYS_TRANS",
)  # fmt: skip


def name_fault(name: str) -> str | None:
    """Why a group cannot have this name; None when it can."""
    if not name.strip():
        return "The specified group is blank."
    if len(name) > GROUP_LENGTH_MAX:
        return f"The specified group has {len(name)} characters; the limit is {GROUP_LENGTH_MAX}."
    if not _NAME.fullmatch(name):
        return "The specified group contains illegal characters, allowing only ^[%|a-zA-Z0-9_-]+$"
    return None


class Groups:
    """All groups by name. `on_change(group name)` is called after each change."""

    def __init__(self, settings: Settings, files: Files, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self.table: dict[str, GroupConfig] = {}
        self.forbidden: dict[str, dict[str, int]] = {}
        self.version = DataVersion()
        self._unknown = Unknown()
        self._texts: Texts[GroupConfig] = {}
        self.on_change: Callable[[str], None] = lambda name: None
        self.document = Document(
            files, f"{settings.store.root}/config/subscriptionGroup.json", self._render,
            lambda: self.version,
        )  # fmt: skip

    def load(self) -> None:
        """Reads the file and adds RocketMQ's own groups. Raises StoreDamagedError."""
        found = self.document.load(tables.decode_group_table_file)
        if found is not None:
            self.version, self._unknown = found.data_version, found.unknown
            self.table.update(found.groups)
            self.forbidden = {group: dict(bits) for group, bits in found.forbidden.items()}
        changes = self.document.journaled(self.table)
        for change in changes:
            self.table.pop(change.name, None)
            if change.value is not None:
                self.table[change.name] = group_from(change.value, change.name)
        missing = [name for name in SYSTEM_GROUPS if name not in self.table]
        for name in missing:
            self.table[name] = GroupConfig(name)
        if changes:
            self.version = max(self.version, changes[-1].version)
        if missing or changes:
            self.version = self.version.next(self._clock.now_ms())
            self.document.changed = True

    def _render(self) -> Callable[[], str]:
        return partial(tables.encode_group_table_file, self.snapshot(), self._texts)

    def snapshot(self) -> tables.GroupTable:
        """The table as 201 and the file carry it."""
        return tables.GroupTable(dict(self.table), self.version, self.forbidden, self._unknown)

    def may_read(self, group: str, topic: str) -> bool:
        """Is the group not kept from the topic? (Set with RocketMQ's tools, spec/admin.md 353.)"""
        return not self.forbidden.get(group, {}).get(topic, 0) & PERM_READ

    def find(self, name: str) -> GroupConfig | None:
        """The group; made with the defaults where that is allowed; None when there is none."""
        config = self.table.get(name)
        broker = self._settings.broker
        if (
            config is None
            and broker.auto_create_group
            and len(self.table) < broker.auto_groups_max
            and not name_fault(name)
        ):
            config = GroupConfig(name)
            self.put(config, is_asked=False)
        return config

    def put(self, *configs: GroupConfig, is_asked: bool = True) -> None:
        """Creates or changes groups, all or none; what is just so already stays. Raises StoreError
        when that cannot be kept, unless nobody has asked for it (`Document.record`)."""
        news = [config for config in configs if self.table.get(config.name) != config]
        if not news:
            return
        self._record({config.name: group_object(config) for config in news}, is_asked=is_asked)
        for config in news:
            word = "changed" if config.name in self.table else "created"
            self.table[config.name] = config
            log.info("group %s: %s", word, config)
            self.on_change(config.name)

    def remove(self, name: str) -> bool:
        """Raises StoreError when that cannot be kept."""
        if name not in self.table:
            return False
        self._record({name: None})
        del self.table[name]
        self._unknown.items.pop(name, None)
        log.info("group %s deleted", name)
        self.on_change(name)
        return True

    def _record(
        self, values: Mapping[str, dict[str, Any] | None], *, is_asked: bool = True
    ) -> None:
        version = self.version.next(self._clock.now_ms())
        self.document.record(version, values, is_asked=is_asked)
        self.version = version

    def __contains__(self, name: str) -> bool:
        return name in self.table

    def __iter__(self) -> Iterator[GroupConfig]:
        return iter(self.table.values())

    def __len__(self) -> int:
        return len(self.table)
