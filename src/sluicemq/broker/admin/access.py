"""Access rules by request: 50 to 54 of mqadmin, and 900121 (ours), how they stand.

A change is written to the file that holds the account (a new one to the main file) and is in force
before its answer leaves; slaves that count have it by then, too (`Announced`). It is checked as a
whole first: what would not load is not written. Reading and writing happen elsewhere, one change
after the other.

Secrets go in and never come out: 54 shows `******`.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from sluicemq.acl import loading as edit
from sluicemq.acl.guard import Guard, access_status
from sluicemq.acl.loading import RuleFiles, decode_text
from sluicemq.acl.rules import GROUP_PREFIX, PERMISSION_WORDS
from sluicemq.broker.group_commit import Announced
from sluicemq.broker.settings import Settings
from sluicemq.clock import Clock
from sluicemq.errors import RequestError
from sluicemq.files import Files, overwrite_text
from sluicemq.model.topic import DataVersion
from sluicemq.net.dispatch import OutcomeHandler, Peer, encode_response_to
from sluicemq.net.work.background import Offload
from sluicemq.wire import fastjson
from sluicemq.wire.codes import ResponseCode
from sluicemq.wire.declare import encode_header
from sluicemq.wire.frames import Command
from sluicemq.wire.headers import (
    AccessVersionResponse,
    DeleteAccountRequest,
    UpdateAccountRequest,
    UpdateWhiteAddressesRequest,
)
from sluicemq.wire.tables import data_version_object

Change = Callable[[str], str | None]
"""The text of a file -> its new text, None to leave it."""
MASK: Final = "******"
UPDATE_FAILED, DELETE_FAILED, WHITE_FAILED = 209, 210, 211
"""Numbers that RocketMQ has given to answers of POP as well."""


@dataclass(slots=True, eq=False)
class AccessAdmin:
    """The request family about access rules."""

    settings: Settings
    guard: Guard | None
    files: Files
    clock: Clock
    offload: Offload
    deferred: OutcomeHandler
    waiting: deque[Callable[[], None]] = field(default_factory=deque, init=False)

    # --- changes

    def update_account(self, header: UpdateAccountRequest, command: Command, peer: Peer) -> None:
        """Answer UPDATE_AND_CREATE_ACL_CONFIG (50): create an account, or change what is given.

        As in RocketMQ, a field that is absent stays as it was. An empty list of permissions takes
        them all away, an empty white address too; an empty text changes nothing else.
        """
        guard = self._in_force()
        account = guard.accounts.get(header.access_key)
        place = guard.path if account is None else account.origin.rpartition(":")[0]
        lists = {"topicPerms": header.topic_permissions, "groupPerms": header.group_permissions}
        values: dict[str, Any] = {
            "secretKey": header.secret_key or None,
            "whiteRemoteAddress": header.white_address,
            "admin": header.admin,
            "defaultTopicPerm": header.topic_default or None,
            "defaultGroupPerm": header.group_default or None,
            **{
                name: [entry for entry in text.split(",") if entry.strip()]
                for name, text in lists.items()
                if text is not None
            },
        }
        changes = {name: value for name, value in values.items() if value is not None}

        def change(text: str) -> str | None:
            return edit.with_account(text, header.access_key, changes, self.clock.now_ms())

        self._change(command, peer, change, UPDATE_FAILED, place)

    def delete_account(self, header: DeleteAccountRequest, command: Command, peer: Peer) -> None:
        """51: out of every file, lest another's entry comes to light."""
        access_key = header.access_key
        if access_key not in self._in_force().accounts:
            raise RequestError(DELETE_FAILED, f"there is no account {access_key}.")

        def change(text: str) -> str | None:
            return edit.without_account(text, access_key, self.clock.now_ms())

        self._change(command, peer, change, DELETE_FAILED)

    def update_white_addresses(
        self, header: UpdateWhiteAddressesRequest, command: Command, peer: Peer
    ) -> None:
        """53."""
        guard = self._in_force()
        place, known = header.file or guard.path, guard.paths
        if place not in known:
            raise RequestError(WHITE_FAILED, f"{place} is none of the files: {', '.join(known)}.")
        addresses = [one.strip() for one in header.addresses.split(",") if one.strip()]

        def change(text: str) -> str | None:
            return edit.with_white_addresses(text, addresses, self.clock.now_ms())

        self._change(command, peer, change, WHITE_FAILED, place)

    def _change(
        self, command: Command, peer: Peer, change: Change, failed: int, place: str | None = None
    ) -> None:
        """Changes one of the files, or all, when what comes out loads."""
        guard = self._in_force()

        def work() -> Any:
            """Blocking. Raises ConfigurationError with file, line and cure, OSError."""
            news, texts = {}, []
            for name, data in guard.source.read_files().contents:
                text = change(decode_text(name, data)) if place in (None, name) else None
                if text is not None:
                    news[name] = text
                texts.append((name, data if text is None else text.encode()))
            guard.source.load(RuleFiles(tuple(texts)))
            for name, text in news.items():
                overwrite_text(self.files, name, text)
            return guard.check_files()

        def done(found: Any) -> Announced:
            guard.apply_checked_files(found)
            return Announced(Command(ResponseCode.SUCCESS))

        self._in_order(command, peer, work, done, failed)

    def _in_order(
        self,
        command: Command,
        peer: Peer,
        work: Callable[[], Any],
        done: Callable[[Any], Command | Announced],
        failed: int,
    ) -> None:
        """One after the other: each begins with what the one before has written. `done` makes the
        answer of what `work` found."""

        def ended(found: Any) -> None:
            self.waiting.popleft()
            if isinstance(found, Exception):
                answer: Command | Announced = Command(failed, remark=str(found))
            else:
                answer = done(found)
            if isinstance(answer, Announced):
                self.deferred(answer, command, peer)
            else:
                peer.write(b"" if command.is_oneway else encode_response_to(answer, command))
            if self.waiting:
                self.waiting[0]()

        self.waiting.append(lambda: self.offload(work, ended))
        if len(self.waiting) == 1:
            self.waiting[0]()

    # --- questions

    def versions(self, command: Command, peer: Peer) -> None:
        """52: editions of the files."""
        guard = self._in_force()
        texts = guard.files.contents if guard.files is not None else ()

        def work() -> dict[str, Any]:
            objects = {}
            for path, data in texts:
                counter, time_ms = edit.version_of(decode_text(path, data))
                version = DataVersion(counter, time_ms or guard.loaded_ms)
                objects[path] = data_version_object(version)
            return objects

        def done(objects: Any) -> Command:
            config = self.settings.broker
            header = AccessVersionResponse(
                version=_json(objects.get(guard.path)),
                all_versions=_json(objects),
                broker=config.broker_name,
                address=str(peer.local),
                cluster=config.cluster_name,
            )
            return Command(ResponseCode.SUCCESS, encode_header(header))

        self._in_order(command, peer, work, done, ResponseCode.SYSTEM_ERROR)

    def listed(self, command: Command, peer: Peer) -> Command:
        """54: accounts and addresses, without secrets."""
        guard = self._in_force()
        rules, shown = guard.rules, []
        for account in guard.accounts.values():
            entries: dict[bool, list[str]] = {True: [], False: []}
            for name, permission in account.permissions.items():
                entry = f"{name.removeprefix(GROUP_PREFIX)}={PERMISSION_WORDS[permission]}"
                entries[name.startswith(GROUP_PREFIX)].append(entry)
            shown.append({
                "accessKey": account.access_key,
                "secretKey": MASK,
                "whiteRemoteAddress": (
                    "" if account.white_addresses is None else account.white_addresses.text
                ),
                "admin": account.is_admin,
                "defaultTopicPerm": PERMISSION_WORDS[account.topic_default],
                "defaultGroupPerm": PERMISSION_WORDS[account.group_default],
                "topicPerms": entries[False],
                "groupPerms": entries[True],
            })  # fmt: skip
        white = [pattern.text for pattern in rules.white_addresses]
        body = {"globalWhiteAddrs": white, "plainAccessConfigs": shown}
        return Command(ResponseCode.SUCCESS, body=fastjson.dumps_strict(body))

    def status(self, command: Command, peer: Peer) -> Command:
        """900121: ours."""
        return access_status(self.guard)

    def _in_force(self) -> Guard:
        if self.guard is None:
            raise RequestError(
                ResponseCode.SYSTEM_ERROR, "this broker has no access control: aclEnable is false."
            )
        return self.guard


def _json(value: Any) -> str:
    return fastjson.dumps_strict(value).decode()
