"""How a header is declared, and the one codec for all of them.

    @request(Code.GET_MIN_OFFSET)
    class QueueRequest:
        topic: str = text("topic")
        queue_id: int = int32("queueId")
        broker: str | None = text("bname", default=None)

It is frozen, takes keyword arguments and can be compared. One that extends another has the other's
fields first. A field without a default is required. On the wire every value is text: integers
decimal, booleans `true`/`false`; None is not written. An empty text where a number is wanted counts
as absent, as Java's decoder leaves such a field null.
"""

from collections.abc import Callable, Collection, Mapping
from enum import IntEnum
from typing import Any, Final, NamedTuple, TypeVar

from sluicemq.errors import ProtocolError

T = TypeVar("T")
_REQUIRED: Final = object()
_TABLES: Final[dict[type, tuple["_Field", ...]]] = {}


class HeaderError(ProtocolError):
    """A header lacks a field or holds a bad one: answered with code 1, the connection stays."""


class _Declared(NamedTuple):
    wire: str
    parse: Callable[[str, str], Any]
    default: Any


class _Field(NamedTuple):
    name: str
    wire: str
    parse: Callable[[str, str], Any]
    default: Any
    put: Callable[[Any, Any], None]


class _Header:
    """What a frozen dataclass would give each header. Making one compiles half a dozen functions,
    and for all headers together that was a tenth of every start."""

    __slots__ = ()

    def __init__(self, **values: Any) -> None:
        for field in _TABLES[type(self)]:
            value = values.pop(field.name, field.default)
            if value is _REQUIRED:
                raise TypeError(f"{type(self).__name__} needs {field.name}")
            field.put(self, value)
        if values:
            raise TypeError(f"{type(self).__name__} has no {', '.join(values)}")

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{type(self).__name__} is frozen: {name} cannot be set")

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and _values(self) == _values(other)

    def __hash__(self) -> int:
        return hash(_values(self))

    def __repr__(self) -> str:
        values = zip(_TABLES[type(self)], _values(self), strict=True)
        return f"{type(self).__name__}({', '.join(f'{f.name}={value!r}' for f, value in values)})"


def _values(value: object) -> tuple[Any, ...]:
    return tuple(getattr(value, field.name) for field in _TABLES[type(value)])


def _integer(bits: int) -> Callable[[str, str], int | None]:
    limit = 1 << (bits - 1)

    def parse(wire: str, value: str) -> int | None:
        if not value:
            return None
        try:
            number = int(value)
        except ValueError:
            number = limit
        if not -limit <= number < limit:
            raise HeaderError(f"the custom field <{wire}> is not an integer of {bits} bits")
        return number

    return parse


_parse_int32 = _integer(32)
_parse_int64 = _integer(64)


def text(wire: str, *, default: Any = _REQUIRED) -> Any:
    """A text field named `wire` in extFields."""
    return _Declared(wire, lambda _wire, value: value, default)


def int32(wire: str, *, default: Any = _REQUIRED) -> Any:
    """A 32-bit integer field."""
    return _Declared(wire, _parse_int32, default)


def int64(wire: str, *, default: Any = _REQUIRED) -> Any:
    """A 64-bit integer field."""
    return _Declared(wire, _parse_int64, default)


def boolean(wire: str, *, default: Any = _REQUIRED) -> Any:
    """A field that is `true` or `false`."""
    return _Declared(wire, lambda _wire, value: value.lower() == "true", default)


def header_of(
    table: dict[int, type], codes: Collection[IntEnum], letters: str = ""
) -> Callable[[type[T]], type[T]]:
    """A decorator that makes a class the header of these codes in `table`. `letters`: one for each
    field, in the place of their names on the wire."""

    def make(cls: type[T]) -> type[T]:
        (base,) = cls.__bases__
        inherited = {field.name: field for field in _TABLES.get(base, ())}
        own = {name: value for name, value in vars(cls).items() if isinstance(value, _Declared)}
        rest = {name: value for name, value in vars(cls).items() if name not in own}
        rest.pop("__dict__", None)
        rest.pop("__weakref__", None)
        named = ", ".join(f"{code} {code.name}" for code in codes)
        rest["__doc__"] = f"{named}: {cls.__doc__}" if cls.__doc__ else named
        bases = (_Header,) if base is object else (base,)
        made: Any = type(cls.__name__, bases, {**rest, "__slots__": tuple(own)})
        own_fields = {
            name: _Field(name, *declared, put=getattr(made, name).__set__)
            for name, declared in own.items()
        }
        fields = tuple((inherited | own_fields).values())
        if letters:
            fields = tuple(it._replace(wire=a) for it, a in zip(fields, letters, strict=True))
        _TABLES[made] = fields
        table.update(dict.fromkeys(map(int, codes), made))
        return made  # type: ignore[no-any-return]

    return make


def decode_header(cls: type[T], fields: Mapping[str, str] | None) -> T:
    """extFields -> header. Raises HeaderError that names the missing or bad field."""
    given = fields or {}
    made = cls.__new__(cls)
    for field in _TABLES[cls]:
        value = given.get(field.wire)
        parsed = None if value is None else field.parse(field.wire, value)
        if parsed is None:
            parsed = field.default
            if parsed is _REQUIRED:
                raise HeaderError(f"the custom field <{field.wire}> is null")
        field.put(made, parsed)
    return made


def encode_header(value: Any) -> dict[str, str]:
    """Header -> extFields; None is left out."""
    fields: dict[str, str] = {}
    for field in _TABLES[type(value)]:
        item = getattr(value, field.name)
        if item is not None:
            fields[field.wire] = item if isinstance(item, str) else str(item).lower()
    return fields


def wire_names(cls: type) -> tuple[str, ...]:
    """The field names of a header as they stand on the wire, in the order declared."""
    return tuple(field.wire for field in _TABLES[cls])
