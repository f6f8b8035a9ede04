"""Parts that say what a request would cost at each worker: one file each."""
