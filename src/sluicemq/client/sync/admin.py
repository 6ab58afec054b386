"""Blocking administration: the operations of `core.admin`, for the Spark source, the command line
and scripts."""

from sluicemq.client.admin.operations import AdminOperations
from sluicemq.client.sync.cluster import Cluster


class Admin(AdminOperations, Cluster):
    """Administration over blocking connections. Use it in a `with` statement; any number of threads
    may share one. Raises the errors of `sluicemq.errors`."""
