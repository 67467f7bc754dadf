"""Dropout within attention, in Triton: the position of a query and that of a key decide whether a probability is kept.

So nothing is stored, and every kernel finds the same answer wherever it needs it, for two instructions.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

NUM_WORDS = 1024  # that a program fills
DROP = tl.constexpr("""{
    .reg .b32 product;
    .reg .pred is_kept;
    mul.lo.u32 product, $2, $3;
    setp.ge.u32 is_kept, product, $4;
    selp.f32 $0, $1, 0f00000000, is_kept;
}""")


class Dropout(NamedTuple):
    """Which probabilities are dropped, and what the others are multiplied by."""

    words: Any  # 32 random bits for each query of each head, then for each key; None where nothing is dropped
    below: tl.constexpr  # this number, the product of two words drops a probability; a constant of the kernel
    share: Any  # of the probabilities, that is kept


def dropout_of(probability: float, seed: Tensor, like: Tensor) -> Dropout:
    """With random words for all queries and keys, of which `like` has one number each."""
    if not probability:
        return Dropout(None, tl.constexpr(0), 1.0)
    words = like.new_empty(2, *like.shape, dtype=torch.int32)
    _fill_words[(triton.cdiv(words.numel(), NUM_WORDS),)](words, seed, words.numel(), NUM_WORDS)
    return Dropout(words, tl.constexpr(min(round(probability * 2**32), 2**32 - 1)), 1 - probability)


@triton.jit
def _fill_words(words, seed, size, NUMBER: tl.constexpr):
    """Random ones. They are odd: then all products with one of them are different."""
    at = tl.program_id(0) * NUMBER + tl.arange(0, NUMBER)
    tl.store(words + at, tl.randint(tl.load(seed), at) | 1, mask=at < size)


@triton.jit
def of_head(data, head, position, sizes, EVEN: tl.constexpr, OTHER: tl.constexpr):
    """The numbers that a head has for some positions; behind the end, another one."""
    at = data + head.to(tl.int64) * sizes.length + position
    return tl.load(at) if EVEN else tl.load(at, mask=position < sizes.length, other=OTHER)


@triton.jit
def words_of(dropout, position, sizes, tile, OF_KEYS: tl.constexpr):
    """Those of some queries, or keys, of this program's head; without dropout, the positions themselves."""
    found = position
    if dropout.words is not None:
        head = tl.program_id(1) + OF_KEYS * tl.num_programs(1)
        found = of_head(dropout.words, head, position, sizes, tile.is_even, 0).to(tl.uint32, bitcast=True)
    return found


@triton.jit
def drop(numbers, of_rows, of_columns, dropout):
    """The numbers, some of them 0 instead: the product of the words of a row and of a column decides.

    In one piece, because the compiler would decide about many at once, and run out of registers for the decisions.
    """
    return tl.inline_asm_elementwise(
        DROP,
        "=f,f,r,r,r",
        [numbers, of_rows[:, None], of_columns[None, :], tl.full([1, 1], dropout.below, tl.uint32)],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )
