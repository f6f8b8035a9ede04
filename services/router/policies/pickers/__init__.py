"""Parts that take one of the candidates: one file each."""
