# SPDX-License-Identifier: BSD-3-Clause
"""Muon's matrix products on a GPU that the CPU plays: cuBLAS makes them, on the update's
stream, where a trial has shown the bits of PyTorch's operators, and nowhere else."""

import ctypes
import itertools
from pathlib import Path

import fakecuda
import pytest
import torch
from common import assert_same, everything, python_ok
from fakecuda import NAME
from legal import host_waits, legal, net, train
from torch.optim import Muon

import optfuse

pytestmark = pytest.mark.skipif(
    torch.backends.cuda.is_built(),
    reason="a CUDA build of PyTorch brings cuBLAS, which is found in place of the played one",
)
SHAPES = ((20, 50), (50, 20), (30, 30), (131, 57))
EACH = 3 * 5  # products of an update: those of an iteration, in 5 iterations
numbers = itertools.count(1)


@pytest.fixture
def cublas():
    """The played one, as it should be after the test, too."""
    library = fakecuda.fake_blas()
    switches = library.fake_blas_flip, library.fake_blas_reorder, library.fake_blas_tune
    for switch in switches:
        switch.argtypes = [ctypes.c_bool]
    yield library
    for switch in switches:
        switch(False)
    library.fake_blas_fail(0)


@pytest.fixture
def coefficients():
    """That no test had before, so that there was no trial with them."""
    return 3.4445 + next(numbers) / 1000, -4.775, 2.0315


def parameters(shapes=SHAPES):
    torch.manual_seed(1)
    return [torch.randn(shape).to(NAME).requires_grad_() for shape in shapes]


def steps(optimizer, params, n, seed=0):
    for step in range(n):
        torch.manual_seed(100 * seed + step)
        for p in params:
            p.grad = torch.empty_like(p).copy_(torch.randn(p.shape))
        optimizer.step()
    optfuse.flush()


def made_in(work):
    """How many products of matrices cuBLAS makes meanwhile."""
    before = torch.ops.optfuse.products_by_cublas()
    work()
    return torch.ops.optfuse.products_by_cublas() - before


def launches_in(work):
    torch.ops.fakecuda.set_logging(True)
    work()
    names = [line.split(" on ")[0] for line in torch.ops.fakecuda.launches()]
    torch.ops.fakecuda.set_logging(False)
    return names


class Twins:
    """Ours and stock, in step. The first step makes the state, by the class's code."""

    def __init__(self, make=parameters, **options):
        self.ours, self.theirs = make(), make()
        self.fused = optfuse.fuse(Muon(self.ours, **options))
        self.stock = Muon(self.theirs, **options)
        self.seed = 0
        self.step()

    def step(self, n=1):
        """The products that cuBLAS made; the bits are those of the class."""
        self.seed += 1
        made = made_in(lambda: steps(self.fused, self.ours, n, self.seed))
        steps(self.stock, self.theirs, n, self.seed)
        assert optfuse.summary(self.fused).isa == {"float32": "torch's operators"}
        assert_same("parameters", self.ours, self.theirs)
        return made

    def why(self):
        return optfuse.summary(self.fused).products_because


def turned():
    """Parameters, and thus gradients and states, that lie column by column."""
    return [p.detach().t().requires_grad_() for p in parameters()]


@pytest.mark.parametrize("make", [parameters, turned])
@pytest.mark.parametrize("options", [{}, {"nesterov": False}], ids=str)
def test_cublas_makes_the_products_of_all_shapes_that_were_tried(make, options):
    twins = Twins(make, **options)
    assert twins.step(3) == 3 * EACH * len(SHAPES)
    assert twins.why() == ()
    names = launches_in(lambda: steps(twins.fused, twins.ours, 1))
    assert names.count("cublasGemmEx") == EACH * len(SHAPES)
    assert not {"aten::mm", "aten::addmm"} & set(names)


@pytest.mark.parametrize("mode, options", [
    ("forward", {}), ("backward", {}), ("backward", {"side_stream": True}),
], ids=str)  # fmt: skip
def test_they_are_in_order(mode, options):
    def script(wrap):
        model = net()
        optimizer = wrap(Muon([p for p in model.parameters() if p.dim() == 2]))
        train(model, optimizer, 0)
        before = torch.ops.optfuse.products_by_cublas()
        for i in range(1, 5):
            train(model, optimizer, i)
        yield from everything(model, optimizer)
        made = torch.ops.optfuse.products_by_cublas() - before
        assert made == (4 * EACH * 3 if wrap.fused else 0)

    legal(script, mode, **options)


def test_the_host_does_not_wait_for_them():
    twins = Twins()
    waits = []
    made = made_in(
        lambda: waits.append(host_waits(twins.fused, twins.ours, "aten::linalg_vector_norm"))
    )
    assert waits == [0] and made >= EACH * len(SHAPES)


def test_on_the_second_device_too():
    def second():
        return [p.detach().to(f"{NAME}:1").requires_grad_() for p in parameters()]

    twins = Twins(second)
    assert twins.step() == EACH * len(SHAPES)


def test_deterministic_algorithms_are_no_others(coefficients):
    torch.use_deterministic_algorithms(True)
    try:
        assert Twins(ns_coefficients=coefficients).step() == EACH * len(SHAPES)
    finally:
        torch.use_deterministic_algorithms(False)


def test_each_kind_is_tried_once(coefficients):
    def fuse():
        optfuse.fuse(Muon(parameters(), ns_coefficients=coefficients))

    assert "cublasGemmEx" in launches_in(fuse)
    assert "cublasGemmEx" not in launches_in(fuse)


def test_a_group_that_is_added_is_tried(coefficients):
    twins = Twins()
    for optimizer, params in (twins.fused, twins.ours), (twins.stock, twins.theirs):
        params += parameters(((7, 9),))
        optimizer.add_param_group({"params": params[-1:], "ns_coefficients": coefficients})
    twins.step()
    assert twins.step() == EACH * (len(SHAPES) + 1) and twins.why() == ()


# Products that stay with the operators


def test_one_bit_of_one_element_leaves_them_to_the_operators(cublas, coefficients):
    cublas.fake_blas_flip(True)
    twins = Twins(ns_coefficients=coefficients)
    assert twins.step(3) == 0
    why = "in a trial cuBLAS gave other bits (20 x 50 on fakecuda:0 and 3 others)"
    assert twins.why() == (why,)
    assert f"multiply matrices of Muon, and not cuBLAS, because {why}" in str(
        optfuse.summary(twins.fused)
    )
    cublas.fake_blas_flip(False)
    assert twins.step() == 0, "the verdict is kept"


def test_so_does_another_order_of_summation(cublas, coefficients):
    """Random numbers would show it in some elements of large matrices only. The trial of the
    whole update comes first, whose smallest shape may not show it: that depends on the order in
    which this machine's operators sum, and the class's step() would take over."""
    Twins(lambda: parameters(((5, 4),)), ns_coefficients=coefficients)
    cublas.fake_blas_reorder(True)
    shapes = (*SHAPES, (9, 7), (6, 5))
    twins = Twins(lambda: parameters(shapes), ns_coefficients=coefficients)
    why = "in a trial cuBLAS gave other bits (20 x 50 on fakecuda:0 and 5 others)"
    assert twins.why() == (why,)
    assert twins.step() == 0


def check_guard(name, monkeypatch, coefficients):
    """Without it cuBLAS multiplies, although it has other bits."""
    twins = Twins(ns_coefficients=coefficients)
    monkeypatch.setenv("OPTFUSE_TEST_GUARDS_OFF", name)
    with pytest.raises(AssertionError, match="parameters"):
        twins.step(3)


def test_without_the_trial_other_bits_are_trained_with(cublas, coefficients, monkeypatch):
    cublas.fake_blas_flip(True)
    check_guard("products", monkeypatch, coefficients)


def test_a_single_row_or_column_is_left_to_them():
    twins = Twins(lambda: parameters(((1, 1), (1, 9), (9, 1), (2, 9))))
    assert twins.step() == EACH
    (why,) = twins.why()
    assert why == "a single row or column is left to them (1 x 1 on fakecuda:0 and 2 others)"


def test_numbers_that_were_not_tried_are_left_to_them(coefficients):
    twins = Twins()
    for optimizer in twins.fused, twins.stock:
        optimizer.param_groups[0]["ns_coefficients"] = coefficients
    assert twins.step() == 0
    assert twins.why() == ("there was no trial (20 x 50 on fakecuda:0 and 3 others)",)


def test_gradients_that_lie_otherwise_are_left_to_them(coefficients):
    """The direction lies as the gradient does."""
    options = {"ns_coefficients": coefficients}
    ours, theirs = parameters(((20, 50),)), parameters(((20, 50),))
    fused, stock = optfuse.fuse(Muon(ours, **options)), Muon(theirs, **options)
    steps(fused, ours, 1)
    steps(stock, theirs, 1)

    def turned_step(optimizer, param):
        torch.manual_seed(5)
        param.grad = torch.randn(50, 20).to(NAME).t()
        optimizer.step()
        optfuse.flush()

    assert made_in(lambda: turned_step(fused, *ours)) == 0
    turned_step(stock, *theirs)
    assert_same("parameters", ours, theirs)


def setting(name, cublas):
    """Switches it to what has other products, or back."""
    return {
        "allow_bf16_reduced_precision_reduction": lambda on: setattr(
            torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", not on
        ),
        "TunableOp": cublas.fake_blas_tune,
    }[name]


@pytest.mark.parametrize("name", ["allow_bf16_reduced_precision_reduction", "TunableOp"])
def test_with_other_settings_the_operators_multiply(name, cublas, coefficients):
    switch = setting(name, cublas)
    before, after = Twins(), None
    switch(True)
    try:
        assert before.step() == 0
        (why,) = before.why()
        assert name in why
        after = Twins(ns_coefficients=coefficients)
        assert after.step() == 0
        (why,) = after.why()
        assert name in why
    finally:
        switch(False)
    assert before.step() == EACH * len(SHAPES), "its trial still holds"
    assert after.step() == 0, "of which there was no trial"


def test_a_failure_in_a_step_is_made_good_by_them(cublas, coefficients):
    twins = Twins(lambda: parameters(((20, 50),)), ns_coefficients=coefficients)
    assert twins.step() == EACH
    cublas.fake_blas_fail(13)
    assert twins.step() == 0
    (why,) = twins.why()
    assert "CUBLAS_STATUS_EXECUTION_FAILED" in why
    cublas.fake_blas_fail(0)
    assert twins.step() == 0, "nor is it asked again"


def test_numbers_that_overflow_show_nothing():
    ones = torch.ones(3, 4, device=NAME, dtype=torch.bfloat16)
    assert "overflowed" in torch.ops.optfuse.try_products(ones, (1e30, 1e30, 1e30))


SCRIPT = """
import os, sys
os.environ["OPTFUSE_TEST_DEVICE"] = "privateuseone"
sys.path.insert(0, {folder!r})
import fakecuda, torch
fakecuda.load(blas={blas})
import optfuse
param = torch.ones(3, 4, device=fakecuda.NAME, requires_grad=True)
optimizer = optfuse.fuse(torch.optim.Muon([param]))
for _ in range(3):
    param.grad = torch.ones_like(param)
    optimizer.step()
print(optfuse.summary(optimizer))
"""


def test_where_there_is_no_cublas_the_operators_multiply():
    out = python_ok(SCRIPT.format(folder=str(Path(__file__).parent), blas=False))
    assert "libtorch_cuda.so), which is not loaded" in out and "torch's operators" in out


def test_where_another_library_is_preferred_the_operators_multiply():
    """A PyTorch without CUDA takes the preference from the environment only."""
    script = SCRIPT.format(folder=str(Path(__file__).parent), blas=True)
    out = python_ok(script, fresh=True, TORCH_BLAS_PREFER_CUBLASLT="1")
    assert "because PyTorch's preferred BLAS library is not cuBLAS (3 x 4 on fakecuda:0)" in out
    assert "not cuBLAS" not in python_ok(script, fresh=True)


# The played cuBLAS


def gemm(library, c, a, b):
    """c = a b, by rows, as PyTorch calls it."""
    handle = ctypes.c_void_p()
    library.torch_get_current_cuda_blas_handle(ctypes.byref(handle))
    library.cublasSetMathMode(handle, 0)
    one, zero = ctypes.c_float(1), ctypes.c_float(0)
    status = library.cublasGemmEx(
        handle, 0, 0, b.shape[1], a.shape[0], a.shape[1], ctypes.byref(one),
        *_matrix(b), *_matrix(a), ctypes.byref(zero), *_matrix(c), 68, 99,
    )  # fmt: skip
    assert status == 0


def _matrix(x):
    return ctypes.c_void_p(x.data_ptr()), 14, x.stride(0)


def test_it_multiplies_and_is_watched(cublas):
    torch.manual_seed(0)
    a, b = (torch.randn(shape).to(NAME, torch.bfloat16) for shape in ((4, 7), (7, 5)))
    c = torch.empty(4, 5, device=NAME, dtype=torch.bfloat16)
    gemm(cublas, c, a, b)
    assert not fakecuda.races()
    assert_same("product", c, a @ b)
    c.zero_()
    with fakecuda.stream():
        gemm(cublas, c, a, b)
    found = fakecuda.races()
    fakecuda.clear()
    assert any("cublasGemmEx" in race for race in found), found


def test_it_refuses_another_math_mode(cublas):
    c = torch.ones(2, 2, device=NAME, dtype=torch.bfloat16)
    cublas.cublasSetMathMode = lambda *_: 0
    with pytest.raises(AssertionError):
        gemm(cublas, c, c.clone(), c.clone())
