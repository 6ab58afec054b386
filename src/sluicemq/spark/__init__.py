"""Spark data sources and a sink for RocketMQ topics and store directories."""
