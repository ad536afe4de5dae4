"""Classes, FLOPs and bytes of operators, on torch's meta tensors."""

import pytest
import torch

from zerotune.trial_lib.messages.foreseen_run import OPERATIONS
from zerotune.trial_lib.plan.simulate.logs import OperationLog, bytes_of, class_of, cost_of

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("addmm", "matmul"),
        ("bmm", "matmul"),
        ("_scaled_dot_product_flash_attention_backward", "attention"),
        ("convolution_backward", "convolution"),
        ("native_layer_norm", "norm"),
        ("_log_softmax", "loss"),
        ("_softmax", "reduction"),
        ("linalg_vector_norm", "reduction"),
        ("clamp_min", "elementwise"),
        ("normal_", "elementwise"),
        ("gelu", "elementwise"),
        ("_to_copy", "copy"),
        ("embedding_dense_backward", "embedding"),
    ],
)
def test_an_operator_has_a_class(name, kind):
    assert OPERATIONS[class_of(name)] == kind


def cost(func, *args):
    inputs = [each for each in args if isinstance(each, torch.Tensor)]
    out = func(*args)
    dtypes = []
    is_new = all(out.untyped_storage()._cdata != each.untyped_storage()._cdata for each in inputs)
    return cost_of(func, args, {}, inputs, [out] if is_new else [], out, dtypes), dtypes


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def test_a_product_of_matrices_has_the_flops_of_its_formula_and_reads_each_matrix_once():
    (kind, dtype, flops, moved, _), dtypes = cost(aten.mm.default, meta(8, 16), meta(16, 4))
    assert OPERATIONS[kind] == "matmul"
    assert dtypes[dtype] == "bfloat16"
    assert flops == 2 * 8 * 16 * 4
    assert moved == 2 * (8 * 16 + 16 * 4 + 8 * 4)


def test_an_operator_in_place_reads_and_writes_its_tensor():
    (_, _, flops, moved, _), _ = cost(aten.add_.Tensor, meta(10), meta(10))
    assert flops == 10
    assert moved == 2 * (10 + 10 + 10)


@pytest.mark.parametrize(
    ("func", "args", "moved"),
    [
        (aten.copy_.default, (meta(10), meta(10)), 2 * (10 + 10)),
        (aten.zero_.default, (meta(10),), 2 * 10),
        (aten.mul_.Scalar, (meta(10), 2.0), 2 * (10 + 10)),
    ],
)
def test_a_tensor_that_is_overwritten_is_not_read(func, args, moved):
    assert cost(func, *args)[0][3] == moved


@pytest.mark.parametrize(
    ("func", "words", "kind"),
    [
        (aten._scaled_dot_product_flash_attention.default, (0.0, True), "attention"),
        (aten._scaled_dot_product_flash_attention.default, (0.0, False), "whole_attention"),
        (aten._scaled_dot_product_flash_attention.default, (), "whole_attention"),
        (aten._scaled_dot_product_efficient_attention.default, (None, False, 0.0, True), "attention"),
        (aten._scaled_dot_product_efficient_attention.default, (None, False), "whole_attention"),
        (aten._efficient_attention_forward.default, (None, None, None, 8, 8, 0.0, 1), "attention"),
        (aten._efficient_attention_forward.default, (None, None, None, 8, 8, 0.0, 0), "whole_attention"),
    ],
)
def test_attention_is_told_apart_by_whether_it_is_causal_and_counts_in_full_either_way(func, words, kind):
    # As many heads as positions, because the kernels differ in the order of the two.
    tensors = [meta(2, 8, 8, 16) for _ in range(3)]
    found = cost_of(func, (*tensors, *words), {}, tensors, [meta(2, 8, 8, 16)], func(*tensors, *words), [])
    assert OPERATIONS[found[0]] == kind
    assert found[2] == 2 * 2 * (2 * 8 * 8 * 8 * 16)


def test_a_look_up_reads_the_rows_that_it_needs_and_no_others():
    (kind, _, flops, moved, _), _ = cost(aten.embedding.default, meta(1000, 8), meta(3, dtype=torch.int64))
    assert OPERATIONS[kind] == "embedding"
    assert flops == 0
    assert moved == 2 * 2 * 3 * 8 + 3 * 8


def test_views_and_empty_tensors_are_no_work():
    assert cost(aten.view.default, meta(4, 4), [16])[0] is None
    assert cost(aten.empty_like.default, meta(4))[0] is None


def test_an_expanded_tensor_has_the_bytes_that_are_there():
    assert bytes_of(meta(8, 1).expand(8, 100)) == 16


@pytest.mark.parametrize(
    ("allowed", "dtype", "expected"),
    [(True, torch.float32, "tf32"), (False, torch.float32, "float32"), (True, torch.bfloat16, "bfloat16")],
)
def test_a_product_counts_in_the_format_that_it_is_multiplied_in(allowed, dtype, expected):
    log = OperationLog()
    one, other = meta(8, 16, dtype=dtype), meta(16, 4, dtype=dtype)
    product = log.cost(aten.mm.default, (one, other), {}, [one, other], [one @ other], one @ other)
    moved = log.cost(aten.add_.Tensor, (one, one), {}, [one, one], [], one)
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        for kind, index, flops, size, _ in (product, moved):
            log.note((kind, index, flops, size, 0))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    assert [log.dtypes[each.dtype] for each in log.record()] == [expected, str(dtype).removeprefix("torch.")]
    assert log.multiplied_in() == (expected,)
