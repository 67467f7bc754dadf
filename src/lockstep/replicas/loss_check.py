"""A loss of samples must not look across them: tried on the first shard, with and without some of its samples."""

from typing import Any

import torch
from torch import Tensor

from lockstep.core.errors import RunError
from lockstep.core.this_thread import THIS_THREAD
from lockstep.data.dataset import map_leaves
from lockstep.models.losses import PerSample

TOLERANCE = 1e-3


def check_separable(loss: PerSample, output: Any, y: Any, num_samples: int) -> None:
    """Refuses a loss whose numbers for some samples depend on the others; not one that draws, or keeps a state."""
    if num_samples < 2:
        return
    cut = num_samples - num_samples // 2
    num_lent = THIS_THREAD.num_lent
    generator = torch.default_generator if THIS_THREAD.keyed is None else THIS_THREAD.keyed.on_host
    before = generator.get_state()
    try:
        with torch.no_grad():
            whole = loss(*_part(output, y, num_samples, slice(0, num_samples)))
            parts = [loss(*_part(output, y, num_samples, part)) for part in (slice(0, cut), slice(cut, num_samples))]
            again = loss(*_part(output, y, num_samples, slice(0, num_samples)))
    except Exception:  # it may need them all: the step itself says what is wrong
        return
    finally:
        has_drawn = not torch.equal(before, generator.get_state())
        generator.set_state(before)  # the step itself draws what it would have drawn
    if num_lent != THIS_THREAD.num_lent:  # the loss uses another model, whose norm layers may see all samples
        return
    if has_drawn or not _is_the_same(whole, [again], tolerance=0.0):
        return
    if not _is_the_same(whole, parts):
        raise RunError(
            "The loss of a sample depends on the other samples that it is computed with (a contrastive loss, or one "
            "that normalizes over them?). Each shard would be a batch of its own. Use over='batch': then the loss gets "
            "the outputs of the whole batch, and returns one number."
        )


def _part(output: Any, y: Any, num_samples: int, part: slice) -> tuple[Any, Any]:
    def cut(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        found = value.detach()[part] if value.ndim and len(value) == num_samples else value.detach()
        return found.clone()  # the loss may write to it in place

    return map_leaves(output, cut), map_leaves(y, cut)


def _is_the_same(whole: Any, parts: list[Any], tolerance: float = TOLERANCE) -> bool:
    if isinstance(whole, Tensor) and whole.ndim == 1:
        return _is_close(whole, torch.cat(parts), tolerance)
    if not isinstance(whole, tuple) or len(whole) != 2 or any(torch.as_tensor(each).numel() != 1 for each in whole):
        return True  # refused elsewhere
    sums = [sum(map(torch.as_tensor, of_parts)) for of_parts in zip(*parts, strict=True)]
    return all(_is_close(torch.as_tensor(one), other, tolerance) for one, other in zip(whole, sums, strict=True))


def _is_close(one: Tensor, other: Any, tolerance: float) -> bool:
    one, other = one.double(), torch.as_tensor(other).double()
    if not bool(one.isfinite().all()):
        return True  # another error says so
    near = tolerance * (float(one.abs().max()) + 1e-6)
    return one.shape == other.shape and bool(torch.allclose(one, other, rtol=tolerance, atol=near, equal_nan=True))
