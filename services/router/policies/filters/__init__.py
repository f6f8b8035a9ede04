"""Parts that narrow down who may have a request: one file each."""
