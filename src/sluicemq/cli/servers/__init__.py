"""The commands that serve until they are stopped, such as `sluice up`, and what they share."""
