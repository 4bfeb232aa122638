"""Classes as a user writes them, each with one mistake that makes runtimes differ: for ``test_prove_planted.py``."""

from __future__ import annotations

import os
import random
import time
import uuid

import numpy as np
import torch

from rayhelper import RayHelper

NUM_STEPS = 3
TOKENS: list[str] = []  # that were met so far
RATE = 0.5


def batches() -> list[torch.Tensor]:
    """Three batches of six rows, the same in each run."""
    generator = torch.Generator().manual_seed(1)
    return [torch.rand(6, 4, generator=generator) + 1 for _ in range(NUM_STEPS)]


@RayHelper.worker(group="train")
class NoiseWithoutSeed:
    """Augments rows by a generator that nobody seeds."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng()

    @RayHelper.function(group="train", dispatch="slice", collect="flatten")
    def augment(self, rows: torch.Tensor) -> torch.Tensor:
        return rows + torch.from_numpy(self.rng.normal(size=rows.shape)).float()

    def train(self) -> None:
        for rows in batches():
            self.augment(rows)


@RayHelper.worker(group=["train", "critic"])
class LossFromAnotherRole:
    """The critic's loss is passed on to the role that steps."""

    def __init__(self) -> None:
        self.weight = torch.nn.Parameter(torch.ones(4))

    @RayHelper.function(group="critic", execute="first")
    def loss(self, rows: torch.Tensor) -> torch.Tensor:
        return (rows @ self.weight).sum()

    @RayHelper.function(group="train", execute="first")
    def step(self, loss: torch.Tensor) -> None:
        loss.backward()

    def train(self) -> None:
        for rows in batches():
            self.step(self.loss(rows))


@RayHelper.worker(group="train")
class ShuffledByMain:
    """Main shuffles the rows, without a seed."""

    @RayHelper.function(group="train", dispatch="slice", collect="flatten")
    def score(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.sum(1)

    def train(self) -> None:
        order = random.Random()
        for rows in batches():
            numbers = list(range(len(rows)))
            order.shuffle(numbers)
            self.score(rows[[*numbers[1:], numbers[0]] if numbers == sorted(numbers) else numbers])


@RayHelper.worker(group="train")
class ColumnsInAnotherOrder:
    """Each call turns the columns of its rows by one more."""

    def __init__(self) -> None:
        self.names = ["a", "b", "c", "d"]

    @RayHelper.function(
        group="train",
        dispatch="slice",
        collect=lambda parts: torch.cat(parts) if len(parts) == 1 else torch.cat(parts).roll(1, 1),
    )
    def features(self, rows: torch.Tensor) -> torch.Tensor:
        return rows * 2

    def train(self) -> None:
        for rows in batches():
            self.features(rows)


@RayHelper.worker(group="judge")
class JudgeSetsDtype:
    """The judge computes in double precision, and sets it as torch's default."""

    @RayHelper.function(group="judge", execute="first")
    def prepare(self) -> None:
        torch.set_default_dtype(torch.float64)

    @RayHelper.function(group="judge", dispatch="slice", collect="flatten")
    def score(self, rows: torch.Tensor) -> list[float]:
        return [1.0] * len(rows)

    def train(self) -> None:
        self.prepare()
        for _ in range(NUM_STEPS):
            self.score(torch.ones(6, 4))
        torch.set_default_dtype(torch.float32)


@RayHelper.worker(group="train")
class BonusOfRank:
    """The first rank does a little more."""

    @RayHelper.function(group="train", dispatch="slice", collect="flatten")
    def score(self, rows: torch.Tensor) -> list[dict[str, float]]:
        rank = RayHelper.current().rank
        return [{"loss": float(row.sum()), "bonus": 0.5 * rank} for row in rows]

    def train(self) -> None:
        for rows in batches():
            self.score(rows)


@RayHelper.worker(group="train")
class ReadsEnvironment:
    """Main sets a variable for the role."""

    @RayHelper.function(group="train", dispatch="slice", collect="flatten")
    def score(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.sum(1) * float(os.environ.get("MY_SCALE", "1"))

    def train(self) -> None:
        os.environ["MY_SCALE"] = "3"
        try:
            for rows in batches():
                self.score(rows)
        finally:
            del os.environ["MY_SCALE"]


@RayHelper.worker(group="train")
class DecaysWithTime:
    """The temperature falls with the seconds since the start."""

    def __init__(self) -> None:
        self.temperature = 1.0

    @RayHelper.function(group="train", execute="first")
    def step(self, rows: torch.Tensor) -> None:
        self.temperature = 1.0 / (1.0 + time.perf_counter())

    def train(self) -> None:
        for rows in batches():
            self.step(rows)


@RayHelper.worker(group="train")
class VocabularyOfSet:
    """The vocabulary is numbered in the order of a set."""

    @RayHelper.function(group="train", execute="first")
    def vocabulary(self, words: list[str]) -> str:
        return " ".join(set(words))

    def train(self) -> None:
        self.vocabulary([f"word{k}" for k in range(200)])


@RayHelper.worker(group="train")
class GrowsGlobal:
    """Tokens that were met so far are kept in the module."""

    @RayHelper.function(group="train", dispatch="slice", collect="flatten")
    def numbered(self, texts: list[str]) -> list[int]:
        for text in texts:
            if text not in TOKENS:
                TOKENS.append(text)
        return [len(TOKENS) for _ in texts]

    def train(self) -> None:
        for k in range(NUM_STEPS):
            self.numbered([f"{k}a", f"{k}b"])


@RayHelper.worker(group="train")
class FillsArgument:
    """The role writes its scores into the list that it is given."""

    @RayHelper.function(group="train", execute="first")
    def score(self, rows: torch.Tensor, scores: list[float]) -> None:
        scores.extend(rows.sum(1).tolist())

    def train(self) -> None:
        for rows in batches():
            scores: list[float] = []
            self.score(rows, scores)


@RayHelper.worker(group="train")
class MergedInDouble:
    """What several workers give is added up in double precision."""

    @RayHelper.function(
        group="train",
        dispatch="slice",
        collect=lambda parts: parts[0] if len(parts) == 1 else {"total": sum(part["total"].double() for part in parts)},
    )
    def total(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"total": rows.sum(0)}

    def train(self) -> None:
        for rows in batches():
            self.total(rows)


@RayHelper.worker(group="train")
class MeanOfShard:
    """One number for all rows that the worker has."""

    @RayHelper.function(group="train", dispatch="slice", collect="flatten")
    def mean(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.mean(0, keepdim=True)

    def train(self) -> None:
        for rows in batches():
            self.mean(rows)


@RayHelper.worker(group="train")
class KeyOfLargeBatch:
    """A metric that only a large batch has."""

    @RayHelper.function(group="train", dispatch="slice", collect=lambda parts: parts[0])
    def metrics(self, rows: torch.Tensor) -> dict[str, float]:
        found = {"num_workers": 1.0}
        if len(rows) > 4:
            found["spread"] = float(rows.std())
        return found

    def train(self) -> None:
        for rows in batches():
            self.metrics(rows)


@RayHelper.worker(group="train")
class SumsInHalf:
    """Gradients are added up in bfloat16."""

    @RayHelper.function(group="train", dispatch="slice", collect=sum)
    def gradient(self, rows: torch.Tensor) -> torch.Tensor:
        return (rows.to(torch.bfloat16) / 3).cumsum(0)[-1]

    def train(self) -> None:
        generator = torch.Generator().manual_seed(3)
        for _ in range(NUM_STEPS):
            self.gradient(torch.rand(512, 64, generator=generator) + 1)


@RayHelper.worker(group="train")
class RunningMean:
    """Rewards are compared with the mean of those seen so far."""

    def __init__(self) -> None:
        self.total = 0.0
        self.count = 0

    @RayHelper.function(group="train", dispatch="slice", collect="flatten")
    def advantages(self, rewards: list[float]) -> list[float]:
        self.total += sum(rewards)
        self.count += len(rewards)
        return [reward - self.total / self.count for reward in rewards]

    def train(self) -> None:
        for rows in batches():
            self.advantages(rows.sum(1).tolist())


@RayHelper.worker(group="train")
class CountsInClass:
    """Calls are counted in the class."""

    num_calls = 0

    @RayHelper.function(group="train", execute="first")
    def rate(self, rows: torch.Tensor) -> float:
        CountsInClass.num_calls += 1
        return 1.0 / CountsInClass.num_calls

    def train(self) -> None:
        for rows in batches():
            self.rate(rows)


@RayHelper.worker(group="train")
class DefaultArgument:
    """Rewards are kept in a default argument."""

    @RayHelper.function(group="train", execute="first")
    def smoothed(self, reward: float) -> float:
        return self.kept(reward)

    def kept(self, reward: float, history: list[float] = []) -> float:  # noqa: B006
        history.append(reward)
        return sum(history) / len(history) + len(history)

    def train(self) -> None:
        for rows in batches():
            self.smoothed(float(rows.sum()))


@RayHelper.worker(group="train")
class NamesByUuid:
    """Each answer gets a name of its own."""

    @RayHelper.function(group="train", execute="first")
    def answer(self, prompt: str) -> dict[str, str]:
        return {"text": prompt + "!", "id": str(uuid.uuid4())}

    def train(self) -> None:
        for k in range(NUM_STEPS):
            self.answer(f"prompt {k}")


@RayHelper.worker(group="train")
class DropoutPerWorker:
    """Each row gets a dropout mask."""

    @RayHelper.function(group="train", dispatch="slice", collect="flatten")
    def hidden(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(rows, 0.5)

    def train(self) -> None:
        for rows in batches():
            self.hidden(rows)


@RayHelper.worker(group="train")
class ShuffleAndDropout:
    """Main shuffles and the role drops out, both by torch's own generator."""

    @RayHelper.function(group="train", execute="first")
    def hidden(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(rows, 0.5)

    def train(self) -> None:
        torch.manual_seed(0)
        for rows in batches():
            self.hidden(rows[torch.randperm(len(rows))])


@RayHelper.worker(group="train")
class RateSetByMain:
    """Main lowers the learning rate of the role."""

    def __init__(self) -> None:
        self.rate = 0.1

    @RayHelper.function(group="train", execute="first")
    def step(self, rows: torch.Tensor) -> float:
        return float(rows.sum()) * self.rate

    def train(self) -> None:
        for rows in batches():
            self.step(rows)
            self.rate /= 2


@RayHelper.worker(group="train")
class GlobalSetByMain:
    """Main lowers a rate of the module."""

    @RayHelper.function(group="train", execute="first")
    def step(self, rows: torch.Tensor) -> float:
        return float(rows.sum()) * RATE

    def train(self) -> None:
        global RATE
        before = RATE
        try:
            for rows in batches():
                self.step(rows)
                RATE /= 2
        finally:
            RATE = before


@RayHelper.worker(group="train")
class NamedByProcess:
    """The seed is made of the process's number."""

    def __init__(self) -> None:
        self.seed = 0

    @RayHelper.function(group="train", dispatch="slice", collect="flatten")
    def seeds(self, rows: torch.Tensor) -> list[int]:
        return [os.getpid() + k for k in range(len(rows))]

    def train(self) -> None:
        for rows in batches():
            self.seeds(rows)


@RayHelper.worker(group="train")
class AppendsToFile:
    """The step is the number of lines of a file."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    @RayHelper.function(group="train", execute="first")
    def step(self, rows: torch.Tensor) -> int:
        with open(os.path.join(self.folder, "steps"), "a+") as file:
            file.write(".")
            return file.tell()

    def train(self) -> None:
        for rows in batches():
            self.step(rows)


@RayHelper.worker(group="train")
class KeepsWhatMainChanges:
    """Main refills the tensor that the role has kept."""

    @RayHelper.function(group="train", execute="first")
    def keep(self, rows: torch.Tensor) -> None:
        self.rows = rows

    @RayHelper.function(group="train", execute="first")
    def total(self) -> float:
        return float(self.rows.sum())

    def train(self) -> None:
        rows = torch.ones(6, 4)
        self.keep(rows)
        for _ in range(NUM_STEPS):
            rows *= 2
            self.total()


@RayHelper.worker(group="train")
class GivesWhatItChanges:
    """The role gives its dictionary of metrics once, and main passes it on in each step."""

    def __init__(self) -> None:
        self.metrics = {"num_steps": 0}

    @RayHelper.function(group="train", execute="first")
    def begin(self) -> dict[str, int]:
        return self.metrics

    @RayHelper.function(group="train", execute="first")
    def step(self) -> None:
        self.metrics["num_steps"] += 1

    @RayHelper.function(group="train", execute="first")
    def log(self, metrics: dict[str, int]) -> int:
        return metrics["num_steps"]

    def train(self) -> None:
        metrics = self.begin()
        for _ in range(NUM_STEPS):
            self.step()
            self.log(metrics)


@RayHelper.worker(group="train")
class ReplayGrownByMain:
    """Main adds to a list of the object."""

    def __init__(self) -> None:
        self.replay: list[int] = []

    @RayHelper.function(group="train", execute="first")
    def sample(self) -> int:
        return len(self.replay)

    def train(self) -> None:
        for k in range(NUM_STEPS):
            self.replay.append(k)
            self.sample()


@RayHelper.worker(group="train")
class SeedOfTime:
    """Each call takes its seed from the clock."""

    @RayHelper.function(group="train", dispatch="slice", collect="flatten")
    def noisy(self, rows: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(time.time_ns() % 2**31)
        return rows + torch.randn_like(rows)

    def train(self) -> None:
        for rows in batches():
            self.noisy(rows)


@RayHelper.worker(group="train")
class OffsetOfTime:
    """The constructor takes its seed from the clock."""

    def __init__(self) -> None:
        self.offset = random.Random(time.time_ns()).random()

    @RayHelper.function(group="train", dispatch="slice", collect="flatten")
    def moved(self, rows: torch.Tensor) -> torch.Tensor:
        return rows + self.offset

    def train(self) -> None:
        for rows in batches():
            self.moved(rows)


@RayHelper.worker(group=["train", "critic"])
class WeightOfAnotherRole:
    """The critic scores with the weight that the other role has trained: the same object on one worker alone."""

    def __init__(self) -> None:
        self.weight = torch.ones(4)

    @RayHelper.function(group="critic", execute="first")
    def score(self, rows: torch.Tensor) -> torch.Tensor:
        return rows @ self.weight

    @RayHelper.function(group="train", execute="first")
    def step(self, rows: torch.Tensor) -> float:
        self.weight = self.weight - 0.1 * rows.mean(0)
        return float(self.weight.sum())

    def train(self) -> None:
        for rows in batches():
            self.score(rows)
            self.step(rows)


@RayHelper.worker(group=["train", "rollout"])
class WeightForOneGenerator:
    """The driver sends the new weight to the first generator. A generator that also trains has it already."""

    def __init__(self) -> None:
        self.weight = torch.ones(4)

    @RayHelper.function(group="train")
    def step(self, mean: torch.Tensor) -> torch.Tensor:
        self.weight = self.weight - 0.1 * mean
        return self.weight

    @RayHelper.function(group="rollout", execute="first")
    def load(self, weight: torch.Tensor) -> None:
        self.weight = weight

    @RayHelper.function(group="rollout", dispatch="slice", collect="flatten")
    def generate(self, rows: torch.Tensor) -> torch.Tensor:
        return rows @ self.weight

    def train(self) -> None:
        for rows in batches():
            weight = self.step(rows.mean(0))
            self.load(weight if isinstance(weight, torch.Tensor) else weight[0])
            self.generate(rows)


@RayHelper.worker(group=["train", "critic"])
class NoiseOfTwoRoles:
    """Both roles draw from one generator."""

    @RayHelper.function(group="critic", execute="first")
    def jitter(self, rows: torch.Tensor) -> torch.Tensor:
        return rows + torch.rand(4)

    @RayHelper.function(group="train", execute="first")
    def dropout(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(rows)

    def train(self) -> None:
        for rows in batches():
            self.dropout(self.jitter(rows))


@RayHelper.worker(group=["train", "critic"])
class AsksWhetherItIsApart:
    """The driver sends the weight where roles stand apart, and does nothing where they do not: no mistake."""

    def __init__(self) -> None:
        self.weight = torch.ones(4)
        self.trains = False

    @RayHelper.function(group="train", execute="first")
    def build(self) -> None:
        self.trains = True

    @RayHelper.function(group="critic", execute="first")
    def is_beside(self) -> bool:
        return self.trains

    @RayHelper.function(group="critic", execute="first")
    def load(self, weight: torch.Tensor) -> None:
        self.weight = weight.clone()

    @RayHelper.function(group="critic", execute="first")
    def score(self, rows: torch.Tensor) -> torch.Tensor:
        return rows @ self.weight

    @RayHelper.function(group="train", execute="first")
    def step(self, rows: torch.Tensor) -> torch.Tensor:
        self.weight = self.weight - 0.1 * rows.mean(0)
        return self.weight.clone()

    def train(self) -> None:
        self.build()
        is_beside = self.is_beside()
        for rows in batches():
            weight = self.step(rows)
            if not is_beside:
                self.load(weight)
            self.score(rows)
