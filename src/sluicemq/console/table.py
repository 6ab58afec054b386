"""The table of pages: path, handler, role, template, navigation entry and audit event."""

from typing import Final

from sluicemq.console.accounts import Role
from sluicemq.console.context import Page
from sluicemq.console.pages import (
    access,
    cluster,
    groups,
    lab,
    letters,
    messages,
    pipelines,
    topics,
    waiting,
)

PAGES: Final = (
    Page("/", cluster.show, Role.READ, "cluster.html", entry="nav.cluster"),
    Page("/topics", topics.show_all, Role.READ, "topics.html", entry="nav.topics"),
    Page("/topics", topics.create, Role.ADMIN, "", audit_event="create topic"),
    Page("/topics/{topic}", topics.show, Role.READ, "topic.html"),
    Page("/topics/{topic}/change", topics.change, Role.ADMIN, "", audit_event="change topic"),
    Page("/topics/{topic}/delete", topics.delete, Role.ADMIN, "", audit_event="delete topic"),
    Page("/groups", groups.show_all, Role.READ, "groups.html", entry="nav.groups"),
    Page("/groups/{group}", groups.show, Role.READ, "group.html"),
    Page("/groups/{group}/reset", groups.preview, Role.OPERATE, "reset.html"),
    Page("/groups/{group}/reset", groups.reset, Role.OPERATE, "", audit_event="reset offsets"),
    Page("/messages", messages.search, Role.READ, "messages.html", entry="nav.messages"),
    Page("/messages/{topic}/{message_id}", messages.show, Role.READ, "message.html"),
    Page("/messages/{topic}/{message_id}/explain", messages.explain, Role.READ, "explain.html"),
    Page(
        "/messages/{topic}/{message_id}/resend",
        messages.resend,
        Role.OPERATE,
        "",
        audit_event="resend message",
    ),
    Page("/dead-letters", letters.show_all, Role.READ, "dead_letters.html", entry="nav.dead"),
    Page("/dead-letters/{group}", letters.show, Role.READ, "dead_group.html"),
    Page("/dead-letters/{group}/letters", letters.show_cluster, Role.READ, "dead_cluster.html"),
    Page("/dead-letters/{group}/replay", letters.dry_run, Role.READ, "replay.html"),
    Page(
        "/dead-letters/{group}/replay",
        letters.replay,
        Role.OPERATE,
        "replay.html",
        audit_event="replay dead letters",
    ),
    Page("/delayed", waiting.show_delayed, Role.READ, "delayed.html", entry="nav.delayed"),
    Page("/delayed/cancel", waiting.cancel, Role.OPERATE, "", audit_event="cancel delayed message"),
    Page(
        "/transactions",
        waiting.show_transactions,
        Role.READ,
        "transactions.html",
        entry="nav.transactions",
    ),
    Page(
        "/transactions/decide", waiting.decide, Role.OPERATE, "", audit_event="decide transaction"
    ),
    Page("/trace", messages.trace, Role.READ, "trace.html", entry="nav.trace"),
    Page("/lab", lab.show, Role.READ, "lab.html", entry="nav.lab"),
    Page("/pipelines", pipelines.show_all, Role.READ, "pipelines.html", entry="nav.pipelines"),
    Page("/pipelines/{name:path}", pipelines.show, Role.READ, "pipeline.html"),
    Page("/access", access.show, Role.ADMIN, "access.html", entry="nav.access"),
    Page("/access/account", access.account, Role.ADMIN, "account.html"),
    Page("/access/try", access.try_request, Role.ADMIN, "attempt.html"),
    Page("/access/account", access.save, Role.ADMIN, "", audit_event="change access account"),
    Page(
        "/access/account/delete", access.delete, Role.ADMIN, "", audit_event="delete access account"
    ),
    Page("/access/white", access.set_white, Role.ADMIN, "", audit_event="change white addresses"),
)
