import copy
import json
import pickle
from types import MappingProxyType

import pytest

from zerotune.trial_lib.training.context import AttrDict

HPARAMS = {
    "lr": 0.1,
    "deepspeed_config": "ds_config.json",
    "optimizer": {"type": "Adam", "params": {"betas": [0.8, 0.999]}},
    "layers": [{"width": 32}, [{"width": 16}], 8],
}


def test_keys_are_attributes_at_every_depth_and_in_lists():
    hparams = AttrDict(HPARAMS)
    assert hparams.lr == hparams["lr"] == 0.1
    assert hparams.optimizer.params.betas == [0.8, 0.999]
    assert hparams.layers[0].width == 32
    assert hparams.layers[1][0].width == 16
    assert hparams.layers[2] == 8


def test_it_is_built_in_all_the_ways_of_a_dict():
    assert AttrDict(lr=1, net={"width": 2}).net.width == 2
    assert AttrDict([("lr", 1)], width=2) == {"lr": 1, "width": 2}
    assert AttrDict(AttrDict(HPARAMS)) == HPARAMS
    assert AttrDict(net=MappingProxyType({"width": 2})).net.width == 2
    assert AttrDict() == {}


def test_attributes_are_written_as_keys():
    hparams = AttrDict(HPARAMS)
    hparams.lr = 0.2
    hparams.net = {"width": 4}
    hparams.optimizer.params.eps = 1e-8
    assert hparams["lr"] == 0.2
    assert hparams["net"] == {"width": 4}
    assert hparams.net.width == 4
    assert hparams["optimizer"]["params"]["eps"] == 1e-8
    del hparams.lr
    assert "lr" not in hparams


@pytest.mark.parametrize(
    "put",
    [
        lambda hparams, net: hparams.update(net=net),
        lambda hparams, net: hparams.update({"net": net}),
        lambda hparams, net: hparams.setdefault("net", net),
        lambda hparams, net: hparams.__setitem__("net", net),
        lambda hparams, net: hparams.__ior__({"net": net}),
    ],
)
def test_a_mapping_is_readable_however_it_is_put_in(put):
    hparams = AttrDict()
    put(hparams, {"width": 4})
    assert hparams.net.width == 4


def test_setdefault_keeps_what_is_there():
    hparams = AttrDict(net={"width": 4})
    assert hparams.setdefault("net", {"width": 5}).width == 4


def test_a_union_is_readable_too():
    merged = AttrDict(HPARAMS) | {"net": {"width": 4}}
    assert merged.net.width == 4
    assert merged.lr == 0.1
    assert "net" not in AttrDict(HPARAMS)
    with pytest.raises(TypeError):
        AttrDict() | [("net", 1)]


def test_an_unknown_name_is_an_attribute_error_with_the_nearest_known_ones():
    hparams = AttrDict(learning_rate=0.1, width=3)
    with pytest.raises(AttributeError, match='no hyperparameter "learning_rte"; nearest known: learning_rate'):
        _ = hparams.learning_rte
    with pytest.raises(AttributeError, match=r'no hyperparameter "zzz"\.$'):
        _ = hparams.zzz
    with pytest.raises(AttributeError, match="nearest known: width"):
        del hparams.widht
    with pytest.raises(KeyError):
        _ = hparams["learning_rte"]


def test_absence_can_be_asked_for():
    hparams = AttrDict(HPARAMS)
    assert hasattr(hparams, "lr")
    assert not hasattr(hparams, "local_rank")
    assert hparams.get("lr") == 0.1
    assert hparams.get("overwrite_deepspeed_args", {}) == {}
    assert getattr(hparams, "local_rank", 3) == 3


def test_it_serves_as_the_arguments_of_deepspeed():
    args = AttrDict(HPARAMS)
    # What DeepSpeed does with its args: looks, reads, and sets the rank that it found.
    assert hasattr(args, "deepspeed_config")
    assert args.deepspeed_config is not None
    args.local_rank = 1
    args.deepspeed_config = None
    assert isinstance(args.local_rank, int)
    assert args.deepspeed_config is None


def test_it_equals_a_plain_dict():
    hparams, plain = AttrDict(HPARAMS), dict(HPARAMS)
    assert hparams == plain
    assert plain == hparams
    assert hparams != {**plain, "lr": 0.3}
    assert isinstance(hparams.optimizer, dict)


def test_json_knows_it():
    assert json.loads(json.dumps(AttrDict(HPARAMS))) == HPARAMS


@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, AttrDict.copy, lambda d: pickle.loads(pickle.dumps(d))]
)
def test_copies_are_readable_and_apart(duplicate):
    hparams = AttrDict(HPARAMS)
    other = duplicate(hparams)
    assert type(other) is AttrDict
    assert other == HPARAMS
    assert other.layers[1][0].width == 16
    other.lr = 5
    assert hparams.lr == 0.1


def test_a_shallow_copy_shares_its_values_and_a_deep_one_does_not():
    hparams = AttrDict(HPARAMS)
    for shallow in (hparams.copy(), copy.copy(hparams)):
        assert shallow.optimizer is hparams.optimizer
        assert shallow.layers is hparams.layers
    deep = copy.deepcopy(hparams)
    deep.optimizer.params.betas.append(1)
    assert hparams.optimizer.params.betas == [0.8, 0.999]


def test_the_dict_that_it_is_made_from_stays_as_it_is():
    source = copy.deepcopy(HPARAMS)
    AttrDict(source).optimizer.params.lr = 1
    assert source == HPARAMS
    assert type(source["optimizer"]) is dict
    assert type(source["layers"][0]) is dict


def test_a_key_that_dict_has_as_an_attribute_is_reached_by_index_only():
    hparams = AttrDict({"items": 3, "copy": {"width": 1}})
    assert hparams["items"] == 3
    assert hparams["copy"].width == 1
    assert list(hparams.items()) == [("items", 3), ("copy", {"width": 1})]
    with pytest.raises(AttributeError, match=r'set it by index, hparams\["items"\]'):
        hparams.items = 4


def test_keys_need_not_be_strings():
    assert AttrDict({1: "one"})[1] == "one"
    with pytest.raises(AttributeError):
        _ = AttrDict({1: "one"}).one
