"""Reads a pipeline file and checks it as far as that goes without a cluster and without Spark.

    name: late-flights
    cluster: {nameServers: "127.0.0.1:9876"}
    source: {topic: flights, filter.sql: dep_delay > 60}
    transform: select origin, count(*) as n from source group by origin
    sinks:
      - {kind: table, url: "sqlite:///late.db", table: late, key: [origin]}

All that is wrong is found in one reading, each with its line, its key, the nearest right name and a
cure. What needs more is found by `plan`: a transform is parsed by Spark, topics are looked for at
the cluster, tables in the database. Nothing is ever printed that `Secrets` knows.
"""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from sluicemq.errors import ConfigurationError
from sluicemq.files import SYSTEM_FILES, read_text
from sluicemq.spark.pipelines.document import Document, Entry, Problem, nearest
from sluicemq.spark.pipelines.fields import duration_s, read_field, read_fields
from sluicemq.spark.pipelines.pipeline import (
    AVAILABLE_NOW,
    BATCH,
    STREAMING,
    VIEW,
    Pipeline,
)
from sluicemq.spark.pipelines.ready import MAPPING, NAMES, TEXT, Field, ready
from sluicemq.spark.pipelines.sides import read_cluster, read_sinks, read_source

_TOP: Final = (
    "name", "cluster", "source", "transform", "sinks", "mode", "trigger", "checkpoint", "use",
    "with", "spark",
)  # fmt: skip
_OF_FILES: Final = ("source", "transform", "sinks", "mode", "trigger", "checkpoint")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

Entries = Mapping[str, Entry]


def load_pipeline(path: str, environment: Mapping[str, str] | None = None) -> Pipeline:
    """The pipeline of a file. Raises ConfigurationError whose text has a line for each problem:
    `FILE:LINE: KEY: what is wrong. What to do.`"""
    pipeline, problems = check_pipeline(path, environment)
    if pipeline is None:
        told = [one.told(path) for one in problems if one.is_error]
        raise ConfigurationError("\n".join(told))
    return pipeline


def check_pipeline(
    path: str, environment: Mapping[str, str] | None = None
) -> tuple[Pipeline | None, list[Problem]]:
    """The pipeline, if the file is right, and all problems and warnings in the order of lines.

    Raises ConfigurationError when there is no such file or it is no UTF-8.
    """
    try:
        text = read_text(SYSTEM_FILES, path)
    except (UnicodeDecodeError, OSError) as error:
        raise ConfigurationError(f"the file {path!r} cannot be read: {error}.") from None
    if text is None:
        raise ConfigurationError(f"there is no file {path!r}.", cure="Give the path of a pipeline.")
    return parse_pipeline(text, path, os.environ if environment is None else environment)


def parse_pipeline(
    text: str, path: str, environment: Mapping[str, str]
) -> tuple[Pipeline | None, list[Problem]]:
    """The same from the file's text."""
    document = Document(environment)
    root = document.root(text)
    pipeline = None if root is None else _pipeline(document, root, path)
    problems = sorted(document.problems)
    return (None if any(one.is_error for one in problems) else pipeline), problems


def _pipeline(document: Document, root: Entry, path: str) -> Pipeline:
    entries = dict(root.keys_of(_TOP))
    stem = re.sub(r"[^A-Za-z0-9._-]", "-", path.rpartition("/")[2].rpartition(".")[0])
    name = _text(entries, "name") or stem or "pipeline"
    if not _NAME.fullmatch(name):
        entries["name"].problem(f"it is {name!r}.", "Use letters, digits, dots, _ and -.")
    cluster = read_cluster(entries.get("cluster"))
    settings = _settings(entries.get("spark"))
    if "use" in entries:
        use, given = _ready(root, entries)
        made = Pipeline(
            path, name, {one: text for one, (text, _) in cluster.items()}, use=use, given=given,
            settings=settings,
        )  # fmt: skip
    else:
        made = _own(root, entries, Pipeline(path, name, {}, settings=settings), cluster)
    return _with_rest(made, document)


def _with_rest(made: Pipeline, document: Document) -> Pipeline:
    warnings = tuple(one for one in sorted(document.problems) if not one.is_error)
    return replace(made, secrets=document.secrets, warnings=warnings)


def _settings(entry: Entry | None) -> Mapping[str, str]:
    if entry is None:
        return {}
    found: dict[str, str] = read_field(entry, Field("spark", MAPPING, "")) or {}
    for name, inner in (entry.mapping() or {}).items():
        if not name.startswith("spark."):
            inner.problem("a setting of Spark begins with spark.", "As in spark.executor.memory.")
    return found


def _ready(root: Entry, entries: Entries) -> tuple[str, Mapping[str, Any]]:
    use = entries["use"].scalar() or ""
    for name in _OF_FILES:
        if name in entries:
            entries[name].problem("this does not go with use:.", "A ready pipeline has with:.")
    if use not in NAMES:
        entries["use"].problem(f"there is no ready pipeline {use!r}.", nearest(use, NAMES))
        return use, {}
    found = ready(use)
    given = entries.get("with")
    inner = given.mapping() if given is not None else {}
    owner = given if given is not None else entries["use"]
    return use, read_fields(inner or {}, found.fields, owner, f"the ready pipeline {use!r}")


def _own(
    root: Entry, entries: Entries, made: Pipeline, cluster: Mapping[str, tuple[str, int]]
) -> Pipeline:
    if "with" in entries:
        entries["with"].problem("this goes with use: NAME, a ready pipeline.")
    mode = _mode(entries)
    trigger, checkpoint = _when(root, entries, mode)
    source = entries.get("source")
    if source is None:
        root.problem("the key 'source' is missing.", "Say what is read, as in source: {topic: T}.")
    transform = _text(entries, "transform")
    if transform is not None and not re.search(rf"\b{VIEW}\b", transform, re.IGNORECASE):
        entries["transform"].problem(f"it does not read the view {VIEW!r}.", "select … from source")
    sinks = entries.get("sinks")
    if sinks is None:
        root.problem("the key 'sinks' is missing.", "Say where it goes, as in sinks: [{kind: …}].")
    return replace(
        made,
        cluster={name: text for name, (text, _) in cluster.items()},
        source=None if source is None else read_source(source, cluster, mode),
        transform=transform,
        transform_line=entries["transform"].block_line if "transform" in entries else 0,
        sinks=() if sinks is None else read_sinks(sinks, cluster, mode),
        mode=mode,
        trigger=trigger,
        checkpoint=checkpoint,
    )


def _text(entries: Entries, name: str) -> str | None:
    if name not in entries:
        return None
    text: str | None = read_field(entries[name], Field(name, TEXT, ""))
    return text


def _mode(entries: Entries) -> str:
    if "mode" not in entries:
        return BATCH
    found = read_field(entries["mode"], Field("mode", TEXT, "", words=(BATCH, STREAMING)))
    return found or BATCH


def _when(root: Entry, entries: Entries, mode: str) -> tuple[float | None, str | None]:
    """Trigger and checkpoint: both belong to a stream, and a stream has both."""
    cures: tuple[tuple[str, Callable[[], Any], str], ...] = (
        ("trigger", lambda: _trigger(entries["trigger"]), "Write trigger: available-now or 10s."),
        ("checkpoint", lambda: _text(entries, "checkpoint"),
         "Write checkpoint: DIR, where the stream notes how far it is."),
    )  # fmt: skip
    values: list[Any] = []
    for name, read, cure in cures:
        if mode == BATCH and name in entries:
            entries[name].problem("this goes with mode: streaming.", "A batch reads once.")
        elif mode == STREAMING and name not in entries:
            entries["mode"].problem(f"mode: streaming needs the key {name!r}.", cure)
        values.append(read() if name in entries else None)
    return values[0], values[1]


def _trigger(entry: Entry) -> float | None:
    text = entry.scalar()
    if text is None or text.strip() == AVAILABLE_NOW:
        return None
    try:
        return duration_s(text)
    except ValueError:
        entry.problem(f"it is {text!r}.", f"Write {AVAILABLE_NOW}, or a time such as 10s or 5m.")
        return None
