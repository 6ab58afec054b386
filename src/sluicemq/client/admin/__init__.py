"""Administration and diagnosis of a cluster, as requests of a client."""
