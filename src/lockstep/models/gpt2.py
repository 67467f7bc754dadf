"""GPT-2: a decoder for sequences of tokens, with fused causal attention. `--model gpt2` is the small one, 124 M."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.data import Dataset
from lockstep.models.attention import FeedForward, SelfAttention, Size
from lockstep.models.tokens import token_counts


class Block(nn.Module):
    """Causal self-attention and two linear layers, each with layer norm before it and a skip connection."""

    def __init__(self, size: Size, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.attend, self.feed_forward = SelfAttention(size, dropout, is_causal=True), FeedForward(size, "tanh")
        self.dropout = nn.Dropout(dropout)

    def forward(self, X: Tensor) -> Tensor:
        X = X + self.dropout(self.attend(self.norm1(X)))
        return X + self.dropout(self.feed_forward(self.norm2(X)))


class GPT2(nn.Module):
    """Scores for the next token at every position, from the tokens up to there.

    >>> small = Size(width=32, num_heads=2, num_blocks=2)
    >>> GPT2(num_tokens=30, length=16, size=small)(torch.zeros(2, 16, dtype=torch.int64)).shape
    torch.Size([2, 30, 16])
    """

    def __init__(self, num_tokens: int, length: int, size: Size | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        size = size or Size()
        self.tokens, self.positions = nn.Embedding(num_tokens, size.width), nn.Embedding(length, size.width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(size, dropout) for _ in range(size.num_blocks))
        self.norm = nn.LayerNorm(size.width)
        self.register_buffer("numbers", torch.arange(length), persistent=False)
        for name, param in self.named_parameters():
            if param.ndim > 1:
                is_last = name.endswith(("join.weight", "feed_forward.2.weight"))  # they add to the skip connection
                nn.init.normal_(param, std=0.02 / (2 * size.num_blocks) ** 0.5 if is_last else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(param)

    def forward(self, X: Tensor) -> Tensor:
        """(samples, positions) -> (samples, tokens, positions), as `cross_entropy` takes it."""
        Y = self.dropout(self.tokens(X) + self.positions(self.numbers[: X.shape[1]]))
        for block in self.blocks:
            Y = block(Y)
        return F.linear(self.norm(Y), self.tokens.weight).transpose(1, 2)  # tied to the embedding


def gpt2(data: Dataset) -> GPT2:
    """The model for the sequences of a dataset: the targets are the next tokens."""
    return GPT2(*token_counts(data, "gpt2", multiple_of=64))
