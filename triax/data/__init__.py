"""From files to rows of tokens: sources, the held-out split, the tokenizer, packing and mixing."""
