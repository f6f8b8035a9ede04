"""Parts that give each worker a cost for a request: one file each."""
