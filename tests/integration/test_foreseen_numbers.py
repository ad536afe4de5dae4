"""Numbers that a foreseen program asks of its tensors: true ones where they follow from the code."""

import pytest
from case_fixtures import quick_first

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 1},
}
# What the program does between two optimizer steps.
TRAINING = """
import argparse

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
parser.add_argument("--local_rank", type=int, default=-1)
args = parser.parse_args()
model = nn.Linear(8, 1)
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
device = engine.device
while True:
    loss = engine(torch.ones(2, 8, device=device)).mean()
    engine.backward(loss)
    engine.step()
    {does}
"""


@pytest.fixture
def foreseen(foresee_text):
    def run(does, **device):
        found = foresee_text(TRAINING.format(does=does), CONFIG, **device)
        asked = [each for each in found.asks if "train.py" in each.asker]
        return found.stopped, asked

    return run


TRUE = [
    "assert torch.full((1,), 7, device=device).item() == 7",
    "assert torch.arange(3, 6, device=device).tolist() == [3, 4, 5]",
    "assert torch.zeros(2000, device=device).index_fill(0, torch.arange(9, device=device), 4).max().item() == 4",
    "assert torch.histc(torch.arange(8, device=device), 4).tolist() == [2, 2, 2, 2]",
    "counts = torch.zeros(4, dtype=torch.int64, device=device); counts[1:3].add_(2); "
    "assert counts.tolist() == [0, 2, 2, 0]",
    # Every rank has as many tokens as this one.
    "length = torch.full((1,), 16, device=device); "
    "lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(2)]; "
    "dist.all_gather(lengths, length); assert [each.item() for each in lengths] == [16, 16]",
    "both = torch.zeros(4, dtype=torch.int64, device=device); first = both[:2]; "
    "dist.all_gather_into_tensor(both, torch.arange(2, device=device)); first.add_(1); "
    "assert both.tolist() == [1, 2, 0, 1]",
    "length = torch.full((1,), 16, device=device); length.data = torch.full((1,), 8, device=device); "
    "assert length.item() == 8",
    # The numbers are not known, and their places are.
    "labels = torch.tensor([[1, -100, 2], [-100, -100, 3]]).to(device); hidden = engine(torch.ones(2, 3, 8)"
    ".to(device)).expand(2, 3, 4); assert hidden[labels != -100].shape == (3, 4); "
    "assert hidden[:, labels[0] != -100, 1:].shape == (2, 2, 3); "
    "assert hidden.masked_select((labels != -100).unsqueeze(-1)).shape == (12,); "
    "hidden[labels != -100].sum().backward()",
    # The lengths of the labels decide what the loss of speech keeps.
    "scores = torch.randn(4, 2, 5, device=device, requires_grad=True); nn.functional.ctc_loss("
    "scores.log_softmax(-1), torch.tensor([[1, 2], [3, 0]]).to(device), torch.tensor([4, 4]), "
    "torch.tensor([2, 1])).backward(); assert scores.grad.shape == scores.shape",
    # A training goes on if its numbers are finite.
    "assert torch.isfinite(loss) and loss.isfinite().all() and not (~torch.isfinite(loss)).any()",
    "assert torch.isfinite(torch.empty(2**11, device=device)).all()",
    "torch.set_default_device('cuda'); assert torch.isfinite(input=loss); torch.set_default_device('cpu')",
    "losses = loss.detach().expand(3000); assert losses[~losses.isnan()].shape == losses[losses.isfinite()].shape; "
    "assert losses[~torch.isinf(losses)].shape == (3000,); assert not torch.isnan(losses).all()",
    "losses = loss.detach().expand(2**21); assert losses.isfinite().all() and not losses.isnan().all()",
    # A tensor of the device may be one of the numbers of another.
    "length = torch.full((2,), 7, device=device)[0]; assert torch.tensor([length, 3]).tolist() == [7, 3]; "
    "assert torch.as_tensor([[length], [4]], device=device).tolist() == [[7], [4]]; "
    "assert length.new_tensor((length, 5)).tolist() == [7, 5]; "
    "assert torch.tensor([length.int()]).dtype == torch.int32 and torch.asarray([length]).tolist() == [7]; "
    "assert torch.tensor([length, 3], dtype=torch.bfloat16).dtype == torch.bfloat16",
    "rows = torch.randn(3, 5, 8, device=device, requires_grad=True); rnn = nn.utils.rnn; "
    "packed = rnn.pack_padded_sequence(rows, torch.tensor([5, 3, 2]), batch_first=True); "
    "out, _ = nn.LSTM(8, 4, batch_first=True).to(device)(packed); assert out.data.shape == (10, 4); "
    "padded, lengths = rnn.pad_packed_sequence(out, batch_first=True, total_length=6); padded.sum().backward(); "
    "assert lengths.tolist() == [5, 3, 2] and padded.shape == (3, 6, 4) and rows.grad.shape == rows.shape",
    "norm = nn.SyncBatchNorm(4).to(device); norm(torch.randn(2, 4, 6, 6, device=device)).sum().backward(); "
    "assert norm.weight.grad.shape == (4,)",
    # As a moving average of the weights does.
    "import copy; copied = copy.deepcopy(engine.module); theirs = engine.module.weight; "
    "assert copied.weight is not theirs and copied.weight.is_cuda and copied.weight.requires_grad; "
    "torch.optim.swa_utils.AveragedModel(engine.module).update_parameters(engine.module)",
    # No file has numbers that do not exist. The program finds what it has saved.
    "import os; model = engine.module; torch.save({'model': model.state_dict(), 'step': 3}, 'saved.pt'); "
    "torch.save(model, 'whole.pt'); assert not os.path.exists('saved.pt') and not os.path.exists('whole.pt'); "
    "found = torch.load('saved.pt', map_location='cuda'); model.load_state_dict(found['model']); "
    "assert found['step'] == 3 and found['model']['weight'].shape == (1, 8) and found['model']['weight'].is_cuda; "
    "assert torch.load('whole.pt', weights_only=False).weight.shape == (1, 8)",
    # A module of a file, too, lands on the device that the program names.
    "import os, tempfile; path = os.path.join(tempfile.mkdtemp(), 'real.pt'); whole = torch.ones(8); "
    "torch.save({'whole': whole, 'part': whole[2:5]}, path); before = torch.cuda.memory_allocated(); "
    "found = torch.load(path, map_location='cuda'); assert found['part'].shape == (3,) and found['part'].is_cuda; "
    "assert found['whole'].untyped_storage()._cdata == found['part'].untyped_storage()._cdata; "
    "del found; assert torch.cuda.memory_allocated() == before",
]


@pytest.mark.parametrize("does", quick_first(8, TRUE))
def test_they_are_true_where_they_follow_from_the_code(foreseen, does):
    assert foreseen(does) == ("", [])


ASKED = [
    "torch.full((1,), 7.0, device=device).add_(loss.detach()).item()",
    # The element is a view of the buffer that is asked.
    "counts = torch.zeros(4, dtype=torch.int64, device=device); counts[1] = loss.detach().long(); counts.sum().item()",
    "counts = torch.zeros(4, dtype=torch.int64, device=device); part = counts[2:]; "
    "counts.add_(loss.detach().long()); part.sum().item()",
    "counts = torch.zeros(2, dtype=torch.int64, device=device); "
    "dist.all_gather_into_tensor(counts, loss.detach().long().reshape(1)); counts.sum().item()",
    "theirs = torch.zeros(1, dtype=torch.int64, device=device); dist.recv(theirs, 1); theirs.item()",
    "counts = torch.ones(2000, device=device); dist.all_reduce(counts); "
    "counts.index_fill(0, torch.arange(9, device=device), 4).max().item()",
    # A view, and the memory without its gradient, are written to.
    "counts = torch.zeros(2000, device=device); flat = counts.view(-1); "
    "counts.index_fill_(0, torch.arange(9, device=device), 4); flat += loss.detach(); counts.max().item()",
    "counts = torch.zeros(2000, device=device); counts.data.add_(loss.detach()); "
    "counts.index_fill(0, torch.arange(9, device=device), 4).max().item()",
    "counts = torch.zeros(2000, device=device); counts.data = loss.detach().expand(2000).clone(); "
    "counts.index_fill(0, torch.arange(9, device=device), 4).max().item()",
    "count = torch.zeros(1, dtype=torch.int64, device=device); count.data = loss.detach().long().reshape(1); "
    "count.item()",
    "torch.empty_like(torch.full((1,), 5, device=device)).item()",
    "assert torch.tensor([loss.detach(), 2.0]).shape == (2,)",
    # No operator of the host adds numbers of this format.
    "torch.arange(8, device=device).to(torch.float8_e4m3fn).sum().item()",
]


@pytest.mark.parametrize("does", quick_first(4, ASKED))
def test_what_is_not_known_is_asked_and_recorded(foreseen, does):
    stopped, asked = foreseen(does)
    assert stopped == ""
    assert [each.question for each in asked] == ["item"]


def test_what_torchs_own_backward_pass_cannot_do_is_a_sentence_with_the_line(foreseen):
    does = (
        "table = torch.zeros(4, 2, device=device, requires_grad=True); rows = torch.tensor([1]).to(device); "
        "nn.functional.embedding(rows, table, sparse=True).sum().backward()"
    )
    stopped, _ = foreseen(does)
    assert stopped.startswith("NotImplementedError: Cannot access storage of SparseTensorImpl, at ")
    assert stopped.endswith(f"train.py:{TRAINING.splitlines().index('    {does}') + 1}.")


def test_an_error_that_the_program_s_own_hook_catches_is_its_own(foreseen):
    does = (
        "failed = []; weight = torch.ones(3, device=device, requires_grad=True)\n"
        "    def hook(gradient):\n"
        "        try:\n"
        "            gradient @ torch.ones(7, 7, device=device)\n"
        "        except RuntimeError:\n"
        "            failed.append(True)\n"
        "    weight.register_hook(hook)\n"
        "    (weight * 2).sum().backward()\n"
        "    assert failed"
    )
    assert foreseen(does) == ("", [])


def test_a_mark_of_finite_numbers_goes_when_the_program_writes(foreseen):
    does = "are = torch.isfinite(torch.empty(2**21, device=device)); are[0] = False; bool(are.all())"
    assert [each.answer for each in foreseen(does)[1]] == ["False"]
    # The numbers of a shorter one are known.
    assert foreseen(f"{does.replace('21', '11').replace('bool', 'assert not ')}") == ("", [])


HEALTHY = [
    "corners = loss.detach().expand(3, 4); assert (corners[:, 2:] >= corners[:, :2]).all()",
    "assert torch.all(loss.detach() > 0)",
    "torch.distributions.Beta(loss.detach().exp(), 2.0)",
    "assert loss > 0, f'{3:.2f} is no loss'",
    "assert 0 < loss < 9, 'small' if args else 'large'",
    "if not loss > 0:\n        if args.local_rank:\n            print('no loss')\n        raise ValueError",
    "with torch.device(device): assert loss > 0",
    "assert (loss > 0).all() & (loss < 9).all() and loss > 1",
    "if not bool(loss < 1e9): raise ValueError",
    "if loss != loss * 2:\n        pass\n    else:\n        raise ValueError(str(len('no difference')))",
    "torch._assert(loss > 0, 'the loss is negative')",
]


@pytest.mark.parametrize("does", quick_first(4, HEALTHY))
def test_a_healthy_training_passes_its_own_checks(foreseen, does):
    stopped, asked = foreseen(does)
    assert stopped == ""
    assert {each.answer for each in asked} == {"True"}


@pytest.mark.parametrize(
    "does",
    quick_first(
        2,
        [
            "assert not (loss > 9), 'the loss explodes'",
            "if loss > 9 or loss < 0: raise ValueError",
            "assert not torch.equal(loss, loss * 2)",
            # Nothing fails by either answer.
            "if loss > 9: print('large')",
            "is_large = bool(loss > 9)",
        ],
    ),
)
def test_the_answer_to_a_check_is_no_where_yes_would_fail(foreseen, does):
    stopped, asked = foreseen(does)
    assert stopped == ""
    assert {each.answer for each in asked} == {"False"}


def test_a_number_in_a_text_is_asked(foreseen):
    stopped, asked = foreseen("assert f'{loss:.2f} {loss:>6.1e}' == '1.00 1.0e+00'; str(loss), f'{loss}'")
    assert stopped == ""
    assert [(each.question, each.count) for each in asked] == [("item", 2)]


def test_what_programs_ask_of_cuda_beside_tensors_has_an_answer(foreseen):
    does = (
        "torch.cuda.memory_summary(); torch.cuda.memory._record_memory_history(); torch.cuda.memory._snapshot(); "
        "torch.cuda.nvtx.range_push('step'); torch.cuda.nvtx.range_pop(); torch.cuda.profiler.start(); "
        "assert torch.cuda.memory_stats()['reserved_bytes.all.peak'] == torch.cuda.max_memory_reserved() > 0; "
        "assert torch.cuda.memory_stats()['inactive_split.all.peak'] == 0; torch.cuda.device_of(loss).__enter__(); "
        "assert torch.accelerator.memory_allocated() == torch.cuda.memory_allocated() > 0; "
        "module = torch.get_device_module(device); "
        "assert module.max_memory_allocated() == torch.cuda.max_memory_allocated(); "
        "module.stream(module.Stream(priority=0)).__enter__(); module.get_device_properties(0).total_memory; "
        "torch.accelerator.synchronize(); torch.cuda.nccl.version(); torch.cuda.utilization(); "
        "assert int(torch.version.cuda.split('.')[0]) >= 12; "
        # As the start of a framework asks, by the functions or by the core itself.
        "assert torch.cuda.can_device_access_peer(0, 1) and torch.cuda.is_tf32_supported(); "
        "assert torch.cuda.get_arch_list(); "
        "assert torch._C._cuda_getDeviceCount() == 2; torch._C._cuda_emptyCache(); "
        "assert torch.cuda.current_blas_handle() == 0 and not hasattr(torch._C, '_is_no_function'); "
        "assert loss.is_cuda and not torch.ones(1).is_cuda"
    )
    assert foreseen(does) == ("", [])


@pytest.mark.parametrize(
    ("name", "capability", "version", "has_bfloat16"),
    quick_first(1, [("NVIDIA V100 32GB", 7.0, (7, 0), False), ("NVIDIA L4 24GB", 8.9, (8, 9), True)]),
)
def test_a_program_finds_the_device_that_is_asked_for(foreseen, name, capability, version, has_bfloat16):
    does = (
        f"assert torch.cuda.get_device_name(0) == torch.cuda.get_device_properties(0).name == {name!r}; "
        "found = torch.cuda.get_device_properties(device); "
        f"assert (found.major, found.minor) == torch.cuda.get_device_capability() == {version}; "
        f"assert torch.cuda.is_bf16_supported(including_emulation=False) is {has_bfloat16}; "
        # As torch has it: an older device emulates it.
        "assert torch.cuda.is_bf16_supported()"
    )
    assert foreseen(does, device_name=name, capability=capability) == ("", [])


def test_a_norm_of_rows_keeps_its_input_and_a_number_for_each_row(foreseen):
    """As the fused kernel of CUDA does. Several operators would keep three times as much."""
    does = (
        "rows = torch.zeros(512, 256, device=device, requires_grad=True); norm = nn.RMSNorm(256, device=device); "
        "before = torch.cuda.memory_allocated(); normed = norm(rows); "
        "assert torch.cuda.memory_allocated() - before == 4 * 512 * (256 + 1); "
        "torch.vmap(norm)(rows); "
        "normed.sum().backward(); assert (rows.grad.shape, norm.weight.grad.shape) == ((512, 256), (256,)); "
        # These are several kernels on CUDA too.
        "assert norm(rows.bfloat16()).dtype == torch.bfloat16; del normed"
    )
    assert foreseen(does) == ("", [])


def test_a_norm_of_rows_has_32_bits_under_autocast_where_cuda_has_them(foreseen):
    does = (
        "from zerotune.trial_lib.plan.simulate.torch_kernels import casts_norms; "
        "rows = torch.zeros(512, 256, device=device, dtype=torch.bfloat16, requires_grad=True); "
        "norm = nn.RMSNorm(256, device=device); before = torch.cuda.memory_allocated(); "
        "casting = torch.autocast('cuda', torch.bfloat16); casting.__enter__(); normed = norm(rows); "
        "casting.__exit__(None, None, None); assert (normed.dtype == torch.float32) == casts_norms(); "
        # The copy of 32 bits, the result, and a number for each row.
        "assert not casts_norms() or torch.cuda.memory_allocated() - before == 4 * 512 * (2 * 256 + 1); del normed"
    )
    assert foreseen(does) == ("", [])


def test_a_norm_of_rows_has_a_second_derivative(foreseen):
    does = (
        "rows = torch.zeros(4, 8, device=device, requires_grad=True); norm = nn.RMSNorm(8, device=device); "
        "slope, = torch.autograd.grad(norm(rows).sum(), rows, create_graph=True); slope.square().sum().backward(); "
        "assert (rows.grad.shape, norm.weight.grad.shape) == ((4, 8), (8,))"
    )
    assert foreseen(does) == ("", [])


def test_a_cell_of_a_gru_goes_on(foreseen):
    does = (
        "cell = nn.GRUCell(8, 16, device=device); cell(torch.ones(2, 8, device=device)).sum().backward(); "
        "assert cell.weight_hh.grad.shape == (48, 16); "
        "assert cell(torch.ones(8, device=device), torch.ones(16, device=device)).shape == (16,); "
        "casting = torch.autocast('cuda', torch.bfloat16); casting.__enter__(); "
        "assert cell(torch.ones(2, 8, device=device)).dtype == torch.bfloat16; casting.__exit__(None, None, None); "
        "assert torch.jit.script(cell.cpu())"
    )
    assert foreseen(does) == ("", [])


def test_an_encoder_evaluates_with_padding(foreseen):
    does = (
        "layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True); "
        "encoder = nn.TransformerEncoder(layer, 2).to(device).eval().requires_grad_(False); "
        "padding = torch.arange(4, device=device) > torch.tensor([[1], [3]], device=device); "
        "assert encoder(torch.ones(2, 4, 16, device=device), src_key_padding_mask=padding).shape == (2, 4, 16)"
    )
    assert foreseen(does) == ("", [])


def test_an_address_tells_tensors_apart(foreseen):
    does = (
        "first, second = nn.Linear(4, 4).to('cuda'), nn.Linear(4, 4); second.bias = first.bias; "
        "places = [each.data_ptr() for layer in (first, second) for each in layer.parameters()]; "
        "assert len(set(places)) == 3 and places[1] == places[3] and not any(each % 512 for each in places); "
        "row = first.weight.data[1:]; assert row.data_ptr() == places[0] + 16; "
        "assert row.untyped_storage().data_ptr() == first.weight.untyped_storage().data_ptr() == places[0]; "
        "assert torch.empty(0, device=device).data_ptr() == 0 != torch.ones(1).data_ptr()"
    )
    assert foreseen(does) == ("", [])


def test_tensors_are_saved_in_memory_and_loaded_again(foreseen):
    does = (
        "import io; buffer = io.BytesIO(); torch.save(engine.module.state_dict(), buffer); buffer.seek(0); "
        "copied = io.BytesIO(buffer.getvalue()); loaded = torch.load(buffer, map_location='cpu'); "
        "assert loaded['weight'].shape == (1, 8) and loaded['weight'].device.type == 'cpu'; "
        "engine.module.load_state_dict(torch.load(copied)); "
        "real = io.BytesIO(); torch.save(torch.ones(2), real); real.seek(0); "
        "assert torch.load(real).tolist() == [1, 1]; "
        # Two in one buffer, and one in an open file. What is saved stays as it was.
        "state = {'first': engine.module.weight}; both = io.BytesIO(); torch.save(state, both); state.clear(); "
        "torch.save({'second': 1, 'of': engine.module.weight}, both); both.write(bytes([255])); both.seek(0); "
        "assert list(torch.load(both)) == ['first'] and torch.load(both)['second'] == 1; "
        "import tempfile; file = tempfile.TemporaryFile(); torch.save(engine.module.state_dict(), file); file.seek(0); "
        "assert torch.load(file)['weight'].shape == (1, 8)"
    )
    assert foreseen(does) == ("", [])


def test_a_lazy_layer_moves_before_it_has_a_shape(foreseen):
    does = (
        "layer = nn.LazyLinear(8).to('cuda'); assert layer(torch.ones(2, 4, device=device)).shape == (2, 8); "
        "assert layer.weight.is_cuda and nn.LazyLinear(8).cuda()(torch.ones(2, 4, device=device)).shape == (2, 8)"
    )
    assert foreseen(does) == ("", [])


def test_a_loss_scale_is_what_it_begins_with(foreseen):
    does = (
        "scaler = torch.amp.GradScaler('cuda', init_scale=1024.0); scaler.scale(torch.ones(1, device=device)); "
        "assert scaler.get_scale() == 1024; assert torch.amp.GradScaler('cuda', enabled=False).get_scale() == 1"
    )
    assert foreseen(does)[0] == ""


def test_flexible_attention_and_batched_sends_go_on(foreseen):
    does = (
        "from torch.nn.attention.flex_attention import create_block_mask, flex_attention; "
        "heads = torch.zeros(2, 4, 128, 16, device=device, dtype=torch.bfloat16, requires_grad=True); "
        "mask = create_block_mask(lambda sample, head, row, column: row >= column, None, None, 128, 128, 'cuda'); "
        "out = torch.compile(flex_attention)(heads, heads[:, :2], heads[:, :2], block_mask=mask, enable_gqa=True); "
        "out.float().sum().backward(); assert out.shape == heads.grad.shape; "
        "sends = [dist.P2POp(dist.isend, loss.detach(), 1), dist.P2POp(dist.irecv, loss.detach(), 1)]; "
        "[each.wait() for each in dist.batch_isend_irecv(sends)]"
    )
    assert foreseen(does) == ("", [])


def test_numbers_that_a_kernel_of_the_device_writes_are_asked(foreseen):
    """DeepSpeed's fused update writes a parameter, whatever numbers that began with."""
    does = "next(iter(engine.module.parameters())).sum().item()"
    assert [each.question for each in foreseen(does)[1]] == ["item"]


def test_a_large_table_of_known_positions_costs_no_time(foreseen):
    """Attention makes one in each pass: 2 GB of distances."""
    does = "places = torch.arange(16384, device=device); places[:, None] - places[None, :]"
    assert foreseen(does) == ("", [])
