import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import library
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

from zerotune.trial_lib.rank.flops import FlopCounter


def counted(function):
    with FlopCounter() as counter:
        function()
    return counter.flops


def leaf(*shape):
    return torch.randn(*shape, requires_grad=True)


def test_a_product_of_matrices_is_two_flops_for_each_multiplication():
    a, b = leaf(3, 5), leaf(5, 7)
    assert counted(lambda: a @ b) == 2 * 3 * 5 * 7
    assert counted(lambda: (a @ b).sum().backward()) == 3 * 2 * 3 * 5 * 7


def test_what_needs_no_gradient_has_no_backward_pass():
    a, b = torch.randn(3, 5), leaf(5, 7)
    assert counted(lambda: (a @ b).sum().backward()) == 2 * 2 * 3 * 5 * 7


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_attention_costs_the_same_on_every_kernel(causal, dropout):
    # Dropout is not in the fused kernel of a CPU.
    q, k, v = (leaf(2, 4, 16, 8) for _ in range(3))
    forward = 2 * 2 * 2 * 4 * 16 * 16 * 8
    attention = {"is_causal": causal, "dropout_p": dropout}
    assert counted(lambda: F.scaled_dot_product_attention(q, k, v, **attention)) == forward
    assert counted(lambda: F.scaled_dot_product_attention(q, k, v, **attention).sum().backward()) == 3 * forward


def test_keys_and_values_may_be_of_other_lengths_and_depths():
    q, k, v = leaf(1, 2, 6, 8), leaf(1, 2, 10, 8), leaf(1, 2, 10, 8)
    assert counted(lambda: F.scaled_dot_product_attention(q, k, v)) == 2 * 2 * 6 * 10 * (8 + 8)


def test_a_convolution_counts_each_output():
    x, weight = leaf(2, 3, 10, 10), leaf(4, 3, 3, 3)
    forward = 2 * (2 * 4 * 8 * 8) * (3 * 3 * 3)
    assert counted(lambda: F.conv2d(x, weight)) == forward
    assert counted(lambda: F.conv2d(x, weight).sum().backward()) == 3 * forward


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_is_not_counted(reentrant):
    a, b = leaf(3, 5), leaf(5, 7)

    def step():
        checkpoint(lambda x: (x @ b).relu(), a, use_reentrant=reentrant).sum().backward()

    assert counted(step) == 3 * 2 * 3 * 5 * 7
    assert a.grad is not None


def test_a_counter_can_be_entered_again():
    a, b = leaf(3, 5), leaf(5, 7)
    counter = FlopCounter()
    for _ in range(2):
        with counter:
            a @ b
        a @ b
    assert counter.flops == 2 * 2 * 3 * 5 * 7


def test_of_a_tensor_that_is_split_over_ranks_each_counts_its_own_part():
    # Ranks that never answer: what a rank computes by itself is all that counts.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    from torch.testing._internal.distributed.fake_pg import FakeStore

    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 16))
    inputs = torch.randn(4, 16)
    whole = counted(lambda: model(inputs).sum().backward())
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        split = parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        assert counted(lambda: split(inputs).sum().backward()) == whole / 2 > 0
    finally:
        torch.distributed.destroy_process_group()


def test_flex_attention_costs_what_any_attention_does():
    # Without gradients: torch has no backward pass of it on a CPU.
    q, k, v = (torch.randn(2, 4, 128, 8) for _ in range(3))
    with torch.compiler.set_stance("force_eager"):
        assert counted(lambda: flex_attention(q, k, v)) == 2 * 2 * 2 * 4 * 128 * 128 * 8


def test_within_an_operator_that_is_given_functions_the_work_of_those_that_run_counts():
    a = leaf(4, 4)

    def branch():
        return torch.cond(torch.tensor(True), lambda x: (x @ x,), lambda x: (x @ x @ x,), (a,))[0]

    with torch.compiler.set_stance("force_eager"):
        assert counted(branch) == 2 * 4**3


def test_a_nested_tensor_counts_its_rows():
    rows = torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(5, 8)], layout=torch.jagged, requires_grad=True)
    linear = torch.nn.Linear(8, 4)
    assert counted(lambda: linear(rows).values().sum().backward()) == 3 * 2 * (3 + 5) * 8 * 4


def test_work_on_tensors_without_a_shape_is_named():
    rows = torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(5, 8)], layout=torch.strided)
    linear = torch.nn.Linear(8, 4)
    with FlopCounter() as counter:
        linear(rows)
    assert (counter.flops, counter.uncounted) == (0, {"aten::linear"})


@pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="this torch has no such product")
@pytest.mark.parametrize(
    ("left", "right", "grouped", "multiplied"),
    [
        ((12, 16), (3, 16, 8), 12, 12 * 16 * 8),
        ((3, 4, 16), (3, 16, 8), None, 12 * 16 * 8),
        ((3, 4, 16), (16, 24), 24, 4 * 16 * 24),
        ((4, 24), (24, 8), 24, 4 * 24 * 8),
    ],
    ids=["rows", "batches", "columns", "inner"],
)
def test_a_product_by_groups_counts_each_group_with_its_own_matrix(left, right, grouped, multiplied):
    a, b = torch.randn(left, dtype=torch.bfloat16), torch.randn(right, dtype=torch.bfloat16)
    ends = None if grouped is None else torch.arange(1, 4, dtype=torch.int32) * (grouped // 3)
    with FlopCounter() as counter:
        torch._grouped_mm(a, b, offs=ends)
    assert (counter.flops, counter.uncounted) == (2 * multiplied, set())


@library.custom_op("flop_test::product", mutates_args=())
def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b


def test_an_operator_of_somebody_elses_without_a_formula_is_named():
    a, b = torch.randn(3, 5), torch.randn(5, 7)
    with FlopCounter() as counter:
        (product(a, b) @ b.T).relu()
    assert (counter.flops, counter.uncounted) == (2 * 3 * 7 * 5, {"flop_test::product"})


class Doubles(torch.autograd.Function):
    """Writes its result by no operator of torch's, as a Triton kernel does."""

    @staticmethod
    def forward(ctx, inputs):
        output = torch.empty_like(inputs)
        np.multiply(inputs.numpy(), 2, out=output.numpy())
        return output

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


class DoublesInTorch(Doubles):
    """Writes it by one."""

    @staticmethod
    def forward(ctx, inputs):
        output = torch.empty_like(inputs)
        torch.mul(inputs, 2, out=output)
        return output


class Views(Doubles):
    """Returns what it is given."""

    @staticmethod
    def forward(ctx, inputs):
        return inputs.view_as(inputs)


def test_a_kernel_that_is_launched_past_the_operators_is_named():
    a, b = leaf(3, 5), leaf(5, 7)
    with FlopCounter() as counter:
        (Doubles.apply(a) @ b).sum().backward()
        checkpoint(lambda x: Views.apply(DoublesInTorch.apply(x)) @ b, a, use_reentrant=True).sum().backward()
    assert counter.uncounted == {f"{__name__}.Doubles"}
