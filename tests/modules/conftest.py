"""Small data for modules."""

import pytest
import torch


@pytest.fixture
def vectors():
    """40 samples of six numbers, with labels of three classes."""
    generator = torch.Generator().manual_seed(0)
    return torch.rand(40, 6, generator=generator), torch.randint(3, (40,), generator=generator)
