"""A model on a single worker that runs in a lower dtype than its weights: what FSDP2 does over several, without hooks.

low_weights   copies of the weights in that dtype, and their gradients added up in float32
passes        forward and backward passes of fixed shapes, as CUDA graphs
"""
