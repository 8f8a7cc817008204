"""Between text and token ids.

tokenizer        loads a checkpoint's tokenizer, tries its chat template; the bytes of single tokens
tokenizer_files  finds faults of a tokenizer from its files alone, without transformers
detokenizer      text while tokens are generated, cut at a stop string
stop_strings     finds stop strings in growing text
bad_words        token sequences that must not be generated
"""
