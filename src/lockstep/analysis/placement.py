"""Where a network is cut, for the devices of a plan."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from lockstep.analysis.profile import Profile
from lockstep.partition.chain import Chain, Cuts, StageDevice, place_in_any_order, place_stages
from lockstep.schedules.pipeline_orders import max_in_flight


class Pipeline(NamedTuple):
    """What goes through each copy of a network that is cut into stages."""

    num_samples: float  # of a shard
    num_shards: int = 0  # of a copy; 0: not known
    num_copies: int = 1
    order: str = "1f1b"  # of the shards
    shards_update: bool = False

    def bytes_of_entry(self, profile: Profile) -> float:
        """What an entry of the parameters takes, with its gradients and the optimizer's state."""
        # a leaf, sums that wait for others, and what is exchanged with other copies
        gradients = min(self.num_shards, 2 + int(math.log2(max(1, self.num_shards)))) + (self.num_copies > 1)
        state = profile.optimizer_bytes / (self.num_copies if self.shards_update else 1)
        return (profile.parameter_bytes + state) / max(1, profile.num_entries) + 4 * gradients

    def in_flight(self, num_stages: int) -> list[int]:
        """Shards that each stage has under way, at most."""
        places = tuple(range(num_stages))
        return [max_in_flight(self.order, places, place, self.num_shards or num_stages) for place in places]


def chain_of(profile: Profile, pipeline: Pipeline, bandwidth: float = math.inf) -> Chain:
    """The layers of the network with such shards."""
    layers, size, of_entry = profile.layers, pipeline.num_samples, pipeline.bytes_of_entry(profile)
    return Chain(
        costs=[layer.forward.at(size) + layer.backward.at(size) for layer in layers],
        crossing=[2 * layer.sent_bytes * size / bandwidth for layer in layers[:-1]],
        memory=[layer.num_entries * of_entry for layer in layers],
        kept=[layer.kept_bytes * size for layer in layers],
    )


def best_cut(
    profile: Profile,
    places: Sequence[StageDevice],
    pipeline: Pipeline,
    bandwidth: float = math.inf,
    *,
    in_any_order: bool = False,
) -> Cuts | None:
    """The best cut for these devices, in their order or in any."""
    if len(places) > len(profile.layers):
        return None
    place = place_in_any_order if in_any_order else place_stages
    return place(chain_of(profile, pipeline, bandwidth), places, pipeline.in_flight(len(places)))


def best_starts(profile: Profile, num_stages: int, num_samples: float) -> tuple[str, ...]:
    """The names of the layers that all stages but the first begin with, on equal devices."""
    found = best_cut(profile, [StageDevice()] * num_stages, Pipeline(num_samples))
    assert found is not None, "there are as many layers as stages, and no limit to the memory"
    return tuple(profile.layers[start].name for start in found.starts)
