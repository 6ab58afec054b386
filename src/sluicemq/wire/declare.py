"""Declarations of headers and JSON bodies, and the codecs that are derived from them.

A class declares the fields of a header or a body, and how each field is named on the wire:

    @request(Code.GET_MIN_OFFSET)
    class QueueRequest:
        topic: str = text("topic")
        queue_id: int = int32("queueId")
        broker: str | None = text("bname", default=None)

    @body
    class QueueStats:
        offset_min: int = json_field("minOffset")
        offset_max: int = json_field("maxOffset")

    encode_queue_stats, decode_queue_stats = body_codec(QueueStats, "statistics of a queue")

The instances of both classes are frozen, hashable and compared by value.

In a header (extFields) every value is a string: integers are decimal, booleans are `true` or
`false`. None is not written. A field without a default is required. An empty string for an integer
counts as absent, as Java's decoder leaves such a field null. A class that extends another header
has the fields of its base first.

In a body the type of a field determines its JSON: numbers, strings, lists, maps, `X | None`, and
every class with an object codec. `declare_object` makes such a codec for a class that is defined
elsewhere. Bodies are decoded as tolerantly as Java does it. Unknown fields are ignored. Absent and
null fields have their default or, without one, 0, "", false or an empty collection. Numbers may be
strings, and strings may be numbers. A value of any other type raises ProtocolError with the name of
the field. So does an integer outside the range of its Java type: `INTS` names the fields that are a
Java int in every body, and all others are a Java long. Therefore no decoded body holds an integer
that cannot be packed or saved. Bodies are encoded in the form that Java and Go clients read
(spec/remoting.md §5): names are sorted, and None is left out.
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
JsonData = str | bytes | memoryview
"""The text of a JSON body."""
ValueReader = Callable[[Any, str], Any]
"""A function (value, name) that converts a received value other than null.

`name` is used in errors. It raises ProtocolError if the value has another type.
"""
ValueWriter = Callable[[Any], Any]
"""A function (value) that converts a value of an instance to JSON."""


class HeaderError(ProtocolError):
    """A header lacks a required field, or a field is invalid.

    When: a client sends a request whose header differs from what RocketMQ's clients write.
    Then: the request is not carried out. The response has code 1, and the connection stays open.
    Fix: correct the client; the text names the field.

        the custom field <queueId> is not an integer of 32 bits: '5000000000'. Send a whole \
number from -2147483648 to 2147483647.
    """


# -------------------------------------------------------------------------------------- values


class FieldDeclaration(NamedTuple):
    """The declaration of one field of a header or body.

    - `wire_name` is the name of the field on the wire, "" for a field that is never sent.
    - `default` is the value of the field if the caller of the constructor does not give one.
      `default_factory()` makes it for each instance. Without both the field is required.
    - `absent` is the value of the field if a received header or body lacks it or has null. Without
      it that is `default`.
    - `read` and `write` replace the functions of the field's type.
    """

    wire_name: str
    default: Any = MISSING
    default_factory: Any = MISSING
    absent: Any = MISSING
    read: ValueReader | None = None
    write: ValueWriter | None = None


_Field = tuple[str, str, Any, Any, Callable[[Any, Any], None]]
"""The attribute's name, its name on the wire, its reader, its default, and the function
(instance, value) that sets it. It is a plain tuple because every request iterates over them."""
_TABLES: Final[dict[type, tuple[_Field, ...]]] = {}
_FACTORIES: Final[dict[tuple[type, str], Callable[[], Any]]] = {}


class _FrozenValue:
    """The base of all declared classes: the methods of a frozen dataclass, from a table of fields.

    Real dataclasses would compile six functions for each class. For all headers and bodies together
    that took a tenth of the time in which a process starts.
    """

    __slots__ = ()

    def __init__(self, *values: Any, **keywords: Any) -> None:
        """Set all fields. The arguments are those of a dataclass, in the order of declaration.

        Raises TypeError for too many or unknown arguments, and for a required field without value.
        """
        table = _TABLES[type(self)]
        if values:
            if len(values) > len(table):
                raise TypeError(
                    f"{type(self).__name__} takes at most {len(table)} arguments, got {len(values)}"
                )
            keywords.update(zip((name for name, *_ in table), values, strict=False))
        for name, _, _, default, set_value in table:
            value = keywords.pop(name, default)
            if value is MISSING:
                make = _FACTORIES.get((type(self), name))
                if make is None:
                    raise TypeError(f"{type(self).__name__} requires the argument {name}")
                value = make()
            set_value(self, value)
        if keywords:
            raise TypeError(f"{type(self).__name__} has no fields {', '.join(keywords)}")

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{type(self).__name__} is frozen: {name} cannot be set")

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and _field_values(self) == _field_values(other)

    def __hash__(self) -> int:
        return hash(_field_values(self))

    def __repr__(self) -> str:
        values = zip(_TABLES[type(self)], _field_values(self), strict=True)
        return f"{type(self).__name__}({', '.join(f'{f[0]}={value!r}' for f, value in values)})"

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return type(self), _field_values(self)


def _field_values(value: object) -> tuple[Any, ...]:
    """Return the values of all fields of an instance of `_FrozenValue`, in the order declared."""
    return tuple([getattr(value, name) for name, *_ in _TABLES[type(value)]])


def _make_value_class(cls: type[T], **changes: Any) -> type[T]:
    """Return a class like `cls` whose instances are frozen and have slots.

    Its fields are those that the only base of `cls` declares, then those of `cls`. They are stored
    in `_TABLES`, and their default factories in `_FACTORIES`. `changes` are attributes that replace
    those of `cls`, such as `__doc__`.
    """
    (base,) = cls.__bases__
    declared_fields = {
        name: value for name, value in vars(cls).items() if isinstance(value, FieldDeclaration)
    }
    excluded = {*declared_fields, "__dict__", "__weakref__"}
    attributes = {name: value for name, value in vars(cls).items() if name not in excluded}
    bases = (_FrozenValue if base is object else base,)
    value_class = type(
        cls.__name__, bases, {**attributes, **changes, "__slots__": tuple(declared_fields)}
    )
    table = {field[0]: field for field in _TABLES.get(base, ())}  # by attribute name
    for name, declaration in declared_fields.items():
        set_value = getattr(value_class, name).__set__
        table[name] = (
            name,
            declaration.wire_name,
            declaration.read,
            declaration.default,
            set_value,
        )
        if declaration.default_factory is not MISSING:
            _FACTORIES[value_class, name] = declaration.default_factory
    _TABLES[value_class] = tuple(table.values())
    return cast(type[T], value_class)


# ------------------------------------------------------------------------------------- headers


def _integer_reader(bits: int) -> ValueReader:
    """Return the reader of a header field that is a signed integer of `bits` bits.

    The reader returns None for an empty string. It raises HeaderError if the string is not an
    integer, or is out of range.
    """
    limit = 1 << (bits - 1)

    def read(value: str, wire_name: str) -> int | None:
        if not value:
            return None
        try:
            number = int(value)
        except ValueError:
            number = limit
        if not -limit <= number < limit:
            shown = value if len(value) <= _SHOWN_MAX else f"{value[:_SHOWN_MAX]}…"
            raise HeaderError(
                f"the custom field <{wire_name}> is not an integer of {bits} bits: {shown!r}. "
                f"Send a whole number from {-limit} to {limit - 1}."
            )
        return number

    return read


_SHOWN_MAX: Final = 40
"""The most characters of a wrong value that an error shows."""
_READ_INT32 = _integer_reader(32)
_READ_INT64 = _integer_reader(64)


def text(wire_name: str, *, default: Any = MISSING) -> Any:
    """Declare a string field that is named `wire_name` in extFields."""
    return FieldDeclaration(wire_name, default, read=lambda value, _wire_name: value)


def int32(wire_name: str, *, default: Any = MISSING) -> Any:
    """Declare a field that is a signed integer of 32 bits, named `wire_name` in extFields."""
    return FieldDeclaration(wire_name, default, read=_READ_INT32)


def int64(wire_name: str, *, default: Any = MISSING) -> Any:
    """Declare a field that is a signed integer of 64 bits, named `wire_name` in extFields."""
    return FieldDeclaration(wire_name, default, read=_READ_INT64)


def boolean(wire_name: str, *, default: Any = MISSING) -> Any:
    """Declare a boolean field that is named `wire_name` in extFields.

    `true` in any case is True, every other string is False.
    """
    return FieldDeclaration(
        wire_name, default, read=lambda value, _wire_name: value.lower() == "true"
    )


def declare_header(
    table: dict[int, type], codes: Collection[IntEnum], short_names: str = ""
) -> Callable[[type[T]], type[T]]:
    """Return a decorator that declares a class as the header of `codes`, and adds it to `table`.

    `short_names` has one character for each field. They replace the names of the fields on the
    wire. An empty string leaves the names as they are. A class without a docstring gets one with
    the names and numbers of the codes.
    """

    def make(cls: type[T]) -> type[T]:
        code_names = ", ".join(f"{code.name} ({code})" for code in codes)
        header_class = _make_value_class(cls, __doc__=cls.__doc__ or f"The header of {code_names}.")
        if short_names:
            renamed = zip(_TABLES[header_class], short_names, strict=True)
            _TABLES[header_class] = tuple(
                (name, short_name, *rest) for (name, _, *rest), short_name in renamed
            )
        table.update(dict.fromkeys(map(int, codes), header_class))
        return header_class

    return make


def decode_header(cls: type[T], fields: Mapping[str, str] | None) -> T:
    """Return the instance of the header class `cls` that extFields contain.

    `fields` is None if the command has no extFields. Fields that `cls` does not declare are
    ignored, and absent ones have their default. Raises HeaderError with the name of the field if a
    required field is missing, or a field is invalid. This runs for every request.
    """
    received = fields or {}
    header = cls.__new__(cls)
    for _, wire_name, read, default, set_value in _TABLES[cls]:
        value: Any = received.get(wire_name)
        if value is not None:
            value = read(value, wire_name)
        if value is None:
            value = default
            if value is MISSING:
                raise HeaderError(f"the custom field <{wire_name}> is null")
        set_value(header, value)
    return header


def encode_header(value: Any) -> dict[str, str]:
    """Return the extFields of a header, an instance of a declared class, as strings.

    Booleans become `true` or `false`. Fields that are None are left out.
    """
    fields: dict[str, str] = {}
    for name, wire_name, _, _, _ in _TABLES[type(value)]:
        item = getattr(value, name)
        if item is not None:
            fields[wire_name] = item if isinstance(item, str) else str(item).lower()
    return fields


def wire_names(cls: type) -> tuple[str, ...]:
    """Return the names of a header's fields on the wire, in the order of declaration."""
    return tuple(wire_name for _, wire_name, *_ in _TABLES[cls])


# --------------------------------------------------------------------- single values of bodies


def load_object(data: JsonData, what: str) -> dict[Any, Any]:
    """Decode a body that is a JSON object. `what` names the body in errors.

    Raises ProtocolError if the body is empty, is not valid JSON, or is another JSON value. A body
    that is null gives {}.
    """
    if not data:
        raise ProtocolError(f"The {what} has no body.")
    return as_object(fastjson.loads(data), f"The {what}")


def as_object(value: Any, what: str) -> dict[Any, Any]:
    """Return `value` if it is a JSON object, and {} if it is None.

    Raises ProtocolError, which begins with `what`, for any other value.
    """
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ProtocolError(f"{what} is not a JSON object.")
    return value


def as_list(value: Any, what: str) -> list[Any]:
    """Return `value` if it is a JSON list. Raises ProtocolError, which begins with `what`."""
    if not isinstance(value, list):
        raise ProtocolError(f"{what} is not a JSON list.")
    return value


def _number_reader(number_type: Callable[[Any], Any], noun: str) -> ValueReader:
    """Return a reader that converts values to `number_type`, which is int or float.

    Strings are parsed, as fastjson does. The reader raises ProtocolError, which says that the value
    is not `noun`.
    """

    def read(value: Any, what: str) -> Any:
        try:
            return number_type(value)
        except (ValueError, TypeError, OverflowError) as error:
            raise ProtocolError(f"{what} is not {noun}.") from error

    return read


_integer_of: Callable[[Any, str], int] = _number_reader(int, "an integer")

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


def as_integer(value: Any, what: str) -> int:
    """Return a JSON value as an integer. Strings are parsed.

    `what` is the name of the field. It selects the range: 32 bits for a name in `INTS`, else 64.
    Raises ProtocolError if the value is not an integer in that range.
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
    """Return the field `key` as an object, {} if it is absent or null. Raises ProtocolError."""
    return as_object(values.get(key), key)


def take_list(values: Mapping[Any, Any], key: str) -> list[Any]:
    """Return the field `key` as a list, [] if it is absent or null. Raises ProtocolError."""
    value = values.get(key)
    return [] if value is None else as_list(value, key)


def take_integer(values: Mapping[Any, Any], key: str, default: int = 0) -> int:
    """Return the field `key` as `as_integer` does, `default` if it is absent or null.

    Raises ProtocolError.
    """
    value = values.get(key)
    return default if value is None else as_integer(value, key)


def take_text(values: Mapping[Any, Any], key: str, default: str = "") -> str:
    """Return the field `key` as a string, `default` if it is absent or null.

    Other JSON values become the string that fastjson makes of them.
    """
    value = values.get(key)
    return default if value is None else fastjson.to_text(value)


QUEUE_TEXT_VALUES_MAX: Final = 32
"""The most JSON values in a string that contains a queue. A queue has three fields."""


def queue_from(value: Any, what: str = "The queue") -> MessageQueue:
    """Return the queue that a JSON value describes.

    The value is an object, an object that was a map's key (a tuple of pairs), or a string that
    contains the JSON of such an object. `what` names the value in errors. Raises ProtocolError if
    the value is none of these, or lacks the topic or the broker name.
    """
    if isinstance(value, str):
        if fastjson.bound_counts(value).values > QUEUE_TEXT_VALUES_MAX:
            raise ProtocolError(f"{what} has more than {QUEUE_TEXT_VALUES_MAX} values.")
        value = fastjson.loads(value, QUEUE_TEXT_VALUES_MAX)
    values = dict(value) if isinstance(value, tuple) else as_object(value, what)
    if "topic" not in values or "brokerName" not in values:
        raise ProtocolError("A queue lacks its topic or brokerName.")
    return MessageQueue(
        take_text(values, "topic"), take_text(values, "brokerName"), take_integer(values, "queueId")
    )


def queue_object(queue: MessageQueue) -> dict[str, Any]:
    """Return a queue as a JSON object."""
    return {"brokerName": queue.broker, "queueId": queue.queue_id, "topic": queue.topic}


# -------------------------------------------------------------------------------- value codecs


class ValueCodec(NamedTuple):
    """How the values of one type are converted from and to JSON.

    - `read(value, what)` converts a JSON value other than null. `what` names the value in errors.
    - `make_default()` returns the value for null or for an absent field.
    - `write(value)` converts a value to JSON. None means that the value is already JSON.
    - `write_key(value)` converts a value that is the key of a map. None means that the value can be
      a key in JSON as it is.
    """

    read: ValueReader
    make_default: Callable[[], Any]
    write: ValueWriter | None = None
    write_key: ValueWriter | None = None


_VALUE_CODECS: Final[dict[Any, ValueCodec]] = {
    int: ValueCodec(as_integer, int),
    float: ValueCodec(_number_reader(float, "a number"), float),
    bool: ValueCodec(lambda it, _: it.lower() == "true" if isinstance(it, str) else bool(it), bool),
    str: ValueCodec(lambda value, _what: fastjson.to_text(value), str),
    Any: ValueCodec(lambda value, _what: value, NoneType),
    MessageQueue: ValueCodec(
        queue_from,
        lambda: queue_from({}),
        queue_object,
        write_key=lambda queue: tuple(queue_object(queue).items()),
    ),
}


def value_codec(annotation: Any) -> ValueCodec:
    """Return the codec of a type, and cache it.

    `annotation` is a plain type, `X | None`, a collection or mapping of such types, or a class that
    has an object codec. Codecs of classes are looked up here, not when a field is declared, so the
    order of declarations does not matter.
    """
    codec = _VALUE_CODECS.get(annotation)
    if codec is not None:
        return codec
    origin = get_origin(annotation)
    arguments = get_args(annotation)
    if annotation in OBJECT_CODECS:
        object_codec = OBJECT_CODECS[annotation]
        codec = ValueCodec(object_codec.read, lambda: object_codec.read({}), object_codec.write)
    elif NoneType in arguments:
        codec = _optional_codec(next(one for one in arguments if one is not NoneType))
    elif issubclass(origin, Mapping):
        codec = _map_codec(*arguments)
    else:
        codec = _list_codec(origin if origin in (tuple, frozenset) else list, arguments[0])
    _VALUE_CODECS[annotation] = codec
    return codec


def _optional_codec(value_type: Any) -> ValueCodec:
    """Return the codec of `value_type | None`. None is null in JSON."""
    codec = value_codec(value_type)
    write = codec.write
    write_optional = write and (lambda value: None if value is None else write(value))
    return ValueCodec(codec.read, NoneType, write_optional)


def _list_codec(collection_type: Callable[[Iterable[Any]], Any], item_type: Any) -> ValueCodec:
    """Return the codec of collections, which are lists in JSON.

    The items of a collection have the type `item_type`. `collection_type` is the constructor of the
    collection: list, tuple or frozenset.

    A null in a received list becomes the default of the item type; if items are strings, it is left
    out. The items of a frozenset are written in sorted order if they are already JSON.
    """
    read, make_default, write, _ = value_codec(item_type)

    def read_list(value: Any, what: str) -> Any:
        items = as_list(value, what)
        if item_type is str:
            return collection_type([read(item, what) for item in items if item is not None])
        return collection_type(
            [make_default() if item is None else read(item, what) for item in items]
        )

    def write_list(items: Iterable[Any]) -> list[Any]:
        return [write(item) for item in items]  # type: ignore[misc]

    write_plain = sorted if collection_type is frozenset else list
    return ValueCodec(read_list, collection_type, write_list if write else write_plain)  # type: ignore[arg-type]


def _map_codec(key_type: Any, value_type: Any) -> ValueCodec:
    """Return the codec of mappings from `key_type` to `value_type`, which are objects in JSON.

    A null value in a received object becomes the default of the value type; if values are strings,
    the member is left out. If the values are objects that have a `key_name`, a received value
    without that field gets the key of its member there.
    """
    read_key, _, _, write_key = value_codec(key_type)
    read, make_default, write, _ = value_codec(value_type)
    key_name = OBJECT_CODECS[value_type].key_name if value_type in OBJECT_CODECS else ""

    def read_member_value(key: Any, value: Any, what: str) -> Any:
        if key_name and as_object(value, what).get(key_name) is None:
            value = {**(value or {}), key_name: key}
        return make_default() if value is None else read(value, what)

    def read_map(members: Any, what: str) -> dict[Any, Any]:
        return {
            read_key(key, what): read_member_value(key, value, what)
            for key, value in as_object(members, what).items()
            if value is not None or value_type is not str
        }

    def write_map(mapping: Mapping[Any, Any]) -> dict[Any, Any]:
        return {
            write_key(key) if write_key else key: write(value) if write else value
            for key, value in mapping.items()
        }

    return ValueCodec(read_map, dict, write_map if write or write_key else dict)


# ------------------------------------------------------------------------------- object codecs


class ObjectCodec(Generic[T]):
    """How the instances of one class are converted from and to JSON objects.

    - `cls` is the class.
    - `declared` has the attribute name, the type and the declaration of each field.
    - `constants` are members with a fixed value that are written, and ignored when read.
    - `key` is the attribute name of a field, or "". If an object is the value of a map's member and
      lacks this field, the field gets the key of that member. `key_name` is its wire name.

    `names` are the wire names of all fields.
    """

    def __init__(
        self,
        cls: type[T],
        declared: Iterable[tuple[str, Any, FieldDeclaration]],
        constants: Mapping[str, Any],
        key: str = "",
    ) -> None:
        self._cls = cls
        self._declared = [row for row in declared if row[2].wire_name]
        self.constants = dict(constants)
        self.names = frozenset(declaration.wire_name for _, _, declaration in self._declared)
        self.key_name = next(
            (declaration.wire_name for name, _, declaration in self._declared if name == key), ""
        )

    @cached_property
    def read(self) -> Callable[..., T]:
        """The function (value, what) that makes an instance from a JSON object.

        `what` names the value in errors. The function raises ProtocolError if the value is not an
        object or null, or if a field has another type than declared. The function is made when it
        is first read, because the codecs of all other classes must be declared by then.
        """
        cls = self._cls
        rows = []
        for name, field_type, declaration in self._declared:
            codec = value_codec(field_type)
            default = declaration.absent
            if default is MISSING:
                default = declaration.default
            make_default = codec.make_default if default is MISSING else repeat(default).__next__
            plain = field_type if field_type in (str, bool) and not declaration.read else None
            rows.append(
                (name, declaration.wire_name, plain, declaration.read or codec.read, make_default)
            )

        def read_object(value: Any, what: str = "The value") -> T:
            get_member = as_object(value, what).get
            attributes = {}
            for name, wire_name, plain, read_value, make_default in rows:
                value = get_member(wire_name)
                if value.__class__ is not plain:  # a str or bool needs no conversion
                    value = make_default() if value is None else read_value(value, wire_name)
                attributes[name] = value
            return cls(**attributes)

        return read_object

    @cached_property
    def write(self) -> Callable[[T], dict[str, Any]]:
        """The function (instance) that makes a JSON object, a dict, from an instance.

        The members are sorted by their wire name. Fields that are None are left out. `constants`
        follow the fields. The function is made when it is first read, as for `read`.
        """
        rows = sorted(self._declared, key=lambda row: row[2].wire_name)
        names = [name for name, _, _ in rows]
        names_on_wire = [declaration.wire_name for _, _, declaration in rows]
        get_values = (
            attrgetter(*names) if len(names) > 1 else lambda item: (getattr(item, names[0]),)
        )
        # Only the fields that need it are converted, and only those that can be None are checked.
        converters = []
        optional_names = []
        for _, field_type, declaration in rows:
            convert = declaration.write or value_codec(field_type).write
            if convert:
                converters.append((declaration.wire_name, convert))
            if declaration.write or NoneType in get_args(field_type):
                optional_names.append(declaration.wire_name)
        constants = self.constants

        def write_plain_object(item: T) -> dict[str, Any]:
            return dict(zip(names_on_wire, get_values(item), strict=True))

        def write_object(item: T) -> dict[str, Any]:
            values = dict(zip(names_on_wire, get_values(item), strict=True))
            for wire_name, convert in converters:
                values[wire_name] = convert(values[wire_name])
            for wire_name in optional_names:
                if values[wire_name] is None:
                    del values[wire_name]
            if constants:
                values.update(constants)
            return values

        is_plain = not (converters or optional_names or constants)
        return write_plain_object if is_plain else write_object


OBJECT_CODECS: Final[dict[Any, ObjectCodec[Any]]] = {}


def json_field(wire_name: str, **options: Any) -> Any:
    """Declare a field that is named `wire_name` in JSON.

    `options` are the other attributes of `FieldDeclaration`.
    """
    return FieldDeclaration(wire_name, **options)


def declare_object(
    cls: type[T],
    *,
    key: str = "",
    constants: Mapping[str, Any] | None = None,
    **declared: str | FieldDeclaration,
) -> ObjectCodec[T]:
    """Make and register the object codec of a dataclass that is defined elsewhere.

    `declared` has for each field, by its attribute name, its name in JSON or a `json_field(…)`. A
    field that it lacks is never sent. `key` and `constants` are explained at `ObjectCodec`.
    """
    rows = []
    for field in fields(cls):  # type: ignore[arg-type]
        declaration = declared.get(field.name, "")
        declaration = FieldDeclaration(declaration) if isinstance(declaration, str) else declaration
        rows.append((field.name, field.type, declaration._replace(default=field.default)))
    codec = OBJECT_CODECS[cls] = ObjectCodec(cls, rows, constants or {}, key)
    return codec


@dataclass_transform(frozen_default=True, field_specifiers=(json_field,))
def body(cls: type[T]) -> type[T]:
    """Declare a class as a JSON object: make its instances frozen, and register its codec.

    Every annotated attribute of the class must have a `json_field(…)` as its value.
    """
    rows = [
        (name, field_type, vars(cls)[name]) for name, field_type in get_annotations(cls).items()
    ]
    value_class = _make_value_class(cls)
    OBJECT_CODECS[value_class] = ObjectCodec(value_class, rows, {})
    return value_class


Codec = tuple[Callable[[T], bytes], Callable[[JsonData], T]]
"""An encoder and a decoder of bodies."""


def body_codec(cls: type[T], what: str) -> Codec[T]:
    """Return the encoder and the decoder of bodies that are an instance of `cls` as JSON.

    `what` names the body in the errors of the decoder, which raises ProtocolError.
    """
    codec: ObjectCodec[T] = OBJECT_CODECS[cls]
    return (
        lambda value: fastjson.dumps(codec.write(value)),
        lambda data: codec.read(load_object(data, what)),
    )


def member_codec(
    key: str, value_type: type[T], what: str, **constants: Any
) -> tuple[Callable[[Any], bytes], Callable[[JsonData], T]]:
    """Return the encoder and the decoder of bodies that are an object with the member `key`.

    `value_type` is the type of the member's value. The encoder also writes `constants`. The decoder
    returns the default of the type if the member is absent, and raises ProtocolError with `what` as
    the body's name.
    """
    codec = value_codec(value_type)

    def encode(value: Any) -> bytes:
        written = value if codec.write is None else codec.write(value)
        return fastjson.dumps({key: written, **constants})

    def decode(data: JsonData) -> T:
        value = load_object(data, what).get(key)
        return codec.make_default() if value is None else codec.read(value, key)  # type: ignore[no-any-return]

    return encode, decode
