"""What the ``vllm`` engine needs beside prompts of text for a model that sees pictures."""
