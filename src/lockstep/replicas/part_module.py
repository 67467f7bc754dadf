"""The module of a rank: a copy of the user's, or the part of it that the rank holds."""

import torch
from torch import nn

from lockstep.partition.placement import Part
from lockstep.replicas.module_state import copy_of
from lockstep.replicas.sliced_layers import slice_layers
from lockstep.replicas.stage_module import StageModule
from lockstep.replicas.train_spec import TrainSpec


def part_of_module(spec: TrainSpec, part: Part) -> nn.Module:
    """A copy of the module, in slices and in stages as the run wants it, on the CPU."""
    module = copy_of(spec.module, torch.device("cpu"))
    if spec.num_slices:
        slice_layers(module, spec.num_slices, part.layer_rank, part.num_layer_ranks, spec.in_one_piece)
    if part.num_stages > 1:
        (stage,) = part.stages
        assert spec.cut is not None, "it was cut when the run was prepared"
        return StageModule(module, spec.cut, stage)
    return module
