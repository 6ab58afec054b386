"""POP consumption: what is popped and not acknowledged, and what brings it back."""
