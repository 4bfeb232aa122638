"""Learning curves of a real model on GSM8K, with test accuracy: ``python -m benchmarks.real.learning``."""
