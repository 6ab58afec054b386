"""The proxy served: its methods, its port, its end."""

from collections.abc import Mapping

from sluicemq.proxy import messages as m
from sluicemq.proxy.backend import Backend
from sluicemq.proxy.pulling import Pulling
from sluicemq.proxy.routes import Routing
from sluicemq.proxy.service import Method


def table(backend: Backend) -> Mapping[str, Method]:
    """Which method is whose."""
    routing, pulling = Routing(backend), Pulling(backend)
    return {
        "QueryRoute": Method(m.QueryRouteRequest, m.QueryRouteResponse, routing.query_route),
        "QueryAssignment": Method(
            m.QueryAssignmentRequest, m.QueryAssignmentResponse, routing.query_assignment
        ),
        "UpdateOffset": Method(m.UpdateOffsetRequest, m.UpdateOffsetResponse, pulling.update),
        "GetOffset": Method(m.GetOffsetRequest, m.GetOffsetResponse, pulling.get),
        "QueryOffset": Method(m.QueryOffsetRequest, m.QueryOffsetResponse, pulling.query),
        "SyncLiteSubscription": Method(
            m.SyncLiteSubscriptionRequest, m.SyncLiteSubscriptionResponse, pulling.sync_lite
        ),
    }
