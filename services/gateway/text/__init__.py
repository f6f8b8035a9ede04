"""Converts between text and token ids: templates, tokenization, incremental detokenization, stop strings."""
