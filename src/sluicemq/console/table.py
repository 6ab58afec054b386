"""The pages: path, handler, role, template, and under which word they stand in the navigation."""

from typing import Final

from sluicemq.console.accounts import Role
from sluicemq.console.context import Page
from sluicemq.console.pages import cluster, groups, topics

PAGES: Final = (
    Page("/", cluster.show, Role.READ, "cluster.html", entry="nav.cluster"),
    Page("/topics", topics.show_all, Role.READ, "topics.html", entry="nav.topics"),
    Page("/topics/{topic}", topics.show, Role.READ, "topic.html"),
    Page("/groups", groups.show_all, Role.READ, "groups.html", entry="nav.groups"),
    Page("/groups/{group}", groups.show, Role.READ, "group.html"),
)
