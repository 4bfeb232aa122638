"""verl's keys of rows with pictures and of models that see them, in ours."""

from __future__ import annotations

from trainers.translate.table import Ours, Theirs
from trainers.translate.verl.names import ACTOR, MODEL

COLUMNS = {"data.prompt_key": "prompt", "data.image_key": "images", "data.video_key": "videos"}


def columns(theirs: Theirs, ours: Ours) -> None:
    """What the columns of the rows are called, where it is not what they are called here."""
    names = [name for name, meant in COLUMNS.items() if theirs.take(name) != meant]
    if names:
        ours.say("columns", {theirs.take(name): COLUMNS[name] for name in names}, theirs, *names)


def sees(theirs: Theirs) -> bool:
    """Whether a script says that its rows have pictures or videos."""
    return "data.image_key" in theirs or "data.video_key" in theirs


def tower(theirs: Theirs, ours: Ours) -> None:
    """The vision tower with its merger learns in verl, with adapters too, unless it is frozen or its names are left
    out of them."""
    name, excluded = f"{ACTOR}.freeze_vision_tower", f"{MODEL}.exclude_modules"
    frozen, has_adapter = bool(theirs.take(name)), any(line.key == "tuner_type" for line in ours.lines)
    without = has_adapter and "visual" in str(theirs.values.get(excluded))
    if (frozen or has_adapter) and not without:
        ours.say("freeze_vit", frozen, theirs, name)
        ours.say("freeze_aligner", frozen, theirs, name)
