"""Text to batches: corpora, tokenizers, token files, and the baseline a model has to beat."""
