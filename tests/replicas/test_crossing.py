"""What crosses a cut is taken apart and put together again, and a tensor crosses once."""

import pytest
import torch

from lockstep.core.serialization import pack, unpack
from lockstep.replicas.crossing import CannotCross, flattened, put_together, sharing_memory

CPU, META = torch.device("cpu"), torch.device("meta")


def test_values_have_the_same_form_on_the_other_side():
    X, y = torch.rand(3, 4), torch.arange(3)
    value = (X, [y, {"size": X.shape, 7: (None, True, 2, 0.5, "text")}], X.dtype, X.topk(2, 1))
    tensors, form = flattened(value)
    found = put_together(tensors, unpack(pack(form)), CPU)
    assert found[0] is X
    assert found[1][0] is y
    assert found[1][1] == value[1][1]
    assert type(found[1][1]["size"]) is torch.Size
    assert found[2] is torch.float32
    assert type(found[3]) is torch.return_types.topk
    assert found[3].indices is value[3].indices


def test_a_tensor_crosses_once():
    X = torch.rand(2)
    tensors, form = flattened((X, {"again": [X]}, X))
    assert len(tensors) == 1
    other = torch.rand(2)
    found = put_together([other], form, CPU)
    assert found[0] is found[1]["again"][0] is found[2] is other


def test_a_device_is_that_of_the_receiver():
    assert put_together(*flattened((CPU,)), META) == (META,)


class Own(dict):
    """A class of one's own."""


@pytest.mark.parametrize("value", [Own(a=1), {1, 2}, range(3), object()], ids=lambda value: type(value).__name__)
def test_other_objects_are_refused(value):
    with pytest.raises(CannotCross, match=f"^a {type(value).__name__} crosses a cut between stages, and only tensors"):
        flattened((torch.rand(1), [value]))


def test_views_share_memory_and_copies_do_not():
    X = torch.rand(4)
    assert sharing_memory([X, torch.rand(4), X[:2], X.clone(), torch.rand(2).to_sparse()]) == [0, 2]
