"""`sluice up` and the other commands that serve until they are told to end, and what they share."""
