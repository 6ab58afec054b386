"""The console: a cluster in the browser (docs/design/0025)."""
