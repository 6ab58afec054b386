"""The units of consume queues as columns: position, size and code of a tag."""

from typing import Final

from sluicemq.record.layout import UNIT

UNIT_COLUMNS: Final = UNIT.dtype
