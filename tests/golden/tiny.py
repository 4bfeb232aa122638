"""The tokenizer and the model of ``tiny/text.py``, under the name that tests use."""

from benchmarks.tiny.text import CHAT_TEMPLATE, SPECIAL_TOKENS, save_tiny, tiny_model, tiny_tokenizer

__all__ = ["CHAT_TEMPLATE", "SPECIAL_TOKENS", "save_tiny", "tiny_model", "tiny_tokenizer"]
