"""What channels are made of, without processes: buckets, checksums, the choice of a transport."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rayhelper import ChannelError
from rayhelper.channel.buckets import ALIGNMENT, BLOCK, Reader, fill
from rayhelper.channel.checksums import PART, checksum, payload_code, word_checksum
from rayhelper.channel.transports import Endpoint, choose

CPU = torch.device("cpu")


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.integers(0, 3 * BLOCK), max_size=12), num_blocks=st.integers(1, 3))
def test_what_is_laid_into_buckets_is_read_out_of_them(sizes: list[int], num_blocks: int) -> None:
    generator = torch.Generator().manual_seed(0)
    named = [
        (str(k), torch.randint(256, (size,), generator=generator, dtype=torch.uint8)) for k, size in enumerate(sizes)
    ]
    room, reader, found = torch.zeros(num_blocks * BLOCK, dtype=torch.uint8), Reader(CPU, copy=True), []
    for bucket in fill(iter(named), lambda: room, CPU):
        assert bucket.used % BLOCK == 0
        for piece in bucket.pieces:
            assert piece.offset % ALIGNMENT == 0
            assert piece.offset + piece.nbytes <= bucket.used
            cut = piece.nbytes < piece.tensor_bytes
            assert not cut or piece.tensor_bytes > len(room), "a tensor that fits into a bucket was cut"
            tensor = reader.read(piece, bucket.data[: bucket.used])
            if tensor is not None:
                found.append((piece.name, tensor))
    assert [name for name, _ in found] == [name for name, _ in named]
    assert all(torch.equal(ours, theirs) for (_, ours), (_, theirs) in zip(found, named, strict=True))


@pytest.mark.parametrize("of", [checksum, word_checksum])
def test_a_checksum_notices_what_can_happen_to_bytes(of: object) -> None:
    assert callable(of)
    data = torch.randint(256, (4 * BLOCK,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    seen = {of(data)}
    for position in (0, 7, 5000, 4 * BLOCK - 1):
        for bit in (1, 128):
            changed = data.clone()
            changed[position] ^= bit
            seen.add(of(changed))
    blocks, words = data.view(4, BLOCK), data.view(-1, 8)
    seen.add(of(blocks[[1, 0, 2, 3]].reshape(-1)))  # a page in another's place
    seen.add(of(words[[*range(1, len(words)), 0]].reshape(-1)))  # everything moved by a word
    seen.add(of(torch.cat([data[:BLOCK], torch.zeros_like(data[BLOCK:])])))  # the end never came
    assert len(seen) == 12
    assert of(data.clone()) in seen
    assert all(0 <= one < 2**64 for one in seen)


def at(machine: str, gpu: str | None = None, sees: tuple[str, ...] = ()) -> Endpoint:
    return Endpoint(machine, f"a process on {machine}", gpu, sees or ((gpu,) if gpu else ()))


@pytest.mark.parametrize(
    ("sender", "receivers", "transport"),
    [
        (at("A"), [at("A"), at("A")], "shared_memory"),
        (at("A"), [at("A", "gpu0")], "shared_memory"),  # what lies on the CPU goes to the CPU
        (at("A"), [at("A"), at("B")], "gloo"),
        (at("A", "gpu0"), [at("A", "gpu0")], "cuda_ipc"),
        (at("A", "gpu0"), [at("A", "gpu1", sees=("gpu0", "gpu1"))], "cuda_ipc"),
        (at("A", "gpu0"), [at("A", "gpu1")], "nccl"),  # each sees its own GPU alone
        (at("A", "gpu0"), [at("A", "gpu1"), at("B", "gpu2")], "nccl"),
        (at("A", "gpu0"), [at("A", "gpu0"), at("A", "gpu1")], "shared_memory"),  # nccl wants one process a GPU
        (at("A", "gpu0"), [at("A", "gpu0"), at("B", "gpu1")], "gloo"),
        (at("A", "gpu0"), [at("A")], "shared_memory"),
        (at(""), [at("")], "gloo"),  # a system without memory files
    ],
)
def test_the_transport_follows_from_where_both_sides_are(
    sender: Endpoint, receivers: list[Endpoint], transport: str
) -> None:
    assert choose("auto", sender, receivers) == transport
    assert choose("gloo", sender, receivers) == "gloo"


def test_a_transport_that_cannot_work_is_refused_with_the_reason() -> None:
    with pytest.raises(ChannelError, match=r"a process on B cannot open memory of a process on A.*transport='auto'"):
        choose("shared_memory", at("A"), [at("B")])
    with pytest.raises(ChannelError, match="not on a GPU"):
        choose("cuda_ipc", at("A"), [at("A")])
    with pytest.raises(ChannelError, match="the same GPU"):
        choose("nccl", at("A", "gpu0"), [at("A", "gpu0")])
    with pytest.raises(ChannelError, match="does not see the sender's GPU"):
        choose("cuda_ipc", at("A", "gpu0"), [at("A", "gpu1")])


def test_the_code_of_a_payload_is_that_of_its_bytes_and_key_on_any_number_of_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = torch.arange(3 * PART // 8 + 512).view(torch.uint8)
    codes = []
    for cores in (1, 8):
        monkeypatch.setattr("os.sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        codes.append(payload_code(b"key", data))
    assert codes[0] == codes[1]
    changed = data.clone()
    changed[-1] ^= 1
    moved = torch.cat([data[PART : 2 * PART], data[:PART], data[2 * PART :]])
    others = [payload_code(b"other", data), *(payload_code(b"key", one) for one in (changed, moved, data[:-8]))]
    assert len({*codes, *others}) == 5
