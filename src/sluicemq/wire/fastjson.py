"""JSON as Java's fastjson writes it, and the plain kind (spec/remoting.md §5).

fastjson writes integer map keys without quotes (`{0:"a"}`), objects as map keys
(`{{"brokerName":"b","queueId":0,"topic":"T"}:5}`) and `{"$ref":"$.path"}` for an object that it
has written before. `loads` takes the plain kind through orjson and the rest through a small
parser:

    unquoted integer key   int
    object as key          tuple of its (name, value) pairs, sorted by name: `object_key`
    {"$ref": path}         the value at that path; as a key, the only object key of that map
    1L, 1.5D               the number

`dumps` and `dumps_pretty` write the fastjson form, `dumps_strict` and `dumps_file` the plain one.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import orjson

from sluicemq.errors import ProtocolError

DEPTH_MAX: Final = 64
"""Nesting that a body may have. The deepest that RocketMQ writes has seven levels."""
VALUES_MAX: Final = 5_000_000
"""The most values that the small parser reads from one text, which takes 1.5 µs for each."""
KEY_FIELDS_MAX: Final = 16
"""The most fields of an object that is a map's key. A MessageQueue has three."""
PATH_BYTES_MAX: Final = 4096
"""The longest path of a reference. RocketMQ's have at most seven steps."""
EXPANDED_FREE: Final = 1000
EXPANDED_PER_VALUE: Final = 16
"""References let thirty lines stand for a thousand million values. A document whose references make
more values of it than it has bytes, or than 16 for each value that is written in it, is refused;
EXPANDED_FREE values are allowed in any case."""


class _Scalar(NamedTuple):
    """A kind of value: what it looks like, what is wanted where nothing does, what it means, and
    what is wanted where that fails."""

    pattern: re.Pattern[str]
    wanted: str
    value_of: Callable[[re.Match[str]], Any]
    wanted_of_it: str


def _text_of(match: re.Match[str]) -> str:
    """Return what a text means; one without escapes is taken as it stands."""
    written = match.group()
    return json.loads(written, strict=False) if "\\" in written else written[1:-1]


_SPACE: Final = re.compile(r"[ \t\r\n\f\b]*")
_TEXT: Final = _Scalar(
    re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL),
    "the end of a text",
    _text_of,
    "a text with valid escapes",
)
_NUMBER: Final = _Scalar(
    re.compile(r"(-?\d+)((?:\.\d*)?(?:[eE][-+]?\d+)?)[BSLFD]?"),
    "a number",
    lambda match: float(match[1] + match[2]) if match[2] else int(match[1]),
    "a number of fewer digits",  # than Python takes
)
_WORDS: Final = {"true": True, "false": False, "null": None, "NaN": None}
_WORD: Final = _Scalar(
    re.compile(r"[A-Za-z]+"), "a value", lambda match: _WORDS[match.group()], "a value"
)
REFERENCE_NAME: Final = "$ref"
REFERENCE: Final = REFERENCE_NAME.encode()
"""The name by which a reference is known, as it stands in a body."""
_STEP: Final = re.compile(r"[^.\[\]$]+")

_INTEGERS: Final = {int}

ObjectKey = tuple[tuple[str, Any], ...]


# ------------------------------------------------------------------------------------- reading


def loads(data: str | bytes | memoryview, values_max: int = VALUES_MAX) -> Any:
    """Decode JSON of either kind.

    `values_max` bounds the values of text that is costly to read: text that only the small parser
    reads, and text with references. Raises ProtocolError for bad text, and for more values.

    >>> loads('{0:"a"}')
    {0: 'a'}
    """
    if isinstance(data, memoryview):
        data = bytes(data)
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError:
        text = data if isinstance(data, str) else data.decode("utf-8", "replace")
        value = _Parser(text, values_max).document()
    mark = REFERENCE_NAME if isinstance(data, str) else REFERENCE
    if mark not in data:  # type: ignore[operator]
        return value
    written = weigh(data).values
    if written > values_max:
        raise ProtocolError("The JSON has references, and too many values to be read so.")
    value = _References(value).resolved(value, ())
    # A value may hold itself now, or a thousand million others: nobody could write it into a file.
    waiting, left = [value], EXPANDED_FREE + min(len(data), EXPANDED_PER_VALUE * written)
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict | list):
            left -= len(item)
            if left < 0:
                raise ProtocolError("The JSON has references that make too many values of it.")
            waiting += item.values() if isinstance(item, dict) else item
    return value


class Weight(NamedTuple):
    """Upper bounds of what a JSON text holds: values of all kinds, and objects and lists."""

    values: int
    containers: int


def weigh(data: str | bytes) -> Weight:
    """Return upper bounds of the values and containers in a JSON text, without parsing it: its
    brackets, commas and colons are counted, those within strings too. 1 MiB takes a millisecond."""
    if isinstance(data, str):
        containers = data.count("{") + data.count("[")
        return Weight(containers + data.count(",") + data.count(":") + 1, containers)
    containers = data.count(b"{") + data.count(b"[")
    return Weight(containers + data.count(b",") + data.count(b":") + 1, containers)


_STRINGS: Final = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)


def without_texts(data: bytes, count_max: int) -> bytes:
    """Return a JSON text without its first `count_max` strings, of which each costs 0.15 µs."""
    return _STRINGS.sub(b"", data, count_max)


def object_key(value: Mapping[str, Any]) -> ObjectKey:
    """Return the form in which an object that is a map's key stands in a dict: its (name, value)
    pairs, sorted by name.

    Raises ProtocolError for an object with more than KEY_FIELDS_MAX fields, with names that are not
    texts, or with values that are lists or objects: the hash of such a key would cost as much as
    the whole object, each time it is looked up.
    """
    if len(value) > KEY_FIELDS_MAX:
        raise ProtocolError(
            f"An object that is a map's key has {len(value)} fields, the limit is {KEY_FIELDS_MAX}."
        )
    for name, item in value.items():
        if name.__class__ is not str or isinstance(item, dict | list | tuple):
            raise ProtocolError("An object that is a map's key holds more than plain values.")
    return tuple(sorted(value.items()))


class _Parser:
    """Recursive descent over one text."""

    __slots__ = ("_depth", "_position", "_text", "_values_left")

    def __init__(self, text: str, values_max: int = VALUES_MAX) -> None:
        self._text = text
        self._values_left = values_max
        self._position = 0
        self._depth = 0

    def document(self) -> Any:
        value = self._value()
        if self._peek():
            raise self._error("nothing more")
        return value

    def _peek(self) -> str:
        """The next character that is not white space; empty at the end."""
        match = _SPACE.match(self._text, self._position)
        if match is not None:
            self._position = match.end()
        return self._text[self._position : self._position + 1]

    def _error(self, wanted: str) -> ProtocolError:
        return ProtocolError(
            f"The JSON is bad at character {self._position} of {len(self._text)}: "
            f"expected {wanted}."
        )

    def _take(self, wanted: str) -> None:
        if self._peek() != wanted:
            raise self._error(repr(wanted))
        self._position += 1

    def _value(self) -> Any:
        self._values_left -= 1
        if self._values_left < 0:
            raise ProtocolError("The JSON is not plain, and has too many values to be read so.")
        first = self._peek()
        if first == "{":
            return self._container("}")
        if first == "[":
            return self._container("]")
        is_number = first == "-" or first.isdigit()
        scalar = _TEXT if first == '"' else _NUMBER if is_number else _WORD
        match = scalar.pattern.match(self._text, self._position)
        if match is None:
            raise self._error(scalar.wanted)
        try:
            value = scalar.value_of(match)
        except (ValueError, KeyError) as error:
            raise self._error(scalar.wanted_of_it) from error
        self._position = match.end()
        return value

    def _container(self, end: str) -> Any:
        self._position += 1
        self._depth += 1
        if self._depth > DEPTH_MAX:
            raise _too_deep()
        values: Any = {} if end == "}" else []
        while self._peek() != end:
            value = self._value()
            if end == "]":
                values.append(value)
            elif isinstance(value, list):
                raise self._error("a key that is not a list")
            else:
                key = object_key(value) if isinstance(value, dict) else value
                if key.__class__ is int and not -(1 << 63) <= key < 1 << 63:
                    raise self._error("a key of 64 bits")  # larger ones can share one hash
                self._take(":")
                values[key] = self._value()
            if self._peek() != end:
                self._take(",")
        self._position += 1
        self._depth -= 1
        return values


def _too_deep() -> ProtocolError:
    return ProtocolError(f"The JSON is nested deeper than {DEPTH_MAX} levels.")


class _References:
    """The references of one document, which `resolved` replaces by what they lead to."""

    __slots__ = ("_only_keys", "_root")

    def __init__(self, root: Any) -> None:
        self._root = root
        self._only_keys: dict[int, tuple[Any, ObjectKey | None]] = {}
        """By the identity of a map: the map, which keeps that identity taken, and its only object
        key. None where there is none, or more than one."""

    def resolved(self, value: Any, parents: tuple[Any, ...]) -> Any:
        """Replace the references in `value`, which lies in `parents`, and return it. A reference
        that leads nowhere becomes None. Raises ProtocolError below DEPTH_MAX levels."""
        if not isinstance(value, dict | list):
            return value
        chain = (*parents, value)
        if len(chain) > DEPTH_MAX:
            raise _too_deep()
        if isinstance(value, list):
            value[:] = [
                self.resolved(item, chain) if isinstance(item, dict | list) else item
                for item in value
            ]
            return value
        path = _reference_of(value)
        if path is not None:
            return self._target(path, chain)
        keys = []
        for key, item in value.items():
            if isinstance(item, dict | list):
                value[key] = self.resolved(item, chain)
            if isinstance(key, tuple):
                keys.append(key)
        for key in keys:
            item = value.pop(key)
            value[self._meant(key)] = item
        return value

    def _meant(self, key: ObjectKey) -> ObjectKey:
        """Return the object key that `key` stands for. `{"$ref":"$.mqPopTable.null"}` as a key
        means a key of that map (spec/remoting.md §5); which one is known only when that map has a
        single object key. A map is searched once, however many keys refer to it."""
        if len(key) != 1 or key[0][0] != REFERENCE_NAME:
            return key
        owner = self._target(str(key[0][1]).rpartition(".")[0] or "$", (self._root,))
        if not isinstance(owner, dict):
            return key
        found = self._only_keys.get(id(owner))
        if found is None:
            keys = [it for it in owner if isinstance(it, tuple)]
            found = self._only_keys[id(owner)] = owner, keys[0] if len(keys) == 1 else None
        return found[1] or key

    def _target(self, path: str, chain: tuple[Any, ...]) -> Any:
        """Return the value at `path`: `@` is the object itself, `..` its parent, `$` the root,
        `$.a.b[0]` a path from there. The work is proportional to the length of the path."""
        if len(path) > PATH_BYTES_MAX:
            return None
        if path == "@":
            return chain[-2] if len(chain) > 1 else self._root
        if set(path) <= {".", "/"}:
            ups = path.count("..") + 2
            return chain[-ups] if ups <= len(chain) else self._root
        value = self._root
        for step in _STEP.findall(path):
            name = step.strip("\"'")
            index = int(name) if name.isdecimal() and len(name) < 10 else -1
            if isinstance(value, list):
                value = value[index] if 0 <= index < len(value) else None
            elif isinstance(value, dict):
                value = value[name] if name in value else value.get(index)
            else:
                return None
        return None if _reference_of(value) else value


def _reference_of(value: Any) -> str | None:
    if isinstance(value, dict) and len(value) == 1:
        path = value.get(REFERENCE_NAME)
        return path if isinstance(path, str) else None
    return None


# ------------------------------------------------------------------------------------- writing


def dumps(value: Any) -> bytes:
    """The fastjson form: integer and object keys raw, names sorted, None left out of objects.

    >>> dumps({"b": {1: "x", 0: "y"}, "a": None})
    b'{"b":{0:"y",1:"x"}}'
    """
    try:
        data = orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except TypeError:
        data = b"null"
    if b"null" not in data:
        return data
    parts: list[str] = []
    _write(value, parts)
    return "".join(parts).encode("utf-8", "replace")


def _write(value: Any, parts: list[str]) -> None:
    if isinstance(value, dict):
        begin = "{"
        order = {key: (0, key) if isinstance(key, int) else (1, str(key)) for key in value}
        for key in sorted(value, key=order.__getitem__):  # integers first, then texts and objects
            if value[key] is not None:
                parts.append(begin)
                _write(dict(key) if isinstance(key, tuple) else key, parts)
                parts.append(":")
                _write(value[key], parts)
                begin = ","
        parts.append("}" if begin == "," else "{}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            parts.append("," if index else "[")
            _write(item, parts)
        parts.append("]" if value else "[]")
    else:
        parts.append(_scalar(value))


def _scalar(value: Any) -> str:
    return dumps_strict(value).decode()


def dumps_strict(value: Any) -> bytes:
    """Plain JSON, keys in the order given. A lone surrogate travels as an escape."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return json.dumps(value, separators=(",", ":")).encode()


def dumps_file(value: Any) -> str:
    """Plain JSON for a file of `config/`: indented, sorted, integer keys quoted. RocketMQ reads
    it as it reads its own (spec/store.md §11)."""
    option = orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS | orjson.OPT_INDENT_2
    try:
        return orjson.dumps(value, option=option).decode()
    except TypeError:  # an integer beyond 64 bits, or a lone surrogate
        return json.dumps(value, indent=2, sort_keys=True)


class Pretty(str):
    """A value as `dumps_pretty` has written it for its depth: to be put in as it is."""

    __slots__ = ()


def dumps_pretty(value: Any, depth: int = 0) -> Pretty:
    """As fastjson writes the files of `config/` (spec/store.md §11): tabs, no blank after a colon,
    integer keys raw and in one line, keys in the order given, None left out.

    A tuple is written in one line, as Java's arrays and sets are, a list with a line for each item.
    `depth`: how many values it is to be put into (`Pretty`).
    """
    parts: list[str] = []
    _write_pretty(value, "\n" + "\t" * depth, parts)
    return Pretty("".join(parts))


def _write_pretty(value: Any, line: str, parts: list[str]) -> None:
    if isinstance(value, list | tuple) and value:
        inner = line + "\t" if isinstance(value, list) else ""
        for index, item in enumerate(value):
            parts.append(("," if index else "[") + inner)
            _write_pretty(item, line + "\t", parts)
        parts.append((line if inner else "") + "]")
    elif not isinstance(value, Mapping):
        parts.append(_scalar(value))
    elif set(map(type, value)) | set(map(type, value.values())) == _INTEGERS:  # offsets: many
        pairs = ",".join(["%d:%d" % pair for pair in value.items()])  # noqa: UP031 - half the time
        parts.append(f"{{{pairs}{line}}}")
    else:
        inner, begin = line + "\t", "{"
        for key, item in value.items():
            if item is None:
                continue
            name = str(key)
            if not isinstance(key, int):
                is_text = isinstance(key, str)
                name = inner + (_scalar(name) if is_text else dumps(dict(key)).decode())
            parts.append(f"{begin}{name}:")
            if item.__class__ is int or item.__class__ is Pretty:
                parts.append(str(item))
            else:
                _write_pretty(item, inner, parts)
            begin = ","
        parts.append(f"{line}}}" if begin == "," else "{}")


def text(value: Any) -> str:
    """A JSON value as the text that fastjson makes of it where text is wanted."""
    if isinstance(value, str):
        return value
    try:
        return dumps(value).decode()
    except RecursionError:  # orjson reads 1,024 levels
        raise _too_deep() from None
