"""The consumer groups of a broker and their file (config/subscriptionGroup.json).

A group that connects and is not known is made with the defaults when
autoCreateSubscriptionGroup=true; RocketMQ's own groups are always there.
"""

import logging
import re
from collections.abc import Callable, Iterator
from typing import Final

from sluicemq.broker.documents import Document
from sluicemq.broker.settings import Settings
from sluicemq.clock import Clock
from sluicemq.files import Files
from sluicemq.model.topic import GROUP_LENGTH_MAX, PERM_READ, DataVersion, GroupConfig
from sluicemq.protocol import bodies
from sluicemq.protocol.bodies.unknown import Unknown

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
        self.on_change: Callable[[str], None] = lambda name: None
        self.document = Document(
            files, f"{settings.store.root}/config/subscriptionGroup.json", self._render
        )

    def load(self) -> None:
        """Reads the file and adds RocketMQ's own groups. Raises StoreDamagedError."""
        found = self.document.load(bodies.decode_group_table_file)
        if found is not None:
            self.version, self._unknown = found.data_version, found.unknown
            self.table.update(found.groups)
            self.forbidden = {group: dict(bits) for group, bits in found.forbidden.items()}
        missing = [name for name in SYSTEM_GROUPS if name not in self.table]
        for name in missing:
            self.table[name] = GroupConfig(name)
        if missing:
            self._bump()

    def _render(self) -> str:
        return bodies.encode_group_table_file(self.snapshot())

    def snapshot(self) -> bodies.GroupTable:
        """The table as 201 and the file carry it."""
        return bodies.GroupTable(dict(self.table), self.version, self.forbidden, self._unknown)

    def may_read(self, group: str, topic: str) -> bool:
        """Is the group not kept from the topic? (Set with RocketMQ's tools, spec/admin.md 353.)"""
        return not self.forbidden.get(group, {}).get(topic, 0) & PERM_READ

    def _bump(self) -> None:
        self.version = DataVersion(
            self.version.counter + 1, self._clock.now_ms(), self.version.state_version
        )
        self.document.changed = True

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
            self.put(config)
        return config

    def put(self, config: GroupConfig) -> bool:
        """Creates or changes a group; False when it is just so already."""
        old = self.table.get(config.name)
        if old == config:
            return False
        self.table[config.name] = config
        log.info("group %s: %s", "created" if old is None else "changed", config)
        self._bump()
        self.on_change(config.name)
        return True

    def remove(self, name: str) -> bool:
        if self.table.pop(name, None) is None:
            return False
        self._unknown.items.pop(name, None)
        log.info("group %s deleted", name)
        self._bump()
        self.on_change(name)
        return True

    def __contains__(self, name: str) -> bool:
        return name in self.table

    def __iter__(self) -> Iterator[GroupConfig]:
        return iter(self.table.values())

    def __len__(self) -> int:
        return len(self.table)
