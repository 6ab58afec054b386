"""Messages that are delivered later: after a delay level, or at a given time."""
