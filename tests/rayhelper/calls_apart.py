"""Groups on processes of their own under torchrun: who is not of a deferred call's group goes on meanwhile.

Each of three processes runs this as a test: see ``test_torchrun.py``.
"""

from __future__ import annotations

import pytest
import torch

from rayhelper import Channel, RayHelper

GROUPS = {  # of invented GPUs: CPUs have no ranks
    "learner": {"device": "GPU", "ranks": [0], "workers": ["train"]},
    "actors": {"device": "GPU", "ranks": [1, 2], "workers": ["rollout"]},
}


@RayHelper.worker(group=["train", "rollout"])
class Apart:
    @RayHelper.function(group="driver", execute="first")
    def open(self) -> Channel:
        return Channel(2, transport="gloo", timeout_s=60)

    @RayHelper.function(group="train", execute="first")
    def send(self, channel: Channel, value: float) -> int:
        return channel.send([("weight", torch.full((4,), value))]).num_tensors

    @RayHelper.function(group="rollout")
    def receive(self, channel: Channel) -> float:
        return sum(float(weight.sum()) for _, weight in channel.receive())

    @RayHelper.function(group="train", execute="first")
    def fail(self) -> None:
        raise KeyError("the learner cannot")


def test_both_sides_of_a_channel_are_called_by_every_process() -> None:
    with RayHelper.session(GROUPS, runtime="torchrun"):
        apart = Apart()
        channel = apart.open()
        for value in (1.0, 2.0):
            sent = apart.send.defer(channel, value)
            assert apart.receive(channel) == [4 * value] * 2
            assert sent.result() == 1
        failed = apart.fail.defer()
        sent = apart.send.defer(channel, 3.0)
        assert apart.receive(channel) == [12.0] * 2
        assert sent.done()
        with pytest.raises(KeyError, match="the learner cannot"):
            failed.result()
        Apart()  # while a call is owed, and another at the end
        apart.fail.defer()
        channel.close()
