"""Tuners: what is trained beside, or in the place of, a model's frozen weights. peft builds all of them.

kinds.py      their names and peft's configuration of each; imports no torch
adapters.py   adds one to a model, merges it, writes it and reads it back
adalora.py    the ranks of AdaLoRA, which a run divides among layers as it goes
quantized.py  frozen weights of 4 or 8 bits under a LoRA adapter (QLoRA), by bitsandbytes
"""
