"""Policies, scalar heads, tokenizers and adapters on Hugging Face models."""
