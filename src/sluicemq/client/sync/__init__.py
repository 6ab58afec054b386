"""The blocking shell of the client."""
