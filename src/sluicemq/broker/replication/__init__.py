"""Several brokers of one name: what a master gives its slaves, and what they do with it."""
