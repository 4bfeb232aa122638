"""What the ``megatron`` backend knows of pictures: transformers' vision tower in front of megatron-core's layers.

tower.py     the tower, on the workers of the first stage, and the positions of pictures, on all
rotation.py  which of a picture's three positions turns which channels of a head
"""
