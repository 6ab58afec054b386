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
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from sluicemq.acl import loading as edit
from sluicemq.acl.guard import Guard, access_status
from sluicemq.acl.loading import RuleFiles, decode_text
from sluicemq.acl.rules import GROUP_PREFIX, PERMISSION_WORDS, Account
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
UPDATE_FAILED = 209
DELETE_FAILED = 210
WHITE_FAILED = 211
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

        As in RocketMQ, only the fields in the request change. An empty list of permissions removes
        all permissions, and an empty white address (from which no signature is needed) removes the
        address. Other empty fields change nothing. The answer is sent when the file is written.
        """
        guard = self._require_guard()
        account = guard.accounts.get(header.access_key)
        path = guard.path
        if account is not None:
            path, _, _ = account.origin.rpartition(":")  # the origin is `path:line`

        changes = _list_account_changes(header)

        def set_account(file_text: str) -> str | None:
            return edit.with_account(file_text, header.access_key, changes, self.clock.now_ms())

        self._edit_files_and_answer(command, peer, set_account, UPDATE_FAILED, path)

    def delete_account(self, header: DeleteAccountRequest, command: Command, peer: Peer) -> None:
        """Answer DELETE_ACL_CONFIG (51): delete an account from all files with access rules.

        If it stayed in one of them, that entry would come into force. The answer is sent when the
        files are written. Raises RequestError if there is no such account.
        """
        access_key = header.access_key
        if access_key not in self._require_guard().accounts:
            raise RequestError(DELETE_FAILED, f"account {access_key} does not exist.")

        def remove_account(file_text: str) -> str | None:
            return edit.without_account(file_text, access_key, self.clock.now_ms())

        self._edit_files_and_answer(command, peer, remove_account, DELETE_FAILED)

    def update_white_addresses(
        self, header: UpdateWhiteAddressesRequest, command: Command, peer: Peer
    ) -> None:
        """Answer UPDATE_GLOBAL_WHITE_ADDRS_CONFIG (53): replace the global white addresses.

        Requests from these addresses need no signature. The request may name one of the files with
        access rules; by default, the main file is changed. Raises RequestError if the broker does
        not use that file.
        """
        guard = self._require_guard()
        path = header.file or guard.path
        if path not in guard.paths:
            known_paths = ", ".join(guard.paths)
            raise RequestError(WHITE_FAILED, f"{path} is not one of the files: {known_paths}.")

        stripped_addresses = map(str.strip, header.addresses.split(","))
        addresses = [address for address in stripped_addresses if address]

        def set_addresses(file_text: str) -> str | None:
            return edit.with_white_addresses(file_text, addresses, self.clock.now_ms())

        self._edit_files_and_answer(command, peer, set_addresses, WHITE_FAILED, path)

    def _edit_files_and_answer(
        self,
        command: Command,
        peer: Peer,
        edit_text: Change,
        failure_code: int,
        path: str | None = None,
    ) -> None:
        """Start to edit the file `path`, or all files if it is None, and answer afterwards.

        `edit_text(text)` returns the new text of a file, or None if it does not change. The files
        are edited on another thread. Then the new rules come into force, and the answer is sent. If
        the edited files cannot be loaded or written, the answer has the code `failure_code`.
        """
        guard = self._require_guard()

        def apply_and_answer(checked_files: Any) -> Announced:
            guard.apply_checked_files(checked_files)
            return Announced(Command(ResponseCode.SUCCESS))

        self._run_in_order(
            command,
            peer,
            partial(self._edit_files, guard, edit_text, path),
            apply_and_answer,
            failure_code,
        )

    def _edit_files(self, guard: Guard, edit_text: Change, path: str | None) -> Any:
        """Edit the file `path`, or all files if it is None, and return the rules loaded from them.

        The edited texts are checked before anything is written. Blocks, so it runs on another
        thread. Raises ConfigurationError if an edited text is invalid. Raises OSError if a file
        cannot be read or written.
        """
        # Edit the texts in memory.
        new_texts: dict[str, str] = {}  # the new text of each edited file, by path
        new_contents = []
        for file_path, old_content in guard.source.read_files().contents:
            is_to_edit = path is None or path == file_path
            new_text = edit_text(decode_text(file_path, old_content)) if is_to_edit else None
            if new_text is None:
                new_contents.append((file_path, old_content))
            else:
                new_texts[file_path] = new_text
                new_contents.append((file_path, new_text.encode()))

        # Load them for a check before anything is written: this raises ConfigurationError.
        guard.source.load(RuleFiles(tuple(new_contents)))

        for file_path, new_text in new_texts.items():
            overwrite_text(self.files, file_path, new_text)
        return guard.check_files()

    def _run_in_order(
        self,
        command: Command,
        peer: Peer,
        blocking_work: Callable[[], Any],
        make_answer: Callable[[Any], Command | Announced],
        failure_code: int,
    ) -> None:
        """Run `blocking_work` on another thread after all earlier jobs, and then answer `command`.

        The jobs run one after the other, so each reads what the one before it has written.
        `make_answer(result)` makes the answer from the result of `blocking_work`. If that raises an
        exception, the answer has the code `failure_code` and the text of the exception.
        """

        def answer_and_start_next(result_or_error: Any) -> None:
            self.pending_jobs.popleft()
            if isinstance(result_or_error, Exception):
                answer: Command | Announced = Command(failure_code, remark=str(result_or_error))
            else:
                answer = make_answer(result_or_error)
            self._send_answer(answer, command, peer)
            if self.pending_jobs:
                start_next_job = self.pending_jobs[0]
                start_next_job()

        def start_job() -> None:
            self.offload(blocking_work, answer_and_start_next)

        self.pending_jobs.append(start_job)
        is_only_job = len(self.pending_jobs) == 1
        if is_only_job:
            start_job()

    def _send_answer(self, answer: Command | Announced, command: Command, peer: Peer) -> None:
        """Send `answer` to `peer`, as the answer to the request `command`.

        An Announced is sent when the change is saved and the replicas have it. A one-way request
        gets no answer.
        """
        if isinstance(answer, Announced):
            self.handle_outcome(answer, command, peer)
        elif command.is_oneway:
            peer.write(b"")
        else:
            peer.write(encode_response_to(answer, command))

    # --- queries

    def get_versions(self, command: Command, peer: Peer) -> None:
        """Answer GET_BROKER_CLUSTER_ACL_INFO (52) with the versions of the files.

        Return None: the answer is sent when the files were parsed on another thread.
        """
        guard = self._require_guard()
        contents = guard.files.contents if guard.files is not None else ()

        def make_answer(versions: Any) -> Command:
            config = self.settings.broker
            header = AccessVersionResponse(
                version=_json(versions.get(guard.path)),
                all_versions=_json(versions),
                broker=config.broker_name,
                address=str(peer.local),
                cluster=config.cluster_name,
            )
            return Command(ResponseCode.SUCCESS, encode_header(header))

        parse_versions = partial(_parse_versions, contents, guard)
        self._run_in_order(command, peer, parse_versions, make_answer, ResponseCode.SYSTEM_ERROR)

    def list_rules(self, command: Command, peer: Peer) -> Command:
        """Answer GET_BROKER_CLUSTER_ACL_CONFIG (54) with all rules, but without secret keys."""
        guard = self._require_guard()
        rules = {
            "globalWhiteAddrs": [pattern.text for pattern in guard.rules.white_addresses],
            "plainAccessConfigs": [
                _describe_account(account) for account in guard.accounts.values()
            ],
        }
        return Command(ResponseCode.SUCCESS, body=fastjson.dumps_strict(rules))

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


def _parse_versions(contents: Iterable[tuple[str, bytes]], guard: Guard) -> dict[str, Any]:
    """Return the versions of the files with access rules as JSON objects, by path.

    `contents` are (path, content) of each file. If a file contains no time, the time when `guard`
    has loaded it is used.
    """
    versions = {}
    for path, content in contents:
        counter, time_ms = edit.version_of(decode_text(path, content))
        version = DataVersion(counter, time_ms or guard.loaded_ms)
        versions[path] = data_version_object(version)
    return versions


def _list_account_changes(header: UpdateAccountRequest) -> dict[str, Any]:
    """Return the fields of an account that a request changes, by their names in the file.

    Fields that the request does not change are left out.
    """
    fields: dict[str, Any] = {
        "secretKey": header.secret_key or None,
        "whiteRemoteAddress": header.white_address,
        "admin": header.admin,
        "defaultTopicPerm": header.topic_default or None,
        "defaultGroupPerm": header.group_default or None,
        "topicPerms": _split_permissions(header.topic_permissions),
        "groupPerms": _split_permissions(header.group_permissions),
    }
    return {name: content for name, content in fields.items() if content is not None}


def _split_permissions(comma_separated: str | None) -> list[str] | None:
    """Return the entries of a comma-separated list of permissions; None if there is no list.

    Empty entries are left out, but white space around an entry stays.
    """
    if comma_separated is None:
        return None
    return [permission for permission in comma_separated.split(",") if permission.strip()]


def _describe_account(account: Account) -> dict[str, Any]:
    """Return an account as a JSON object, with the names of the file, and a masked secret key."""
    topic_permissions = []
    group_permissions = []
    for name, permission in account.permissions.items():
        permission_word = PERMISSION_WORDS[permission]
        if name.startswith(GROUP_PREFIX):
            group = name.removeprefix(GROUP_PREFIX)
            group_permissions.append(f"{group}={permission_word}")
        else:
            topic_permissions.append(f"{name}={permission_word}")

    white_address = ""
    if account.white_addresses is not None:
        white_address = account.white_addresses.text
    return {
        "accessKey": account.access_key,
        "secretKey": MASK,
        "whiteRemoteAddress": white_address,
        "admin": account.is_admin,
        "defaultTopicPerm": PERMISSION_WORDS[account.topic_default],
        "defaultGroupPerm": PERMISSION_WORDS[account.group_default],
        "topicPerms": topic_permissions,
        "groupPerms": group_permissions,
    }


def _json(json_object: Any) -> str:
    """Return an object as JSON text."""
    return fastjson.dumps_strict(json_object).decode()
