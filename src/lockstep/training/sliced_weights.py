"""The parameters of sliced layers: as a whole, and in slices."""

from collections.abc import Callable, Mapping

import numpy as np

from lockstep.core.layout import Array

Arrays = dict[str, Array]
Slicing = Mapping[str, tuple[list[str], list[int], int]]  # name -> names of its slices, their sizes, the axis


def whole_of(slices: Slicing) -> Callable[[Arrays], Arrays]:
    """A function that puts the slices of parameters together, in the order of the model."""

    def whole(arrays: Arrays) -> Arrays:
        first = {names[0]: (name, names, dim) for name, (names, _, dim) in slices.items()}
        later = {n for names, _, _ in slices.values() for n in names[1:]}
        found: Arrays = {}
        for unit, array in arrays.items():
            if unit in first:
                name, names, dim = first[unit]
                found[name] = np.concatenate([arrays[n] for n in names], axis=dim)
            elif unit not in later:
                found[unit] = array
        return found

    return whole


def sliced_by(slices: Slicing) -> Callable[[Arrays], Arrays]:
    """A function that takes parameters apart into their slices."""

    def sliced(arrays: Arrays) -> Arrays:
        found: Arrays = {}
        for name, array in arrays.items():
            if name in slices:
                names, widths, dim = slices[name]
                parts = np.split(array, np.cumsum(widths)[:-1], axis=dim)
                found |= {n: np.ascontiguousarray(part) for n, part in zip(names, parts, strict=True)}
            else:
                found[name] = array
        return found

    return sliced
