"""Models, tokenizers and pictures that are small enough for one core: what tests and benchmarks both need."""
