"""Pure decisions of a client: routing, balance, retry, in-flight, offsets."""
