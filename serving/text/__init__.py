"""Between text and token ids.

tokenizer       loads a checkpoint's tokenizer, or checks its files without transformers; the bytes of single tokens
chat_template   writes conversations, after normalising their messages
template_forms  the forms in which a chat template reads messages, found by trial
detokenizer     text while tokens are generated, cut at a stop string
stop_strings    finds stop strings in growing text
bad_words       token sequences that must not be generated
"""
