"""POP consumption: its requests, what is popped and not acknowledged, and what brings it back."""
