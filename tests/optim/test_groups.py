import json
import logging

import pytest
import torch
from torch import nn

from triax.config.optim import MuonClip
from triax.errors import ConfigError
from triax.optim import build, dump, roles
from triax.optim.groups import unstated


class Layer(nn.Module):
    """Two heads of three rows, one whole matrix, two experts, and parts that nobody states."""

    def __init__(self, stated=None):
        super().__init__()
        self.query = nn.Linear(5, 6)
        self.output = nn.Linear(6, 5, bias=False)
        self.experts = nn.ParameterDict({"gate": torch.randn(2, 4, 5)})
        self.beta = nn.Linear(5, 2, bias=False)
        self.query_conv = nn.Parameter(torch.randn(6, 4))
        self.decay_rate = nn.Parameter(torch.zeros(2))
        self.norm = nn.RMSNorm(5)
        self.stated = {"query.weight": (3,), "output.weight": (5,), "experts.gate": (4,)} if stated is None else stated

    def matrices(self):
        return self.stated


class Network(nn.Module):
    def __init__(self, layer=None):
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.layers = nn.ModuleList([layer or Layer()])
        self.head = nn.Linear(5, 7, bias=False)


def test_stated_matrices_are_muon_s_and_all_else_is_adamw_s():
    rows = {row["name"]: row for row in json.loads(json.dumps(dump(roles(Network()))))}
    muon = {name: (row["pattern"], row["num_matrices"]) for name, row in rows.items() if row["rule"] == "muon"}
    assert muon == {
        "layers.0.query.weight": ([3], 2),
        "layers.0.output.weight": ([5], 1),
        "layers.0.experts.gate": ([4], 2),
    }
    assert set(rows) == {name for name, _ in Network().named_parameters()}


def test_only_matrices_and_the_vocabulary_s_tables_are_decayed():
    for muon in (True, False):
        decayed = {
            name.removeprefix("layers.0.") for name, role in roles(Network(), muon=muon).items() if role.is_decayed
        }
        assert decayed == {"query.weight", "output.weight", "experts.gate", "embed.weight", "head.weight"}


def test_without_muon_adamw_moves_everything():
    assert {role.rule for role in roles(Network(), muon=False).values()} == {"adamw"}


def test_frozen_parameters_have_no_role():
    network = Network()
    network.layers[0].output.requires_grad_(False)
    assert "layers.0.output.weight" not in roles(network)


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({"qery.weight": (3,)}, "`layers.0` .* `qery.weight`, which is not"),
        ({"query.weight": (4,)}, r"`query.weight` into matrices of `\(4,\)` rows.*found shape `\(6, 5\)`"),
        ({"query.weight": ()}, "do not fill it"),
        ({"query.weight": (6, 0)}, "do not fill it"),
        ({"query.bias": (6,)}, "do not fill it"),
    ],
)
def test_a_layer_cannot_state_what_it_does_not_have(stated, message):
    with pytest.raises(ConfigError, match=message):
        roles(Network(Layer(stated)))


def test_a_weight_cannot_be_cut_in_two_ways():
    layer = Layer()
    layer.inner = Layer({"query.weight": (2,)})
    layer.inner.query.weight = layer.query.weight
    with pytest.raises(ConfigError, match="state it in one place"):
        roles(Network(layer))


def test_f67_matrices_that_no_layer_states_are_told_once_by_name(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("triax"), "propagate", True)
    network = Network()
    with caplog.at_level("WARNING", logger="triax"):
        build(network, MuonClip())
    assert not caplog.records, "convolutions, `beta` and the vocabulary's tables are AdamW's on purpose"
    network.layers[0].mine = nn.Linear(5, 5)
    with caplog.at_level("WARNING", logger="triax"):
        build(network, MuonClip())
    (record,) = caplog.records
    assert "no layer states `layers.0.mine.weight` as matrices" in record.getMessage()
    assert "`matrices()`" in record.getMessage()


class Own(nn.Module):
    """A layer of somebody else's: two matrices, a table, a convolution, a gain, none of them stated."""

    def __init__(self):
        super().__init__()
        self.inside = nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 5))
        self.table = nn.Embedding(7, 5)
        self.conv = nn.Conv1d(5, 5, 3)
        self.gain = nn.Parameter(torch.ones(1, 5))


def test_f67_matrices_of_an_unknown_layer_are_found_wherever_it_stands():
    network = Network()
    network.layers.append(Own())
    network.layers[0].more = Own()
    both = [f"layers.{where}.inside.{n}.weight" for where in ("0.more", "1") for n in (0, 1)]
    assert unstated(network) == both
    network.layers[0].more.requires_grad_(requires_grad=False)
    assert unstated(network) == both[2:]


def test_f67_a_layer_that_says_that_it_has_no_matrices_is_taken_at_its_word():
    network = Network()
    network.layers.append(Own())
    network.layers[1].inside.matrices = lambda: {"0.weight": (6,)}
    assert unstated(network) == ["layers.1.inside.1.weight"]
    network.layers[1].inside.matrices = dict
    assert unstated(network) == []
