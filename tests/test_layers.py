"""Arrows point one way: who may import what."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RAY_PLACES = {"runtimes/ray", "values/packing.py"}  # what wraps Ray, and the pickler that takes what Ray's takes
KERNELS = {"checksum_kernel.py"}  # imported by functions alone, where there is a GPU


def imports(file: Path, *, top_level: bool = False) -> set[str]:
    """The modules that a file imports; ``top_level``: without those inside functions and TYPE_CHECKING."""
    tree = ast.parse(file.read_text())
    nodes = tree.body if top_level else list(ast.walk(tree))
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def roots(modules: set[str]) -> set[str]:
    return {module.partition(".")[0] for module in modules}


def test_the_core_knows_no_model_and_ray_only_where_it_is_wrapped() -> None:
    for file in (ROOT / "rayhelper").rglob("*.py"):
        found = roots(imports(file))
        place = file.relative_to(ROOT / "rayhelper")
        assert not found & {"transformers", "trainers", "trl", "vllm", "megatron", "datasets"}, place
        assert {str(place), str(place.parent)} & RAY_PLACES or "ray" not in found, place
        at_once = imports(file, top_level=True)
        assert file.name in KERNELS or "torch" not in roots(at_once), place
        assert not {f"rayhelper.channel.{kernel.removesuffix('.py')}" for kernel in KERNELS} & at_once, place


def is_of_a_trainer(folder: Path) -> bool:
    """Whether the folder declares a trainer: it has its keys."""
    return (folder / "config.py").is_file()


def test_a_module_that_declares_a_trainer_is_known_in_its_own_folder_alone() -> None:
    for file in (ROOT / "trainers").rglob("*.py"):
        found = imports(file)
        assert "ray" not in roots(found), file
        own = ROOT.joinpath(*file.relative_to(ROOT).parts[:2])
        folders = {ROOT.joinpath(*name.split(".")[:2]) for name in found if name.startswith("trainers.")}
        assert {folder.name for folder in folders - {own} if is_of_a_trainer(folder)} == set(), file
        if {ROOT / "trainers" / "backends", ROOT / "trainers" / "rollout"} & set(file.parents):
            assert not found & {"trainers.run.run", "trainers.configuration.shared", "trainers.cli"}, file


def test_mathematics_is_plain() -> None:
    plain = [*(ROOT / "trainers" / "losses").glob("*.py")]
    plain += [ROOT / "trainers" / "rewards" / "advantages.py", ROOT / "trainers" / "rewards" / "gae.py"]
    for file in plain:
        found = imports(file)
        assert not {name for name in found if name.startswith(("rayhelper", "torch.distributed", "trainers.config"))}


MOST_FILES = {"trainers/backends/megatron": 27}  # directly in a folder; others have 14 at most


def test_folders_and_files_can_be_read_in_one_sitting() -> None:
    """As many files as fit on a page, and none of more than 600 lines; the loop of GRPO has 380 at most."""
    for path in (one for package in ("rayhelper", "trainers") for one in (ROOT / package).rglob("*.py")):
        folder, limit = path.parent.relative_to(ROOT), 380 if path.match("grpo/trainer.py") else 600
        assert len(list(path.parent.glob("*.py"))) <= MOST_FILES.get(str(folder), 14), folder
        assert len(path.read_text().splitlines()) <= limit, path
