"""A small transformer for sequences of tokens: `--model transformer`."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.data import Dataset
from lockstep.models.tokens import token_counts


class Block(nn.Module):
    """Causal self-attention, then two linear layers, each with layer norm before it and a skip connection."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend = nn.MultiheadAttention(width, num_heads, dropout=dropout, batch_first=True)
        self.feed_forward = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, X: Tensor, mask: Tensor) -> Tensor:
        Y = self.norm1(X)
        X = X + self.attend(Y, Y, Y, attn_mask=mask, need_weights=False)[0]
        return X + self.feed_forward(self.norm2(X))


class Transformer(nn.Module):
    """Scores for the next token at every position, from the tokens up to there.

    >>> Transformer(num_tokens=30, length=16)(torch.zeros(2, 16, dtype=torch.int64)).shape
    torch.Size([2, 30, 16])
    """

    def __init__(
        self,
        num_tokens: int,
        length: int,
        width: int = 128,
        num_heads: int = 4,
        num_blocks: int = 2,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(num_tokens, width)
        nn.init.normal_(self.tokens.weight, std=0.02)  # also the output layer: scores start near zero
        self.positions = nn.Parameter(0.02 * torch.randn(length, width))
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, num_heads, dropout) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(width)
        self.register_buffer("mask", torch.ones(length, length).triu(1).bool(), persistent=False)

    def forward(self, X: Tensor) -> Tensor:
        """(samples, positions) -> (samples, tokens, positions), as `cross_entropy` takes it."""
        length = X.shape[1]
        Y = self.dropout(self.tokens(X) + self.positions[:length])
        for block in self.blocks:
            Y = block(Y, self.mask[:length, :length])
        return F.linear(self.norm(Y), self.tokens.weight).transpose(1, 2)  # tied to the embedding


def transformer(data: Dataset) -> Transformer:
    """The model for the sequences of a dataset: the targets are the next tokens."""
    return Transformer(*token_counts(data, "transformer"))
