"""Parts that narrow down the workers for a request: one file each."""
