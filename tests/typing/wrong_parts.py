"""Wrong uses of a trainer of parts, one a line: checked by ``test_types.py``, never run."""

from __future__ import annotations

from tests.typing.user_parts import Generator, Model, Policy, Reference, Trainer


def constructors(trainer: Trainer) -> None:
    Policy(3)  # error
    Policy("a", step=1)  # error
    Reference()  # error
    Generator(trainer.references[0])  # error
    Generator(trainer)  # error


def calls(trainer: Trainer) -> None:
    trainer.policy.scores("text")  # error
    trainer.policy.scores([1], by=2)  # error
    trainer.references[0].scores([1], scale="2")  # error
    trainer.references[0].step([1.0])  # error
    trainer.references.scores([1])  # error
    trainer.named["old"].step("text")  # error
    trainer.generator.complete([1])  # error
    trainer.generator.policy.steps.step()  # error
    trainer.policy.version(1)  # error
    trainer.policy.kind("a")  # error
    trainer.critic.step([1.0])  # error


def objects_and_values(trainer: Trainer) -> None:
    trainer.generator.judged_by(trainer.generator)  # error
    trainer.policy.best_of([trainer.references[0]])  # error
    reference: Reference = trainer.policy  # error
    best: Reference = trainer.policy.best_of([trainer.policy])  # error
    scores: list[int] = trainer.policy.scores.defer([1]).result()  # error
    models: list[Model] = [trainer.policy, trainer.generator]  # error
    print(reference, best, scores, models)
