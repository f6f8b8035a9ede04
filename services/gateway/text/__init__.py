"""Between token ids and text: templates, tokenization, incremental detokenization, stop strings."""
