"""Timer wheel, timer log, and what a start has to know about them."""
