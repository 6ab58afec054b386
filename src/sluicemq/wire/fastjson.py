"""Codec for standard JSON and for the dialect that Java's fastjson writes (spec/remoting.md §5).

fastjson writes integer keys of maps without quotes (`{0:"a"}`), objects as keys of maps
(`{{"brokerName":"b","queueId":0,"topic":"T"}:5}`), and `{"$ref":"$.path"}` for an object that it
has written before. `loads` decodes standard JSON with orjson, and the dialect with a small parser
in Python. It decodes the parts of the dialect as follows:

    unquoted integer key   int
    object as key          tuple of its (name, value) pairs, sorted by name: `make_object_key`
    {"$ref": path}         the value at that path; as a key, the only object key of that map
    1L, 1.5D               the number

`dumps` and `dumps_pretty` write the dialect. `dumps_strict` and `dumps_file` write standard JSON.

Bodies come from the network, so the work for each is limited: by nesting (DEPTH_MAX), by the number
of values that the parser in Python reads (VALUES_MAX), and by the number of values that references
may add (EXPANDED_PER_VALUE).
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import orjson

from sluicemq.errors import ProtocolError

DEPTH_MAX: Final = 64
"""The most levels of nesting in a body. The deepest body that RocketMQ writes has seven."""
VALUES_MAX: Final = 5_000_000
"""The most values that the parser in Python reads from one text. Each takes 1.5 µs."""
KEY_FIELDS_MAX: Final = 16
"""The most fields of an object that is a map's key. A MessageQueue has three."""
PATH_BYTES_MAX: Final = 4096
"""The most characters in the path of a reference. RocketMQ's paths have at most seven steps."""
EXPANDED_FREE: Final = 1000
EXPANDED_PER_VALUE: Final = 16
"""The most values, for each value in a text, that the text may have after its references are
resolved. Their number may not exceed the text's size in bytes either. EXPANDED_FREE values are
allowed in addition. Without these limits, thirty lines of JSON could expand to 10⁹ values."""


class _Scalar(NamedTuple):
    """The syntax of one type of value that is not a container.

    `value_of` converts a match of `pattern`. It raises ValueError or KeyError if the match has no
    value. `wanted` describes what the parser expected if `pattern` does not match, and
    `wanted_of_it` if `value_of` fails.
    """

    pattern: re.Pattern[str]
    wanted: str
    value_of: Callable[[re.Match[str]], Any]
    wanted_of_it: str


def _text_of(match: re.Match[str]) -> str:
    """Return the string that a quoted string denotes. Raises ValueError for a bad escape."""
    written = match.group()
    return json.loads(written, strict=False) if "\\" in written else written[1:-1]


_SPACE: Final = re.compile(r"[ \t\r\n\f\b]*")
_TEXT: Final = _Scalar(
    re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL),
    "the end of a string",
    _text_of,
    "a string with valid escapes",
)
_NUMBER: Final = _Scalar(
    re.compile(r"(-?\d+)((?:\.\d*)?(?:[eE][-+]?\d+)?)[BSLFD]?"),
    "a number",
    lambda match: float(match[1] + match[2]) if match[2] else int(match[1]),
    "a number of fewer digits",  # Python limits the digits that int() converts
)
_WORDS: Final = {"true": True, "false": False, "null": None, "NaN": None}
_WORD: Final = _Scalar(
    re.compile(r"[A-Za-z]+"), "a value", lambda match: _WORDS[match.group()], "a value"
)
REFERENCE_NAME: Final = "$ref"
REFERENCE: Final = REFERENCE_NAME.encode()
"""The name that marks a reference, as the bytes in a body."""
_STEP: Final = re.compile(r"[^.\[\]$]+")

_INTEGERS: Final = {int}

ObjectKey = tuple[tuple[str, Any], ...]
JsonData = str | bytes | memoryview
"""The text of a JSON body."""


# ------------------------------------------------------------------------------------- reading


def loads(json_text: str | bytes | memoryview, values_max: int = VALUES_MAX) -> Any:
    """Decode standard JSON or the dialect of fastjson, the JSON library of RocketMQ.

    The dialect has unquoted and integer keys, and references such as `{"$ref": "$.a"}`, which are
    replaced by the value they refer to. Bytes that are not UTF-8 become U+FFFD.

    `values_max` limits the number of values in text that is slow to decode: text that is not
    standard JSON, and text with references. Raises ProtocolError for invalid text, and for text
    that exceeds a limit.

    >>> loads('{0:"a"}')
    {0: 'a'}
    """
    if isinstance(json_text, memoryview):
        json_text = bytes(json_text)
    try:
        document = orjson.loads(json_text)
    except orjson.JSONDecodeError:
        decoded_text = json_text
        if isinstance(decoded_text, bytes):
            decoded_text = decoded_text.decode("utf-8", "replace")
        document = _Parser(decoded_text, values_max).parse_document()
    reference_mark = REFERENCE_NAME if isinstance(json_text, str) else REFERENCE
    if reference_mark not in json_text:  # type: ignore[operator]
        return document

    # Resolving references takes time and memory, so both the values before and after are limited.
    written_values = bound_counts(json_text).values
    if written_values > values_max:
        raise ProtocolError("The JSON has references and too many values to resolve them.")
    document = _References(document).resolve(document, ())
    expanded_max = EXPANDED_FREE + min(len(json_text), EXPANDED_PER_VALUE * written_values)
    _check_expanded_count(document, expanded_max)
    return document


def _check_expanded_count(root: Any, values_max: int) -> None:
    """Raise ProtocolError if `root` contains more than `values_max` values at all depths.

    A value that occurs several times is counted each time. Because of references, a small JSON text
    can make a value contain itself or 10⁹ others, which could not be written to a file.
    """
    uncounted_values = [root]
    remaining = values_max
    while uncounted_values:
        value = uncounted_values.pop()
        if isinstance(value, dict | list):
            remaining -= len(value)
            if remaining < 0:
                raise ProtocolError("The JSON has references that expand to too many values.")
            uncounted_values += value.values() if isinstance(value, dict) else value


class CountBounds(NamedTuple):
    """Upper bounds for the content of a JSON text.

    `values` is for all values and keys. `containers` is for objects and lists.
    """

    values: int
    containers: int


def bound_counts(json_text: str | bytes) -> CountBounds:
    """Return upper bounds for the number of values and of containers in a JSON text.

    The text is not parsed: the function counts brackets, commas and colons, including those within
    strings. 1 MiB takes a millisecond.
    """
    if isinstance(json_text, str):
        containers = json_text.count("{") + json_text.count("[")
        return CountBounds(containers + json_text.count(",") + json_text.count(":") + 1, containers)
    containers = json_text.count(b"{") + json_text.count(b"[")
    return CountBounds(containers + json_text.count(b",") + json_text.count(b":") + 1, containers)


_STRINGS: Final = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)


def remove_strings(json_text: bytes, count_max: int) -> bytes:
    """Return a JSON text without its first `count_max` strings. Each string takes 0.15 µs."""
    return _STRINGS.sub(b"", json_text, count_max)


def make_object_key(json_object: Mapping[str, Any]) -> ObjectKey:
    """Return a hashable key for an object that is used as the key of a map.

    It is a tuple of the object's (name, value) pairs, sorted by name. Raises ProtocolError for an
    object with more than KEY_FIELDS_MAX fields, with names that are not strings, or with values
    that are lists or objects. Hashing such a key at each lookup would take as long as reading the
    object.
    """
    if len(json_object) > KEY_FIELDS_MAX:
        raise ProtocolError(
            f"An object that is a map's key has {len(json_object)} fields; the limit is "
            f"{KEY_FIELDS_MAX}."
        )
    for name, field_value in json_object.items():
        if name.__class__ is not str or isinstance(field_value, dict | list | tuple):
            raise ProtocolError(
                "An object that is a map's key contains a list, an object or a name that is not "
                "a string."
            )
    return tuple(sorted(json_object.items()))


class _Parser:
    """A recursive-descent parser of one text in the dialect of fastjson."""

    __slots__ = ("_depth", "_position", "_text", "_values_left")

    def __init__(self, json_text: str, values_max: int = VALUES_MAX) -> None:
        """Parse `json_text`, which may contain at most `values_max` values."""
        self._text = json_text
        self._values_left = values_max
        self._position = 0
        self._depth = 0

    def parse_document(self) -> Any:
        """Parse the text, which must contain exactly one value, and return it.

        Raises ProtocolError if the text is invalid or has too many values.
        """
        root = self._parse_value()
        if self._peek():
            raise self._make_error("the end of the text")
        return root

    def _peek(self) -> str:
        """Skip white space, and return the next character, which stays unread; "" at the end."""
        match = _SPACE.match(self._text, self._position)
        if match is not None:
            self._position = match.end()
        return self._text[self._position : self._position + 1]

    def _make_error(self, expected: str) -> ProtocolError:
        """Return the error that `expected` was not found at the current position."""
        return ProtocolError(
            f"The JSON is invalid at character {self._position} of {len(self._text)}: "
            f"expected {expected}."
        )

    def _expect(self, expected_character: str) -> None:
        """Take the next character. Raises ProtocolError if it is not `expected_character`."""
        if self._peek() != expected_character:
            raise self._make_error(repr(expected_character))
        self._position += 1

    def _parse_value(self) -> Any:
        """Parse the value at the current position, move behind it, and return it.

        Raises ProtocolError if the text is invalid or has too many values.
        """
        self._values_left -= 1
        if self._values_left < 0:
            raise ProtocolError(
                "The JSON is not standard, and has too many values to be parsed tolerantly."
            )
        first_character = self._peek()
        if first_character == "{":
            return self._parse_container("}")
        if first_character == "[":
            return self._parse_container("]")
        if first_character == '"':
            syntax = _TEXT
        elif first_character == "-" or first_character.isdigit():
            syntax = _NUMBER
        else:
            syntax = _WORD

        match = syntax.pattern.match(self._text, self._position)
        if match is None:
            raise self._make_error(syntax.wanted)
        try:
            scalar = syntax.value_of(match)
        except (ValueError, KeyError) as error:
            raise self._make_error(syntax.wanted_of_it) from error
        self._position = match.end()
        return scalar

    def _parse_container(self, end: str) -> Any:
        """Parse the object or list at the current position, and return it as a dict or list.

        `end` is its last character, `}` or `]`. A comma before the end is accepted. A key that is
        an object becomes a tuple of pairs. Raises ProtocolError if the text is invalid, or nested
        too deeply.
        """
        self._position += 1
        self._depth += 1
        if self._depth > DEPTH_MAX:
            raise _too_deep_error()
        container: Any = {} if end == "}" else []
        while self._peek() != end:
            key_or_item = self._parse_value()  # a key of an object, an item of a list
            if end == "]":
                container.append(key_or_item)
            elif isinstance(key_or_item, list):
                raise self._make_error("a key that is not a list")
            else:
                key = make_object_key(key_or_item) if isinstance(key_or_item, dict) else key_or_item
                if key.__class__ is int and not -(1 << 63) <= key < 1 << 63:
                    raise self._make_error("a key of 64 bits")  # larger integers can share one hash
                self._expect(":")
                container[key] = self._parse_value()
            if self._peek() != end:
                self._expect(",")
        self._position += 1
        self._depth -= 1
        return container


def _too_deep_error() -> ProtocolError:
    """Return the error for a body with more than DEPTH_MAX levels."""
    return ProtocolError(f"The JSON is nested deeper than {DEPTH_MAX} levels.")


class _References:
    """Resolves the references (`$ref`) in one decoded document, whose value is `root`."""

    __slots__ = ("_only_keys", "_root")

    def __init__(self, root: Any) -> None:
        """Resolve references within the document `root`."""
        self._root = root
        self._only_keys: dict[int, tuple[Any, ObjectKey | None]] = {}
        """By the `id` of a map: the map and its only object key, or None if it has none or several.

        The reference to the map ensures that no other object gets its `id`.
        """

    def resolve(self, json_value: Any, parents: tuple[Any, ...]) -> Any:
        """Replace all references within `json_value` by their targets, in place.

        A reference is an object such as `{"$ref": "$.a"}`. Return `json_value`, or its target if it
        is a reference itself. `parents` are the containers around `json_value`, the root first. A
        reference without a target becomes None. Raises ProtocolError if `json_value` is nested
        deeper than DEPTH_MAX.
        """
        if not isinstance(json_value, dict | list):
            return json_value
        chain = (*parents, json_value)
        if len(chain) > DEPTH_MAX:
            raise _too_deep_error()
        if isinstance(json_value, list):
            json_value[:] = [
                self.resolve(json_item, chain) if isinstance(json_item, dict | list) else json_item
                for json_item in json_value
            ]
            return json_value
        path = _get_reference_path(json_value)
        if path is not None:
            return self._find_target(path, chain)
        self._resolve_members(json_value, chain)
        return json_value

    def _resolve_members(self, json_object: dict[Any, Any], chain: tuple[Any, ...]) -> None:
        """Replace the references in the values and keys of `json_object`, in place.

        `chain` contains the containers around the object and then the object itself.
        """
        object_keys = []
        for key, member in json_object.items():
            if isinstance(member, dict | list):
                json_object[key] = self.resolve(member, chain)
            if isinstance(key, tuple):
                object_keys.append(key)
        for key in object_keys:  # after the loop, during which no key may be added
            member = json_object.pop(key)
            json_object[self._resolve_key(key)] = member

    def _resolve_key(self, key: ObjectKey) -> ObjectKey:
        """Return the object key that a reference stands for. Return any other key unchanged.

        An object key is an object used as a key of a map, here a tuple of pairs. fastjson writes an
        object key as `null` in a path (spec/remoting.md §5). So the key
        `{"$ref":"$.mqPopTable.null"}` stands for an object key of the map `$.mqPopTable`. If this
        map does not exist, or does not have exactly one object key, the reference cannot be
        resolved, and `key` is returned.
        """
        if len(key) != 1:
            return key
        ((name, path),) = key
        if name != REFERENCE_NAME:
            return key
        map_path = str(path).rpartition(".")[0] or "$"
        target_map = self._find_target(map_path, (self._root,))
        if not isinstance(target_map, dict):
            return key
        # Search each map once, even if many keys refer to it.
        if id(target_map) not in self._only_keys:
            object_keys = [map_key for map_key in target_map if isinstance(map_key, tuple)]
            only_key = object_keys[0] if len(object_keys) == 1 else None
            self._only_keys[id(target_map)] = target_map, only_key
        _, only_key = self._only_keys[id(target_map)]
        return only_key or key

    def _find_target(self, path: str, chain: tuple[Any, ...]) -> Any:
        """Return the value at `path`, or None if there is none or if it is a reference itself.

        `@` is the object that contains the reference, `..` its parent, `$` the root, and `$.a.b[0]`
        a path from the root. `chain` contains the containers around the reference, the root first,
        and then the reference itself.
        """
        if len(path) > PATH_BYTES_MAX:
            return None
        if path == "@":
            return chain[-2] if len(chain) > 1 else self._root
        if set(path) <= {".", "/"}:
            # chain[-1] is the reference, chain[-2] the object that contains it.
            levels_up = path.count("..") + 2
            return chain[-levels_up] if levels_up <= len(chain) else self._root
        target = self._root
        for step in _STEP.findall(path):
            target = _take_step(target, step.strip("\"'"))
        return None if _get_reference_path(target) else target


def _take_step(container: Any, step: str) -> Any:
    """Return the item or member of `container` to which one step of a path leads.

    `step` is the index of an item, or the name or integer key of a member. Return None if there is
    no such item or member.
    """
    # -1 if the step is not an index. The length is limited because of huge numbers.
    index = int(step) if step.isdecimal() and len(step) < 10 else -1
    if isinstance(container, list):
        return container[index] if 0 <= index < len(container) else None
    if isinstance(container, dict):
        return container[step] if step in container else container.get(index)
    return None


def _get_reference_path(json_value: Any) -> str | None:
    """Return the path in a reference such as `{"$ref": "$.a"}`; None for any other value."""
    if isinstance(json_value, dict) and len(json_value) == 1:
        path = json_value.get(REFERENCE_NAME)
        return path if isinstance(path, str) else None
    return None


# ------------------------------------------------------------------------------------- writing


def dumps(json_value: Any) -> bytes:
    """Encode a value in the dialect of fastjson.

    Integer and object keys are not quoted. Keys are sorted. Members of objects that are None are
    left out, but None in a list is written as null. A lone surrogate is written as an escape.

    >>> dumps({"b": {1: "x", 0: "y"}, "a": None})
    b'{"b":{0:"y",1:"x"}}'
    """
    # orjson is fast, but writes None in objects, and refuses integer and object keys.
    try:
        json_text = orjson.dumps(json_value, option=orjson.OPT_SORT_KEYS)
    except TypeError:
        json_text = b"null"  # so that the slow encoder below is used
    if b"null" not in json_text:
        return json_text
    written: list[str] = []
    _write(json_value, written)
    return "".join(written).encode("utf-8", "replace")


def _write(json_value: Any, written: list[str]) -> None:
    """Append the JSON text of `json_value` to `written`, in the dialect of fastjson."""
    if isinstance(json_value, dict):
        _write_object(json_value, written)
    elif isinstance(json_value, list | tuple):
        for index, json_item in enumerate(json_value):
            written.append("," if index else "[")
            _write(json_item, written)
        written.append("]" if json_value else "[]")
    else:
        written.append(_encode_scalar(json_value))


def _write_object(json_object: dict[Any, Any], written: list[str]) -> None:
    """Append the JSON text of an object to `written`. Members that are None are left out."""
    separator = "{"  # before the first member
    for key in sorted(json_object, key=_make_sort_key):
        if json_object[key] is not None:
            written.append(separator)
            _write(dict(key) if isinstance(key, tuple) else key, written)
            written.append(":")
            _write(json_object[key], written)
            separator = ","
    written.append("}" if separator == "," else "{}")


def _make_sort_key(key: Any) -> tuple[int, Any]:
    """Return what keys are sorted by: integer keys come before strings and objects."""
    return (0, key) if isinstance(key, int) else (1, str(key))


def _encode_scalar(scalar: Any) -> str:
    """Return the standard JSON of a string, number, boolean or None."""
    return dumps_strict(scalar).decode()


def dumps_strict(json_value: Any) -> bytes:
    """Encode a value as standard JSON, with its keys in their order.

    A lone surrogate is written as an escape with a backslash and `u`.
    """
    try:
        return orjson.dumps(json_value)
    except TypeError:
        return json.dumps(json_value, separators=(",", ":")).encode()


def dumps_file(json_value: Any) -> str:
    """Encode a value as standard JSON for a file of `config/`: indented, with sorted keys.

    Integer keys are quoted. RocketMQ can read such files (spec/store.md §11).
    """
    option = orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS | orjson.OPT_INDENT_2
    try:
        return orjson.dumps(json_value, option=option).decode()
    except TypeError:  # an integer beyond 64 bits, or a lone surrogate
        return json.dumps(json_value, indent=2, sort_keys=True)


class PrettyText(str):
    """The result of `dumps_pretty`, which `dumps_pretty` inserts unchanged in a larger value."""

    __slots__ = ()


def dumps_pretty(json_value: Any, depth: int = 0) -> PrettyText:
    """Encode a value as fastjson writes the files of `config/` (spec/store.md §11).

    Lines are indented with tabs, and colons have no blank after them. Integer keys are not quoted,
    and do not begin a line. Keys keep their order, and members that are None are left out. A tuple
    is written in one line, as Java's arrays and sets are; a list has a line for each item.

    `depth` is the number of containers around the place where the caller will insert the result.
    """
    written: list[str] = []
    _write_pretty(json_value, "\n" + "\t" * depth, written)
    return PrettyText("".join(written))


def _write_pretty(json_value: Any, line: str, written: list[str]) -> None:
    """Append the indented JSON text of `json_value` to `written`.

    `line` is a newline and the indentation for the closing bracket of `json_value`.
    """
    if isinstance(json_value, list | tuple) and json_value:
        _write_pretty_items(json_value, line, written)
    elif not isinstance(json_value, Mapping):
        written.append(_encode_scalar(json_value))
    elif set(map(type, json_value)) | set(map(type, json_value.values())) == _INTEGERS:
        # The same text as `_write_pretty_members`, but faster: a table of offsets has many such
        # maps.
        pairs = ",".join(["%d:%d" % pair for pair in json_value.items()])  # noqa: UP031 - takes half the time of an f-string
        written.append(f"{{{pairs}{line}}}")
    else:
        _write_pretty_members(json_value, line, written)


def _write_pretty_items(
    json_items: list[Any] | tuple[Any, ...], line: str, written: list[str]
) -> None:
    """Append the text of a list or tuple to `written`.

    Each item of a list is on a line of its own, and a tuple is on one line. `line` is a newline and
    the indentation for the closing bracket.
    """
    is_list = isinstance(json_items, list)
    before_item = line + "\t" if is_list else ""
    for index, json_item in enumerate(json_items):
        written.append(("," if index else "[") + before_item)
        _write_pretty(json_item, line + "\t", written)
    written.append(f"{line}]" if is_list else "]")


def _write_pretty_members(mapping: Mapping[Any, Any], line: str, written: list[str]) -> None:
    """Append the text of an object to `written`. Members that are None are left out.

    `line` is a newline and the indentation for the closing bracket. Each member begins a line,
    except members with integer keys.
    """
    member_line = line + "\t"
    separator = "{"  # before the first member
    for key, member in mapping.items():
        if member is None:
            continue
        if isinstance(key, int):
            written_key = str(key)
        elif isinstance(key, str):
            written_key = member_line + _encode_scalar(str(key))
        else:
            written_key = member_line + dumps(dict(key)).decode()
        written.append(f"{separator}{written_key}:")
        if member.__class__ is int or member.__class__ is PrettyText:
            written.append(str(member))
        else:
            _write_pretty(member, member_line, written)
        separator = ","
    written.append(f"{line}}}" if separator == "," else "{}")


def to_text(json_value: Any) -> str:
    """Return a JSON value as the string that fastjson makes of it for a field of type String.

    A string is returned as it is, and any other value as its JSON text. Raises ProtocolError if the
    value is nested too deeply.
    """
    if isinstance(json_value, str):
        return json_value
    try:
        return dumps(json_value).decode()
    except RecursionError:  # orjson decodes up to 1,024 levels
        raise _too_deep_error() from None


# ------------------------------------------------------------------------------- single values


def load_object(json_body: JsonData, body_name: str) -> dict[Any, Any]:
    """Decode a body that is a JSON object. `body_name` is the name of the body in errors.

    Raises ProtocolError if the body is empty, is not valid JSON, or is another JSON value. A body
    that is null gives {}.
    """
    if not json_body:
        raise ProtocolError(f"The {body_name} has no body.")
    return as_object(loads(json_body), f"The {body_name}")


def as_object(json_value: Any, value_name: str) -> dict[Any, Any]:
    """Return `json_value` if it is a JSON object, and {} if it is None.

    Raises ProtocolError for any other value. Its message begins with `value_name`.
    """
    if json_value is None:
        return {}
    if not isinstance(json_value, dict):
        raise ProtocolError(f"{value_name} is not a JSON object.")
    return json_value


def as_list(json_value: Any, value_name: str) -> list[Any]:
    """Return `json_value` if it is a JSON list.

    Raises ProtocolError, which begins with `value_name`, for any other value.
    """
    if not isinstance(json_value, list):
        raise ProtocolError(f"{value_name} is not a JSON list.")
    return json_value


def as_float(json_value: Any, value_name: str) -> float:
    """Return a JSON number, or a string that contains one, as a float.

    Raises ProtocolError for any other value. Its message begins with `value_name`.
    """
    try:
        return float(json_value)
    except (ValueError, TypeError, OverflowError) as error:
        raise ProtocolError(f"{value_name} is not a number.") from error


def _parse_integer(json_value: Any, value_name: str) -> int:
    """Return a JSON number, or a string that contains one, as an integer of any size.

    Raises ProtocolError for any other value. Its message begins with `value_name`.
    """
    try:
        return int(json_value)
    except (ValueError, TypeError, OverflowError) as error:
        raise ProtocolError(f"{value_name} is not an integer.") from error


_SHOWN_MAX: Final = 40
"""The most characters of a wrong value that an error shows."""
INTS: Final = frozenset(
    {
        "consumeTimeoutMinute",
        "delayLevel",
        "groupSysFlag",
        "level",
        "perm",
        "popShareQueueNum",
        "queueId",
        "readQueueNums",
        "retryMaxTimes",
        "retryQueueNums",
        "topicSysFlag",
        "version",
        "writeQueueNums",
    }
)
"""The wire names of those integer fields of bodies that are a Java int. All others are a long."""
INT_LIMIT: Final = 1 << 31
"""The smallest positive number that a Java int cannot hold."""
LONG_LIMIT: Final = 1 << 63
"""The smallest positive number that a Java long cannot hold."""


def as_integer(json_value: Any, field_name: str) -> int:
    """Return a JSON number, or a string that contains one, as an integer.

    The integer must fit into 32 bits if `field_name` is in `INTS`, else into 64 bits. Raises
    ProtocolError if the value is not an integer in that range. Its message begins with
    `field_name`.
    """
    integer = json_value if json_value.__class__ is int else _parse_integer(json_value, field_name)
    if not -INT_LIMIT <= integer < INT_LIMIT and (
        field_name in INTS or not -LONG_LIMIT <= integer < LONG_LIMIT
    ):
        bits = 32 if field_name in INTS else 64
        raise ProtocolError(
            f"{field_name} is not an integer of {bits} bits: {str(json_value)[:_SHOWN_MAX]}.",
            fix=f"Send a whole number from {-(1 << bits - 1)} to {(1 << bits - 1) - 1}.",
        )
    return integer


def take_object(json_object: Mapping[Any, Any], key: str) -> dict[Any, Any]:
    """Return the field `key` as an object, {} if it is absent or null. Raises ProtocolError."""
    return as_object(json_object.get(key), key)


def take_list(json_object: Mapping[Any, Any], key: str) -> list[Any]:
    """Return the field `key` as a list, [] if it is absent or null. Raises ProtocolError."""
    member = json_object.get(key)
    return [] if member is None else as_list(member, key)


def take_integer(json_object: Mapping[Any, Any], key: str, default: int = 0) -> int:
    """Return the field `key` as `as_integer` does, `default` if it is absent or null.

    Raises ProtocolError.
    """
    member = json_object.get(key)
    return default if member is None else as_integer(member, key)


def take_text(json_object: Mapping[Any, Any], key: str, default: str = "") -> str:
    """Return the field `key` as a string, `default` if it is absent or null.

    Other JSON values become the string that fastjson makes of them.
    """
    member = json_object.get(key)
    return default if member is None else to_text(member)
