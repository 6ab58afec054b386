"""Lanes: how members of one group with different subscriptions share its messages.

A lane consists of the members of a group that have the same subscription. It has committed offsets
of its own. design/0009 explains why this neither loses nor repeats messages.
"""
