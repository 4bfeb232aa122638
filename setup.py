"""Packaging; the exact versions that the tests run with are pinned in requirements/."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r'^__version__ = "(.+)"$', (HERE / "rayhelper" / "__init__.py").read_text("utf-8"), re.MULTILINE)
EXTRAS = {
    "vllm": ["vllm>=0.26"],
    "megatron": ["megatron-core>=0.16.1,<0.17"],
    "delta": ["flash-linear-attention>=0.4"],  # kernels of gated delta-rule layers, for GPUs
    "lora": ["peft>=0.17"],
    "wandb": ["wandb"],
}

setup(
    name="rayhelper",
    version=VERSION[1],
    description="Post-training algorithms as one plain class: in one process, under torchrun or on Ray device groups.",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    keywords=["ray", "reinforcement learning", "grpo", "ppo", "rlhf", "fine-tuning", "distributed training", "llm"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Environment :: GPU :: NVIDIA CUDA",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: System :: Distributed Computing",
        "Typing :: Typed",
    ],
    packages=[*find_packages(include=["rayhelper", "rayhelper.*", "trainers", "trainers.*"]), "trainers.examples"],
    package_dir={"trainers.examples": "examples"},  # what rayhelper examples copies
    package_data={
        "rayhelper": ["py.typed", "timeline/page.html"],
        "rayhelper.trainers": ["first/trainers.py"],
        "trainers": ["py.typed", "report/page.html", "report/page.js"],
        "trainers.examples": ["*/*.*", "*/gsm8k/*"],
    },
    exclude_package_data={"trainers.examples": ["*/__pycache__/*"]},
    install_requires=[
        "accelerate>=1.0",
        "datasets>=3.0",
        "jsonargparse[signatures]>=4.40",
        "math-verify>=0.8",
        "numpy>=1.26",
        "pandas",
        "pillow",
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
    entry_points={
        "console_scripts": ["rayhelper = rayhelper.__main__:main"],
        # rayhelper. before trainers: a folder of that name where the command runs is not asked
        "rayhelper.commands": ["trainers = rayhelper.trainers.program"],  # rayhelper grpo
        "rayhelper.trainers": ["trainers = rayhelper.trainers.commands:roles_named"],  # rayhelper plan --trainer
    },
    extras_require={
        **EXTRAS,
        "all": sorted({requirement for extra in EXTRAS.values() for requirement in extra}),
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
