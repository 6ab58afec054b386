"""Simulators, models and the stepped broker: what the product's own tests drive it with."""
