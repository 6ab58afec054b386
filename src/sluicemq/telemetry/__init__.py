"""Metrics, health checks and OpenTelemetry export, which all servers share."""
