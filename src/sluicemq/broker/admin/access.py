"""Handlers for requests of tools about access rules (ACL 1.0).

They answer UPDATE_AND_CREATE_ACL_CONFIG (50), DELETE_ACL_CONFIG (51), GET_BROKER_CLUSTER_ACL_INFO
(52), UPDATE_GLOBAL_WHITE_ADDRS_CONFIG (53), GET_BROKER_CLUSTER_ACL_CONFIG (54) and
SLUICE_ACCESS_STATUS (900121), a request of SluiceMQ.

A change is written to the file that contains the account; a new account goes to the main file. The
change is in force before its answer is sent, also on the slaves that must confirm changes
(`Announced`). The changed files are loaded for a check first; if that fails, nothing is written.
Files are read and written on another thread, one change after the other.

No answer contains a secret key: GET_BROKER_CLUSTER_ACL_CONFIG shows `******`.
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
"""A function that returns the new text of a file from its text, or None to leave it unchanged."""
MASK: Final = "******"
"""What answers contain in place of a secret key."""
UPDATE_FAILED, DELETE_FAILED, WHITE_FAILED = 209, 210, 211
"""Response codes of failed changes. RocketMQ uses these numbers for answers to pops, too."""


@dataclass(slots=True, eq=False)
class AccessHandlers:
    """Request handlers for access rules.

    They answer UPDATE_AND_CREATE_ACL_CONFIG (50), DELETE_ACL_CONFIG (51),
    GET_BROKER_CLUSTER_ACL_INFO (52), UPDATE_GLOBAL_WHITE_ADDRS_CONFIG (53),
    GET_BROKER_CLUSTER_ACL_CONFIG (54) and SLUICE_ACCESS_STATUS (900121). Without access control,
    all but the last raise RequestError. A handler that returns None answers later, when the files
    have been read or written on another thread.
    """

    settings: Settings
    guard: Guard | None
    files: Files
    clock: Clock
    offload: Offload
    handle_outcome: OutcomeHandler
    """Sends an answer that a handler gives later."""
    pending_jobs: deque[Callable[[], None]] = field(default_factory=deque, init=False)
    """The job that runs, and those that wait for it, in order."""

    # --- changes

    def update_account(self, header: UpdateAccountRequest, command: Command, peer: Peer) -> None:
        """Answer UPDATE_AND_CREATE_ACL_CONFIG (50): create or change an account.

        As in RocketMQ, a field that is absent in the request stays unchanged. An empty list of
        permissions removes all permissions, and an empty white address removes the address. Every
        other empty field stays unchanged.
        """
        guard = self._require_guard()
        account = guard.accounts.get(header.access_key)
        path = guard.path if account is None else account.origin.rpartition(":")[0]
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

        self._apply_change(command, peer, change, UPDATE_FAILED, path)

    def delete_account(self, header: DeleteAccountRequest, command: Command, peer: Peer) -> None:
        """Answer DELETE_ACL_CONFIG (51): delete an account from all files.

        If the account stayed in another file, that entry would come into force. Raises RequestError
        if there is no such account.
        """
        access_key = header.access_key
        if access_key not in self._require_guard().accounts:
            raise RequestError(DELETE_FAILED, f"account {access_key} does not exist.")

        def change(text: str) -> str | None:
            return edit.without_account(text, access_key, self.clock.now_ms())

        self._apply_change(command, peer, change, DELETE_FAILED)

    def update_white_addresses(
        self, header: UpdateWhiteAddressesRequest, command: Command, peer: Peer
    ) -> None:
        """Answer UPDATE_GLOBAL_WHITE_ADDRS_CONFIG (53): replace the global white addresses.

        The request names one of the files; by default, the main file is changed. Raises
        RequestError if the broker does not use that file.
        """
        guard = self._require_guard()
        path, known = header.file or guard.path, guard.paths
        if path not in known:
            raise RequestError(WHITE_FAILED, f"{path} is not one of the files: {', '.join(known)}.")
        addresses = [address.strip() for address in header.addresses.split(",") if address.strip()]

        def change(text: str) -> str | None:
            return edit.with_white_addresses(text, addresses, self.clock.now_ms())

        self._apply_change(command, peer, change, WHITE_FAILED, path)

    def _apply_change(
        self,
        command: Command,
        peer: Peer,
        change: Change,
        failure_code: int,
        path: str | None = None,
    ) -> None:
        """Change the file `path`, or all files if it is None, and answer the request.

        If the changed files cannot be loaded or written, answer with `failure_code`.
        """
        guard = self._require_guard()

        def work() -> Any:
            """Write the changed files and return what the guard loads from them. Blocks.

            Raises ConfigurationError, with file, line and fix, and OSError.
            """
            new_texts, contents = {}, []
            for name, data in guard.source.read_files().contents:
                text = change(decode_text(name, data)) if path in (None, name) else None
                if text is not None:
                    new_texts[name] = text
                contents.append((name, data if text is None else text.encode()))
            guard.source.load(RuleFiles(tuple(contents)))
            for name, text in new_texts.items():
                overwrite_text(self.files, name, text)
            return guard.check_files()

        def make_answer(checked: Any) -> Announced:
            guard.apply_checked_files(checked)
            return Announced(Command(ResponseCode.SUCCESS))

        self._run_in_order(command, peer, work, make_answer, failure_code)

    def _run_in_order(
        self,
        command: Command,
        peer: Peer,
        work: Callable[[], Any],
        make_answer: Callable[[Any], Command | Announced],
        failure_code: int,
    ) -> None:
        """Run `work` on another thread once all earlier jobs have ended, and answer the request.

        Each job thus reads what the job before it has written. `make_answer` returns the answer
        from the result of `work`. If `work` raises an error, the answer has `failure_code`.
        """

        def on_end(result: Any) -> None:
            self.pending_jobs.popleft()
            if isinstance(result, Exception):
                answer: Command | Announced = Command(failure_code, remark=str(result))
            else:
                answer = make_answer(result)
            if isinstance(answer, Announced):
                self.handle_outcome(answer, command, peer)
            else:
                peer.write(b"" if command.is_oneway else encode_response_to(answer, command))
            if self.pending_jobs:
                self.pending_jobs[0]()

        self.pending_jobs.append(lambda: self.offload(work, on_end))
        if len(self.pending_jobs) == 1:
            self.pending_jobs[0]()

    # --- queries

    def get_versions(self, command: Command, peer: Peer) -> None:
        """Answer GET_BROKER_CLUSTER_ACL_INFO (52) with the versions of the files.

        Return None: the answer is sent when the files were parsed on another thread.
        """
        guard = self._require_guard()
        texts = guard.files.contents if guard.files is not None else ()

        def work() -> dict[str, Any]:
            objects = {}
            for path, data in texts:
                counter, time_ms = edit.version_of(decode_text(path, data))
                version = DataVersion(counter, time_ms or guard.loaded_ms)
                objects[path] = data_version_object(version)
            return objects

        def make_answer(objects: Any) -> Command:
            config = self.settings.broker
            header = AccessVersionResponse(
                version=_json(objects.get(guard.path)),
                all_versions=_json(objects),
                broker=config.broker_name,
                address=str(peer.local),
                cluster=config.cluster_name,
            )
            return Command(ResponseCode.SUCCESS, encode_header(header))

        self._run_in_order(command, peer, work, make_answer, ResponseCode.SYSTEM_ERROR)

    def list_rules(self, command: Command, peer: Peer) -> Command:
        """Answer GET_BROKER_CLUSTER_ACL_CONFIG (54) with all rules, but without secret keys."""
        guard = self._require_guard()
        rules, accounts = guard.rules, []
        for account in guard.accounts.values():
            permissions: dict[bool, list[str]] = {True: [], False: []}
            for name, permission in account.permissions.items():
                entry = f"{name.removeprefix(GROUP_PREFIX)}={PERMISSION_WORDS[permission]}"
                permissions[name.startswith(GROUP_PREFIX)].append(entry)
            white_address = "" if account.white_addresses is None else account.white_addresses.text
            accounts.append(
                {
                    "accessKey": account.access_key,
                    "secretKey": MASK,
                    "whiteRemoteAddress": white_address,
                    "admin": account.is_admin,
                    "defaultTopicPerm": PERMISSION_WORDS[account.topic_default],
                    "defaultGroupPerm": PERMISSION_WORDS[account.group_default],
                    "topicPerms": permissions[False],
                    "groupPerms": permissions[True],
                }
            )
        white = [pattern.text for pattern in rules.white_addresses]
        body = {"globalWhiteAddrs": white, "plainAccessConfigs": accounts}
        return Command(ResponseCode.SUCCESS, body=fastjson.dumps_strict(body))

    def get_status(self, command: Command, peer: Peer) -> Command:
        """Answer SLUICE_ACCESS_STATUS (900121) with the state of access control."""
        return access_status(self.guard)

    def _require_guard(self) -> Guard:
        """Return the guard. Raises RequestError if the broker has no access control."""
        if self.guard is None:
            raise RequestError(
                ResponseCode.SYSTEM_ERROR, "this broker has no access control: aclEnable is false."
            )
        return self.guard


def _json(value: Any) -> str:
    """Return a value as JSON text."""
    return fastjson.dumps_strict(value).decode()
