"""Groups on processes of their own under torchrun: who is not of a deferred call's group goes on meanwhile."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from rayhelper import Channel, RayHelper
from tests.rayhelper.test_torchrun import torchrun

ROOT = Path(__file__).resolve().parents[2]
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


def by_processes(folder: Path) -> None:
    with RayHelper.session(GROUPS, runtime="torchrun"):
        apart = Apart()
        channel = apart.open()
        found = []
        for value in (1.0, 2.0):
            sent = apart.send.defer(channel, value)
            found.append((apart.receive(channel), sent.result()))
        failed = apart.fail.defer()
        sent = apart.send.defer(channel, 3.0)
        found.append((apart.receive(channel), sent.done()))
        try:
            failed.result()
        except KeyError as error:
            found.append(str(error))
        Apart()  # while a call is owed, and another at the end
        apart.fail.defer()
        channel.close()
    (folder / os.environ["RANK"]).write_text(json.dumps(found))


def test_both_sides_of_a_channel_are_called_by_every_process(tmp_path: Path) -> None:
    done = torchrun(3, "-m", __name__, str(tmp_path), cwd=ROOT)
    assert done.returncode == 0, done.stderr[-4000:]
    found = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(3)]
    received = [[[4.0, 4.0], 1], [[8.0, 8.0], 1], [[12.0, 12.0], True]]
    assert [facts[:3] for facts in found] == [received] * 3
    assert all("the learner cannot" in facts[3] for facts in found)


if __name__ == "__main__":
    by_processes(Path(sys.argv[1]))
