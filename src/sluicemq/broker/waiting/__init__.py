"""Messages that are delivered later: by delay level, or at a time of their own."""
