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


def load_rules(yaml_text: str, name: str, *, is_compatible: bool = False) -> LoadedRules:
    """Parse the YAML text of one file of rules.

    `name` is the name of the file for errors and warnings. If `is_compatible`, the text is read
    exactly as RocketMQ does. Raises ConfigurationError with line and fix if the text is invalid.
    """
    if len(yaml_text) > TEXT_BYTES_MAX:
        raise ConfigurationError(
            f"{name} has {len(yaml_text)} characters, the limit is {TEXT_BYTES_MAX}.",
            fix="Split it into several files below conf/acl.",
        )
    warnings: list[str] = []
    yaml_text = _replace_tabs(yaml_text, name, warnings)
    if warnings and is_compatible:
        raise ConfigurationError(warnings[0], fix="Or set sluiceAclCompatible = false.")
    root = _YamlBuilder(name, with_aliases=is_compatible).build(yaml_text)
    if root is None:
        return LoadedRules(Rules(), tuple(warnings))
    rules = _RuleReader(name, warnings, is_compatible=is_compatible).read_rules(root)
    return LoadedRules(rules, tuple(warnings))


def _make_error_at(name: str, line: int, why: str, fix: str) -> ConfigurationError:
    """Return the error for a line of the file `name`. `why` says what is wrong with it."""
    return ConfigurationError(f"{name}:{line}: {why}.", fix=fix)


def load_credentials(yaml_text: str, name: str) -> tuple[str, str] | None:
    """Return (access key, secret key) of a `tools.yml`; None if it has neither.

    `name` is the name of the file for errors. Raises ConfigurationError if only one is given or the
    text is not YAML; the error shows neither key.
    """
    root = _YamlBuilder(name).build(_replace_tabs(yaml_text, name, []))
    credentials = None if root is None else _convert_to_plain_value(root)
    if not isinstance(credentials, dict):
        return None

    access_key = credentials.get("accessKey")
    secret_key = credentials.get("secretKey")
    if not access_key and not secret_key:
        return None
    if not _is_filled(access_key) or not _is_filled(secret_key):
        raise ConfigurationError(
            f"{name} has only one of accessKey and secretKey.", fix="Write both."
        )
    return str(access_key), str(secret_key)


def _is_filled(key: Any) -> bool:
    """Return whether a key of a `tools.yml` is a string that is not empty."""
    return isinstance(key, str) and key != ""


def _convert_to_plain_value(node: YamlNode) -> Any:
    """Convert a node of YAML, and the nodes in it, to dicts, lists, strings and None.

    The line numbers are lost.
    """
    if isinstance(node.value, dict):
        return {key: _convert_to_plain_value(child) for key, child in node.value.items()}
    if isinstance(node.value, list):
        return [_convert_to_plain_value(child) for child in node.value]
    return None if node.is_empty else node.value


def _replace_tabs(yaml_text: str, name: str, warnings: list[str]) -> str:
    """Return the text with four spaces for each tab where YAML forbids tabs.

    If there are any, a warning that names their lines is added to `warnings`.
    """
    if "\t" not in yaml_text:
        return yaml_text
    lines: list[int] = []

    def replace_tabs_of_match(match: re.Match[str]) -> str:
        lines.append(yaml_text.count("\n", 0, match.start()) + 1)
        return match[0].replace("\t", "    ")

    text_without_tabs = _TABS.sub(replace_tabs_of_match, yaml_text)
    if lines:
        shown_lines = ", ".join(map(str, lines[:5]))
        if len(lines) > 5:
            shown_lines += " …"
        warnings.append(
            f"{name} has tabs in line {shown_lines}: they are read as spaces; RocketMQ refuses the "
            "file. Replace them by spaces."
        )
    return text_without_tabs


class _YamlBuilder:
    """Builds nodes from the events of a YAML parser, within limits of size and depth."""

    def __init__(self, name: str, *, with_aliases: bool = False) -> None:
        """Create a builder for one text. `name` is the name of its file for errors.

        If `with_aliases`, anchors (`&name`) and aliases (`*name`) of YAML are allowed, as in
        RocketMQ.
        """
        self._name = name
        self._anchors: dict[str, YamlNode] | None = {} if with_aliases else None
        """The nodes that have an anchor, by its name; None if aliases are not allowed."""
        self._node_counts: dict[str, int] = {}
        """The number of nodes of each of `_anchors`."""
        self._count = 0
        """The number of nodes, in which the nodes of an alias count each time."""

    def build(self, yaml_text: str) -> YamlNode | None:
        """Parse a YAML text into nodes with line numbers. Return the root; None if it is empty.

        Raises ConfigurationError with the line if the text is not YAML, has several documents, or
        uses something that is not allowed, such as tags.
        """
        try:
            root = self._build_only_document(iter(yaml.parse(yaml_text, Loader=_LOADER)))
        except yaml.YAMLError as error:
            raise self._make_syntax_error(error) from None
        return None if root is None or root.is_empty else root

    def _build_only_document(self, events: Iterator[Any]) -> YamlNode | None:
        """Build the document from the events of the YAML parser. Return its root, or None.

        Raises ConfigurationError if there are several documents, and yaml.YAMLError.
        """
        root = None
        has_document = False
        for event in events:
            if isinstance(event, yaml.DocumentStartEvent):
                if has_document:
                    raise self._make_error(event, "a second document begins", "Write one document.")
                has_document = True
                root = self._build_node(next(events), events, 0)
        return root

    def _make_syntax_error(self, error: yaml.YAMLError) -> ConfigurationError:
        """Make the error for a text that is not YAML, with the line if the parser tells it."""
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
        return ConfigurationError(
            f"{self._name}{line} is not valid YAML: {problem}.",
            fix='Check the indentation there (spaces, no tabs), and put "*" and text with ": "'
            " or # in quotes.",
        )

    def _build_node(self, event: Any, events: Iterator[Any], depth: int) -> YamlNode:
        """Build the node that begins with `event`. Take its further events from `events`.

        `depth` is the number of nodes around it. If the node has an anchor, it is remembered for
        aliases. Raises ConfigurationError for an alias that is unknown or not allowed, a tag, or a
        node that is nested too deeply.
        """
        self._count += 1
        if isinstance(event, yaml.AliasEvent):
            return self._resolve_alias(event)
        if event.tag is not None and event.tag != "!":
            raise self._make_error(event, f"the tag {event.tag} is not allowed", "Remove it.")
        if depth > DEPTH_MAX:
            raise self._make_error(
                event, f"it is nested deeper than {DEPTH_MAX}", "Accounts need three levels."
            )

        count_before = self._count
        node = self._build_content(event, events, depth)
        if event.anchor is not None and self._anchors is not None:
            self._anchors[event.anchor] = node
            self._node_counts[event.anchor] = self._count - count_before
        return node

    def _resolve_alias(self, event: Any) -> YamlNode:
        """Return the node for which an alias stands. The nodes in it count again.

        Raises ConfigurationError if there is no such anchor, or if there are too many nodes.
        """
        if self._anchors is None or event.anchor not in self._anchors:
            raise self._make_error(
                event, f"*{event.anchor} is a YAML alias", 'Put a star in quotes: "*".'
            )
        # A few lines of nested aliases may stand for millions of nodes.
        self._count += self._node_counts[event.anchor]
        if self._count > NODES_MAX:
            raise self._make_error(event, "there are too many aliases", "Write the values out.")
        return self._anchors[event.anchor]

    def _build_content(self, event: Any, events: Iterator[Any], depth: int) -> YamlNode:
        """Build the node of a string, list or mapping that begins with `event`.

        Further events are taken from `events`. `depth` is the number of nodes around it.
        """
        line = event.start_mark.line + 1
        if isinstance(event, yaml.ScalarEvent):
            has_no_quotes = event.style in (None, "")
            return YamlNode(event.value, line, is_plain=has_no_quotes)
        if isinstance(event, yaml.SequenceStartEvent):
            return YamlNode(list(self._build_items(events, yaml.SequenceEndEvent, depth)), line)
        return YamlNode(self._build_mapping(event, events, depth), line)

    def _build_mapping(self, event: Any, events: Iterator[Any], depth: int) -> dict[str, YamlNode]:
        """Build the nodes of a mapping, by key. `event` is its first event.

        `<<: *alias` adds the nodes of another mapping; the mapping's own keys have precedence.
        """
        own_nodes: dict[str, YamlNode] = {}
        merged_nodes: dict[str, YamlNode] = {}
        for key in self._build_items(events, yaml.MappingEndEvent, depth):
            child = self._build_node(next(events), events, depth + 1)
            if not isinstance(key.value, str):
                raise self._make_error(event, "a key must be a string", "Put it in quotes.")
            is_merge_key = key.value == "<<" and key.is_plain and self._anchors is not None
            if is_merge_key:
                merged_nodes = {**self._merge_mappings(event, child), **merged_nodes}
            else:
                own_nodes[key.value] = child
        return {**merged_nodes, **own_nodes}

    def _merge_mappings(self, event: Any, node: YamlNode) -> dict[str, YamlNode]:
        """Return the nodes of the mapping, or of the list of mappings, behind a `<<`.

        The first of several mappings has precedence. `event` is only for the line of an error.
        """
        mappings = node.value if isinstance(node.value, list) else [node]
        merged_nodes: dict[str, YamlNode] = {}
        for mapping in mappings:
            if not isinstance(mapping.value, dict):
                raise self._make_error(event, "<< must name a mapping", "Write the keys out.")
            merged_nodes = {**mapping.value, **merged_nodes}
        return merged_nodes

    def _build_items(
        self, events: Iterator[Any], end_type: type[Any], depth: int
    ) -> Iterator[YamlNode]:
        """Build and yield the nodes inside a node at `depth`, up to an event of `end_type`."""
        for event in events:
            if isinstance(event, end_type):
                return
            yield self._build_node(event, events, depth + 1)

    def _make_error(self, event: Any, why: str, fix: str) -> ConfigurationError:
        """Return an error for the line where `event` begins."""
        return _make_error_at(self._name, event.start_mark.line + 1, why, fix)


class _RuleReader:
    """Makes rules from the nodes of one file, and adds to `warnings` what is allowed but doubtful.

    With `is_compatible` (`sluiceAclCompatible`, spec/acl) it reads them as RocketMQ 5 does: a word
    that is not a permission, including ANY, means DENY; empty parts of `=a=PUB` are ignored; and an
    invalid dataVersion is refused.
    """

    def __init__(self, name: str, warnings: list[str], *, is_compatible: bool) -> None:
        """Create a reader for the file `name`, which adds its warnings to `warnings`."""
        self._name = name
        self._warnings = warnings
        self._is_compatible = is_compatible

    def read_rules(self, root: YamlNode) -> Rules:
        """Return the rules of a document. Raises ConfigurationError with the line of an error."""
        fields = self._read_mapping(root, "the file", (WHITE, ACCOUNTS), (DATA_VERSION,))
        white_addresses: list[AddressPattern] = []
        for node in self._read_list(fields.get(WHITE), "a list of addresses"):
            pattern = self._read_address_pattern(node)
            if pattern is not None:
                white_addresses.append(pattern)

        accounts: dict[str, Account] = {}
        for node in self._read_list(fields.get(ACCOUNTS), "a list of accounts"):
            account = self._read_account(node)
            # The first account with an access key has precedence.
            accounts.setdefault(account.access_key, account)

        if self._is_compatible:
            self._check_versions(fields.get(DATA_VERSION))
        return Rules(accounts, tuple(white_addresses))

    def _check_versions(self, node: YamlNode | None) -> None:
        """Raise ConfigurationError if dataVersion has a timestamp or counter that is not a number.

        None means that the file has no dataVersion.
        """
        for version in self._read_list(node, "a list of versions"):
            fields = self._read_mapping(version, DATA_VERSION, ("timestamp", "counter"))
            for key, number in fields.items():
                if not re.fullmatch(r"[-+]?\d+", self._read_text(number, key), re.ASCII):
                    raise self._make_error(
                        number, f"{key} is not a number", "Write a whole number."
                    )

    def _read_account(self, node: YamlNode) -> Account:
        """Return the account in a node. Raises ConfigurationError with the line of an error."""
        fields = self._read_mapping(node, "an account", ACCOUNT_FIELDS)
        is_admin = self._read_admin(fields.get("admin"))
        access_key = self._read_key(fields, "accessKey", node)
        secret_key = self._read_key(fields, "secretKey", node)
        white_addresses = self._read_address_pattern(fields.get("whiteRemoteAddress"))
        topic_default = self._read_default_permission(fields.get("defaultTopicPerm"))
        group_default = self._read_default_permission(fields.get("defaultGroupPerm"))
        permissions = {
            **self._read_permissions(fields.get("groupPerms"), GROUP_PREFIX),
            **self._read_permissions(fields.get("topicPerms"), ""),
        }
        return Account(
            access_key,
            secret_key,
            white_addresses,
            is_admin,
            topic_default,
            group_default,
            permissions,
            f"{self._name}:{node.line}",
        )

    def _read_admin(self, node: YamlNode | None) -> bool:
        """Return whether `admin` is true or yes, in any case; False if it is missing.

        Raises ConfigurationError for another word than true, yes and their opposites.
        """
        if node is None:
            return False
        answer = self._read_text(node, "admin").lower()
        if answer not in (*_YES, *_NO):
            raise self._make_error(node, f"admin is {answer!r}", "Write true or false.")
        return answer in _YES

    def _read_key(self, fields: Mapping[str, YamlNode], name: str, account: YamlNode) -> str:
        """Return the access key or secret key of an account: the field `name` of `fields`.

        `account` is the node of the account, for the line of an error. Raises ConfigurationError if
        the key is missing or too short.
        """
        node = fields.get(name)
        key = "" if node is None or node.is_empty else self._read_text(node, name)
        # Java counts UTF-16 code units, of 2 bytes each, as characters.
        character_count = len(key.encode("utf-16-le", "surrogatepass")) // 2
        if character_count < KEY_LENGTH_MIN:
            line = account.line if node is None else node.line
            why = f"{name} has {character_count} characters"
            raise _make_error_at(self._name, line, why, f"Write at least {KEY_LENGTH_MIN}.")
        return key

    def _read_address_pattern(self, node: YamlNode | None) -> AddressPattern | None:
        """Parse an entry of a white list; return None if it is missing or empty.

        In compatible mode, the result is also None for an entry that RocketMQ ignores. Raises
        ConfigurationError for an invalid entry.
        """
        if node is None or node.is_empty:
            return None
        address = self._read_text(node, "an address")
        if not address.strip():
            return None
        if self._is_compatible:
            return self._parse_at(node, parse_pattern_like_rocketmq, address)
        return self._parse_at(node, parse_pattern, address)

    def _read_default_permission(self, node: YamlNode | None) -> Permission:
        """Return the permission for topics or groups without an entry; NOTHING if it is missing."""
        if node is None or node.is_empty:
            return Permission.NOTHING
        return self._parse_permission(node, self._read_text(node, "a permission"))

    def _parse_permission(self, node: YamlNode, permission: str) -> Permission:
        """Parse a permission such as `PUB|SUB`, which is the text of `node`.

        Adds a warning for ANY, which RocketMQ reads as DENY. In compatible mode, a text that
        RocketMQ does not know gives NOTHING; otherwise it raises ConfigurationError.
        """
        if self._is_compatible:
            is_known = permission.strip() in (*PERMISSION_WORDS.values(), "SUB|PUB")
            return parse_permission(permission) if is_known else Permission.NOTHING
        if permission.strip() == "ANY":
            self._warnings.append(
                f"{self._name}:{node.line}: ANY is read as PUB|SUB, as RocketMQ's articles say; "
                "its code reads DENY. Write which of them you mean."
            )
        return self._parse_at(node, parse_permission, permission)

    def _read_permissions(self, node: YamlNode | None, prefix: str) -> dict[str, Permission]:
        """Parse a list of `name=permission`. Return the permissions by `prefix` + name."""
        permissions: dict[str, Permission] = {}
        for entry in self._read_list(node, "a list of name=permission"):
            name, permission = self._split_permission(entry)
            permissions[prefix + name.strip()] = self._parse_permission(entry, permission)
        return permissions

    def _split_permission(self, entry: YamlNode) -> tuple[str, str]:
        """Split an entry such as `topicA=PUB` into name and permission.

        In compatible mode empty parts are ignored, as by RocketMQ: `=a=PUB` is the same as `a=PUB`.
        Raises ConfigurationError if there are not exactly two parts.
        """
        entry_text = self._read_text(entry, "name=permission")
        parts = entry_text.split("=")
        if self._is_compatible:
            parts = [part for part in parts if part]
        lacks_name = not self._is_compatible and not parts[0].strip()
        if len(parts) != 2 or lacks_name:
            raise self._make_error(
                entry,
                f"{entry_text!r} is not name=permission",
                "Write for instance topicA=PUB|SUB.",
            )
        name, permission = parts
        return name, permission

    # --- shapes

    def _read_mapping(
        self,
        node: YamlNode,
        owner: str,
        keys: tuple[str, ...],
        ignored_keys: tuple[str, ...] = (),
    ) -> dict[str, YamlNode]:
        """Return the nodes of a mapping, by key.

        `owner` names the mapping in errors, such as "an account". Raises ConfigurationError if the
        node is not a mapping, or has a key that is neither in `keys` nor in `ignored_keys`.
        """
        if not isinstance(node.value, dict):
            raise self._make_error(node, f"{owner} must be `key: value` lines", "Indent them.")
        for key, child in node.value.items():
            if key not in keys and key not in ignored_keys:
                shown_key = key.partition(":")[0]  # secretKey:… without a space is one long key
                raise self._make_error(
                    child,
                    f"{shown_key!r} is not a key of {owner}",
                    f"The keys are {', '.join(keys)}.",
                )
        return dict(node.value)

    def _read_list(self, node: YamlNode | None, expected: str) -> list[YamlNode]:
        """Return the nodes of a list; [] if it is missing. `expected` describes it in errors.

        Raises ConfigurationError if the node is not a list.
        """
        if node is None or node.is_empty:
            return []
        if not isinstance(node.value, list):
            raise self._make_error(
                node, f"there must be {expected}", "Begin each line with a dash."
            )
        return list(node.value)

    def _read_text(self, node: YamlNode, owner: str) -> str:
        """Return the string of a node. `owner` names it in messages, such as "an address"."""
        if not isinstance(node.value, str):
            raise self._make_error(node, f"{owner} must be text", "Write a single value.")
        return node.value

    def _parse_at(self, node: YamlNode, parse: Callable[[str], T], node_text: str) -> T:
        """Return `parse(node_text)`. Add the line of `node` to a ConfigurationError."""
        try:
            return parse(node_text)
        except ConfigurationError as error:
            raise self._make_error(node, str(error.fact), error.fix) from None

    def _make_error(self, node: YamlNode, why: str, fix: str) -> ConfigurationError:
        """Return an error for the line where `node` begins."""
        return _make_error_at(self._name, node.line, why, fix)


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
        """Create a source of rules: the main file at `path` and the directory `acl` next to it.

        If `is_compatible`, they are read exactly as RocketMQ does.
        """
        self._files = files
        self._is_compatible = is_compatible
        self.path = path
        self.directory = f"{path.rpartition('/')[0] or '.'}/acl"

    @classmethod
    def from_config(cls, files: Files, config: ServerConfig) -> "RuleSource":
        """Return the source of rules for a server: the first configured main file that exists.

        Raises ConfigurationError if none exists.
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
        """Read the contents of all files of rules, in order of precedence.

        Raises ConfigurationError if the main file is missing or there are more than
        `DIRECTORY_FILES_MAX` files, and OSError if a file cannot be read.
        """
        if not self._files.exists(self.path):
            raise ConfigurationError(
                f"{self.path} does not exist, but aclEnable=true requires a file of accounts.",
                fix="Write it (`accounts:` with accessKey and secretKey), configure another file"
                " with plainAclFile, or set aclEnable=false.",
            )
        paths = [*self._find_paths_below(self.directory, 0), self.path]
        if len(paths) > DIRECTORY_FILES_MAX:
            raise ConfigurationError(
                f"{self.directory} holds {len(paths)} files, the limit is {DIRECTORY_FILES_MAX}.",
                fix="Merge some of them.",
            )
        return RuleFiles(tuple((path, self._read_content(path)) for path in paths))

    def load(self, rule_files: RuleFiles) -> LoadedRules:
        """Parse and merge the rules of the files. Add a warning for each file that others can read.

        Raises ConfigurationError with file, line and fix if a file is invalid.
        """
        loaded = load_rule_files(rule_files, is_compatible=self._is_compatible)
        warnings = list(loaded.warnings)
        for path, _content in rule_files.contents:
            warning = exposure_warning(self._files, path)
            if warning:
                warnings.append(warning)
        return loaded._replace(warnings=tuple(warnings))

    def _find_paths_below(self, directory: str, depth: int) -> list[str]:
        """Return the paths of the YAML files in a directory and below it, in order of names.

        `depth` is the number of directories above it. Directories deeper than DEPTH_MAX are not
        read.
        """
        if depth > DEPTH_MAX or not self._files.exists(directory):
            return []
        paths = []
        for name in sorted(self._files.names(directory)):
            path = f"{directory}/{name}"
            if name.endswith(_ENDINGS):
                paths.append(path)
            elif "." not in name:  # a directory
                paths += self._find_paths_below(path, depth + 1)
        return paths

    def _read_content(self, path: str) -> bytes:
        """Return the content of a file. Raises OSError."""
        file = self._files.open(path)
        try:
            return file.pread(file.size(), 0)
        finally:
            file.close()


def load_rule_files(rule_files: RuleFiles, *, is_compatible: bool = False) -> LoadedRules:
    """Parse the files and merge their rules, in order of precedence.

    Raises ConfigurationError with file, line and fix if a file is invalid.
    """
    rules_of_files: list[Rules] = []
    warnings: list[str] = []
    for path, content in rule_files.contents:
        loaded = load_rules(decode_text(path, content), path, is_compatible=is_compatible)
        rules_of_files.append(loaded.rules)
        warnings += loaded.warnings
    return LoadedRules(Rules.merge(rules_of_files), tuple(warnings))


def decode_text(path: str, content: bytes) -> str:
    """Decode the content of the file at `path`. Raises ConfigurationError if it is not UTF-8."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigurationError(
            f"{path}:{line} is not UTF-8 text.", fix="Save the file as UTF-8."
        ) from None


Document = dict[str, Any]


def with_account(yaml_text: str, access_key: str, changes: Mapping[str, Any], now_ms: int) -> str:
    """Return the text of a `plain_acl.yml` with changes to an account, or with a new account.

    `yaml_text` is the text so far. `changes` are keys of the account and their values. `now_ms`
    becomes the time in dataVersion.
    """
    document = _parse_document(yaml_text)
    account = _find_account(document, access_key)
    if account is None:
        account = {"accessKey": access_key}
        document[ACCOUNTS] = [*(document.get(ACCOUNTS) or []), account]
    account.update(changes)
    return _encode_document(document, now_ms)


def without_account(yaml_text: str, access_key: str, now_ms: int) -> str | None:
    """Return the text of a `plain_acl.yml` without an account; None if it has no such account.

    `now_ms` becomes the time in dataVersion.
    """
    document = _parse_document(yaml_text)
    if _find_account(document, access_key) is None:
        return None
    document[ACCOUNTS] = [
        account for account in document[ACCOUNTS] if account.get("accessKey") != access_key
    ]
    return _encode_document(document, now_ms)


def with_white_addresses(yaml_text: str, addresses: list[str], now_ms: int) -> str:
    """Return the text with `addresses` as the global white list."""
    document = _parse_document(yaml_text)
    document[WHITE] = addresses
    return _encode_document(document, now_ms)


def version_of(yaml_text: str) -> tuple[int, int]:
    """Return counter and time (ms) of the last change by request; (0, 0) if there was none."""
    return _read_version(_parse_document(yaml_text))


def _read_version(document: Document) -> tuple[int, int]:
    """Return (counter, time) of the first dataVersion of a document.

    A number that is missing or invalid is 0.
    """
    versions = document.get(DATA_VERSION)
    version = versions[0] if isinstance(versions, list) and versions else None
    if not isinstance(version, dict):
        return 0, 0
    return _read_number(version.get("counter")), _read_number(version.get("timestamp"))


def _read_number(digits: Any) -> int:
    """Return the number that a decoded YAML value is; 0 if it is not one of at most 18 digits."""
    digits = str(digits)
    is_number = digits.isascii() and digits.isdigit() and len(digits) < 19
    return int(digits) if is_number else 0


def _parse_document(yaml_text: str) -> Document:
    """Parse a `plain_acl.yml` into a dict; {} if it is empty or not a mapping."""
    builder = _YamlBuilder("plain_acl.yml", with_aliases=True)
    root = builder.build(_replace_tabs(yaml_text, "", []))
    document = None if root is None else _convert_to_plain_value(root)
    return document if isinstance(document, dict) else {}


def _find_account(document: Document, access_key: str) -> dict[str, Any] | None:
    """Return the first account of a document with this access key; None if there is none."""
    for account in document.get(ACCOUNTS) or []:
        if account.get("accessKey") == access_key:
            return account  # type: ignore[no-any-return]
    return None


def _encode_document(document: Document, now_ms: int) -> str:
    """Write a document as YAML, with a new version at the time `now_ms`.

    Changes `document`: sets dataVersion, and makes `admin` of each account a Boolean.
    """
    last_counter, _last_time_ms = _read_version(document)
    counter = last_counter + 1
    document[DATA_VERSION] = [{"counter": counter, "timestamp": now_ms}]
    for account in document.get(ACCOUNTS) or []:
        if str(account.get("admin")).lower() in ("true", "yes", "on"):
            account["admin"] = True  # RocketMQ requires a Boolean
        elif "admin" in account:
            account["admin"] = False
    # The dumper quotes strings such as 12345678, so that they stay strings.
    yaml_text = yaml.dump(
        document, Dumper=_DUMPER, sort_keys=False, allow_unicode=True, default_flow_style=False
    )
    return str(yaml_text)
