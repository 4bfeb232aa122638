"""A stream of named tensors from one worker to others: how weights get from a trainer to the rollout workers.

channel.py       Channel: what is said on the driver, ``send`` and ``receive``
links.py         how the two sides meet; lines.py: what they tell each other, and how a death is noticed
rounds.py        one round of sending; buckets.py: tensors laid into flat bytes
checksums.py     whether bytes are those that were sent; checksum_kernel.py: the same, fast on GPUs
transports.py    how bytes travel: shared memory, CUDA IPC, gloo, NCCL
"""

from rayhelper.channel.channel import Channel, Reception
from rayhelper.channel.rounds import Receipt

__all__ = ["Channel", "Receipt", "Reception"]
