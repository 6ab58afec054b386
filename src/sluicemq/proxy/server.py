"""The proxy served: its methods, its port, its end."""

from collections.abc import Mapping

from sluicemq.proxy import messages as m
from sluicemq.proxy.backend import Backend
from sluicemq.proxy.routes import Routing
from sluicemq.proxy.service import Method


def table(backend: Backend) -> Mapping[str, Method]:
    """Which method is whose."""
    routing = Routing(backend)
    return {
        "QueryRoute": Method(m.QueryRouteRequest, m.QueryRouteResponse, routing.query_route),
        "QueryAssignment": Method(
            m.QueryAssignmentRequest, m.QueryAssignmentResponse, routing.query_assignment
        ),
    }
