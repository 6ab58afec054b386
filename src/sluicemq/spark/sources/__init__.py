"""Reading: what the driver plans and what executors do, of brokers and of store directories."""
