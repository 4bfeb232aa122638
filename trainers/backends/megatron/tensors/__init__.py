"""The tensors of a Hugging Face checkpoint, as megatron-core's parameters are made of them.

sources.py  what one parameter is made of, and how that is cut over workers
table.py    all layers of all architectures
stacks.py   experts that a checkpoint has stacked
kept.py     what a checkpoint has beside, which is written again as it came
"""
