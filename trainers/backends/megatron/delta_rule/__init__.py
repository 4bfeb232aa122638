"""Layers that keep a state in the place of keys (Qwen3-Next and Qwen3.5), and the attention between them.

rule.py       the gated delta rule over the documents of a row, in plain torch
kernels.py    the same by flash-linear-attention, where that is installed and the tensors lie on a GPU
mixing.py     what is around the rule: convolution, decay, gated norm
layer.py      the layer as megatron-core's layers take it, cut over heads
attention.py  attention whose output is gated
"""
