"""Lanes: members of one group with different subscriptions share its messages.

design/0009 is the theory.
"""
