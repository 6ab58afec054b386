"""Findings as JSON. Scripts depend on the keys, so they never change.

`sluice explain` and `sluice doctor` print the fix of a finding under different keys, for
historical reasons.
"""

from typing import Any

from sluicemq.client.admin.diagnose.findings import Finding, GroupExplained


def explain_record(finding: Finding) -> dict[str, str]:
    """Return a finding as `sluice explain --json` prints it: code, what, instead."""
    return {"code": finding.code, "what": finding.what, "instead": finding.fix}


def doctor_record(finding: Finding) -> dict[str, str]:
    """Return a finding as `sluice doctor --json` prints it: code, what, "cure"."""
    return {"code": finding.code, "what": finding.what, "cure": finding.fix}


def group_record(explained: GroupExplained) -> dict[str, Any]:
    """Return an explained group as a dictionary, as `sluice explain group --json` prints it."""
    return {
        "group": explained.group,
        "findings": [explain_record(finding) for finding in explained.findings],
        "lag": explained.lag,
        "matching": explained.matching,
    }
