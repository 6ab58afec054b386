"""The web console: a cluster in the browser (design/0025)."""
