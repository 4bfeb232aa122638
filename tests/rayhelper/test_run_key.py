"""The key of a torchrun run: where it lies, who has it, and what is believed without it."""

from __future__ import annotations

import gc
import os
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from rayhelper import ConfigError
from rayhelper.runtimes.torchrun.key import Codes, RunKey, has_several_nodes
from tests.backends.ranks import run_ranks
from tests.rayhelper.strangers import LOOPBACK, Payload, listening

SECRET = "a secret of several nodes"


@pytest.fixture
def store_port() -> Iterator[int]:
    """Of a store such as torchrun's agent holds; whoever looks for a free port may find it taken a moment later."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield store.port
    del store


@pytest.fixture(autouse=True)
def of_one_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAYHELPER_KEY", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def test_processes_of_a_node_share_a_file_that_this_user_alone_can_read(tmp_path: Path) -> None:
    store = dist.HashStore()
    first, second = RunKey(store), RunKey(store)
    (folder,) = tmp_path.iterdir()
    (file,) = folder.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert first.secret == second.secret
    assert first.is_shared
    in_store = b"".join([store.get("file of node 0"), store.get("key of node 0")])
    for secret in (first.secret, file.read_bytes()):
        assert secret not in in_store
        assert secret.hex().encode() not in in_store
    assert RunKey(dist.HashStore()).secret != first.secret  # that of the next session
    first.forget_file()
    assert not file.exists()


def test_a_secret_in_the_environment_is_that_of_all_nodes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert has_several_nodes()
    alone = RunKey(dist.HashStore())
    assert not alone.is_shared
    alone.forget_file()
    monkeypatch.setenv("RAYHELPER_KEY", SECRET)
    one, other = RunKey(dist.HashStore()), RunKey(dist.HashStore())
    assert one.secret == other.secret != SECRET.encode()
    assert one.is_shared
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv("RAYHELPER_KEY", "short")
    with pytest.raises(ConfigError, match="RAYHELPER_KEY has 5 characters"):
        RunKey(dist.HashStore())


@pytest.mark.parametrize("name", [b"../../../etc/passwd", b"x", b"\xff", b"1.2-" + b"0" * 32])
def test_who_writes_to_the_store_cannot_name_a_file_of_its_own(name: bytes, tmp_path: Path) -> None:
    store = dist.HashStore()
    store.add("key of node 0", 1)
    store.set("file of node 0", name)
    with pytest.raises(ConfigError, match=r"Another program writes to the store|set RAYHELPER_KEY"):
        RunKey(store)


def test_files_of_killed_runs_are_removed_by_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    first = RunKey(dist.HashStore())
    mine = first.file_for("group")
    first.first_process = 2**22 + 1  # no process has such a number
    killed = first.file_for("group")
    assert mine is not None
    assert killed is not None
    for path in (mine, killed, mine.with_name("something else")):
        path.touch()
    second = RunKey(dist.HashStore())
    assert (mine.exists(), killed.exists()) == (True, False)
    for key in (first, second):
        key.forget_file()
        key.close()
    assert [path.name for path in mine.parent.iterdir()] == ["something else"]


@pytest.mark.parametrize("spoil", ["others may look", "a link"])
def test_a_folder_of_somebody_else_is_refused(spoil: str, tmp_path: Path) -> None:
    folder = tmp_path / f"rayhelper-{os.getuid()}"
    if spoil == "a link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        folder.symlink_to(tmp_path / "elsewhere")
    else:
        folder.mkdir()
        folder.chmod(0o755)
    with pytest.raises(ConfigError, match="belongs to another user, or others may read it"):
        RunKey(dist.HashStore())


def test_codes_are_of_one_process_gathering_body_and_exchange() -> None:
    codes, body = Codes(b"key", [b"a", b"b"]), b"body"
    code = codes.made(1, 7, body)
    assert codes.fits(code, 1, 7, memoryview(body))
    others: list[tuple[Any, ...]] = [(0, 7, body), (1, 8, body), (1, 7, b"bodY"), (1, 7, b"")]
    assert not any(codes.fits(code, *other) for other in others)
    for other in (Codes(b"key", [b"a", b"c"]), Codes(b"another", [b"a", b"b"])):
        assert not other.fits(code, 1, 7, body)


def joined_over(exchange: Any, rank: int) -> tuple[float, int, int]:
    """What a role's process group adds up, and the files of the run while it is there and after it."""
    import torch

    from rayhelper.roles.runtime import Shard, WorkerInfo
    from rayhelper.worker.process_group import join_process_group, leave_process_group

    def files() -> int:
        folder = Path(os.environ["XDG_RUNTIME_DIR"]) / f"rayhelper-{os.getuid()}"
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        return len(list(folder.iterdir()))

    info = WorkerInfo(("w",), "g", rank, 2, rank, 2, 0, Shard(rank, 2))
    join_process_group(info, "gloo", 60.0, exchange.store_of_group("g/1", 2))
    value = torch.ones(1)
    dist.all_reduce(value)
    before = files()
    exchange.gather(None, lambda: False, 60.0)
    leave_process_group()
    exchange.gather(None, lambda: False, 60.0)
    end = time.monotonic() + 60
    while files() and time.monotonic() < end:  # torch removes it where the last reference ends, on a thread of gloo's
        gc.collect()
        time.sleep(0.01)
    return value.item(), before, files()


def in_exchange(rank: int, folder: Path, port: int, made: Path) -> dict[str, Any]:
    """Rank 1 gathers once as it should, then as somebody who took its place without the key."""
    from rayhelper.runtimes.torchrun.exchange import Exchange
    from rayhelper.worker.side_door import ask

    env = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ.update(env | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    os.environ["XDG_RUNTIME_DIR"] = str(folder / "tmp")
    exchange = Exchange(rank, 2)
    left = list((folder / "tmp").rglob("*"))
    values = [value for value, _ in exchange.gather(("value", rank), lambda: False, 60.0)]
    own = {port: host for port, host in listening().items() if port in {exchange.door.address[1]}}
    answered = ask(exchange.doors, exchange.key, "joined", None, 10.0)
    in_store = [exchange.store.get(name) for name in exchange.store.list_keys()]
    assert len(in_store) > 3
    group = joined_over(exchange, rank)
    told = ""
    if rank == 1:
        exchange.codes = Codes(b"a stranger's", [b""])
    value = Payload(made) if rank == 1 else None
    try:
        exchange.gather(value, lambda: False, 60.0)
    except ConnectionError as error:
        told = str(error)
    exchange.close()
    return {
        "left": left,
        "values": values,
        "own": own,
        "told": told,
        "answered": answered,
        "group": group,
        "secret in store": any(exchange.key.hex().encode() in text or exchange.key in text for text in in_store),
    }


def test_what_is_gathered_in_a_processs_place_is_not_unpickled(tmp_path: Path, store_port: int) -> None:
    (tmp_path / "tmp").mkdir()
    made = tmp_path / "made"
    first, second = run_ranks(2, in_exchange, tmp_path, store_port, made, folder=tmp_path, joined=False)
    assert not made.exists()
    assert "in the place of rank 1 was not made with this run's key" in first["told"]
    for seen in (first, second):
        assert seen["values"] == [("value", 0), ("value", 1)]
        assert set(seen["own"].values()) == {LOOPBACK}
        assert seen["answered"] == {0: False, 1: False}
        assert not seen["secret in store"]
        assert seen["group"] == (2.0, 1, 0)
    assert not [path for path in (tmp_path / "tmp").rglob("*") if path.is_file()]


def joined(rank: int, port: int) -> tuple[dict[int, str], float, float]:
    """The addresses at which a member of a group listens, and sums over the group before and after it was left."""
    import torch

    from rayhelper.roles.runtime import Shard, WorkerInfo
    from rayhelper.worker.process_group import join_process_group, leave_process_group

    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    info = WorkerInfo(("w",), "g", rank, 2, rank, 2, 0, Shard(rank, 2))
    sums, seen = [], {}
    for _ in range(2):
        join_process_group(info, "gloo", 60.0)
        value = torch.ones(1)
        dist.all_reduce(value)
        sums.append(value.item())
        seen = listening()
        dist.barrier()
        leave_process_group()
        time.sleep(float(rank))  # the other, at whose address they meet, has left before: a driver has all leave first
    return {port: seen[port]} if port in seen else {}, *sums


def test_the_store_of_a_roles_process_group_listens_at_one_address() -> None:
    with socket.socket() as held, tempfile.TemporaryDirectory() as folder:  # as Host.hold_port holds it
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("", 0))
        port = held.getsockname()[1]
        first, second = run_ranks(2, joined, port, folder=Path(folder), joined=False)
    assert first == ({port: LOOPBACK}, 2.0, 2.0)
    assert second == ({}, 2.0, 2.0)


def on_two_nodes(rank: int, folder: Path, port: int) -> dict[str, Any]:
    """Sessions without a shared key and with one, of two nodes that are one machine."""
    import logging

    from rayhelper.runtimes.torchrun.exchange import Exchange

    env = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": str(rank)}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.update(env | {"TORCHELASTIC_USE_AGENT_STORE": "True", "XDG_RUNTIME_DIR": str(folder)})
    said: list[str] = []
    logging.getLogger("rayhelper.runtimes.torchrun.exchange").addFilter(
        lambda one: said.append(one.getMessage()) or True
    )
    seen = {}
    for name, key in {"without": "", "with": SECRET}.items():
        os.environ["RAYHELPER_KEY"] = key
        said.clear()
        exchange = Exchange(rank, 2)
        values = [value for value, _ in exchange.gather(rank, lambda: False, 60.0)]
        seen[name] = (values, sorted(exchange.doors), sorted(exchange._situations()), list(said))
        exchange.gather(None, lambda: False, 60.0)  # neither leaves while the other asks
        exchange.close()
    os.environ["RAYHELPER_KEY"] = f"{SECRET} of rank {rank}"
    try:
        Exchange(rank, 2)
    except ConnectionError as error:
        seen["differ"] = str(error)
    return seen


def test_between_nodes_without_a_shared_key_doors_stay_shut_with_one_line(tmp_path: Path, store_port: int) -> None:
    ranks = run_ranks(2, on_two_nodes, tmp_path, store_port, folder=tmp_path, joined=False)
    for rank, seen in enumerate(ranks):
        values, doors, answered, said = seen["without"]
        assert (values, doors, answered) == ([0, 1], [rank], [rank])
        assert len(said) == (rank == 0)
        assert all("several nodes and no RAYHELPER_KEY. So a late call shows only" in line for line in said)
        assert seen["with"] == ([0, 1], [0, 1], [0, 1], [])
        assert "Either RAYHELPER_KEY is not the same on all nodes" in seen["differ"]
