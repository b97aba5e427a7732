"""Context parallelism: what the lanes of a CP group do together on a pack they share."""
