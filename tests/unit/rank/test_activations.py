import torch

from zerotune.trial_lib.rank.flops import SavedActivations


def test_what_a_forward_pass_keeps_is_counted_once_and_without_parameters():
    layer = torch.nn.Linear(4, 8, bias=False)
    x = torch.randn(5, 4, requires_grad=True)
    with SavedActivations() as saved:
        (layer(x).relu() + layer(x).sigmoid()).sum().backward()
    # x is kept by both products, in one storage; the outputs of relu and sigmoid are kept by themselves.
    assert saved.bytes == 4 * (5 * 4 + 2 * 5 * 8)


def test_nothing_is_kept_without_gradients():
    with SavedActivations() as saved, torch.no_grad():
        torch.nn.Linear(4, 8)(torch.randn(5, 4))
    assert saved.bytes == 0
