"""Access control (RocketMQ's ACL 1.0): rules from files, and verdicts on requests.

The package does no I/O except through `files`, and has no clock of its own.
"""
