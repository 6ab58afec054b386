"""Load access rules from `plain_acl.yml`, and change that file.

Values are taken as they are written: `secretKey: 01234567` is the string 01234567. Unknown keys,
words and structures are errors with line and fix; they never become a silent denial. Tabs, which
YAML forbids but articles contain, are read as spaces, with a warning.

The YAML is read from libyaml's events. Tags and aliases are refused and nesting is limited, so that
a small file cannot use much memory. With `is_compatible`, files are read as RocketMQ 5 reads them:
aliases are followed, up to a limited number of nodes.

The rules come from `plain_acl.yml` and all .yml and .yaml files in the directory `acl` next to it.
The files of the directory have precedence, in the order of their names; if several files have the
same account, the first one applies, as in RocketMQ. If one file is invalid, none takes effect.

The functions that change `plain_acl.yml` take its text and return the new text. Entries and keys
that they do not know are kept in their order; comments and formatting are lost. Each change
increments the counter of `dataVersion`, as in RocketMQ. The new text is not validated: the caller
loads it before writing it.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple, TypeVar

import yaml  # type: ignore[import-untyped]

from sluicemq.acl.rules import (
    ACCOUNT_FIELDS,
    GROUP_PREFIX,
    PERMISSION_WORDS,
    Account,
    AddressPattern,
    Permission,
    Rules,
    parse_pattern,
    parse_pattern_like_rocketmq,
    parse_permission,
)
from sluicemq.config.keys import ServerConfig
from sluicemq.errors import ConfigurationError
from sluicemq.files import Files, exposure_warning

T = TypeVar("T")
KEY_LENGTH_MIN: Final = 7
"""The minimum length of accessKey and secretKey in UTF-16 code units, as in RocketMQ."""
DEPTH_MAX: Final = 8
TEXT_BYTES_MAX: Final = 16 << 20
NODES_MAX: Final = 2_000_000
"""The maximum number of nodes of a file, with aliases expanded."""
_TABS: Final = re.compile(
    r"^[ \t]*\t[ \t]*|(?<=[:\-])[ ]*\t[ \t]*|[ \t]*\t[ \t]*(?=#|$)", re.MULTILINE
)
_YES: Final = ("true", "yes", "on")
_NO: Final = ("false", "no", "off")
_LOADER: Final[Any] = getattr(yaml, "CBaseLoader", yaml.BaseLoader)
_DUMPER: Final[Any] = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
ACCOUNTS = "accounts"
WHITE = "globalWhiteRemoteAddresses"
DATA_VERSION = "dataVersion"


class YamlNode(NamedTuple):
    """A YAML value with the line where it begins.

    `value` is a string, a list of nodes, or a dictionary of nodes. `is_plain` is true for a string
    without quotes.
    """

    value: Any
    line: int
    is_plain: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether the value is missing (`key:`), `~` or `null`."""
        return self.is_plain and self.value in ("", "~", "null", "Null", "NULL")


class LoadedRules(NamedTuple):
    """The rules of one or all files, with warnings for their owner."""

    rules: Rules
    warnings: tuple[str, ...]


def load_rules(text: str, name: str, *, is_compatible: bool = False) -> LoadedRules:
    """Parse the text of one file.

    `name` is the file name for messages. `is_compatible` reads the text as RocketMQ does. Raises
    ConfigurationError with line and fix if the text is invalid.
    """
    if len(text) > TEXT_BYTES_MAX:
        raise ConfigurationError(
            f"{name} has {len(text)} characters, the limit is {TEXT_BYTES_MAX}.",
            fix="Split it into several files below conf/acl.",
        )
    warnings: list[str] = []
    text = _replace_tabs(text, name, warnings)
    if warnings and is_compatible:
        raise ConfigurationError(warnings[0], fix="Or set sluiceAclCompatible = false.")
    root = _YamlBuilder(name, with_aliases=is_compatible).build(text)
    if root is None:
        return LoadedRules(Rules(), tuple(warnings))
    rules = _RuleReader(name, warnings, is_compatible=is_compatible).rules(root)
    return LoadedRules(rules, tuple(warnings))


def _error_at(name: str, line: int, why: str, fix: str) -> ConfigurationError:
    return ConfigurationError(f"{name}:{line}: {why}.", fix=fix)


def load_credentials(text: str, name: str) -> tuple[str, str] | None:
    """Return access key and secret key of a `tools.yml`; None if it has neither.

    `name` is the file name for messages. Raises ConfigurationError if only one is given or the text
    is not YAML; the message shows neither key.
    """
    root = _YamlBuilder(name).build(_replace_tabs(text, name, []))
    found = {} if root is None else _plain_value(root)
    pair = [found.get(key) for key in ("accessKey", "secretKey")] if isinstance(found, dict) else []
    if not any(pair):
        return None
    if not all(isinstance(one, str) and one for one in pair):
        raise ConfigurationError(
            f"{name} has only one of accessKey and secretKey.", fix="Write both."
        )
    return str(pair[0]), str(pair[1])


def _plain_value(node: YamlNode) -> Any:
    if isinstance(node.value, dict):
        return {key: _plain_value(value) for key, value in node.value.items()}
    if isinstance(node.value, list):
        return [_plain_value(value) for value in node.value]
    return None if node.is_empty else node.value


def _replace_tabs(text: str, name: str, warnings: list[str]) -> str:
    if "\t" not in text:
        return text
    lines: list[int] = []

    def blanks(found: re.Match[str]) -> str:
        lines.append(text.count("\n", 0, found.start()) + 1)
        return found[0].replace("\t", "    " if found[0].strip(" ") else "  ")

    changed = _TABS.sub(blanks, text)
    if lines:
        where = ", ".join(map(str, lines[:5])) + (" …" if len(lines) > 5 else "")
        warnings.append(
            f"{name} has tabs in line {where}: they are read as spaces; RocketMQ refuses the file."
            " Replace them by spaces."
        )
    return changed


class _YamlBuilder:
    """Builds nodes from the events of a YAML parser, within limits of size and depth."""

    def __init__(self, name: str, *, with_aliases: bool = False) -> None:
        self._name = name
        self._anchors: dict[str, YamlNode] | None = {} if with_aliases else None
        self._sizes: dict[str, int] = {}
        self._count = 0

    def build(self, text: str) -> YamlNode | None:
        """Return the root node of the document; None if it is empty.

        Raises ConfigurationError with the line if the text is not YAML, has several documents, or
        uses what is not allowed.
        """
        try:
            events = iter(yaml.parse(text, Loader=_LOADER))
            root = None
            documents = 0
            for event in events:
                if isinstance(event, yaml.DocumentStartEvent):
                    documents += 1
                    if documents > 1:
                        raise self._error(event, "a second document begins", "Write one document.")
                    root = self._node(next(events), events, 0)
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            line = f":{mark.line + 1}" if mark is not None else ""
            why = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
            raise ConfigurationError(
                f"{self._name}{line} is not valid YAML: {why}.",
                fix='Check the indentation there (spaces, no tabs), and put "*" and text with ": "'
                " or # in quotes.",
            ) from None
        return None if root is None or root.is_empty else root

    def _node(self, event: Any, events: Iterator[Any], depth: int) -> YamlNode:
        line = event.start_mark.line + 1
        self._count += 1
        if isinstance(event, yaml.AliasEvent):
            if self._anchors is not None and event.anchor in self._anchors:
                self._count += self._sizes[event.anchor]
                if self._count > NODES_MAX:
                    raise self._error(event, "there are too many aliases", "Write the values out.")
                return self._anchors[event.anchor]
            raise self._error(
                event, f"*{event.anchor} is a YAML alias", 'Put a star in quotes: "*".'
            )
        if event.tag is not None and event.tag != "!":
            raise self._error(event, f"the tag {event.tag} is not allowed", "Remove it.")
        if depth > DEPTH_MAX:
            raise self._error(
                event, f"it is nested deeper than {DEPTH_MAX}", "Accounts need three levels."
            )
        before = self._count
        node = self._content(event, events, depth, line)
        if event.anchor is not None and self._anchors is not None:
            self._anchors[event.anchor] = node
            self._sizes[event.anchor] = self._count - before
        return node

    def _content(self, event: Any, events: Iterator[Any], depth: int, line: int) -> YamlNode:
        if isinstance(event, yaml.ScalarEvent):
            return YamlNode(event.value, line, event.style in (None, ""))
        if isinstance(event, yaml.SequenceStartEvent):
            return YamlNode(list(self._items(events, yaml.SequenceEndEvent, depth)), line)
        mapping: dict[str, YamlNode] = {}
        merged: dict[str, YamlNode] = {}
        for key in self._items(events, yaml.MappingEndEvent, depth):
            value = self._node(next(events), events, depth + 1)
            if not isinstance(key.value, str):
                raise self._error(event, "a key must be a string", "Put it in quotes.")
            if key.value == "<<" and key.is_plain and self._anchors is not None:
                several = value.value if isinstance(value.value, list) else [value]
                for one in several:  # the first of several mappings has precedence
                    if not isinstance(one.value, dict):
                        raise self._error(event, "<< must name a mapping", "Write the keys out.")
                    merged = {**one.value, **merged}
            else:
                mapping[key.value] = value
        return YamlNode({**merged, **mapping}, line)

    def _items(self, events: Iterator[Any], end: type[Any], depth: int) -> Iterator[YamlNode]:
        for event in events:
            if isinstance(event, end):
                return
            yield self._node(event, events, depth + 1)

    def _error(self, event: Any, why: str, fix: str) -> ConfigurationError:
        return _error_at(self._name, event.start_mark.line + 1, why, fix)


class _RuleReader:
    """Makes rules from the nodes of one file.

    With `is_compatible` (`sluiceAclCompatible`, spec/acl) it reads them as RocketMQ 5 does: a word
    that is not a permission, including ANY, means DENY; empty parts of `=a=PUB` are ignored; and an
    invalid dataVersion is refused.
    """

    def __init__(self, name: str, warnings: list[str], *, is_compatible: bool) -> None:
        self._name = name
        self._warnings = warnings
        self._is_compatible = is_compatible

    def rules(self, root: YamlNode) -> Rules:
        """Return the rules of a document. Raises ConfigurationError with the line of an error."""
        fields = self._mapping(root, "the file", (WHITE, ACCOUNTS), (DATA_VERSION,))
        entries = self._list(fields.get(WHITE), "a list of addresses")
        white = [
            pattern for node in entries if (pattern := self._address_pattern(node)) is not None
        ]
        accounts: dict[str, Account] = {}
        for node in self._list(fields.get(ACCOUNTS), "a list of accounts"):
            account = self._account(node)
            accounts.setdefault(account.access_key, account)
        versions = fields.get(DATA_VERSION) if self._is_compatible else None
        for entry in self._list(versions, "a list of versions"):
            for key, node in self._mapping(entry, DATA_VERSION, ("timestamp", "counter")).items():
                if not re.fullmatch(r"[-+]?\d+", self._text(node, key), re.ASCII):
                    raise self._error(node, f"{key} is not a number", "Write a whole number.")
        return Rules(accounts, tuple(white))

    def _account(self, node: YamlNode) -> Account:
        fields = self._mapping(
            node,
            "an account",
            ACCOUNT_FIELDS,
        )
        is_admin = False
        if (admin := fields.get("admin")) is not None:
            word = self._text(admin, "admin").lower()
            if word not in (*_YES, *_NO):
                raise self._error(admin, f"admin is {word!r}", "Write true or false.")
            is_admin = word in _YES
        return Account(
            self._key(fields, "accessKey", node),
            self._key(fields, "secretKey", node),
            self._address_pattern(fields.get("whiteRemoteAddress")),
            is_admin,
            self._default_permission(fields.get("defaultTopicPerm")),
            self._default_permission(fields.get("defaultGroupPerm")),
            {
                **self._permissions(fields.get("groupPerms"), GROUP_PREFIX),
                **self._permissions(fields.get("topicPerms"), ""),
            },
            f"{self._name}:{node.line}",
        )

    def _key(self, fields: Mapping[str, YamlNode], name: str, account: YamlNode) -> str:
        node = fields.get(name)
        text = "" if node is None or node.is_empty else self._text(node, name)
        units = len(text.encode("utf-16-le", "surrogatepass")) // 2
        if units < KEY_LENGTH_MIN:
            line = account.line if node is None else node.line
            why = f"{name} has {units} characters"
            raise _error_at(self._name, line, why, f"Write at least {KEY_LENGTH_MIN}.")
        return text

    def _address_pattern(self, node: YamlNode | None) -> AddressPattern | None:
        if node is None or node.is_empty:
            return None
        text = self._text(node, "an address")
        parse = parse_pattern_like_rocketmq if self._is_compatible else parse_pattern
        return self._parse_at(node, parse, text) if text.strip() else None

    def _default_permission(self, node: YamlNode | None) -> Permission:
        if node is None or node.is_empty:
            return Permission.NOTHING
        return self._permission(node, self._text(node, "a permission"))

    def _permission(self, node: YamlNode, word: str) -> Permission:
        if self._is_compatible:
            is_word = word.strip() in (*PERMISSION_WORDS.values(), "SUB|PUB")
            return parse_permission(word) if is_word else Permission.NOTHING
        if word.strip() == "ANY":
            self._warnings.append(
                f"{self._name}:{node.line}: ANY is read as PUB|SUB, as RocketMQ's articles say; "
                "its code reads DENY. Write which of them you mean."
            )
        return self._parse_at(node, parse_permission, word)

    def _permissions(self, node: YamlNode | None, prefix: str) -> dict[str, Permission]:
        found: dict[str, Permission] = {}
        for item in self._list(node, "a list of name=permission"):
            text = self._text(item, "name=permission")
            parts = [part for part in text.split("=") if part or not self._is_compatible]
            if len(parts) != 2 or not (self._is_compatible or parts[0].strip()):
                raise self._error(
                    item, f"{text!r} is not name=permission", "Write for instance topicA=PUB|SUB."
                )
            found[prefix + parts[0].strip()] = self._permission(item, parts[1])
        return found

    # --- shapes

    def _mapping(
        self, node: YamlNode, what: str, known: tuple[str, ...], ignored: tuple[str, ...] = ()
    ) -> dict[str, YamlNode]:
        if not isinstance(node.value, dict):
            raise self._error(node, f"{what} must be `key: value` lines", "Indent them.")
        for key, value in node.value.items():
            if key not in known and key not in ignored:
                shown = key.partition(":")[0]  # secretKey:… without a space is one long key
                raise self._error(
                    value, f"{shown!r} is not a key of {what}", f"The keys are {', '.join(known)}."
                )
        return dict(node.value)

    def _list(self, node: YamlNode | None, what: str) -> list[YamlNode]:
        if node is None or node.is_empty:
            return []
        if not isinstance(node.value, list):
            raise self._error(node, f"there must be {what}", "Begin each line with a dash.")
        return list(node.value)

    def _text(self, node: YamlNode, what: str) -> str:
        if not isinstance(node.value, str):
            raise self._error(node, f"{what} must be text", "Write a single value.")
        return node.value

    def _parse_at(self, node: YamlNode, parse: Callable[[str], T], text: str) -> T:
        try:
            return parse(text)
        except ConfigurationError as error:
            raise self._error(node, str(error.fact), error.fix) from None

    def _error(self, node: YamlNode, why: str, fix: str) -> ConfigurationError:
        return _error_at(self._name, node.line, why, fix)


DIRECTORY_FILES_MAX: Final = 1000
_ENDINGS: Final = (".yml", ".yaml")


class RuleFiles(NamedTuple):
    """The files of rules as they are on disk."""

    contents: tuple[tuple[str, bytes], ...]

    def __repr__(self) -> str:
        """Return the number of files, without their contents, which are secret."""
        return f"<{len(self.contents)} files>"


class RuleSource:
    """The files that access rules come from. Its methods block."""

    def __init__(self, files: Files, path: str, *, is_compatible: bool = False) -> None:
        """Use the main file at `path` and the directory `acl` next to it.

        `is_compatible` reads them as RocketMQ does.
        """
        self._files = files
        self._is_compatible = is_compatible
        self.path = path
        self.directory = f"{path.rpartition('/')[0] or '.'}/acl"

    @classmethod
    def from_config(cls, files: Files, config: ServerConfig) -> "RuleSource":
        """Return the source for a server with these settings.

        Raises ConfigurationError if none of the configured main files exists.
        """
        for path in config.acl_files:
            if files.exists(path):
                return cls(files, path, is_compatible=config.acl_compatible)
        raise ConfigurationError(
            "aclEnable=true, but no file of accounts exists "
            f"({', '.join(config.acl_files) or 'none is configured'}).",
            fix="Write plain_acl.yml there (`accounts:` with accessKey and secretKey), configure"
            " another file with plainAclFile, or set aclEnable=false.",
        )

    def read_files(self) -> RuleFiles:
        """Return the current contents of all files, in order of precedence.

        Raises ConfigurationError if the main file is missing or there are more than
        `DIRECTORY_FILES_MAX` files, and OSError if a file cannot be read.
        """
        if not self._files.exists(self.path):
            raise ConfigurationError(
                f"{self.path} does not exist, but aclEnable=true requires a file of accounts.",
                fix="Write it (`accounts:` with accessKey and secretKey), configure another file"
                " with plainAclFile, or set aclEnable=false.",
            )
        paths = [*self._paths_below(self.directory, 0), self.path]
        if len(paths) > DIRECTORY_FILES_MAX:
            raise ConfigurationError(
                f"{self.directory} holds {len(paths)} files, the limit is {DIRECTORY_FILES_MAX}.",
                fix="Merge some of them.",
            )
        return RuleFiles(tuple((path, self._read(path)) for path in paths))

    def load(self, texts: RuleFiles) -> LoadedRules:
        """Return the rules of the files, with a warning for each file that other users can read.

        Raises ConfigurationError as `load_rule_files` does.
        """
        read = load_rule_files(texts, is_compatible=self._is_compatible)
        exposed = [exposure_warning(self._files, path) for path, _ in texts.contents]
        return read._replace(warnings=(*read.warnings, *filter(None, exposed)))

    def _paths_below(self, directory: str, depth: int) -> list[str]:
        if depth > DEPTH_MAX or not self._files.exists(directory):
            return []
        found = []
        for name in sorted(self._files.names(directory)):
            path = f"{directory}/{name}"
            if name.endswith(_ENDINGS):
                found.append(path)
            elif "." not in name:
                found += self._paths_below(path, depth + 1)
        return found

    def _read(self, path: str) -> bytes:
        file = self._files.open(path)
        try:
            return file.pread(file.size(), 0)
        finally:
            file.close()


def load_rule_files(texts: RuleFiles, *, is_compatible: bool = False) -> LoadedRules:
    """Parse the files and merge their rules, in order of precedence.

    Raises ConfigurationError with file, line and fix if a file is invalid.
    """
    loaded = [
        load_rules(decode_text(path, data), path, is_compatible=is_compatible)
        for path, data in texts.contents
    ]
    return LoadedRules(
        Rules.merge(one.rules for one in loaded),
        tuple(warning for one in loaded for warning in one.warnings),
    )


def decode_text(path: str, data: bytes) -> str:
    """Decode the content of the file at `path`. Raises ConfigurationError if it is not UTF-8."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigurationError(
            f"{path}:{line} is not UTF-8 text.", fix="Save the file as UTF-8."
        ) from None


Document = dict[str, Any]


def with_account(text: str, access_key: str, changes: Mapping[str, Any], now_ms: int) -> str:
    """Return `text` with `changes` applied to the keys of an account, which is added if missing.

    `text` is the content of `plain_acl.yml`; `now_ms` is written to its `dataVersion`.
    """
    document = _parse_document(text)
    account = _find_account(document, access_key)
    if account is None:
        account = {"accessKey": access_key}
        document[ACCOUNTS] = [*(document.get(ACCOUNTS) or []), account]
    account.update(changes)
    return _render(document, now_ms)


def without_account(text: str, access_key: str, now_ms: int) -> str | None:
    """Return `text` without an account; None if it does not have the account."""
    document = _parse_document(text)
    if _find_account(document, access_key) is None:
        return None
    accounts = document[ACCOUNTS]
    document[ACCOUNTS] = [one for one in accounts if one.get("accessKey") != access_key]
    return _render(document, now_ms)


def with_white_addresses(text: str, addresses: list[str], now_ms: int) -> str:
    """Return `text` with `addresses` as the global white list."""
    return _render({**_parse_document(text), WHITE: addresses}, now_ms)


def version_of(text: str) -> tuple[int, int]:
    """Return counter and time (ms) of the last change by request; (0, 0) if there was none."""
    return _version(_parse_document(text))


def _version(document: Document) -> tuple[int, int]:
    entries = document.get(DATA_VERSION)
    entry = entries[0] if isinstance(entries, list) and entries else None
    if not isinstance(entry, dict):
        return 0, 0
    texts = [str(entry.get(name)) for name in ("counter", "timestamp")]
    counter, time_ms = (
        int(text) if text.isascii() and text.isdigit() and len(text) < 19 else 0 for text in texts
    )
    return counter, time_ms


def _parse_document(text: str) -> Document:
    builder = _YamlBuilder("plain_acl.yml", with_aliases=True)
    root = builder.build(_replace_tabs(text, "", []))
    found = None if root is None else _plain_value(root)
    return found if isinstance(found, dict) else {}


def _find_account(document: Document, access_key: str) -> dict[str, Any] | None:
    for account in document.get(ACCOUNTS) or []:
        if account.get("accessKey") == access_key:
            return account  # type: ignore[no-any-return]
    return None


def _render(document: Document, now_ms: int) -> str:
    counter = _version(document)[0] + 1
    document[DATA_VERSION] = [{"counter": counter, "timestamp": now_ms}]
    for account in document.get(ACCOUNTS) or []:
        if str(account.get("admin")).lower() in ("true", "yes", "on"):
            account["admin"] = True  # RocketMQ requires a Boolean
        elif "admin" in account:
            account["admin"] = False
    # The dumper quotes strings such as 12345678, so that they stay strings.
    text = yaml.dump(
        document, Dumper=_DUMPER, sort_keys=False, allow_unicode=True, default_flow_style=False
    )
    return str(text)
