"""Lanes: members of one group with different subscriptions share its messages.

docs/design/0009-lanes.md is the theory.
"""
