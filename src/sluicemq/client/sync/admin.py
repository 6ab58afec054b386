"""Blocking administration, for the Spark source, the command line and scripts."""

from sluicemq.client.admin.operations import AdminOperations
from sluicemq.client.sync.cluster import Cluster


class Admin(AdminOperations, Cluster):
    """The administrative operations of a cluster, as blocking methods.

        with Admin("127.0.0.1:9876") as admin:
            admin.create_topic("flights", queues=8)

    The operations are those of `sluicemq.Admin`. Any number of threads may share one object. The
    operations raise the errors of `sluicemq.errors`, and ClosedError after `close`.
    """
