"""Writing: the sink `rocketmq`, and rows into tables of databases."""
