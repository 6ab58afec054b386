"""Ready pipelines as Python functions: options by name, checked against the declared fields."""

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sluicemq.errors import ConfigurationError
from sluicemq.spark.pipelines.ready import LIST, REQUIRED, Field, Task


def task_of(
    fields: Sequence[Field],
    spark: Any,
    connection: Mapping[str, str],
    options: Mapping[str, Any],
    *,
    say: Callable[[str], None] = print,
    stopping: Callable[[], bool] = lambda: False,
) -> Task:
    """A task with defaults filled in. Raises ConfigurationError for an option that is unknown,
    missing, or says what it may not."""
    known = {field.name: field for field in fields}
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"Did you mean {near[0]!r}? " if near else ""
            listed = ", ".join(known)
            raise ConfigurationError(
                f"there is no option {name!r}.", cure=f"{hint}There are: {listed}."
            )
    values = {field.name: _value(field, options) for field in fields}
    return Task(spark, values, connection, say, stopping)


def _value(field: Field, options: Mapping[str, Any]) -> Any:
    value = options.get(field.name, field.default)
    if value is REQUIRED:
        raise ConfigurationError(f"the option {field.name!r} is missing.", cure=field.what)
    if field.kind == LIST and isinstance(value, str):
        value = [value]
    if field.words and value not in field.words:
        raise ConfigurationError(
            f"the option {field.name!r} is {value!r}.", cure=f"It is {' or '.join(field.words)}."
        )
    return value
