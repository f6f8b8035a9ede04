"""Agreements of the gateway and the process that reads its PDFs; free of libraries for PDFs."""

MAX_CHARS = 2_000_000  # in the text that a file is read as
ENCRYPTED, TOO_LONG = 3, 4  # exit statuses; any other than 0: it is broken, or takes too much
