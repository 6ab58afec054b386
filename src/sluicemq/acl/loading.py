"""`plain_acl.yml` as rules.

Every scalar is its own text: `secretKey: 12345678` and `01234567` are what they look like. Unknown
keys, words and shapes are errors with a line and a cure, never a silent denial. Tabs, which YAML
forbids and articles have, are read as blanks, with a warning.

The YAML is taken from libyaml's events, not from objects: no tags are followed, aliases are
refused, and nesting is bounded, so a file cannot be a bomb. Read as RocketMQ does,
aliases are followed, to a bounded number of nodes.

The files of the rules: `plain_acl.yml` and all .yml and .yaml files below `acl` beside it.

RocketMQ's order: the files of the directory first, in the order of their names, then the main file;
of an account that is in several the first counts. All of them are read or none: when one is wrong
the rules that were in force stay.

Changes of `plain_acl.yml` by request are text in, text out. What others wrote stays, in its order;
comments and spacing do not: the file is written anew. Each change raises the counter of
`dataVersion`, as RocketMQ does. Nothing is checked: the caller loads the new text before it writes
it.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple, TypeVar

import yaml  # type: ignore[import-untyped]

from sluicemq.acl.rules import (
    GROUP_PREFIX,
    WORD_OF,
    Account,
    Pattern,
    Permission,
    Rules,
    parse_compatible,
    parse_pattern,
    parse_permission,
)
from sluicemq.config.keys import ServerConfig
from sluicemq.errors import ConfigurationError
from sluicemq.files import Files, exposure_warning

T = TypeVar("T")
KEY_UNITS_MIN: Final = 7
"""Of accessKey and secretKey, in UTF-16 units (RocketMQ: longer than 6)."""
DEPTH_MAX: Final = 8
TEXT_BYTES_MAX: Final = 16 << 20
NODES_MAX: Final = 2_000_000
"""With what aliases stand for."""
_TABS: Final = re.compile(
    r"^[ \t]*\t[ \t]*|(?<=[:\-])[ ]*\t[ \t]*|[ \t]*\t[ \t]*(?=#|$)", re.MULTILINE
)
_YES: Final = ("true", "yes", "on")
_NO: Final = ("false", "no", "off")
_LOADER: Final[Any] = getattr(yaml, "CBaseLoader", yaml.BaseLoader)
_DUMPER: Final[Any] = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
ACCOUNTS, WHITE, DATA_VERSION = "accounts", "globalWhiteRemoteAddresses", "dataVersion"


class Node(NamedTuple):
    """A YAML value and its line: text, a list of nodes, or a dict of nodes by key."""

    value: Any
    line: int
    is_plain: bool = False

    @property
    def is_empty(self) -> bool:
        """`key:` without a value, or `~` or `null`."""
        return self.is_plain and self.value in ("", "~", "null", "Null", "NULL")


class Read(NamedTuple):
    """The rules of a file or of all, and what their owner should know."""

    rules: Rules
    warnings: tuple[str, ...]


def load_rules(text: str, name: str, *, is_compatible: bool = False) -> Read:
    """`name` is the file, for messages; `is_compatible` reads it as RocketMQ does. Raises
    ConfigurationError naming line and cure."""
    if len(text) > TEXT_BYTES_MAX:
        raise ConfigurationError(
            f"{name} has {len(text)} characters, the limit is {TEXT_BYTES_MAX}.",
            fix="Split it into several files below conf/acl.",
        )
    warnings: list[str] = []
    text = _without_tabs(text, name, warnings)
    if warnings and is_compatible:
        raise ConfigurationError(warnings[0], fix="Or set sluiceAclCompatible = false.")
    root = _Builder(name, with_aliases=is_compatible).build(text)
    if root is None:
        return Read(Rules(), tuple(warnings))
    rules = _Reader(name, warnings, is_compatible=is_compatible).rules(root)
    return Read(rules, tuple(warnings))


def _wrong(name: str, line: int, why: str, fix: str) -> ConfigurationError:
    return ConfigurationError(f"{name}:{line}: {why}.", fix=fix)


def load_credentials(text: str, name: str) -> tuple[str, str] | None:
    """Access key and secret of a tools.yml; None when it has none.

    Raises ConfigurationError, which shows neither.
    """
    root = _Builder(name).build(_without_tabs(text, name, []))
    found = {} if root is None else _plain(root)
    pair = [found.get(key) for key in ("accessKey", "secretKey")] if isinstance(found, dict) else []
    if not any(pair):
        return None
    if not all(isinstance(one, str) and one for one in pair):
        raise ConfigurationError(
            f"{name} has only one of accessKey and secretKey.", fix="Write both."
        )
    return str(pair[0]), str(pair[1])


def _plain(node: Node) -> Any:
    if isinstance(node.value, dict):
        return {key: _plain(value) for key, value in node.value.items()}
    if isinstance(node.value, list):
        return [_plain(value) for value in node.value]
    return None if node.is_empty else node.value


def _without_tabs(text: str, name: str, warnings: list[str]) -> str:
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
            f"{name} has tabs in line {where}: they are read as blanks; RocketMQ refuses the file."
            " Replace them by blanks."
        )
    return changed


class _Builder:
    """YAML events -> nodes."""

    def __init__(self, name: str, *, with_aliases: bool = False) -> None:
        self._name = name
        self._anchors: dict[str, Node] | None = {} if with_aliases else None
        self._sizes: dict[str, int] = {}
        self._count = 0

    def build(self, text: str) -> Node | None:
        """The document; None when there is none. Raises ConfigurationError."""
        try:
            events = iter(yaml.parse(text, Loader=_LOADER))
            root = None
            documents = 0
            for event in events:
                if isinstance(event, yaml.DocumentStartEvent):
                    documents += 1
                    if documents > 1:
                        raise self._wrong(event, "a second document begins", "Write one document.")
                    root = self._node(next(events), events, 0)
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            line = f":{mark.line + 1}" if mark is not None else ""
            why = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
            raise ConfigurationError(
                f"{self._name}{line} is no YAML: {why}.",
                fix='Check the indentation there (blanks, no tabs), and put "*" and text with ": "'
                " or # in quotes.",
            ) from None
        return None if root is None or root.is_empty else root

    def _node(self, event: Any, events: Iterator[Any], depth: int) -> Node:
        line = event.start_mark.line + 1
        self._count += 1
        if isinstance(event, yaml.AliasEvent):
            if self._anchors is not None and event.anchor in self._anchors:
                self._count += self._sizes[event.anchor]
                if self._count > NODES_MAX:
                    raise self._wrong(event, "its aliases are too many", "Write them out.")
                return self._anchors[event.anchor]
            raise self._wrong(
                event, f"*{event.anchor} is a YAML alias", 'Put a star in quotes: "*".'
            )
        if event.tag is not None and event.tag != "!":
            raise self._wrong(event, f"the tag {event.tag} is not allowed", "Remove it.")
        if depth > DEPTH_MAX:
            raise self._wrong(
                event, f"it is nested deeper than {DEPTH_MAX}", "Accounts need three levels."
            )
        before = self._count
        node = self._content(event, events, depth, line)
        if event.anchor is not None and self._anchors is not None:
            self._anchors[event.anchor] = node
            self._sizes[event.anchor] = self._count - before
        return node

    def _content(self, event: Any, events: Iterator[Any], depth: int, line: int) -> Node:
        if isinstance(event, yaml.ScalarEvent):
            return Node(event.value, line, event.style in (None, ""))
        if isinstance(event, yaml.SequenceStartEvent):
            return Node(list(self._items(events, yaml.SequenceEndEvent, depth)), line)
        mapping: dict[str, Node] = {}
        merged: dict[str, Node] = {}
        for key in self._items(events, yaml.MappingEndEvent, depth):
            value = self._node(next(events), events, depth + 1)
            if not isinstance(key.value, str):
                raise self._wrong(event, "a key is no text", "Put it in quotes.")
            if key.value == "<<" and key.is_plain and self._anchors is not None:
                several = value.value if isinstance(value.value, list) else [value]
                for one in several:  # of several mappings the first counts
                    if not isinstance(one.value, dict):
                        raise self._wrong(
                            event, "<< merges what is no mapping", "Write the keys out."
                        )
                    merged = {**one.value, **merged}
            else:
                mapping[key.value] = value
        return Node({**merged, **mapping}, line)

    def _items(self, events: Iterator[Any], end: type[Any], depth: int) -> Iterator[Node]:
        for event in events:
            if isinstance(event, end):
                return
            yield self._node(event, events, depth + 1)

    def _wrong(self, event: Any, why: str, fix: str) -> ConfigurationError:
        return _wrong(self._name, event.start_mark.line + 1, why, fix)


class _Reader:
    """Nodes -> rules. `is_compatible`: as RocketMQ 5 reads them (`sluiceAclCompatible`, spec/acl).
    A word that is no permission, ANY among them, is DENY then; empty parts of `=a=PUB` do not
    count; aliases and merge keys are followed; tabs and an odd dataVersion are refused."""

    def __init__(self, name: str, warnings: list[str], *, is_compatible: bool) -> None:
        self._name = name
        self._warnings = warnings
        self._is_compatible = is_compatible

    def rules(self, root: Node) -> Rules:
        fields = self._mapping(root, "the file", (WHITE, ACCOUNTS), (DATA_VERSION,))
        entries = self._list(fields.get(WHITE), "a list of addresses")
        white = [pattern for node in entries if (pattern := self._white(node)) is not None]
        accounts: dict[str, Account] = {}
        for node in self._list(fields.get(ACCOUNTS), "a list of accounts"):
            account = self._account(node)
            accounts.setdefault(account.access_key, account)
        versions = fields.get(DATA_VERSION) if self._is_compatible else None
        for entry in self._list(versions, "a list of versions"):
            for key, node in self._mapping(entry, DATA_VERSION, ("timestamp", "counter")).items():
                if not re.fullmatch(r"[-+]?\d+", self._text(node, key), re.ASCII):
                    raise self._wrong(node, f"{key} is no number", "Write a whole number.")
        return Rules(accounts, tuple(white))

    def _account(self, node: Node) -> Account:
        fields = self._mapping(
            node,
            "an account",
            ("accessKey", "secretKey", "whiteRemoteAddress", "admin", "defaultTopicPerm",
             "defaultGroupPerm", "topicPerms", "groupPerms"),
        )  # fmt: skip
        is_admin = False
        if (admin := fields.get("admin")) is not None:
            word = self._text(admin, "admin").lower()
            if word not in (*_YES, *_NO):
                raise self._wrong(admin, f"admin is {word!r}", "Write true or false.")
            is_admin = word in _YES
        return Account(
            self._key(fields, "accessKey", node),
            self._key(fields, "secretKey", node),
            self._white(fields.get("whiteRemoteAddress")),
            is_admin,
            self._default(fields.get("defaultTopicPerm")),
            self._default(fields.get("defaultGroupPerm")),
            {
                **self._permissions(fields.get("groupPerms"), GROUP_PREFIX),
                **self._permissions(fields.get("topicPerms"), ""),
            },
            f"{self._name}:{node.line}",
        )

    def _key(self, fields: Mapping[str, Node], name: str, account: Node) -> str:
        node = fields.get(name)
        text = "" if node is None or node.is_empty else self._text(node, name)
        units = len(text.encode("utf-16-le", "surrogatepass")) // 2
        if units < KEY_UNITS_MIN:
            line = account.line if node is None else node.line
            why = f"{name} has {units} characters"
            raise _wrong(self._name, line, why, f"Write at least {KEY_UNITS_MIN}.")
        return text

    def _white(self, node: Node | None) -> Pattern | None:
        if node is None or node.is_empty:
            return None
        text = self._text(node, "an address")
        parse = parse_compatible if self._is_compatible else parse_pattern
        return self._at(node, parse, text) if text.strip() else None

    def _default(self, node: Node | None) -> Permission:
        if node is None or node.is_empty:
            return Permission.NOTHING
        return self._permission(node, self._text(node, "a permission"))

    def _permission(self, node: Node, word: str) -> Permission:
        if self._is_compatible:
            is_word = word.strip() in (*WORD_OF.values(), "SUB|PUB")
            return parse_permission(word) if is_word else Permission.NOTHING
        if word.strip() == "ANY":
            self._warnings.append(
                f"{self._name}:{node.line}: ANY is read as PUB|SUB, as RocketMQ's articles say; "
                "its code reads DENY. Write which of them you mean."
            )
        return self._at(node, parse_permission, word)

    def _permissions(self, node: Node | None, prefix: str) -> dict[str, Permission]:
        found: dict[str, Permission] = {}
        for item in self._list(node, "a list of name=permission"):
            text = self._text(item, "name=permission")
            parts = [part for part in text.split("=") if part or not self._is_compatible]
            if len(parts) != 2 or not (self._is_compatible or parts[0].strip()):
                raise self._wrong(
                    item, f"{text!r} is not name=permission", "Write for instance topicA=PUB|SUB."
                )
            found[prefix + parts[0].strip()] = self._permission(item, parts[1])
        return found

    # --- shapes

    def _mapping(
        self, node: Node, what: str, known: tuple[str, ...], ignored: tuple[str, ...] = ()
    ) -> dict[str, Node]:
        if not isinstance(node.value, dict):
            raise self._wrong(node, f"{what} must be `key: value` lines", "Indent them.")
        for key, value in node.value.items():
            if key not in known and key not in ignored:
                shown = key.partition(":")[0]  # secretKey:… without a blank is a key
                raise self._wrong(
                    value, f"{shown!r} is no key of {what}", f"The keys are {', '.join(known)}."
                )
        return dict(node.value)

    def _list(self, node: Node | None, what: str) -> list[Node]:
        if node is None or node.is_empty:
            return []
        if not isinstance(node.value, list):
            raise self._wrong(node, f"there must be {what}", "Begin each line with a dash.")
        return list(node.value)

    def _text(self, node: Node, what: str) -> str:
        if not isinstance(node.value, str):
            raise self._wrong(node, f"{what} must be text", "Write a single value.")
        return node.value

    def _at(self, node: Node, parse: Callable[[str], T], text: str) -> T:
        try:
            return parse(text)
        except ConfigurationError as error:
            raise self._wrong(node, str(error.fact), error.fix) from None

    def _wrong(self, node: Node, why: str, fix: str) -> ConfigurationError:
        return _wrong(self._name, node.line, why, fix)


DIRECTORY_FILES_MAX: Final = 1000
_ENDINGS: Final = (".yml", ".yaml")


class Texts(NamedTuple):
    """What the files say: (path, content) in the order in which they count."""

    items: tuple[tuple[str, bytes], ...]

    def __repr__(self) -> str:
        """Without what they say: secrets."""
        return f"<{len(self.items)} files>"


class Source:
    """Where the rules come from. Blocking; for another thread than the loop's."""

    def __init__(self, files: Files, path: str, *, is_compatible: bool = False) -> None:
        """`path` is the main file's; `is_compatible` reads as RocketMQ does."""
        self._files = files
        self._is_compatible = is_compatible
        self.path = path
        self.directory = f"{path.rpartition('/')[0] or '.'}/acl"

    @classmethod
    def of(cls, files: Files, config: ServerConfig) -> "Source":
        """That of a server with these settings. Raises ConfigurationError without a file."""
        for path in config.acl_files:
            if files.exists(path):
                return cls(files, path, is_compatible=config.acl_compatible)
        raise ConfigurationError(
            "aclEnable=true, and there is no file of accounts "
            f"({', '.join(config.acl_files) or 'none named'}).",
            fix="Write plain_acl.yml there (`accounts:` with accessKey and secretKey), name"
            " another file by plainAclFile, or set aclEnable=false.",
        )

    def texts(self) -> Texts:
        """The present content. Raises ConfigurationError when the main file is missing or the
        directory holds too much, OSError when a file cannot be read."""
        if not self._files.exists(self.path):
            raise ConfigurationError(
                f"{self.path} does not exist, and aclEnable=true refuses who is not in it.",
                fix="Write it (`accounts:` with accessKey and secretKey), name another by"
                " plainAclFile, or set aclEnable=false.",
            )
        paths = [*self._below(self.directory, 0), self.path]
        if len(paths) > DIRECTORY_FILES_MAX:
            raise ConfigurationError(
                f"{self.directory} holds {len(paths)} files, the limit is {DIRECTORY_FILES_MAX}.",
                fix="Merge some of them.",
            )
        return Texts(tuple((path, self._content(path)) for path in paths))

    def read(self, texts: Texts) -> Read:
        """As `read_rules`, and warns of files that others can read."""
        read = read_rules(texts, is_compatible=self._is_compatible)
        exposed = [exposure_warning(self._files, path) for path, _ in texts.items]
        return read._replace(warnings=(*read.warnings, *filter(None, exposed)))

    def _below(self, directory: str, depth: int) -> list[str]:
        if depth > DEPTH_MAX or not self._files.exists(directory):
            return []
        found = []
        for name in sorted(self._files.names(directory)):
            path = f"{directory}/{name}"
            if name.endswith(_ENDINGS):
                found.append(path)
            elif "." not in name:
                found += self._below(path, depth + 1)
        return found

    def _content(self, path: str) -> bytes:
        file = self._files.open(path)
        try:
            return file.pread(file.size(), 0)
        finally:
            file.close()


def read_rules(texts: Texts, *, is_compatible: bool = False) -> Read:
    """Raises ConfigurationError naming file, line and cure."""
    loaded = [
        load_rules(decoded(path, data), path, is_compatible=is_compatible)
        for path, data in texts.items
    ]
    return Read(
        Rules.merged(one.rules for one in loaded),
        tuple(warning for one in loaded for warning in one.warnings),
    )


def decoded(path: str, data: bytes) -> str:
    """Raises ConfigurationError when it is no UTF-8."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigurationError(
            f"{path}:{line} is no UTF-8 text.", fix="Save the file as UTF-8."
        ) from None


Document = dict[str, Any]


def with_account(text: str, access_key: str, changes: Mapping[str, Any], now_ms: int) -> str:
    """`plain_acl.yml` with some keys of an account set; a new one when there is none."""
    document = _read_document(text)
    account = _find(document, access_key)
    if account is None:
        account = {"accessKey": access_key}
        document[ACCOUNTS] = [*(document.get(ACCOUNTS) or []), account]
    account.update(changes)
    return _written(document, now_ms)


def without_account(text: str, access_key: str, now_ms: int) -> str | None:
    """The same without this account; None when it is not there."""
    document = _read_document(text)
    if _find(document, access_key) is None:
        return None
    accounts = document[ACCOUNTS]
    document[ACCOUNTS] = [one for one in accounts if one.get("accessKey") != access_key]
    return _written(document, now_ms)


def with_white_addresses(text: str, addresses: list[str], now_ms: int) -> str:
    """The same with this global white list."""
    return _written({**_read_document(text), WHITE: addresses}, now_ms)


def version_of(text: str) -> tuple[int, int]:
    """Counter and time (ms) of the last change by request; (0, 0) when there was none."""
    return _version(_read_document(text))


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


def _read_document(text: str) -> Document:
    builder = _Builder("plain_acl.yml", with_aliases=True)
    root = builder.build(_without_tabs(text, "", []))
    found = None if root is None else _plain(root)
    return found if isinstance(found, dict) else {}


def _find(document: Document, access_key: str) -> dict[str, Any] | None:
    for account in document.get(ACCOUNTS) or []:
        if account.get("accessKey") == access_key:
            return account  # type: ignore[no-any-return]
    return None


def _written(document: Document, now_ms: int) -> str:
    counter = _version(document)[0] + 1
    document[DATA_VERSION] = [{"counter": counter, "timestamp": now_ms}]
    for account in document.get(ACCOUNTS) or []:
        if str(account.get("admin")).lower() in ("true", "yes", "on"):
            account["admin"] = True  # RocketMQ takes no text for it
        elif "admin" in account:
            account["admin"] = False
    # Every text as itself: 12345678 gets quotes, and an account stays one.
    text = yaml.dump(
        document, Dumper=_DUMPER, sort_keys=False, allow_unicode=True, default_flow_style=False
    )
    return str(text)
