"""How a PyTorch module is split: its stages, its slices, and the replica of each part."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, cast

from lockstep.backends.torch.session import own_modes, single_threaded
from lockstep.config import RunConfig
from lockstep.core.device import Device
from lockstep.partition.grid import Grid
from lockstep.partition.placement import Part
from lockstep.replicas.chunked import ChunkedReplica
from lockstep.replicas.module_capture import CapturableModuleReplica
from lockstep.replicas.module_state import arrays_of
from lockstep.replicas.module_update import check_can_be_shared
from lockstep.replicas.part_replica import PartModuleReplica
from lockstep.replicas.replica import Replica, ReplicaState
from lockstep.replicas.sliced_layers import KINDS, slices_of
from lockstep.replicas.stage_check import check_stages
from lockstep.replicas.stages import check_not_shared, cut_module, find_stages
from lockstep.replicas.train_spec import TrainSpec
from lockstep.replicas.weight_reads import layers_in_one_piece
from lockstep.training.sliced_weights import Arrays, sliced_by, whole_of
from lockstep.training.split_checks import notes_on_stages


class SplitModule(NamedTuple):
    """A module's stages and slices."""

    spec: TrainSpec  # with stages and slices
    stages: tuple[int, ...]  # for each stage, its place in a pipeline
    whole: Callable[[Arrays], Arrays]  # puts slices together
    sliced: Callable[[Arrays], Arrays]  # and takes them apart
    notes: tuple[str, ...] = ()


@own_modes()
@single_threaded()  # stages and whole are compared; and ranks of torchrun do so at the same time, on the same cores
def split_module(config: RunConfig, grid: Grid, spec: TrainSpec, samples: Callable[[], Any]) -> SplitModule:
    """The stages and slices of a module; `samples` gives the inputs of a few samples."""
    found: dict[str, tuple[list[str], list[int], int]] = {}
    whole: Callable[[Arrays], Arrays] = unsliced
    sliced: Callable[[Arrays], Arrays] = unsliced
    if config.num_slices:
        in_one_piece = layers_in_one_piece(spec.module, tuple(KINDS), samples())
        found = slices_of(spec.module, config.num_slices, in_one_piece)
        whole, sliced = whole_of(found), sliced_by(found)
        names = tuple(n for name in spec.names for n in (found[name][0] if name in found else [name]))
        spec = replace(spec, num_slices=config.num_slices, in_one_piece=in_one_piece, names=names)
    shapes = {name: array.shape for name, array in sliced(arrays_of(spec.module)).items()}
    spec = replace(spec, shapes=shapes)
    if grid.splits_model or (config.update == "sharded" and grid.data > 1):
        check_can_be_shared(spec)
    if grid.network == 1:
        return SplitModule(spec, (0,), whole, sliced)
    wanted = None if config.stages is None else [name.strip() for name in config.stages.split(",")]
    X = samples()
    with spec.autocast():
        starts, places = find_stages(spec.module, grid.network, wanted, X)
        cut = cut_module(spec.module, starts, X)
        check_not_shared(cut, found)
        check_stages(spec.module, cut, X)
    return SplitModule(replace(spec, cut=cut), places, whole, sliced, notes_on_stages(config, grid, starts, places))


def unsliced(arrays: Arrays) -> Arrays:
    """The same, where no layer is in slices."""
    return dict(arrays)


def make_replica(spec: TrainSpec, device: Device, weights: Arrays, state: ReplicaState | None, part: Part) -> Replica:
    """The replica of a rank: of the whole module, or of the part that it holds."""
    if part.is_whole and not spec.num_slices:
        return CapturableModuleReplica(spec, device, weights, state, part)
    stages = {s: PartModuleReplica(spec, device, weights, state, part._replace(stages=(s,))) for s in part.stages}
    if len(stages) == 1:
        return stages[part.stages[0]]
    return cast(Replica, ChunkedReplica(stages))  # it measures stages, never the whole
