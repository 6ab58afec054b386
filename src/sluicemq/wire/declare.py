"""How headers and bodies are declared, and their codecs.

    @request(Code.GET_MIN_OFFSET)
    class QueueRequest:
        topic: str = text("topic")
        queue_id: int = int32("queueId")
        broker: str | None = text("bname", default=None)

    @body
    class QueueStats:
        offset_min: int = json("minOffset")
        offset_max: int = json("maxOffset")

    encode_queue_stats, decode_queue_stats = body_codec(QueueStats, "statistics of a queue")

Either class gets frozen values that can be compared; its fields name their spelling on the wire.

In a header (extFields) every value is text: integers decimal, booleans `true`/`false`; None is not
written. A field without a default is required. An empty text where a number is wanted counts as
absent, as Java's decoder leaves such a field null. One that extends another has its fields first.

In a body how a value stands follows from its type: numbers, texts, lists, tables, `X | None`, and
every other class with a form; `form` says the same of a class that is declared elsewhere. Bodies
are read with Java's tolerance: unknown fields are ignored, absent and null mean the default
(without one: 0, "", false, nothing), numbers may be texts and texts numbers. Everything that is of
another kind raises ProtocolError that names the field. So does an integer that its Java type cannot
hold: `INTS` names the fields that are a Java int in every body, all others are a Java long. So no
table ever holds an integer that cannot be packed or saved. Written are the forms that Java and Go
clients read (spec/remoting.md §5): names sorted, None left out.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import MISSING, fields
from enum import IntEnum
from functools import cached_property
from inspect import get_annotations
from itertools import repeat
from operator import attrgetter
from types import NoneType
from typing import (
    Any,
    Final,
    Generic,
    NamedTuple,
    TypeVar,
    cast,
    dataclass_transform,
    get_args,
    get_origin,
)

from sluicemq.errors import ProtocolError
from sluicemq.model.topic import MessageQueue
from sluicemq.wire import fastjson

T = TypeVar("T")
Data = str | bytes | memoryview
Read = Callable[[Any, str], Any]
"""(a value that is not null, its name for errors) -> what it means."""
Write = Callable[[Any], Any]


class HeaderError(ProtocolError):
    """A header lacks a field or holds a bad one: answered with code 1, the connection stays.

    When: a client sends a request whose header is not as RocketMQ's clients write it.
    Then: the request was not carried out.
    Fix: correct the client; the text names the field.

        the custom field <queueId> is not an integer of 32 bits: '5000000000'. Send a whole \
number from -2147483648 to 2147483647.
    """


# -------------------------------------------------------------------------------------- values


class Declared(NamedTuple):
    """A field. `wire` is its name there, "" when it does not travel; `absent` is what null means
    when that is not the default; `read` and `write` take the place of those of its type."""

    wire: str
    default: Any = MISSING
    default_factory: Any = MISSING
    absent: Any = MISSING
    read: Read | None = None
    write: Write | None = None


_Field = tuple[str, str, Any, Any, Callable[[Any, Any], None]]
"""Name, name on the wire, how it is read, default, how it is set in a value. Plain tuples: these
are gone through with each request."""
_TABLES: Final[dict[type, tuple[_Field, ...]]] = {}
_FACTORIES: Final[dict[tuple[type, str], Callable[[], Any]]] = {}


class _Value:
    """What a frozen dataclass would give each class. Making one compiles half a dozen functions,
    and for all headers and bodies together that was a tenth of every start."""

    __slots__ = ()

    def __init__(self, *values: Any, **named: Any) -> None:
        table = _TABLES[type(self)]
        if values:
            if len(values) > len(table):
                raise TypeError(f"{type(self).__name__} has {len(table)} fields")
            named.update(zip((name for name, *_ in table), values, strict=False))
        for name, _, _, default, put in table:
            value = named.pop(name, default)
            if value is MISSING:
                make = _FACTORIES.get((type(self), name))
                if make is None:
                    raise TypeError(f"{type(self).__name__} needs {name}")
                value = make()
            put(self, value)
        if named:
            raise TypeError(f"{type(self).__name__} has no {', '.join(named)}")

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{type(self).__name__} is frozen: {name} cannot be set")

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and _values(self) == _values(other)

    def __hash__(self) -> int:
        return hash(_values(self))

    def __repr__(self) -> str:
        values = zip(_TABLES[type(self)], _values(self), strict=True)
        return f"{type(self).__name__}({', '.join(f'{f[0]}={value!r}' for f, value in values)})"

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return type(self), _values(self)


def _values(value: object) -> tuple[Any, ...]:
    return tuple([getattr(value, name) for name, *_ in _TABLES[type(value)]])


def _made(cls: type[T], **changes: Any) -> type[T]:
    """`cls` as a class of values, whose fields are what it and its base declare."""
    (base,) = cls.__bases__
    own = {name: it for name, it in vars(cls).items() if isinstance(it, Declared)}
    left_out = {*own, "__dict__", "__weakref__"}
    rest = {name: it for name, it in vars(cls).items() if name not in left_out}
    bases = (_Value if base is object else base,)
    made = type(cls.__name__, bases, {**rest, **changes, "__slots__": tuple(own)})
    table = {field[0]: field for field in _TABLES.get(base, ())}
    for name, said in own.items():
        put = getattr(made, name).__set__
        table[name] = (name, said.wire, said.read, said.default, put)
        if said.default_factory is not MISSING:
            _FACTORIES[made, name] = said.default_factory
    _TABLES[made] = tuple(table.values())
    return cast(type[T], made)


# ------------------------------------------------------------------------------------- headers


def _integer(bits: int) -> Read:
    limit = 1 << (bits - 1)

    def read(value: str, wire: str) -> int | None:
        if not value:
            return None
        try:
            number = int(value)
        except ValueError:
            number = limit
        if not -limit <= number < limit:
            shown = value if len(value) <= _SHOWN_MAX else f"{value[:_SHOWN_MAX]}…"
            raise HeaderError(
                f"the custom field <{wire}> is not an integer of {bits} bits: {shown!r}. Send a "
                f"whole number from {-limit} to {limit - 1}."
            )
        return number

    return read


_SHOWN_MAX: Final = 40
_READ_INT32, _READ_INT64 = _integer(32), _integer(64)


def text(wire: str, *, default: Any = MISSING) -> Any:
    """A text field named `wire` in extFields."""
    return Declared(wire, default, read=lambda value, _wire: value)


def int32(wire: str, *, default: Any = MISSING) -> Any:
    """A 32-bit integer field."""
    return Declared(wire, default, read=_READ_INT32)


def int64(wire: str, *, default: Any = MISSING) -> Any:
    """A 64-bit integer field."""
    return Declared(wire, default, read=_READ_INT64)


def boolean(wire: str, *, default: Any = MISSING) -> Any:
    """A field that is `true` or `false`."""
    return Declared(wire, default, read=lambda value, _wire: value.lower() == "true")


def header_of(
    table: dict[int, type], codes: Collection[IntEnum], letters: str = ""
) -> Callable[[type[T]], type[T]]:
    """A decorator that makes a class the header of these codes in `table`. `letters`: one for each
    field, in the place of their names on the wire."""

    def make(cls: type[T]) -> type[T]:
        named = ", ".join(f"{code} {code.name}" for code in codes)
        made = _made(cls, __doc__=f"{named}: {cls.__doc__}" if cls.__doc__ else named)
        if letters:
            both = zip(_TABLES[made], letters, strict=True)
            _TABLES[made] = tuple((name, letter, *rest) for (name, _, *rest), letter in both)
        table.update(dict.fromkeys(map(int, codes), made))
        return made

    return make


def decode_header(cls: type[T], fields: Mapping[str, str] | None) -> T:
    """extFields -> header. Raises HeaderError that names the missing or bad field."""
    given = fields or {}
    made = cls.__new__(cls)
    for _, wire, read, default, put in _TABLES[cls]:
        value: Any = given.get(wire)
        if value is not None:
            value = read(value, wire)
        if value is None:
            value = default
            if value is MISSING:
                raise HeaderError(f"the custom field <{wire}> is null")
        put(made, value)
    return made


def encode_header(value: Any) -> dict[str, str]:
    """Header -> extFields; None is left out."""
    fields: dict[str, str] = {}
    for name, wire, _, _, _ in _TABLES[type(value)]:
        item = getattr(value, name)
        if item is not None:
            fields[wire] = item if isinstance(item, str) else str(item).lower()
    return fields


def wire_names(cls: type) -> tuple[str, ...]:
    """The field names of a header as they stand on the wire, in the order declared."""
    return tuple(wire for _, wire, *_ in _TABLES[cls])


# --------------------------------------------------------------------- single values of bodies


def load_object(data: Data, what: str) -> dict[Any, Any]:
    """The body `what` as a JSON object."""
    if not data:
        raise ProtocolError(f"The {what} has no body.")
    return as_object(fastjson.loads(data), f"The {what}")


def as_object(value: Any, what: str) -> dict[Any, Any]:
    """`value` as an object; {} for null."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ProtocolError(f"{what} is not a JSON object.")
    return value


def as_list(value: Any, what: str) -> list[Any]:
    """`value` as a list."""
    if not isinstance(value, list):
        raise ProtocolError(f"{what} is not a JSON list.")
    return value


def _as(make: Callable[[Any], Any], noun: str) -> Read:
    """Reads a number; text is parsed, as fastjson does."""

    def read(value: Any, what: str) -> Any:
        try:
            return make(value)
        except (ValueError, TypeError, OverflowError) as error:
            raise ProtocolError(f"{what} is not {noun}.") from error

    return read


_integer_of: Callable[[Any, str], int] = _as(int, "an integer")

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
"""Fields of bodies that are an int in Java, by their name on the wire; others are a long."""
INT_LIMIT: Final = 1 << 31
LONG_LIMIT: Final = 1 << 63


def as_integer(value: Any, what: str) -> int:
    """Read an integer, also from text. `what` is the field's name: it decides about the range.

    Raises ProtocolError.
    """
    number = value if value.__class__ is int else _integer_of(value, what)
    if not -INT_LIMIT <= number < INT_LIMIT and (
        what in INTS or not -LONG_LIMIT <= number < LONG_LIMIT
    ):
        bits = 32 if what in INTS else 64
        raise ProtocolError(
            f"{what} is not an integer of {bits} bits: {str(value)[:_SHOWN_MAX]}.",
            fix=f"Send a whole number from {-(1 << bits - 1)} to {(1 << bits - 1) - 1}.",
        )
    return number


def take_object(values: Mapping[Any, Any], key: str) -> dict[Any, Any]:
    """An object field; {} when absent."""
    return as_object(values.get(key), key)


def take_list(values: Mapping[Any, Any], key: str) -> list[Any]:
    """A list field; [] when absent."""
    value = values.get(key)
    return [] if value is None else as_list(value, key)


def take_integer(values: Mapping[Any, Any], key: str, default: int = 0) -> int:
    """An integer field."""
    value = values.get(key)
    return default if value is None else as_integer(value, key)


def take_text(values: Mapping[Any, Any], key: str, default: str = "") -> str:
    """A text field; a number becomes text."""
    value = values.get(key)
    return default if value is None else fastjson.text(value)


QUEUE_TEXT_VALUES_MAX: Final = 32
"""The most values of a text that holds a queue, which has three fields."""


def queue_from(value: Any, what: str = "The queue") -> MessageQueue:
    """Return a queue that is written as an object, as an object that is a map's key, or as a text
    that holds the object. Raises ProtocolError."""
    if isinstance(value, str):
        if fastjson.weigh(value).values > QUEUE_TEXT_VALUES_MAX:
            raise ProtocolError(f"{what} has more than {QUEUE_TEXT_VALUES_MAX} values.")
        value = fastjson.loads(value, QUEUE_TEXT_VALUES_MAX)
    values = dict(value) if isinstance(value, tuple) else as_object(value, what)
    if "topic" not in values or "brokerName" not in values:
        raise ProtocolError("A queue lacks its topic or brokerName.")
    return MessageQueue(
        take_text(values, "topic"), take_text(values, "brokerName"), take_integer(values, "queueId")
    )


def queue_object(queue: MessageQueue) -> dict[str, Any]:
    """A queue as a JSON object."""
    return {"brokerName": queue.broker, "queueId": queue.queue_id, "topic": queue.topic}


# --------------------------------------------------------------------------------------- kinds


class Kind(NamedTuple):
    """How the values of one type stand in JSON. `absent` makes what null means; without `write`
    they are JSON as they are. As a map's key they are written by `write_key`."""

    read: Read
    absent: Callable[[], Any]
    write: Write | None = None
    write_key: Write | None = None


_KINDS: Final[dict[Any, Kind]] = {
    int: Kind(as_integer, int),
    float: Kind(_as(float, "a number"), float),
    bool: Kind(lambda it, _: it.lower() == "true" if isinstance(it, str) else bool(it), bool),
    str: Kind(lambda value, _what: fastjson.text(value), str),
    Any: Kind(lambda value, _what: value, NoneType),
    MessageQueue: Kind(
        queue_from,
        lambda: queue_from({}),
        queue_object,
        write_key=lambda queue: tuple(queue_object(queue).items()),
    ),
}


def kind_of(annotation: Any) -> Kind:
    """The kind of a type."""
    found = _KINDS.get(annotation)
    if found is not None:
        return found
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation in FORMS:
        form = FORMS[annotation]
        found = Kind(form.read, lambda: form.read({}), form.write)
    elif NoneType in arguments:
        inner = kind_of(next(one for one in arguments if one is not NoneType))
        write = inner.write
        optional = write and (lambda it: None if it is None else write(it))
        found = Kind(inner.read, NoneType, optional)
    elif issubclass(origin, Mapping):
        found = _table_kind(*arguments)
    else:
        found = _list_kind(origin if origin in (tuple, frozenset) else list, arguments[0])
    _KINDS[annotation] = found
    return found


def _list_kind(make: Callable[[Iterable[Any]], Any], item: Any) -> Kind:
    read, absent, write, _ = kind_of(item)

    def read_list(value: Any, what: str) -> Any:
        values = as_list(value, what)
        if item is str:  # nulls are left out
            return make([read(one, what) for one in values if one is not None])
        return make([absent() if one is None else read(one, what) for one in values])

    def write_list(values: Iterable[Any]) -> list[Any]:
        return [write(one) for one in values]  # type: ignore[misc]

    plain = sorted if make is frozenset else list
    return Kind(read_list, make, write_list if write else plain)  # type: ignore[arg-type]


def _table_kind(key: Any, item: Any) -> Kind:
    read_key, _, _, write_key = kind_of(key)
    read, absent, write, _ = kind_of(item)
    named = FORMS[item].key_name if item in FORMS else ""

    def read_item(key: Any, value: Any, what: str) -> Any:
        if named and as_object(value, what).get(named) is None:
            value = {**(value or {}), named: key}
        return absent() if value is None else read(value, what)

    def read_table(value: Any, what: str) -> dict[Any, Any]:
        return {
            read_key(key, what): read_item(key, one, what)
            for key, one in as_object(value, what).items()
            if one is not None or item is not str  # null texts are left out
        }

    def write_table(table: Mapping[Any, Any]) -> dict[Any, Any]:
        return {
            write_key(key) if write_key else key: write(one) if write else one
            for key, one in table.items()
        }

    return Kind(read_table, dict, write_table if write or write_key else dict)


# --------------------------------------------------------------------------------------- forms


class Form(Generic[T]):
    """How a class stands in JSON. `constants` are written besides; `key_name` is the wire name of
    the field that the key of a table stands in for when it is absent."""

    def __init__(
        self,
        cls: type[T],
        declared: Iterable[tuple[str, Any, Declared]],
        constants: Mapping[str, Any],
        key: str = "",
    ) -> None:
        """`declared`: name, type and what is said of each field."""
        self._cls = cls
        self._declared = [row for row in declared if row[2].wire]
        self.constants = dict(constants)
        self.names = frozenset(said.wire for _, _, said in self._declared)
        self.key_name = next((said.wire for name, _, said in self._declared if name == key), "")

    @cached_property
    def read(self) -> Callable[..., T]:
        """(A JSON object, what it is) -> an instance. Raises ProtocolError."""
        cls, rows = self._cls, []
        for name, kind_type, said in self._declared:
            kind, default = kind_of(kind_type), said.absent
            default = said.default if default is MISSING else default
            absent = kind.absent if default is MISSING else repeat(default).__next__
            plain = kind_type if kind_type in (str, bool) and not said.read else None
            rows.append((name, said.wire, plain, said.read or kind.read, absent))

        def read(value: Any, what: str = "The value") -> T:
            given = as_object(value, what).get
            made = {}
            for name, wire, plain, read, absent in rows:
                value = given(wire)
                if value.__class__ is not plain:  # what is plain is taken as it is
                    value = absent() if value is None else read(value, wire)
                made[name] = value
            return cls(**made)

        return read

    @cached_property
    def write(self) -> Callable[[T], dict[str, Any]]:
        """(An instance) -> a JSON object, names sorted, None left out."""
        rows = sorted(self._declared, key=lambda row: row[2].wire)
        names, wires = [name for name, _, _ in rows], [said.wire for _, _, said in rows]
        get = attrgetter(*names) if len(names) > 1 else lambda item: (getattr(item, names[0]),)
        writes = [(said.wire, said.write or kind_of(it).write) for _, it, said in rows]
        converted = [(wire, write) for wire, write in writes if write]
        optional = [said.wire for _, it, said in rows if said.write or NoneType in get_args(it)]
        constants = self.constants

        def write(item: T) -> dict[str, Any]:
            values = dict(zip(wires, get(item), strict=True))
            for wire, convert in converted:
                values[wire] = convert(values[wire])
            for wire in optional:
                if values[wire] is None:
                    del values[wire]
            if constants:
                values.update(constants)
            return values

        is_plain = not (converted or optional or constants)
        return (lambda item: dict(zip(wires, get(item), strict=True))) if is_plain else write


FORMS: Final[dict[Any, Form[Any]]] = {}


def json(wire: str, **options: Any) -> Any:
    """A field named `wire` in JSON, with the options of `Declared`."""
    return Declared(wire, **options)


def form(
    cls: type[T],
    *,
    key: str = "",
    constants: Mapping[str, Any] | None = None,
    **declared: str | Declared,
) -> Form[T]:
    """Declare how a dataclass stands in JSON: field -> its name there, or `json(…)`."""
    rows = []
    for field in fields(cls):  # type: ignore[arg-type]
        said = declared.get(field.name, "")
        said = Declared(said) if isinstance(said, str) else said
        rows.append((field.name, field.type, said._replace(default=field.default)))
    made = FORMS[cls] = Form(cls, rows, constants or {}, key)
    return made


@dataclass_transform(frozen_default=True, field_specifiers=(json,))
def body(cls: type[T]) -> type[T]:
    """Make `cls` a class of values with a form."""
    rows = [(name, kind_type, vars(cls)[name]) for name, kind_type in get_annotations(cls).items()]
    made = _made(cls)
    FORMS[made] = Form(made, rows, {})
    return made


Codec = tuple[Callable[[T], bytes], Callable[[Data], T]]


def body_codec(cls: type[T], what: str) -> Codec[T]:
    """Encoder and decoder of a body that is an object; `what` it is, for errors."""
    found: Form[T] = FORMS[cls]
    return (
        lambda value: fastjson.dumps(found.write(value)),
        lambda data: found.read(load_object(data, what)),
    )


def member_codec(
    key: str, kind: type[T], what: str, **constants: Any
) -> tuple[Callable[[Any], bytes], Callable[[Data], T]]:
    """The same of a body whose only member, but for constants, is `key`."""
    found = kind_of(kind)

    def encode(value: Any) -> bytes:
        written = value if found.write is None else found.write(value)
        return fastjson.dumps({key: written, **constants})

    def decode(data: Data) -> T:
        value = load_object(data, what).get(key)
        return found.absent() if value is None else found.read(value, key)  # type: ignore[no-any-return]

    return encode, decode
