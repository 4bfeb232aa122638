"""Learning from completions that are each judged good or bad: KTO."""

from trainers import from_folder

__getattr__ = from_folder(__name__)
