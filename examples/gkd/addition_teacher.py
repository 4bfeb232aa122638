"""A teacher of two-digit addition, for ``external_plugins`` beside ``examples/grpo/addition.py``.

Registers the model ``addition_teacher``: that plugin's model after far more of the same lessons.
"""

from __future__ import annotations

from pathlib import Path

from rayhelper import RayHelper
from trainers.plugins import register_model, resolve_model

STEPS = 1200


@register_model("addition_teacher")
def teacher(output_dir: Path, seed: int) -> Path:
    """The folder of a model that SFT taught addition."""
    from trainers.sft import SFTConfig, SFTTrainer

    config = SFTConfig(
        model=resolve_model("addition", output_dir=output_dir / "beginner", seed=seed),
        dataset="addition",
        columns={"answer": "completion"},
        output_dir=str(output_dir / "teacher"),
        seed=seed,
        max_steps=STEPS,
        per_device_train_batch_size=128,
        learning_rate=2e-3,
        warmup_steps=20,
        logging_steps=200,
        save_steps=0,
        report_to=["none"],
    )
    with RayHelper.local():
        SFTTrainer(config).train()
    return output_dir / "teacher" / "final"
