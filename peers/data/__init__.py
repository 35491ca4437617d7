"""Where tokens come from: text sources, the tokenizer, the store of tokens."""
