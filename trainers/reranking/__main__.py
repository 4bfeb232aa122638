"""``python -m trainers.NAME --config x.yaml``, where NAME is this folder's."""

from trainers.cli import main

if __name__ == "__main__":
    assert __package__ is not None
    main(__package__.rpartition(".")[2])
