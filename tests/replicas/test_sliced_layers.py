"""Layers in slices: their values, which layers are sliced, and what is refused."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import lockstep
from lockstep.core.errors import LockstepError, RunError
from lockstep.replicas.sliced_layers import SliceContext, can_be_sliced, slice_layers, slices_of
from lockstep.replicas.weight_reads import layers_in_one_piece
from training.split_models import VECTORS, Checkpointed, Skip, Tied, seeded, sequential

KINDS = (nn.Linear, nn.Conv2d, nn.Embedding)


def alone(name, tensors):
    return tensors


LAYERS = {
    "linear": (lambda: nn.Linear(5, 7), torch.rand(3, 5)),
    "linear without bias": (lambda: nn.Linear(5, 7, bias=False), torch.rand(3, 2, 5)),
    "convolution": (lambda: nn.Conv2d(3, 6, 3, stride=2, padding=1), torch.rand(2, 3, 8, 8)),
    "convolution with reflections": (
        lambda: nn.Conv2d(3, 5, 3, padding=1, padding_mode="reflect"),
        torch.rand(2, 3, 8, 8),
    ),
    "embedding": (lambda: nn.Embedding(9, 10, padding_idx=0), torch.randint(9, (4, 3))),
    "one unit": (lambda: nn.Linear(4, 1), torch.rand(2, 4)),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("num_slices", [1, 2, 4, 9])
def test_slices_have_the_values_and_gradients_of_the_layer(name, num_slices):
    make, X = LAYERS[name]
    torch.manual_seed(0)
    layer = make()
    whole = nn.Sequential(nn.Identity(), layer)
    sliced = nn.Sequential(nn.Identity(), make())
    sliced.load_state_dict(whole.state_dict())
    parts = slices_of(sliced, num_slices, frozenset())
    slice_layers(sliced, num_slices, 0, 1)
    first, second = (X.clone().requires_grad_(X.is_floating_point()) for _ in range(2))
    expected = whole(first)
    context = SliceContext(alone)
    with context.forward():
        found = sliced(second)
    torch.testing.assert_close(found, expected)
    expected.square().sum().backward()
    found.square().sum().backward()
    context.backward(lambda: None)
    if X.is_floating_point():
        torch.testing.assert_close(second.grad, first.grad)
    gradients = dict(sliced.named_parameters())
    for parameter, (names, widths, dim) in parts.items():
        grad = torch.cat([gradients[one].grad for one in names], dim)
        torch.testing.assert_close(grad, whole.get_parameter(parameter).grad)
        assert max(widths) - min(widths) <= 1
        assert len(widths) == min(num_slices, whole.get_parameter(parameter).shape[dim])


def test_a_rank_has_its_own_slices_only():
    module = sequential()
    slice_layers(module, 4, 1, 2)
    names = [name for name, _ in module[7].named_parameters()]
    assert names == ["[2/4]weight", "[3/4]weight", "[2/4]bias", "[3/4]bias"]


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(4, 4, 3, groups=2),
        nn.Embedding(5, 4, max_norm=1.0),
        nn.Embedding(5, 4, sparse=True),
        nn.LayerNorm(4),
        nn.Bilinear(3, 3, 3),
        type("Own", (nn.Linear,), {})(3, 4),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_other_layers_stay_as_they_are(layer):
    assert not can_be_sliced(layer)


def test_tied_layers_and_layers_that_others_read_stay_in_one_piece():
    assert "first.weight" not in slices_of(Tied(), 4, frozenset())
    assert "middle.weight" in slices_of(Tied(), 4, frozenset())

    class Reads(Skip):
        def forward(self, X):
            return super().forward(X) + F.linear(X, self.first.weight).sum()

    found = layers_in_one_piece(Reads(), KINDS, VECTORS[0])
    assert found == {"first"}
    assert layers_in_one_piece(Skip(), KINDS, VECTORS[0]) == frozenset()
    assert "first.weight" not in slices_of(Reads(), 4, found)


def test_layers_that_are_read_in_eval_mode_only():
    """As PyTorch's own encoder layer does: its fast path does not call them."""

    class Reads(Skip):
        def forward(self, X):
            return super().forward(X) + (0 if self.training else self.middle.bias.sum())

    assert layers_in_one_piece(Reads(), KINDS, VECTORS[0]) == {"middle"}


def test_who_reads_the_weight_of_a_sliced_layer_is_told():
    module = Skip()
    slice_layers(module, 4, 0, 1)
    with pytest.raises(RunError, match=r"^The model reads the weight or bias of middle, which is in slices, instead"):
        module.middle.weight  # noqa: B018


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_layers_whose_activations_are_checkpointed_stay_in_one_piece(use_reentrant):
    assert layers_in_one_piece(Checkpointed(use_reentrant), KINDS, VECTORS[0]) == {"middle.0", "middle.3"}


def test_a_layer_that_is_called_in_mid_backward_all_the_same_is_refused():
    class Sometimes(Skip):
        """Only when gradients are needed: two passes without do not show it."""

        def forward(self, X):
            hidden = self.first(X)
            if torch.is_grad_enabled():
                return self.last(checkpoint(self.left, hidden, use_reentrant=False).relu())
            return self.last(self.left(hidden).relu())

    with pytest.raises(LockstepError, match="left is computed outside of a forward pass"):
        lockstep.train(
            model=seeded(Sometimes), data=VECTORS, split="layers=2", slices=4, epochs=1, batch_size=20, quiet=True,
            checkpoint_every=0,
        )  # fmt: skip
