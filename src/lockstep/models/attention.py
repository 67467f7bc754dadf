"""Self-attention with PyTorch's fused kernels, and the two linear layers that follow it in a block."""

from typing import NamedTuple

from torch import Tensor, nn
from torch.nn import functional as F


class Size(NamedTuple):
    """The size of a model of such blocks; the default is that of GPT-2 small, BERT base and ViT-B."""

    width: int = 768
    num_heads: int = 12
    num_blocks: int = 12


class SelfAttention(nn.Module):
    """Every position attends to all positions of its sequence, or to those before it."""

    def __init__(self, size: Size, dropout: float = 0.0, is_causal: bool = False) -> None:
        super().__init__()
        self._num_heads, self._dropout, self._is_causal = size.num_heads, dropout, is_causal
        self.project, self.join = nn.Linear(size.width, 3 * size.width), nn.Linear(size.width, size.width)

    def forward(self, X: Tensor) -> Tensor:
        num_samples, length, width = X.shape
        heads = num_samples, length, self._num_heads, width // self._num_heads
        queries, keys, values = (part.view(heads).transpose(1, 2) for part in self.project(X).split(width, dim=2))
        dropout = self._dropout if self.training else 0.0
        Y = F.scaled_dot_product_attention(queries, keys, values, dropout_p=dropout, is_causal=self._is_causal)
        return self.join(Y.transpose(1, 2).reshape(X.shape))


class FeedForward(nn.Sequential):
    """Two linear layers, the first of them four times as wide."""

    def __init__(self, size: Size, approximate: str = "none") -> None:
        wide = 4 * size.width
        super().__init__(nn.Linear(size.width, wide), nn.GELU(approximate), nn.Linear(wide, size.width))
