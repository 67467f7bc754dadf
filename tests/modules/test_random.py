"""Random numbers inside a model depend on their key, and leave the process's own stream alone."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import lockstep
from lockstep.errors import RankError
from lockstep.modules.random import KeyedRandom, NoDraws, shard_seed, surely_draws

CPU = torch.device("cpu")
X = torch.rand(4, 6, 8)
GRU = nn.GRU(8, 8, num_layers=2, dropout=0.5, batch_first=True)
ATTENTION = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True)

DRAWS = {
    "dropout": lambda: F.dropout(X, 0.5),
    "dropout with gradient": lambda: F.dropout(X.clone().requires_grad_(), 0.5),
    "dropout2d": lambda: F.dropout2d(X[..., None], 0.5),
    "alpha_dropout": lambda: F.alpha_dropout(X, 0.5, training=True),
    "feature_alpha_dropout": lambda: F.feature_alpha_dropout(X, 0.5, training=True),
    "native_dropout": lambda: torch.native_dropout(X, 0.5, True)[0],
    "rand": lambda: torch.rand(3, 2),
    "randn": lambda: torch.randn(3),
    "randint": lambda: torch.randint(100, (9,)),
    "randint low": lambda: torch.randint(5, 100, (9,)),
    "randperm": lambda: torch.randperm(50),
    "rand_like": lambda: torch.rand_like(X),
    "randn_like": lambda: torch.randn_like(X),
    "randint_like": lambda: torch.randint_like(X, 100),
    "normal": lambda: torch.normal(0.0, 1.0, (5,)),
    "normal_": lambda: torch.empty(5).normal_(),
    "uniform_": lambda: torch.empty(5).uniform_(),
    "exponential_": lambda: torch.empty(5).exponential_(),
    "bernoulli": lambda: torch.bernoulli(X),
    "multinomial": lambda: torch.multinomial(torch.ones(50), 20),
    "poisson": lambda: torch.poisson(10 * X),
    "gumbel_softmax": lambda: F.gumbel_softmax(X),
    "rrelu": lambda: F.rrelu(X - 0.5, training=True),
    "fractional_max_pool2d": lambda: F.fractional_max_pool2d(torch.rand(1, 1, 20, 20), 2, output_size=9),
    "distribution": lambda: torch.distributions.Normal(X, 1.0).rsample(),
    "gru": lambda: GRU(X)[0],
    "attention": lambda: ATTENTION(X, X, X)[0],
    "attention without weights": lambda: ATTENTION(X, X, X, need_weights=False)[0],
}


@pytest.mark.parametrize("draw", DRAWS)
def test_what_is_drawn_depends_on_the_seed_only(draw):
    keyed, before = KeyedRandom(CPU), torch.get_rng_state()

    def drawn(seed):
        torch.manual_seed(123)  # for arguments that are drawn outside
        with keyed.start(seed):
            return DRAWS[draw]().detach()

    first, again, other = drawn(7), drawn(7), drawn(8)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    torch.manual_seed(123)
    state = torch.get_rng_state()
    if draw != "fractional_max_pool2d":  # its argument is drawn inside
        drawn(7)
        assert torch.equal(torch.get_rng_state(), state), "the process's own numbers were drawn from"
    torch.set_rng_state(before)


def test_a_generator_of_the_users_own_is_the_users():
    keyed = KeyedRandom(CPU)
    with keyed.start(1):
        mine = torch.rand(3, generator=torch.Generator().manual_seed(5))
    assert torch.equal(mine, torch.rand(3, generator=torch.Generator().manual_seed(5)))


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_fused_dropout_scales_what_it_keeps_and_has_its_gradient(p):
    x = torch.ones(1000, requires_grad=True)
    with KeyedRandom(CPU).start(3):
        out, kept = torch.native_dropout(x, p, True)
    torch.testing.assert_close(out, kept / (1 - p) if p < 1 else torch.zeros(1000))
    assert kept.sum() == pytest.approx(1000 * (1 - p), abs=60)
    out.sum().backward()
    assert torch.equal(x.grad, out.detach())


def test_seeds_differ_for_every_part_of_the_key():
    seeds = {shard_seed(seed, step, shard) for seed in range(4) for step in range(20) for shard in range(8)}
    assert len(seeds) == 4 * 20 * 8


def test_layers_with_dropout_are_known_to_draw():
    assert surely_draws(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)))
    assert surely_draws(GRU)
    assert surely_draws(ATTENTION)
    assert not surely_draws(nn.Sequential(nn.Dropout(0.0), nn.GRU(2, 2), nn.MultiheadAttention(2, 1)))


def test_nothing_may_be_drawn_on_the_way_back():
    with NoDraws(), pytest.raises(RuntimeError, match=r"bernoulli_.* draws random numbers in the backward pass"):
        F.dropout(X, 0.5)
    with NoDraws():
        F.relu(X)


class Checkpointed(nn.Module):
    def __init__(self, p, reentrant):
        super().__init__()
        self.first, self.part = nn.Linear(6, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(p))
        self.last, self.reentrant = nn.Linear(8, 3), reentrant

    def forward(self, x):
        return self.last(checkpoint(self.part, self.first(x), use_reentrant=self.reentrant))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_parts_train_and_with_dropout_they_are_refused(vectors, reentrant):
    settings = {"data": vectors, "batch_size": 16, "epochs": 1, "quiet": True}
    module = Checkpointed(0.0, reentrant)
    results = [lockstep.train(model=module, devices=k, **settings) for k in (1, 2)]
    assert results[0].weights_sha256 == results[1].weights_sha256
    plain = nn.Sequential(module.first, module.part, module.last)
    assert lockstep.train(model=plain, devices=1, **settings).weights_sha256 == results[0].weights_sha256
    with pytest.raises(RankError, match="Leave dropout out of checkpointed parts"):
        lockstep.train(model=Checkpointed(0.5, reentrant), devices=2, **settings)
