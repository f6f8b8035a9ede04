"""Files and batches: many requests in one file, answered when workers have room."""
