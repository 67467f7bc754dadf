"""BERT: an encoder for sequences of tokens, with a score for each token at every position. `--model bert`."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.data import Dataset
from lockstep.models.attention import FeedForward, SelfAttention, Size
from lockstep.models.tokens import token_counts


class Block(nn.Module):
    """Self-attention and two linear layers, each with a skip connection and layer norm after it."""

    def __init__(self, size: Size, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.attend, self.feed_forward = SelfAttention(size, dropout), FeedForward(size)
        self.dropout = nn.Dropout(dropout)

    def forward(self, X: Tensor) -> Tensor:
        X = self.norm1(X + self.dropout(self.attend(X)))
        return self.norm2(X + self.dropout(self.feed_forward(X)))


class Bert(nn.Module):
    """Scores for the token at every position, from all tokens of the sequence.

    >>> small = Size(width=32, num_heads=2, num_blocks=2)
    >>> Bert(num_tokens=30, length=16, size=small)(torch.zeros(2, 16, dtype=torch.int64)).shape
    torch.Size([2, 30, 16])
    """

    def __init__(self, num_tokens: int, length: int, size: Size | None = None, dropout: float = 0.1) -> None:
        super().__init__()
        size = size or Size()
        self.tokens, self.positions = nn.Embedding(num_tokens, size.width), nn.Embedding(length, size.width)
        self.norm, self.dropout = nn.LayerNorm(size.width), nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(size, dropout) for _ in range(size.num_blocks))
        self.transform, self.last_norm = nn.Linear(size.width, size.width), nn.LayerNorm(size.width)
        self.bias = nn.Parameter(torch.zeros(num_tokens))
        self.register_buffer("numbers", torch.arange(length), persistent=False)
        for name, param in self.named_parameters():
            if param.ndim > 1:
                nn.init.normal_(param, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(param)

    def forward(self, X: Tensor) -> Tensor:
        """(samples, positions) -> (samples, tokens, positions), as `cross_entropy` takes it."""
        Y = self.dropout(self.norm(self.tokens(X) + self.positions(self.numbers[: X.shape[1]])))
        for block in self.blocks:
            Y = block(Y)
        Y = self.last_norm(F.gelu(self.transform(Y)))
        return F.linear(Y, self.tokens.weight, self.bias).transpose(1, 2)  # tied to the embedding


def bert(data: Dataset) -> Bert:
    """The model for the sequences of a dataset: a target at every position, -100 where none counts."""
    return Bert(*token_counts(data, "bert", multiple_of=64))
