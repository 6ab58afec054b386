"""The rule table: every rule, and the diagnosis of a whole cluster.

`sluice explain` applies the rules about groups and messages: see `group_rules.explain_group` and
`message_rules.explain_message`. `sluice doctor` applies the rules about servers, topics and groups,
and adds the findings of `sluice explain`.
"""

from typing import Any, Final

from sluicemq.client.admin.diagnose import (
    cluster_rules,
    group_rules,
    message_rules,
    server_rules,
)
from sluicemq.client.admin.diagnose.cluster_facts import ClusterFacts
from sluicemq.client.admin.diagnose.findings import Finding, Rule, Severity, judge

CLUSTER_RULES: Final[tuple[Rule[ClusterFacts], ...]] = (
    *server_rules.ADDRESS_RULES,
    *server_rules.ACCESS_RULES,
    *server_rules.REACHABILITY_RULES,
    *server_rules.STORE_RULES,
    *cluster_rules.TOPIC_RULES,
    *cluster_rules.MESSAGE_RULES,
    *cluster_rules.GROUP_RULES,
    *cluster_rules.LAST_RULES,
)
"""The rules that `sluice doctor` applies to the facts about a cluster."""

EXPLAIN_RULES: Final[tuple[Rule[Any], ...]] = (
    group_rules.NO_SUCH_GROUP,
    *group_rules.GROUP_RULES,
    group_rules.MEMBER_IDLE,
    group_rules.RETRIES_PENDING,
    *group_rules.TOPIC_RULES,
    *group_rules.FILTER_RULES,
    *group_rules.ROUTE_RULES,
    *group_rules.QUEUE_RULES,
    *group_rules.LANE_RULES,
    *group_rules.CONTRACT_RULES,
    group_rules.FILTER_FAILED,
    *group_rules.LAG_RULES,
    *message_rules.VERDICT_RULES,
    *(rule for _, rule in message_rules.FATE_RULES),
    message_rules.OFFSET_PAST,
    message_rules.MESSAGES_AHEAD,
    message_rules.UNDECODABLE,
    *message_rules.LANE_CHOICE_RULES,
)
"""The rules that `sluice explain` applies to the facts about groups and messages."""

RULES: Final = (*CLUSTER_RULES, *EXPLAIN_RULES)
"""All rules. Several rules may have the same code and differ in their conditions and sentences."""


def diagnose_cluster(facts: ClusterFacts) -> list[Finding]:
    """Return what is wrong with a cluster, the most important problem first, then the notes.

    Findings of the same code keep the order in which their rules yield them. Details are left out.
    """
    findings = judge(CLUSTER_RULES, facts) + facts.findings_of_explain
    reported = [finding for finding in findings if finding.severity is not Severity.DETAIL]
    return sorted(dict.fromkeys(reported), key=lambda finding: (finding.is_note, finding.rank))
