"""Read the YAML text of a pipeline file and collect all problems in it, each with its line.

PyYAML's `compose` returns nodes, which know their lines, instead of plain values. An `Entry` wraps
one node together with the path of keys that leads to it, such as `sinks[1].url`. Its methods return
the value in the form that the caller expects. If the node has another form, they add a problem to
the `Document` and return None, so that one reading finds every problem of the file. `read_fields`
does the same for the keys that a source, a sink or a ready pipeline declares as `Field`s.

Scalars may name environment variables: `${NAME}` is replaced by the variable's value, and `$${` is
a plain `${`. The value of a variable whose name sounds like a secret is added to `Secrets`, which
masks it in everything that is printed.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import orjson
import yaml  # type: ignore[import-untyped]

from sluicemq.hints import suggest
from sluicemq.pipelines.ready import (
    DURATION,
    FLAG,
    INTEGER,
    LIST,
    MAPPING,
    NUMBER,
    REQUIRED,
    TEXT,
    Field,
    parse_duration_s,
)
from sluicemq.spark.errors import FileProblem, Secrets

NESTING_MAX: Final = 5
_VARIABLE: Final = re.compile(r"\$\$(?=\{)|\$\{([^}]*)\}")
_VARIABLE_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET_NAME: Final = re.compile(r"SECRET|PASS|PWD|TOKEN|KEY|CREDENTIAL|AUTH", re.IGNORECASE)
_NULL_TAG: Final = "tag:yaml.org,2002:null"


@dataclass(slots=True)
class Document:
    """A file that is being read: the environment, the problems found so far, and the secrets."""

    environment: Mapping[str, str]
    problems: list[FileProblem] = field(default_factory=list)
    secrets: Secrets = field(default_factory=Secrets)

    def add_problem(
        self, line: int, key_path: str, message: str, fix: str = "", *, is_error: bool = True
    ) -> None:
        """Add a problem with one line and key of the file, unless the same problem exists.

        Secrets in the texts are masked. If `is_error` is False, the problem is only a warning.
        """
        mask = self.secrets.mask
        problem = FileProblem(line, key_path, mask(message), mask(fix), is_error)
        if problem not in self.problems:
            self.problems.append(problem)

    def parse_root(self, text: str) -> "Entry | None":
        """Parse the text of the file, and return the entry of its top-level mapping.

        If the text is not YAML, or not a mapping, add a problem and return None.
        """
        try:
            node = yaml.compose(text, Loader=yaml.SafeLoader)
        except yaml.YAMLError as error:
            self._add_syntax_problem(error)
            return None
        if not isinstance(node, yaml.MappingNode):
            self.add_problem(
                1, "", "a pipeline must be a mapping.", "Begin with name:, source: and sinks:."
            )
            return None
        return Entry(self, node, "", node.start_mark.line + 1)

    def _add_syntax_problem(self, error: yaml.YAMLError) -> None:
        """Add the problem that the text is not YAML.

        It is at the line that the error names, or at line 1.
        """
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        line = mark.line + 1 if mark else 1
        reason = getattr(error, "problem", None) or getattr(error, "context", None) or error
        self.add_problem(line, "", f"the file is not valid YAML: {reason}.")


@dataclass(slots=True)
class Entry:
    """One value of a document: its YAML node, the path of keys that leads to it, and its line.

    `line` is counted from 1. It is the line of the key if the value belongs to a key.
    """

    document: Document
    node: Any
    key_path: str
    line: int

    def add_problem(self, message: str, fix: str = "", *, is_error: bool = True) -> None:
        """Add a problem with this value to the document."""
        self.document.add_problem(self.line, self.key_path, message, fix, is_error=is_error)

    @property
    def text_line(self) -> int:
        """The line where the text of the value begins.

        In a block scalar (`|` or `>`) that is the line after the indicator's line.
        """
        is_block = getattr(self.node, "style", None) in ("|", ">")
        return int(self.node.start_mark.line) + 1 + is_block

    def read_scalar(self) -> str | None:
        """Return the text of a scalar, with its variables replaced.

        If the value is null, a list or a mapping, a problem is added and the result is None. A
        variable that is not set adds a problem too, and becomes "".
        """
        if not isinstance(self.node, yaml.ScalarNode):
            self.add_problem("a text is expected here, not a list or a mapping.")
            return None
        if self.node.tag == _NULL_TAG:
            self.add_problem("the value is missing.", "Write a value, or remove the key.")
            return None
        return _VARIABLE.sub(self._replace_variable, str(self.node.value))

    def _replace_variable(self, variable: re.Match[str]) -> str:
        """Return the value of a variable in the text, such as `${NAME}`.

        `variable` is a match of `_VARIABLE`. An escaped `$${` becomes a plain `$` and brace. A
        variable that is not set, or whose name is invalid, becomes "" and adds a problem. If the
        name sounds like a secret, the value is added to the document's secrets.
        """
        name = variable[1]
        if name is None:  # $${
            return "$"
        environment = self.document.environment
        if name not in environment:
            self._add_variable_problem(name)
            return ""
        if _SECRET_NAME.search(name):
            self.document.secrets.add(environment[name], f"${{{name}}}")
        return environment[name]

    def _add_variable_problem(self, name: str) -> None:
        """Add the problem that a variable is not set, or that its name is invalid."""
        if _VARIABLE_NAME.fullmatch(name):
            fix = f"Set it, as in: {name}=… sluice pipeline run …"
            self.add_problem(f"the variable {name} is not set.", fix)
        else:
            self.add_problem(
                f"${{{name}}} is not a valid variable name.", "Write $${ for a plain ${."
            )

    def read_list(self) -> "list[Entry] | None":
        """Return the entries of a list. For any other value, add a problem and return None."""
        if not isinstance(self.node, yaml.SequenceNode):
            self.add_problem(
                "a list is expected here.", "Write [a, b], or one line with - for each item."
            )
            return None
        return [
            Entry(self.document, node, f"{self.key_path}[{index}]", node.start_mark.line + 1)
            for index, node in enumerate(self.node.value)
        ]

    def read_mapping(self) -> "dict[str, Entry] | None":
        """Return the entries of a mapping by key, or None for any other value.

        A problem is added for any other value. A repeated key, and a key that is not a scalar, add
        a problem too and are left out.
        """
        if not isinstance(self.node, yaml.MappingNode):
            self.add_problem("a mapping is expected here.", "Write one line key: value for each.")
            return None
        entry_by_key: dict[str, Entry] = {}
        for key_node, value_node in self.node.value:
            line = key_node.start_mark.line + 1
            key = str(getattr(key_node, "value", ""))
            key_path = f"{self.key_path}.{key}" if self.key_path else key
            if not isinstance(key_node, yaml.ScalarNode):
                self.document.add_problem(line, self.key_path, "a key must be a text.")
            elif key in entry_by_key:
                fix = f"Line {entry_by_key[key].line} has it already; keep one."
                self.document.add_problem(line, key_path, "the key is repeated.", fix)
            else:
                entry_by_key[key] = Entry(self.document, value_node, key_path, line)
        return entry_by_key

    def read_value(self, depth: int = NESTING_MAX) -> Any:
        """Return the value as plain lists, dicts, strings and integers, for use as JSON.

        Scalars that consist of digits become integers. If the value has more than `depth` levels, a
        problem is added, and the deeper levels become None.
        """
        if depth == 0:
            self.add_problem("the value is nested too deeply.")
            return None
        if isinstance(self.node, yaml.MappingNode):
            members = self.read_mapping() or {}
            return {key: member.read_value(depth - 1) for key, member in members.items()}
        if isinstance(self.node, yaml.SequenceNode):
            elements = self.read_list() or ()
            return [element.read_value(depth - 1) for element in elements]
        scalar = self.read_scalar()
        if scalar is not None and re.fullmatch(r"-?\d+", scalar):
            return int(scalar)
        return scalar

    def read_option(self) -> str | None:
        """Return the value as the text of a Spark option, or None if a scalar has a problem.

        The items of a list are joined by commas. A mapping, such as a table of offsets, becomes
        JSON.
        """
        if isinstance(self.node.value, str):
            return self.read_scalar()
        members = self.read_value()
        if isinstance(members, list):
            return ",".join(map(str, members))
        return orjson.dumps(members).decode()


Entries = Mapping[str, Entry]
"""The entries of a mapping by key."""


# ---- declared fields

_SCALAR_PARSERS: Final[Mapping[str, tuple[str, Callable[[str], Any], str]]] = {
    TEXT: (r"(?s).*\S.*", str, "it is empty"),
    INTEGER: (r"\s*[+-]?\d[\d_]*\s*", int, "write a whole number"),
    NUMBER: (r"\s*[+-]?(\d[\d_]*\.?\d*|\.\d+)([eE][+-]?\d+)?\s*", float, "write a number"),
    FLAG: (
        r"(?i)\s*(true|false)\s*",
        lambda text: text.strip().lower() == "true",
        "write true or false",
    ),
    DURATION: (r"(?s).*", parse_duration_s, ""),
}
"""For each kind of field: the pattern of valid texts, their parser, and the fix for other texts."""


def read_fields(
    entries: Entries, fields: Sequence[Field], owner: Entry, owner_name: str
) -> dict[str, Any]:
    """Return the values of the declared fields by name, with defaults for absent ones.

    Problems are added for unknown keys, invalid values and missing required keys. A required field
    without a value is not in the result. `owner_name` says in these texts what the fields belong
    to, such as "a parquet sink". A missing key is reported at the line of `owner`.
    """
    field_by_name = {declared.name: declared for declared in fields}
    value_by_name = {
        name: declared.default
        for name, declared in field_by_name.items()
        if declared.default is not REQUIRED
    }
    for name, entry in entries.items():
        if name not in field_by_name:
            entry.add_problem(f"{owner_name} has no such key.", suggest(name, field_by_name))
            continue
        field_value = read_field(entry, field_by_name[name])
        if field_value is not None:
            value_by_name[name] = field_value

    for name, declared in field_by_name.items():
        if declared.default is REQUIRED and name not in entries:
            owner.add_problem(f"{owner_name} needs the key {name!r}.", declared.description)
    return value_by_name


def read_field(entry: Entry | None, declared: Field) -> Any:
    """Return the value of an entry, converted to the kind that `declared` names.

    Return None if `entry` is None or the value is invalid, which adds a problem. For a LIST, a
    single text is accepted as a list of one, and invalid items are left out.
    """
    if entry is None:
        return None
    if declared.kind == LIST:
        return _read_list_field(entry, declared)
    if declared.kind == MAPPING:
        return _read_mapping_field(entry)
    scalar = entry.read_scalar()
    if scalar is None:
        return None
    pattern, parse, fix = _SCALAR_PARSERS[declared.kind]
    try:
        if not re.fullmatch(pattern, scalar):
            raise ValueError(fix)  # noqa: TRY301 - handled like a ValueError of `parse`
        field_value = parse(scalar)
    except ValueError as error:
        entry.add_problem(f"invalid value {scalar!r}: {error}.")
        return None
    if declared.choices and field_value not in declared.choices:
        entry.add_problem(
            f"invalid value {field_value!r}.", f"It can be {' or '.join(declared.choices)}."
        )
        return None
    return field_value


def _read_list_field(entry: Entry, declared: Field) -> list[Any]:
    """Return the valid items of a list, or of a single text. Invalid items add a problem."""
    is_single_text = isinstance(entry.node.value, str)
    item_entries = [entry] if is_single_text else entry.read_list() or []
    item_field = Field("", TEXT, "", choices=declared.choices)
    items = [read_field(item_entry, item_field) for item_entry in item_entries]
    return [item for item in items if item is not None]


def _read_mapping_field(entry: Entry) -> dict[str, str]:
    """Return the texts of a mapping by key. Values that are not a text add a problem."""
    texts = {}
    for key, member in (entry.read_mapping() or {}).items():
        scalar = member.read_scalar()
        if scalar is not None:
            texts[key] = scalar
    return texts
