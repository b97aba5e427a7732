"""The data path: raw samples in, packed micro-batches out."""
