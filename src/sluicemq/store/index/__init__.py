"""The key index: it finds the records of a topic by message key or unique key."""
