"""Read from brokers and from store directories: planning in the driver, reading in executors."""
