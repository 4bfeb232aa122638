"""Packaging; the exact versions that the tests run with are pinned in requirements/."""

from pathlib import Path

from setuptools import find_packages, setup

setup(
    name="rayhelper",
    version="0.1.0",
    description="Post-training algorithms as one plain class: in one process, under torchrun or on Ray device groups.",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["rayhelper", "rayhelper.*", "trainers", "trainers.*"]),
    package_data={"rayhelper": ["py.typed", "timeline/page.html"], "trainers": ["py.typed"]},
    install_requires=[
        "accelerate>=1.0",
        "datasets>=3.0",
        "jsonargparse[signatures]>=4.40",
        "math-verify>=0.8",
        "numpy>=1.26",
        "pandas",
        "pyyaml>=6.0",
        "ray>=2.49",
        "rich",
        "safetensors>=0.4",
        "tensorboard>=2.16",
        "tokenizers>=0.20",
        "torch>=2.6,<3",
        "tqdm",
        "transformers>=5.0,<6",
        "trl>=1.16,<2",
        "typing_extensions>=4.12",
        "xxhash>=3.0",
    ],
    entry_points={"rayhelper.trainers": ["trainers = trainers.commands:roles_named"]},  # for rayhelper plan --trainer
    extras_require={
        "vllm": ["vllm>=0.26"],
        "delta": ["flash-linear-attention>=0.4"],  # kernels of gated delta-rule layers, for GPUs
        "megatron": ["megatron-core>=0.16.1,<0.17"],
        "wandb": ["wandb"],
        "dev": [
            "hypothesis",
            "mkdocs-material",
            "mypy",
            "pyright[nodejs]",
            "pytest",
            "pytest-asyncio",
            "pytest-timeout",
            "pytest-xdist",
            "ruff",
            "types-PyYAML",
        ],
    },
)
