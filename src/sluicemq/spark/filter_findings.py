"""What `filter.sql` loses without a word, said while Spark plans.

A consumer is told of its expression when it subscribes (`filter.check`); a DataFrame is told here.
An expression alone does not show the trap that loses most: beside a whole number '40.7' is an error
and its message no match (docs/filtering.md), so the newest messages are looked at too. A SluiceMQ
broker does that in its property columns; of a RocketMQ broker, and of a store, so many are read.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from sluicemq.client.sync.admin import Admin
from sluicemq.errors import SluiceError
from sluicemq.filter.check import check

logger = logging.getLogger(__name__)
MESSAGES_MAX: Final = 256
TOPICS_MAX: Final = 16
"""So many of a pattern's topics are looked at."""
_ALWAYS: Final = frozenset({"whole-against-fraction", "text-against-number"})
"""The other findings (a name or a spelling that no message has) count where nothing matches."""
Reports = Iterable[Mapping[str, Any]]
"""`filter.lab.Report` as mappings."""


def tried_at_brokers(admin: Admin, topics: Sequence[str], expression: str) -> Reports:
    """The expression on the newest messages of each topic. Raises the client's errors."""
    for topic in topics[:TOPICS_MAX]:
        for trial in admin.try_filter(topic, expression, count_max=MESSAGES_MAX):
            yield trial.report


def tried_here(rows: Sequence[Mapping[str, str]], expression: str) -> Reports:
    """The same on these messages' properties."""
    from sluicemq.filter.lab import Trial  # noqa: PLC0415 - NumPy

    trial = Trial(expression)
    trial.add_rows(rows)
    return [asdict(trial.report())]


def filter_findings(expression: str, try_it: Callable[[str], Reports]) -> list[str]:
    """What surprises in an expression, and what of the newest messages it loses by mistake; each
    once. Nobody is refused a read because this look failed."""
    told = [f"{found.what} {found.instead}" for found in check(expression) if not found.is_error]
    try:
        told += [one for report in try_it(expression) for one in _of_report(report)]
    except SluiceError as error:
        logger.debug("filter.sql %r is not tried: %s", expression, error)
    return list(dict.fromkeys(told))


def _of_report(report: Mapping[str, Any]) -> Iterator[str]:
    newest = f"Of the newest {report['rows']} messages {report['matched']} match."
    for item in report["properties"]:
        for found in item["findings"]:
            if found["code"] in _ALWAYS or not report["matched"]:
                yield f"{newest} {found['what']} {found['instead']}"


def warn_of_filter(expression: str | None, try_it: Callable[[str], Reports]) -> None:
    """Logs `filter_findings` of the option `filter.sql`, when there is one."""
    for one in filter_findings(expression, try_it) if expression is not None else ():
        logger.warning("filter.sql %r: %s", expression, one)
