"""Random numbers inside a model depend on their key, and do not change the process's own generators."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import lockstep
from lockstep.core.errors import RankError, RunError
from lockstep.core.random import shard_seed
from lockstep.replicas.keyed_random import KeyedRandom, NoDraws
from lockstep.replicas.shard_loss import NUM_WATCHED_STEPS

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
        torch.manual_seed(123)  # for arguments that are drawn before
        with keyed.start(seed):
            return DRAWS[draw]().detach()

    first, again, other = drawn(7), drawn(7), drawn(8)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    torch.manual_seed(123)
    state = torch.get_rng_state()
    if draw != "fractional_max_pool2d":  # its argument is drawn in the test itself
        drawn(7)
        assert torch.equal(torch.get_rng_state(), state), "the process's own generator was drawn from"
    torch.set_rng_state(before)


def test_a_generator_that_the_model_seeds_itself_is_as_good_as_a_key():
    generator = torch.Generator()
    with KeyedRandom(CPU).start(1):
        mine = torch.rand(3, generator=generator.manual_seed(5))
        more = torch.rand(3, generator=generator)
    expected = torch.rand(6, generator=torch.Generator().manual_seed(5))
    assert torch.equal(torch.cat([mine, more]), expected)


def test_a_generator_that_continues_from_shard_to_shard_is_refused():
    keyed, generator = KeyedRandom(CPU), torch.Generator().manual_seed(5)
    with keyed.start(1):
        torch.rand(3, generator=generator)
    with (
        keyed.start(2),
        pytest.raises(RuntimeError, match="draws from a generator of its own, which continues from shard to shard"),
    ):
        torch.rand(3, generator=generator)


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_fused_dropout_scales_the_kept_entries_and_their_gradient(p):
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


def test_fused_dropout_with_train_none_drops():
    with KeyedRandom(CPU).start(3):
        out, _ = torch.native_dropout(torch.ones(100), 0.5, None)
    assert 0 < int((out == 0).sum()) < 100


@pytest.mark.parametrize(("source", "draw"), [("Python's random", random.random), ("numpy.random", np.random.rand)])
def test_draws_from_python_or_numpy_in_the_forward_pass_are_refused(vectors, source, draw):
    class Draws(nn.Linear):
        def forward(self, x):
            return super().forward(x * (draw() if self.training else 1.0))

    with pytest.raises(RunError, match=f"Random numbers were drawn from {source} while model or loss were computed"):
        lockstep.train(model=Draws(6, 3), data=vectors, devices=2, batch_size=16, epochs=1, quiet=True)


def test_an_optimizer_that_draws_is_keyed_by_the_step(vectors):
    class Langevin(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            with torch.no_grad():
                for group in self.param_groups:
                    for param in group["params"]:
                        param.add_(0.01 * torch.randn_like(param))

    module = nn.Linear(6, 3)
    settings = {"data": vectors, "batch_size": 16, "epochs": 1, "quiet": True}
    hashes = {
        lockstep.train(model=module, devices=k, optimizer=lambda p: Langevin(p, 0.1), **settings).weights_sha256
        for k in (1, 2, 3)
    }
    assert len(hashes) == 1


def test_a_model_that_starts_to_draw_in_mid_run_is_keyed_from_then_on(vectors):
    class Later(nn.Linear):
        def __init__(self):
            super().__init__(6, 3)
            self.register_buffer("calls", torch.tensor(0))

        def forward(self, x):
            self.calls += int(self.training)
            return super().forward(F.dropout(x, 0.5) if self.calls > 8 * NUM_WATCHED_STEPS + 10 else x)

    module = Later()
    settings = {"data": vectors, "batch_size": 8, "epochs": 2, "quiet": True}
    hashes = set()
    for k in (1, 2, 4, 8):
        torch.manual_seed(k)
        hashes.add(lockstep.train(model=module, devices=k, **settings).weights_sha256)
    assert len(hashes) == 1


def test_a_model_that_seeds_the_process_in_forward_keeps_the_bits(vectors):
    class Seeds(nn.Linear):
        def forward(self, x):
            with torch.random.fork_rng():
                torch.manual_seed(0)
                return super().forward(x + torch.randn_like(x))

    module = Seeds(6, 3)
    settings = {"data": (vectors, vectors), "batch_size": 16, "epochs": 2, "quiet": True}
    results = [lockstep.train(model=module, devices=k, **settings) for k in (1, 2, 4)]
    assert len({(result.weights_sha256, str(result.metrics)) for result in results}) == 1


def test_drawing_in_the_backward_pass_is_refused():
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
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_activation_checkpointing_has_the_bits_of_a_model_without_it(vectors, dropout, reentrant):
    settings = {"data": vectors, "batch_size": 16, "epochs": 1, "quiet": True}
    module = Checkpointed(dropout, reentrant)
    results = [lockstep.train(model=module, devices=k, **settings) for k in (1, 2)]
    assert results[0].weights_sha256 == results[1].weights_sha256
    plain = nn.Sequential(module.first, module.part, module.last)
    assert lockstep.train(model=plain, devices=1, **settings).weights_sha256 == results[0].weights_sha256


def test_random_numbers_that_are_not_put_back_are_refused_in_a_recomputation(vectors):
    class Forgetful(Checkpointed):
        def forward(self, x):
            y = checkpoint(self.part, self.first(x), use_reentrant=False, preserve_rng_state=False)
            return self.last(y)

    with pytest.raises(RankError, match="preserve_rng_state=True"):
        lockstep.train(model=Forgetful(0.5, False), data=vectors, batch_size=16, epochs=1, devices=2, quiet=True)
