"""How a body is declared, and the one codec of all JSON objects.

    @body
    class QueueStats:
        offset_min: int = json("minOffset")
        offset_max: int = json("maxOffset")
        last_time_ms: int = json("lastUpdateTimestamp")

    encode_topic_stats, decode_topic_stats = body_codec(TopicStats, "topic statistics")

`body` makes a frozen dataclass whose fields name their spelling on the wire; `form` says the same
of a class that is declared elsewhere. How a value stands in JSON follows from its type: numbers,
texts, lists, tables, `X | None`, and every other class with a form.

Read is with Java's tolerance: unknown fields are ignored, absent and null mean the default (without
one: 0, "", false, nothing), numbers may be texts and texts numbers. Everything that is of another
kind raises ProtocolError that names the field. Written are the forms that Java and Go clients read
(spec/remoting.md §5): names sorted, None left out.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cached_property
from operator import attrgetter
from types import NoneType
from typing import (
    Any,
    Final,
    Generic,
    NamedTuple,
    TypeVar,
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

# ------------------------------------------------------------------------------- single values


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


def as_integer(value: Any, what: str) -> int:
    """`value` as an integer; text is parsed, as fastjson does."""
    try:
        return int(value)
    except (ValueError, TypeError, OverflowError) as error:
        raise ProtocolError(f"{what} is not an integer.") from error


def _as_float(value: Any, what: str) -> float:
    try:
        return float(value)
    except (ValueError, TypeError, OverflowError) as error:
        raise ProtocolError(f"{what} is not a number.") from error


def _as_boolean(value: Any, _what: str) -> bool:
    return value.lower() == "true" if isinstance(value, str) else bool(value)


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


# --------------------------------------------------------------------------------------- kinds


class Kind(NamedTuple):
    """How the values of one type stand in JSON. `absent` makes what null means; without `write`
    they are JSON as they are. As a map's key they are written by `write_key`."""

    read: Read
    absent: Callable[[], Any]
    write: Write | None = None
    write_key: Write | None = None


def queue_from(value: Any, what: str = "The queue") -> MessageQueue:
    """A queue: an object, an object that is a map's key, or a text that holds the object."""
    if isinstance(value, str):
        value = fastjson.loads(value)
    values = dict(value) if isinstance(value, tuple) else as_object(value, what)
    if "topic" not in values or "brokerName" not in values:
        raise ProtocolError("A queue lacks its topic or brokerName.")
    return MessageQueue(
        take_text(values, "topic"), take_text(values, "brokerName"), take_integer(values, "queueId")
    )


def queue_object(queue: MessageQueue) -> dict[str, Any]:
    """A queue as a JSON object."""
    return {"brokerName": queue.broker, "queueId": queue.queue_id, "topic": queue.topic}


_KINDS: Final[dict[Any, Kind]] = {
    int: Kind(as_integer, int),
    float: Kind(_as_float, float),
    bool: Kind(_as_boolean, bool),
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
    if annotation not in _KINDS:
        _KINDS[annotation] = _kind(annotation)
    return _KINDS[annotation]


def _kind(annotation: Any) -> Kind:
    if annotation in FORMS:
        form = FORMS[annotation]
        return Kind(form.read, lambda: form.read({}), form.write)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if NoneType in arguments:
        inner = kind_of(next(one for one in arguments if one is not NoneType))
        write = inner.write
        return Kind(inner.read, NoneType, write and (lambda it: None if it is None else write(it)))
    if issubclass(origin, Mapping):
        return _table_kind(*arguments)
    return _list_kind(origin if origin in (tuple, frozenset) else list, arguments[0])


def _list_kind(make: Callable[[Iterable[Any]], Any], item: Any) -> Kind:
    kind = kind_of(item)
    read, absent, write = kind.read, kind.absent, kind.write

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
    keys, kind = kind_of(key), kind_of(item)
    read_key, write_key = keys.read, keys.write_key
    read, absent, write = kind.read, kind.absent, kind.write
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


class Json(NamedTuple):
    """A declared field. `absent` is what null means when that is not the default of the class;
    `read` and `write` take the place of those of its type."""

    wire: str
    default: Any = MISSING
    default_factory: Any = MISSING
    absent: Any = MISSING
    read: Read | None = None
    write: Write | None = None


def json(wire: str, **options: Any) -> Any:
    """A field named `wire` in JSON, with the options of `Json`."""
    return Json(wire, **options)


class _Member(NamedTuple):
    """`plain` is the class of values that are read as they are; `read`, `write` and `absent` as in
    a kind."""

    name: str
    wire: str
    plain: type | None
    read: Read
    absent: Callable[[], Any]
    write: Write | None
    is_optional: bool


class Form(Generic[T]):
    """How a class stands in JSON. `constants` are written besides; `key_name` is the wire name of
    the field that the key of a table stands in for when it is absent."""

    def __init__(
        self, cls: type[T], declared: Mapping[str, Json], constants: Mapping[str, Any], key: str
    ) -> None:
        self._cls = cls
        self._declared = declared
        self.constants = dict(constants)
        self.key_name = declared[key].wire if key else ""

    @property
    def names(self) -> frozenset[str]:
        """The names of its fields on the wire."""
        return frozenset(one.wire for one in self._declared.values())

    @cached_property
    def _fields(self) -> tuple[_Member, ...]:
        """In the order of their names on the wire, in which they are written."""
        found = []
        for one in fields(self._cls):  # type: ignore[arg-type]  # forms are of dataclasses
            if (said := self._declared.get(one.name)) is None:
                continue
            kind = kind_of(one.type)
            default = one.default if said.absent is MISSING else said.absent
            found.append(
                _Member(
                    one.name,
                    said.wire,
                    one.type if one.type in (int, str, bool) and not said.read else None,
                    said.read or kind.read,
                    kind.absent if default is MISSING else lambda default=default: default,  # type: ignore[misc]
                    said.write or kind.write,
                    is_optional=said.write is not None or NoneType in get_args(one.type),
                )
            )
        return tuple(sorted(found, key=lambda it: it.wire))

    @cached_property
    def _written(self) -> tuple[Callable[[T], Any], list[str], list[tuple[str, Write]], list[str]]:
        """Values of an instance, their names, what has to be converted, and may be None."""
        found = self._fields
        get = attrgetter(*(it.name for it in found)) if len(found) > 1 else None
        return (
            get or (lambda item: (getattr(item, found[0].name),)),
            [it.wire for it in found],
            [(it.wire, it.write) for it in found if it.write is not None],
            [it.wire for it in found if it.is_optional],
        )

    def read(self, value: Any, what: str = "The value") -> T:
        """A JSON object -> an instance. Raises ProtocolError."""
        given = as_object(value, what).get
        made = {}
        for name, wire, plain, read, absent, _, _ in self._fields:
            value = given(wire)
            if value.__class__ is not plain:
                value = absent() if value is None else read(value, wire)
            made[name] = value
        return self._cls(**made)

    def write(self, item: T) -> dict[str, Any]:
        """An instance -> a JSON object, None left out."""
        get, names, converted, optional = self._written
        values = dict(zip(names, get(item), strict=True))
        for wire, write in converted:
            values[wire] = write(values[wire])
        for wire in optional:
            if values[wire] is None:
                del values[wire]
        return values | self.constants if self.constants else values


FORMS: Final[dict[Any, Form[Any]]] = {}


def form(
    cls: type[T],
    *,
    key: str = "",
    constants: Mapping[str, Any] | None = None,
    **declared: str | Json,
) -> Form[T]:
    """Declare how a dataclass stands in JSON: field -> its name there, or `json(…)`."""
    given = {name: Json(one) if isinstance(one, str) else one for name, one in declared.items()}
    made = FORMS[cls] = Form(cls, given, constants or {}, key)
    return made


@dataclass_transform(frozen_default=True, field_specifiers=(json, field))
def body(cls: type[T]) -> type[T]:
    """Make `cls` a frozen dataclass with a form."""
    declared = {name: one for name, one in vars(cls).items() if isinstance(one, Json)}
    for name, one in declared.items():
        if one.default is not MISSING:
            setattr(cls, name, one.default)
        elif one.default_factory is not MISSING:
            setattr(cls, name, field(default_factory=one.default_factory))
        else:
            delattr(cls, name)
    made = dataclass(frozen=True, slots=True)(cls)
    FORMS[made] = Form(made, declared, {}, "")
    return made


# -------------------------------------------------------------------------------------- bodies

Codec = tuple[Callable[[T], bytes], Callable[[Data], T]]


def body_codec(cls: type[T], what: str) -> Codec[T]:
    """Encoder and decoder of a body that is an object; `what` it is, for errors."""
    found: Form[T] = FORMS[cls]

    def encode(value: T) -> bytes:
        return fastjson.dumps(found.write(value))

    def decode(data: Data) -> T:
        return found.read(load_object(data, what))

    return encode, decode


def member_codec(
    key: str, kind: type[T], what: str
) -> tuple[Callable[[Any], bytes], Callable[[Data], T]]:
    """The same of a body whose only member is `key`."""
    found = kind_of(kind)

    def encode(value: Any) -> bytes:
        return fastjson.dumps({key: value if found.write is None else found.write(value)})

    def decode(data: Data) -> T:
        value = load_object(data, what).get(key)
        return found.absent() if value is None else found.read(value, key)  # type: ignore[no-any-return]

    return encode, decode


def list_codec(
    key: str, cls: type[T], what: str
) -> tuple[Callable[[Iterable[T]], bytes], Callable[[Data], list[T]]]:
    """The same of a body whose only member is a list."""
    return member_codec(key, list[cls], what)  # type: ignore[valid-type]
