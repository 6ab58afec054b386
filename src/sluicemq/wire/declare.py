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
the field. So does an integer outside the range of its Java type: `fastjson.INTS` names the fields
that are a Java int in every body, and all others are a Java long. Therefore no decoded body holds
an integer that cannot be packed or saved. Bodies are encoded in the form that Java and Go clients
read (spec/remoting.md §5): names are sorted, and None is left out.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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
from sluicemq.wire.fastjson import (
    JsonData,
    as_float,
    as_integer,
    as_list,
    as_object,
    load_object,
    take_integer,
    take_text,
)

T = TypeVar("T")
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
        """Set all fields from the arguments, as the constructor of a dataclass.

        Positional arguments belong to the fields in the order of their declaration. Raises
        TypeError for too many or unknown arguments, and for a required field without a value.
        """
        declared_fields = _TABLES[type(self)]
        if values:
            if len(values) > len(declared_fields):
                raise TypeError(
                    f"{type(self).__name__} takes at most {len(declared_fields)} arguments, "
                    f"got {len(values)}"
                )
            # Positional arguments belong to the first fields.
            keywords.update(zip((name for name, *_ in declared_fields), values, strict=False))

        # Each field takes its value out of `keywords`. Unknown arguments are left there.
        for name, _, _, default, set_value in declared_fields:
            field_value = keywords.pop(name, default)
            if field_value is MISSING:
                make_default = _FACTORIES.get((type(self), name))
                if make_default is None:
                    raise TypeError(f"{type(self).__name__} requires the argument {name}")
                field_value = make_default()
            set_value(self, field_value)
        if keywords:
            raise TypeError(f"{type(self).__name__} has no fields {', '.join(keywords)}")

    def __setattr__(self, name: str, new_value: Any) -> None:
        raise AttributeError(f"{type(self).__name__} is frozen: {name} cannot be set")

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and _get_field_values(self) == _get_field_values(other)

    def __hash__(self) -> int:
        return hash(_get_field_values(self))

    def __repr__(self) -> str:
        """Return the call that makes an equal value, such as `PullHeader(group='g')`."""
        names = [name for name, *_ in _TABLES[type(self)]]
        values = _get_field_values(self)
        arguments = [f"{name}={value!r}" for name, value in zip(names, values, strict=True)]
        return f"{type(self).__name__}({', '.join(arguments)})"

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return type(self), _get_field_values(self)


def _get_field_values(instance: object) -> tuple[Any, ...]:
    """Return the values of all fields of an instance of `_FrozenValue`, in the order declared."""
    return tuple([getattr(instance, name) for name, *_ in _TABLES[type(instance)]])


def _make_value_class(cls: type[T], **changes: Any) -> type[T]:
    """Return a copy of the class `cls` whose instances are frozen and have slots.

    The fields of the new class are those of the only base of `cls`, followed by the fields that
    `cls` declares. They are stored in `_TABLES`, and the functions that make their defaults in
    `_FACTORIES`. `changes` are class attributes that replace attributes of `cls`, such as
    `__doc__`.
    """
    (base,) = cls.__bases__
    declarations: dict[str, FieldDeclaration] = {}
    attributes: dict[str, Any] = {}
    for name, attribute in vars(cls).items():
        if isinstance(attribute, FieldDeclaration):
            declarations[name] = attribute
        elif name not in ("__dict__", "__weakref__"):
            attributes[name] = attribute
    attributes.update(changes)
    attributes["__slots__"] = tuple(declarations)

    value_base = _FrozenValue if base is object else base
    value_class = type(cls.__name__, (value_base,), attributes)
    _register_fields(value_class, base, declarations)
    return cast(type[T], value_class)


def _register_fields(
    value_class: type, base: type, declarations: Mapping[str, FieldDeclaration]
) -> None:
    """Store the fields of `value_class` in `_TABLES`.

    They are the fields of `base`, then those in `declarations`. A declaration replaces a field of
    `base` with the same name. Functions that make a default are stored in `_FACTORIES`.
    """
    fields_by_name = {field[0]: field for field in _TABLES.get(base, ())}
    for name, declaration in declarations.items():
        set_value = getattr(value_class, name).__set__  # the setter of the slot
        fields_by_name[name] = (
            name,
            declaration.wire_name,
            declaration.read,
            declaration.default,
            set_value,
        )
        if declaration.default_factory is not MISSING:
            _FACTORIES[value_class, name] = declaration.default_factory
    _TABLES[value_class] = tuple(fields_by_name.values())


# ------------------------------------------------------------------------------------- headers


def _make_integer_reader(bits: int) -> ValueReader:
    """Return the reader of a header field that is a signed integer of `bits` bits.

    The reader returns None for an empty string. It raises HeaderError if the string is not an
    integer, or is out of range.
    """
    limit = 1 << (bits - 1)

    def read(field_text: str, wire_name: str) -> int | None:
        """Return the integer in `field_text`, and None for "". Raises HeaderError."""
        if not field_text:
            return None
        try:
            integer = int(field_text)
        except ValueError:
            integer = limit  # out of range, so that the error below is raised
        if not -limit <= integer < limit:
            shown = field_text if len(field_text) <= _SHOWN_MAX else f"{field_text[:_SHOWN_MAX]}…"
            raise HeaderError(
                f"the custom field <{wire_name}> is not an integer of {bits} bits: {shown!r}. "
                f"Send a whole number from {-limit} to {limit - 1}."
            )
        return integer

    return read


_SHOWN_MAX: Final = 40
"""The most characters of a wrong value that an error shows."""
_READ_INT32 = _make_integer_reader(32)
_READ_INT64 = _make_integer_reader(64)


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
    """Return a decorator that declares a class as the header of some request or response codes.

    The decorator adds the class to `table` under each of `codes`. A class without a docstring gets
    one with the names and numbers of the codes.

    `short_names` has one character for each field, which is the name of the field on the wire. An
    empty string means that the fields keep their names.
    """

    def declare(cls: type[T]) -> type[T]:
        """Make `cls` a header class, add it to the table, and return it."""
        code_names = ", ".join(f"{code.name} ({code})" for code in codes)
        docstring = cls.__doc__ or f"The header of {code_names}."
        header_class = _make_value_class(cls, __doc__=docstring)
        if short_names:
            fields = zip(_TABLES[header_class], short_names, strict=True)
            _TABLES[header_class] = tuple(
                (name, short_name, read, default, set_value)
                for (name, _, read, default, set_value), short_name in fields
            )
        table.update((int(code), header_class) for code in codes)
        return header_class

    return declare


def decode_header(cls: type[T], fields: Mapping[str, str] | None) -> T:
    """Return an instance of the header class `cls`, with the values in `fields`.

    `fields` are the extFields of a command, or None if it has none. Fields that `cls` does not
    declare are ignored. Absent fields get their default. Raises HeaderError with the name of the
    field if a required field is missing or a field is invalid. This runs for every request.
    """
    received = fields or {}
    header = cls.__new__(cls)
    for _, wire_name, read, default, set_value in _TABLES[cls]:
        field_value: Any = received.get(wire_name)
        if field_value is not None:
            field_value = read(field_value, wire_name)
        if field_value is None:
            field_value = default
            if field_value is MISSING:
                raise HeaderError(f"the custom field <{wire_name}> is null")
        set_value(header, field_value)
    return header


def encode_header(header: Any) -> dict[str, str]:
    """Return the extFields of a header, an instance of a declared class, as strings.

    Booleans become `true` or `false`. Fields that are None are left out.
    """
    fields: dict[str, str] = {}
    for name, wire_name, _, _, _ in _TABLES[type(header)]:
        field_value = getattr(header, name)
        if isinstance(field_value, str):
            fields[wire_name] = field_value
        elif field_value is not None:
            fields[wire_name] = str(field_value).lower()  # lower for True and False
    return fields


def wire_names(cls: type) -> tuple[str, ...]:
    """Return the names of a header's fields on the wire, in the order of declaration."""
    return tuple(wire_name for _, wire_name, *_ in _TABLES[cls])


# ------------------------------------------------------------------------------- value codecs

QUEUE_TEXT_VALUES_MAX: Final = 32
"""The most JSON values in a string that contains a queue. A queue has three fields."""


def queue_from(json_value: Any, value_name: str = "The queue") -> MessageQueue:
    """Return the queue that a JSON value describes.

    The value is an object, an object that is the key of a map (a tuple of pairs), or a string with
    the JSON of an object. `value_name` is its name in errors. Raises ProtocolError if the value is
    none of these, or lacks the topic or the broker name.
    """
    if isinstance(json_value, str):
        if fastjson.bound_counts(json_value).values > QUEUE_TEXT_VALUES_MAX:
            raise ProtocolError(f"{value_name} has more than {QUEUE_TEXT_VALUES_MAX} values.")
        json_value = fastjson.loads(json_value, QUEUE_TEXT_VALUES_MAX)
    if isinstance(json_value, tuple):
        queue_fields = dict(json_value)
    else:
        queue_fields = as_object(json_value, value_name)
    if "topic" not in queue_fields or "brokerName" not in queue_fields:
        raise ProtocolError("A queue lacks its topic or brokerName.")
    return MessageQueue(
        take_text(queue_fields, "topic"),
        take_text(queue_fields, "brokerName"),
        take_integer(queue_fields, "queueId"),
    )


def queue_object(queue: MessageQueue) -> dict[str, Any]:
    """Return a queue as a JSON object."""
    return {"brokerName": queue.broker, "queueId": queue.queue_id, "topic": queue.topic}


class ValueCodec(NamedTuple):
    """How the values of one type are converted from and to JSON.

    - `read(json_value, name)` converts a JSON value other than null. `name` is its name in errors.
    - `make_default()` returns the value for null or for an absent field.
    - `write(value)` converts a value to JSON. None means that the value is already JSON.
    - `write_key(value)` converts a value that is the key of a map. None means that the value can be
      a key in JSON as it is.
    """

    read: ValueReader
    make_default: Callable[[], Any]
    write: ValueWriter | None = None
    write_key: ValueWriter | None = None


def _read_boolean(json_value: Any, _name: str) -> bool:
    """Return a JSON value as a boolean. Of strings, only `true` in any case is True."""
    if isinstance(json_value, str):
        return json_value.lower() == "true"
    return bool(json_value)


_VALUE_CODECS: Final[dict[Any, ValueCodec]] = {
    int: ValueCodec(as_integer, int),
    float: ValueCodec(as_float, float),
    bool: ValueCodec(_read_boolean, bool),
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
    """Return the codec of a type: how its values are read from JSON and written to it.

    `annotation` is a plain type, `X | None`, a collection or mapping of such types, or a class that
    has an object codec. The result is cached. Codecs of classes are looked up here, not when a
    field is declared, so the order of declarations does not matter.
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
        value_types = [argument for argument in arguments if argument is not NoneType]
        codec = _make_optional_codec(value_types[0])
    elif issubclass(origin, Mapping):
        codec = _make_map_codec(*arguments)
    else:
        # Abstract types such as Sequence are decoded to lists.
        collection_type = origin if origin in (tuple, frozenset) else list
        codec = _make_list_codec(collection_type, arguments[0])
    _VALUE_CODECS[annotation] = codec
    return codec


def _make_optional_codec(value_type: Any) -> ValueCodec:
    """Return the codec of `value_type | None`. None is null in JSON.

    `NoneType` makes the default: called without arguments, it returns None.
    """
    codec = value_codec(value_type)
    write_value = codec.write
    if write_value is None:
        return ValueCodec(codec.read, NoneType)

    def write_optional(value: Any) -> Any:
        return None if value is None else write_value(value)

    return ValueCodec(codec.read, NoneType, write_optional)


def _make_list_codec(collection_type: Callable[[Iterable[Any]], Any], item_type: Any) -> ValueCodec:
    """Return the codec of collections, which are lists in JSON.

    The items of a collection have the type `item_type`. `collection_type` is the constructor of the
    collection: list, tuple or frozenset.

    A null in a received list becomes the default of the item type. If the items are strings, it is
    left out. A frozenset of plain JSON values is written as a sorted list.
    """
    read_item, make_default_item, write_item, _ = value_codec(item_type)

    def read_list(json_list: Any, list_name: str) -> Any:
        """Return the collection in a JSON list. `list_name` names it in errors."""
        json_items = as_list(json_list, list_name)
        if item_type is str:
            json_items = [json_item for json_item in json_items if json_item is not None]
        return collection_type(
            [
                make_default_item() if json_item is None else read_item(json_item, list_name)
                for json_item in json_items
            ]
        )

    def write_items(items: Iterable[Any]) -> list[Any]:
        return [write_item(item) for item in items]  # type: ignore[misc]

    write_list: ValueWriter
    if write_item:
        write_list = write_items
    elif collection_type is frozenset:
        write_list = sorted
    else:
        write_list = list
    return ValueCodec(read_list, collection_type, write_list)  # type: ignore[arg-type]


def _make_map_codec(key_type: Any, value_type: Any) -> ValueCodec:
    """Return the codec of mappings from `key_type` to `value_type`, which are objects in JSON.

    A null value in a received object becomes the default of the value type. If the values are
    strings, the member is left out.

    A class of values may declare that one of its fields (`key_name`) repeats the key. If a received
    value lacks this field, the field gets the key.
    """
    read_key, _, _, write_key = value_codec(key_type)
    read_value, make_default_value, write_value, _ = value_codec(value_type)
    key_name = OBJECT_CODECS[value_type].key_name if value_type in OBJECT_CODECS else ""

    def read_member_value(json_key: Any, json_value: Any, map_name: str) -> Any:
        """Return the value of one member. It gets the key if it lacks the field `key_name`."""
        if key_name and as_object(json_value, map_name).get(key_name) is None:
            received_fields = json_value or {}
            json_value = {**received_fields, key_name: json_key}
        if json_value is None:
            return make_default_value()
        return read_value(json_value, map_name)

    def read_map(json_map: Any, map_name: str) -> dict[Any, Any]:
        """Return the dict in a JSON object. `map_name` names it in errors."""
        mapping = {}
        for json_key, json_value in as_object(json_map, map_name).items():
            if json_value is None and value_type is str:
                continue
            key = read_key(json_key, map_name)
            mapping[key] = read_member_value(json_key, json_value, map_name)
        return mapping

    def write_map(mapping: Mapping[Any, Any]) -> dict[Any, Any]:
        """Return the JSON object, with converted keys and values, in the same order."""
        json_map = {}
        for key, value in mapping.items():
            json_key = write_key(key) if write_key else key
            json_map[json_key] = write_value(value) if write_value else value
        return json_map

    is_already_json = not (write_value or write_key)
    return ValueCodec(read_map, dict, dict if is_already_json else write_map)


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
        """Store how the fields of `cls` are read and written.

        `declared` has (attribute name, type, declaration) of each field. `constants` are members
        that are written into every object. `key` is the attribute that repeats the key if the
        object is a value of a map, "" if there is none.
        """
        self._cls = cls
        self._declared = [row for row in declared if row[2].wire_name]
        self.constants = dict(constants)
        wire_names_by_attribute = {
            name: declaration.wire_name for name, _, declaration in self._declared
        }
        self.names = frozenset(wire_names_by_attribute.values())
        self.key_name = wire_names_by_attribute.get(key, "")

    @cached_property
    def read(self) -> Callable[..., T]:
        """The function (value, name) that makes an instance of the class from a JSON object.

        `name` is the name of the value in errors. The function raises ProtocolError if the value is
        neither an object nor null, or if a field has another type than declared.

        The function is made at the first access, when the codecs of all other classes are declared.
        """
        cls = self._cls
        rows = [self._make_field_reader(*row) for row in self._declared]

        def read_object(json_object: Any, object_name: str = "The value") -> T:
            """Return an instance with the members of an object. Absent ones get defaults."""
            get_member = as_object(json_object, object_name).get
            attributes = {}
            for name, wire_name, plain_type, read_value, make_default in rows:
                value = get_member(wire_name)
                if value.__class__ is not plain_type:  # a str or bool needs no conversion
                    value = make_default() if value is None else read_value(value, wire_name)
                attributes[name] = value
            return cls(**attributes)

        return read_object

    @staticmethod
    def _make_field_reader(
        name: str, field_type: Any, declaration: FieldDeclaration
    ) -> tuple[str, str, type | None, ValueReader, Callable[[], Any]]:
        """Return the parts that `read` needs for one field.

        - the name of the attribute, and the name of the field in JSON
        - str or bool if instances of it need no conversion, else None
        - the reader of other values
        - the function that returns the default
        """
        codec = value_codec(field_type)
        default = declaration.default if declaration.absent is MISSING else declaration.absent
        # `repeat(default).__next__` is a fast function that always returns `default`.
        make_default = codec.make_default if default is MISSING else repeat(default).__next__
        is_plain = field_type in (str, bool) and not declaration.read
        plain_type = field_type if is_plain else None
        read_value = declaration.read or codec.read
        return name, declaration.wire_name, plain_type, read_value, make_default

    @cached_property
    def write(self) -> Callable[[T], dict[str, Any]]:
        """The function (instance) that returns an instance as a JSON object, a dict.

        The members are sorted by their name in JSON. Fields that are None are left out. The members
        in `constants` come last. The function is made at the first access, as for `read`.
        """
        rows = sorted(self._declared, key=lambda row: row[2].wire_name)
        names_on_wire = [declaration.wire_name for _, _, declaration in rows]
        get_values = _make_attributes_getter([name for name, _, _ in rows])
        converters, optional_names = self._find_converters()
        constants = self.constants

        def write_plain_object(instance: T) -> dict[str, Any]:
            return dict(zip(names_on_wire, get_values(instance), strict=True))

        def write_object(instance: T) -> dict[str, Any]:
            """Return the JSON object of an instance, with the constants at the end."""
            members = dict(zip(names_on_wire, get_values(instance), strict=True))
            for wire_name, convert in converters:
                members[wire_name] = convert(members[wire_name])
            for wire_name in optional_names:
                if members[wire_name] is None:
                    del members[wire_name]
            if constants:
                members.update(constants)
            return members

        is_plain = not (converters or optional_names or constants)
        return write_plain_object if is_plain else write_object

    def _find_converters(self) -> tuple[list[tuple[str, ValueWriter]], list[str]]:
        """Return (converters, optional names) of the fields that `write` must handle one by one.

        Converters are pairs of a field's name in JSON and the function that converts its value. The
        optional names are the names in JSON of the fields that may be None.
        """
        converters: list[tuple[str, ValueWriter]] = []
        optional_names: list[str] = []
        for _, field_type, declaration in self._declared:
            convert = declaration.write or value_codec(field_type).write
            if convert:
                converters.append((declaration.wire_name, convert))
            if declaration.write or NoneType in get_args(field_type):
                optional_names.append(declaration.wire_name)
        return converters, optional_names


def _make_attributes_getter(names: Sequence[str]) -> Callable[[Any], tuple[Any, ...]]:
    """Return a function (instance) that returns the values of the attributes `names`."""
    if len(names) > 1:
        return attrgetter(*names)
    (name,) = names  # for one name `attrgetter` would return the value itself, not a tuple
    return lambda instance: (getattr(instance, name),)


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

    `declared` maps the attribute name of a field to its name in JSON, or to a `json_field(…)`. A
    field that is missing there is never sent. `key` is the attribute that repeats the key if the
    object is a value of a map. `constants` are members that are written into every object.
    """
    rows = []
    for field in fields(cls):  # type: ignore[arg-type]
        declaration = declared.get(field.name, "")
        if isinstance(declaration, str):
            declaration = FieldDeclaration(declaration)
        rows.append((field.name, field.type, declaration._replace(default=field.default)))
    codec = OBJECT_CODECS[cls] = ObjectCodec(cls, rows, constants or {}, key)
    return codec


@dataclass_transform(frozen_default=True, field_specifiers=(json_field,))
def body(cls: type[T]) -> type[T]:
    """Declare a class as the body of a request or response, which is a JSON object.

    The returned class has frozen instances, and its codec is registered. Every annotated attribute
    of the class must have a `json_field(…)` as its value.
    """
    rows = [
        (name, field_type, vars(cls)[name]) for name, field_type in get_annotations(cls).items()
    ]
    value_class = _make_value_class(cls)
    OBJECT_CODECS[value_class] = ObjectCodec(value_class, rows, {})
    return value_class


Codec = tuple[Callable[[T], bytes], Callable[[JsonData], T]]
"""An encoder and a decoder of bodies."""


def body_codec(cls: type[T], body_name: str) -> Codec[T]:
    """Return (encoder, decoder) of bodies that contain an instance of `cls` as JSON.

    The encoder returns bytes. The decoder raises ProtocolError for an invalid body, and calls it
    `body_name`.
    """
    codec: ObjectCodec[T] = OBJECT_CODECS[cls]
    return (
        lambda instance: fastjson.dumps(codec.write(instance)),
        lambda json_data: codec.read(load_object(json_data, body_name)),
    )


def member_codec(
    key: str, value_type: type[T], body_name: str, **constants: Any
) -> tuple[Callable[[Any], bytes], Callable[[JsonData], T]]:
    """Return (encoder, decoder) of bodies that are a JSON object with one important member, `key`.

    The encoder takes the value of the member, of the type `value_type`. It adds `constants` as
    further members. The decoder returns the value of the member, or the default of its type if the
    member is absent or null. It raises ProtocolError for an invalid body, and calls it `body_name`.
    """
    codec = value_codec(value_type)

    def encode(member: Any) -> bytes:
        json_member = member if codec.write is None else codec.write(member)
        return fastjson.dumps({key: json_member, **constants})

    def decode(json_body: JsonData) -> T:
        """Return the member `key` of the body; its default if it is absent or null."""
        json_member = load_object(json_body, body_name).get(key)
        if json_member is None:
            return codec.make_default()  # type: ignore[no-any-return]
        return codec.read(json_member, key)  # type: ignore[no-any-return]

    return encode, decode
