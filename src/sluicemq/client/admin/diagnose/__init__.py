"""Diagnosis of clusters, consumer groups and messages: facts in, findings out.

`sluice explain`, `sluice doctor`, the MCP server and the console share this package. It is pure:
it sends no requests and reads no clock. `client.admin.explain` and `operate.doctor` collect the
facts.

    group_facts, cluster_facts    what brokers, name servers and clients reported
    group_rules, message_rules,   the rules: a code, a condition on the facts, and the sentences of
    cluster_rules                 the finding
    table                         all rules in one table, and `diagnose_cluster`
    findings                      what rules and findings are, and the list of all codes
    records                       findings as JSON

A fact that could not be learned is None or empty, and no rule holds because of it: a finding is
never a guess.
"""
