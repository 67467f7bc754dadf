"""Models whose graphs are harder to cut than a chain, and tiny data for them."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

GENERATOR = torch.Generator().manual_seed(0)
IMAGES = torch.rand(30, 3, 6, 6, generator=GENERATOR), torch.randint(4, (30,), generator=GENERATOR)
VECTORS = torch.rand(30, 6, generator=GENERATOR), torch.randint(3, (30,), generator=GENERATOR)


def sequential():
    """A user's Sequential, with batch norm and dropout, nested."""
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True)),
        nn.Dropout(0.3), nn.Conv2d(8, 8, 2), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Flatten(), nn.Dropout(0.2),
        nn.Linear(72, 10), nn.ReLU(), nn.Linear(10, 4),
    )  # fmt: skip


class Block(nn.Module):
    """A residual block."""

    def __init__(self, channels):
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)
        self.second, self.norm2 = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)

    def forward(self, X):
        return F.relu(self.norm2(self.second(F.relu(self.norm1(self.first(X))))) + X)


class Residual(nn.Module):
    """A small ResNet."""

    def __init__(self):
        super().__init__()
        self.stem, self.blocks = nn.Conv2d(3, 6, 3, padding=1), nn.Sequential(*(Block(6) for _ in range(3)))
        self.head = nn.Linear(6, 4)

    def forward(self, X):
        return self.head(self.blocks(self.stem(X)).mean((2, 3)))


class Skip(nn.Module):
    """What the first layer gives is used again by the last: it crosses every cut. Two tensors cross some."""

    def __init__(self):
        super().__init__()
        self.first, self.left, self.right = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.middle, self.last, self.short = nn.Linear(16, 8), nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, X):
        hidden = self.first(X).relu()
        left, right = self.left(hidden), self.right(hidden)
        return self.last(self.middle(torch.cat([left, right.sigmoid()], 1)).relu()) + self.short(hidden)


class Tied(nn.Module):
    """Its last layer has the weight of its first one."""

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.out = nn.Linear(6, 3, bias=False), nn.Linear(3, 6), nn.Linear(6, 3, bias=False)
        self.out.weight = self.first.weight

    def forward(self, X):
        return self.out(self.middle(self.first(X).relu()).relu())


class CalledTwice(nn.Module):
    """A layer with batch norm that is called at the beginning and at the end."""

    def __init__(self):
        super().__init__()
        self.first, self.again, self.middle = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm, self.last = nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, X):
        hidden = self.again(self.norm(self.first(X))).relu()
        return self.last(self.again(self.norm(self.middle(hidden))).relu())


class Unused(nn.Module):
    """Parameters and buffers that nobody uses, and a frozen layer."""

    def __init__(self):
        super().__init__()
        self.never, self.first, self.middle, self.last = (
            nn.Linear(5, 5),
            nn.Linear(6, 8),
            nn.Linear(8, 8),
            nn.Linear(8, 3),
        )
        self.register_buffer("version", torch.tensor(3.0))
        self.middle.requires_grad_(False)

    def forward(self, X):
        return self.last(self.middle(self.first(X).relu()).relu())


class RootDropout(nn.Module):
    """Dropout as a function, in the root's own forward method: the graph in eval mode is another one."""

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, X):
        hidden = F.dropout(self.first(X).relu(), 0.4, training=self.training)
        return self.last(F.dropout(self.middle(hidden).relu(), 0.4, training=self.training))


class InPlace(nn.Module):
    """Writes to what it was handed."""

    def __init__(self):
        super().__init__()
        self.first, self.relu, self.middle, self.last = (
            nn.Linear(6, 8),
            nn.ReLU(inplace=True),
            nn.Linear(8, 8),
            nn.Linear(8, 3),
        )

    def forward(self, X):
        return self.last(self.relu(self.middle(self.relu(self.first(X)))))


class Nested(nn.Module):
    """Tuples and dicts cross its cuts, a tensor in several, a size, a dtype, a device, and what topk returns."""

    class Both(nn.Module):
        """Gives a tuple with a dict."""

        def __init__(self):
            super().__init__()
            self.left, self.right = nn.Linear(6, 8), nn.Linear(6, 8)

        def forward(self, X):
            left = self.left(X).relu()
            return left, {"left": left, "right": [self.right(X), 2]}

    def __init__(self):
        super().__init__()
        self.both, self.first, self.same = Nested.Both(), nn.Linear(6, 8), nn.Identity()
        self.middle, self.last = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, X):
        size, dtype, device, both = X.shape, X.dtype, X.device, self.both(X)
        largest = both[0].topk(2, 1)
        again = self.same(both[0])
        hidden = self.middle(self.first(X).relu() * again).view(size[:1] + (8,)).to(device, dtype)
        right, factor = both[1]["right"]
        hidden = hidden + both[0] + both[1]["left"] * again + right * factor + largest.values.sum(1, keepdim=True)
        return self.last(hidden)


class Positions(nn.Module):
    """Makes tensors of sizes that it reads from its input, some of them random."""

    def __init__(self):
        super().__init__()
        self.first, self.places = nn.Linear(6, 8), nn.Embedding(8, 1)
        self.middle, self.last = nn.Linear(8, 8), nn.Linear(8, 3)
        self.factor = torch.linspace(0.5, 1.5, 8)  # no buffer

    def forward(self, X):
        num_samples, width = X.size()
        places = torch.arange(width + 2, device=X.device)
        hidden = self.first(X) + self.places(places).squeeze(1)
        hidden = self.middle(hidden * self.factor).relu() + 0.1 * torch.rand(num_samples, 1) + torch.rand(8)
        return self.last(hidden * self.factor) + torch.zeros(num_samples, 3) + torch.tensor([0.1, 0.2, 0.3])


class Counting(nn.Module):
    """Counts its calls in its own forward method, in place."""

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.int64))

    def forward(self, X):
        hidden = self.middle(self.first(X).relu())
        if self.training:
            self.num_calls.add_(1)
        return self.last(hidden.relu())


class Checkpointed(nn.Module):
    """Computes its activations again in mid-backward, with dropout."""

    def __init__(self, use_reentrant=False):
        super().__init__()
        self.first, self.last, self._use_reentrant = nn.Linear(6, 8), nn.Linear(8, 3), use_reentrant
        self.middle = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 8))

    def forward(self, X):
        return self.last(checkpoint(self.middle, self.first(X), use_reentrant=self._use_reentrant))


class Deciding(nn.Module):
    """Takes another path for some values of its input."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, X):
        hidden = self.first(X)
        return self.last(hidden.relu() if hidden.sum() > 0 else hidden)


GRAPHS = {"skip": Skip, "tied": Tied, "called twice": CalledTwice, "unused": Unused, "root dropout": RootDropout,
          "in place": InPlace, "nested": Nested, "positions": Positions, "checkpointed": Checkpointed,
          "counting": Counting}  # fmt: skip


def seeded(make):
    """The model, with the same weights in every call."""

    def made():
        torch.manual_seed(3)
        return make()

    return made
