"""Between text and token ids.

tokenizer       loads a checkpoint's tokenizer, or checks its files without transformers; the bytes of single tokens
chat_template   writes conversations, normalised to the forms that a template reads, which are found by trial
detokenizer     text while tokens are generated, cut at a stop string
words           finds stop strings in growing text; token sequences of words that must not be generated
"""
