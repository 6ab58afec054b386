"""Tag expressions and SQL92 selectors, with exactly RocketMQ's semantics."""
