"""Decoders of the Llama family: configs, files, tokenizers, generation."""
