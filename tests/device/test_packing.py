# SPDX-License-Identifier: BSD-3-Clause
"""K-FAC's factors on a GPU are packed, merged and unpacked by kernels of ours: with the CPU's
bits, on the stream that is current, and never inside a graph that is being captured."""

from pathlib import Path

import gpu
import pytest
import torch
from common import assert_same, python
from gpu import NAME
from legal import loss_of, net, to_host

import optfuse

SIZES = (1, 2, 31, 32, 33, 64, 97, 200)
DTYPES = pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=str)


def packed_by(where, matrix):
    return torch.ops.optfuse.pack_factor(matrix.to(where))


def matrix_of(d, dtype=torch.float32):
    torch.manual_seed(d)
    return torch.randn(d, d, dtype=dtype)


# Bits


@DTYPES
@pytest.mark.parametrize("d", SIZES)
def test_a_triangle_has_the_bits_of_the_cpu(d, dtype):
    matrix = matrix_of(d, dtype)
    ours, theirs = packed_by(NAME, matrix), packed_by("cpu", matrix)
    assert_same("packed", ours.cpu(), theirs)
    for damping in (0.0, 0.3):
        whole = torch.ops.optfuse.unpack_factor(ours, d, damping)
        assert_same("whole", whole.cpu(), torch.ops.optfuse.unpack_factor(theirs, d, damping))


def running_factors(where):
    """After three collections of unequal batches, the weights staying as they are."""
    torch.manual_seed(0)
    model = net(where)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    kfac = optfuse.kfac(model, optimizer, factors_every=1, inverses_every=1, kl_clip=None)
    for i in range(3):
        optimizer.zero_grad()
        loss_of(model, i).backward()
        loss_of(model, i + 1).backward()
        optimizer.step()
    found = to_host(kfac.state_dict()["layers"])
    kfac.remove()
    return found


def test_running_factors_have_the_bits_of_the_cpu():
    factors = [running_factors(where) for where in (NAME, "cpu")]
    for name in factors[1]:
        assert_same(f"layer {name}", *(found[name] for found in factors))


def test_they_are_packed_by_one_kernel_each():
    running_factors(NAME)  # loads what there is to load
    names = gpu.kernels(lambda: running_factors(NAME))
    layers, collections, batches = 3, 3, 2
    factors = 2 * layers
    wanted = {
        # Identities, contributions, inverses of each step and those of state_dict().
        "add": factors * (1 + collections * (batches + 1) + 1),
        "merge": factors * collections,
        "unpack": 2 * factors * collections,
    }
    for task, n in wanted.items():
        assert names.count(f"of_cuda_packing_{task}_float32") == n, task
    assert len(names) == sum(wanted.values()), sorted(set(names))


# Streams


def pack_on_another_stream(waits):
    matrix = matrix_of(40).to(NAME)
    gpu.synchronize()
    matrix.mul_(2)
    stream = gpu.stream()
    if waits:
        stream.wait_stream(gpu.current())
    with stream:
        packed = torch.ops.optfuse.pack_factor(matrix)
        whole = torch.ops.optfuse.unpack_factor(packed, 40, 0.0)
    del packed  # while it is read
    gpu.current().wait_stream(stream)
    return whole, matrix


def test_they_run_on_the_current_stream():
    whole, matrix = pack_on_another_stream(waits=True)
    assert not gpu.races()
    upper = matrix.cpu().triu()
    assert_same("whole", whole.cpu(), upper + upper.triu(1).T)


def test_who_does_not_wait_is_seen():
    gpu.only_played()
    pack_on_another_stream(waits=False)
    found = gpu.races()
    gpu.clear()
    assert any("of_cuda_packing_add_float32" in text for text in found), found


def used_elsewhere_and_freed(use):
    """Whether what takes the memory next, on the stream that it was made on, comes in order."""
    gpu.only_played()
    packed = torch.ops.optfuse.pack_factor(matrix_of(40).to(NAME))
    stream = gpu.stream()
    stream.wait_stream(gpu.current())
    with stream:
        kept = use(packed)
    address = packed.data_ptr()
    del packed
    others = [torch.zeros(820, device=NAME) for _ in range(4)]
    found = gpu.races()
    gpu.synchronize()
    gpu.clear()
    return found, address in [t.data_ptr() for t in others], kept


def test_what_is_used_on_another_stream_is_not_freed_too_early():
    found, again, _ = used_elsewhere_and_freed(
        lambda packed: torch.ops.optfuse.unpack_factor(packed, 40, 0.0)
    )
    assert not found and not again
    found, again, _ = used_elsewhere_and_freed(lambda packed: packed.add(1))
    assert found and again, "nothing here would be freed too early: the test proves nothing"


# Graphs


def collect_in_a_capture(factors_every, steps):
    """The passes of a step after `steps` of them."""
    torch.manual_seed(0)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kfac = optfuse.kfac(model, optimizer, factors_every=factors_every)
    for i in range(steps):
        optimizer.zero_grad()
        loss_of(model, i).backward()
        optimizer.step()
    stream = gpu.stream()
    stream.wait_stream(gpu.current())
    try:
        with gpu.captured(stream):
            loss_of(model, steps).backward()
    finally:
        gpu.settle()
        kfac.remove()


def test_factors_are_not_collected_while_a_graph_is_captured(monkeypatch):
    with pytest.raises(optfuse.Error, match="captured, because its replays would not be counted"):
        collect_in_a_capture(factors_every=1, steps=1)
    monkeypatch.setenv("OPTFUSE_TEST_GUARDS_OFF", "capture")
    collect_in_a_capture(factors_every=1, steps=1)


def test_a_step_that_collects_none_may_be_captured():
    collect_in_a_capture(factors_every=10, steps=1)


# Refused

WITHOUT = """
import os, sys
sys.path.insert(0, {folder!r})
import gpu
gpu.load()
os.environ["OPTFUSE_CUDA_LIBRARY"] = {library!r}
import torch, optfuse
model = torch.nn.Linear(3, 2).to(gpu.NAME)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optfuse.kfac(model, optimizer)
"""


def test_without_kernels_the_error_says_why(tmp_path):
    broken = tmp_path / "kernels.so"
    broken.write_bytes(b"none")
    done = python(WITHOUT.format(folder=str(Path(__file__).parent), library=str(broken)))
    assert done.returncode != 0
    assert "optfuse: factors on a GPU: the library of CUDA kernels does not load" in done.stderr


def test_another_kind_of_device_is_named():
    with pytest.raises(optfuse.Error, match="on the CPU or an NVIDIA GPU, not on meta"):
        torch.ops.optfuse.pack_factor(torch.ones(3, 3, device="meta"))
