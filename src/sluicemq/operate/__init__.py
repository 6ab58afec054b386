"""Tools that ask a cluster and say what they see; they use the client and nothing of a server."""
