"""Where a network is cut, for the devices of a plan."""

import math
from collections.abc import Sequence

from lockstep.analysis.profile import Profile
from lockstep.partition.chain import Chain, Cuts, Place, place_stages

GRADIENTS = 3  # of a stage that are alive at a time, about: a leaf, a sum, and what is exchanged


def chain_of(profile: Profile, num_samples: float, bandwidth: float = math.inf) -> Chain:
    """The layers of the network with shards of so many samples."""
    layers = profile.layers
    state = profile.optimizer_bytes / max(1, profile.num_entries)
    return Chain(
        costs=[layer.forward.at(num_samples) + layer.backward.at(num_samples) for layer in layers],
        crossing=[2 * layer.sent_bytes * num_samples / bandwidth for layer in layers[:-1]],
        memory=[layer.num_entries * (4 + 4 * GRADIENTS + state) for layer in layers],
        kept=[layer.kept_bytes * num_samples for layer in layers],
    )


def best_cut(
    profile: Profile, places: Sequence[Place], num_samples: float, num_shards: int = 0, bandwidth: float = math.inf
) -> Cuts | None:
    """The best cut for these devices, in their order; with so many shards under way, at most."""
    if len(places) > len(profile.layers):
        return None
    in_flight = [min(len(places) - at, num_shards or len(places)) for at in range(len(places))]
    return place_stages(chain_of(profile, num_samples, bandwidth), places, in_flight)


def best_starts(profile: Profile, num_stages: int, num_samples: float) -> tuple[str, ...]:
    """The names of the layers that all stages but the first begin with, on equal devices."""
    found = best_cut(profile, [Place()] * num_stages, num_samples)
    assert found is not None, "there are as many layers as stages, and no limit to the memory"
    return tuple(profile.layers[start].name for start in found.starts)
