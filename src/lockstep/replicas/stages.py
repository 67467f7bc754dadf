"""A module in stages: where it is cut."""

import copy
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from lockstep.partition.chain import Chain, NamedChain
from lockstep.partition.stages import choose_stages, there_and_back
from lockstep.replicas.module_state import modules_in_eval_mode, put_in_mode, without_numbers
from lockstep.replicas.stage_graph import (
    FLOPS_PER_ENTRY,
    CannotCut,
    ancestors,
    check_crossing,
    crossing,
    layer_calls,
    layers_with_weights_elsewhere,
    node_costs,
    stage_graph,
    stages_of_nodes,
    traced,
    traced_with_paths,
)
from lockstep.replicas.stage_module import CutModule

MIN_PARAMETERS = 1_000_000  # of a network whose memory is shared out: less is little for any device
NUM_TRIED = 2  # samples that shapes are found with
MIN_LAYERS_PER_STAGE = 3  # fewer, and blocks are opened to find a more even cut


class FoundStages(NamedTuple):
    """The layers that all stages but the first begin with, and the place in a pipeline of each stage."""

    starts: list[str]
    places: tuple[int, ...]


def find_stages(module: nn.Module, num_places: int, names: Sequence[str] | None, X: Any) -> FoundStages:
    """The stages of a module for so many devices: those that the user names, or stages of equal cost.

    X are some samples, to know the shapes. The choice depends on shapes only: all ranks make the same.
    """
    if names is not None:
        if len(names) not in (num_places - 1, 2 * num_places - 2):
            raise CannotCut(
                f"{num_places} devices have {num_places - 1} cuts between their stages, and {len(names)} layers are "
                f"named. Name the layers that all stages but the first begin with: stages=[...] (--stages); or "
                f"{2 * num_places - 2} of them, to go through all devices and back."
            )
        _check_cut(module, list(names), X)
        places = tuple(range(num_places)) if len(names) < num_places else there_and_back(num_places)
        return FoundStages(list(names), places)
    module = _for_training(module)
    graph = _chain(module, num_places, X)
    calls = layer_calls(graph)
    costs, crossings = _costs(module, graph, X)
    memory = [float(sum(p.numel() for p in module.get_submodule(str(call.target)).parameters())) for call in calls]
    if sum(memory) < MIN_PARAMETERS:  # not worth a second stage for anybody
        memory = [0.0 for _ in calls]
    stages = choose_stages(costs, memory, crossings, num_places)
    found = [str(calls[at].target) for at in stages.starts]
    _check_cut(module, found, X)
    return FoundStages(found, stages.places)


def chain_of(module: nn.Module, samples: Callable[[], Any], num_places: int) -> NamedChain:
    """The layers that a stage may begin with, for so many devices; a layer that is called again is where it was first.

    Costs are for a sample, by shapes only: all ranks find the same.
    """
    module, X = _for_training(module), samples()
    graph = _chain(module, num_places, X)
    names = [str(call.target) for call in layer_calls(graph)]
    costs, crossings = _costs(module, graph, X)
    try:
        entries = node_costs(module, graph, _positional(graph, X))
    except Exception:  # an operation that needs numbers
        entries = {}
    first = [number for number, name in enumerate(names) if names.index(name) == number]
    bounds = [*first, len(names)]
    ranges, calls = list(pairwise(bounds)), layer_calls(graph)
    parameters = [sum(p.numel() for p in module.get_submodule(names[at]).parameters()) for at in first]
    kept = [sum(entries.get(calls[n], (0.0, 0.0))[1] for n in range(a, b)) / NUM_TRIED for a, b in ranges]
    return NamedChain(
        [names[at] for at in first],
        Chain([sum(costs[a:b]) / NUM_TRIED for a, b in ranges], [crossings[at - 1] / NUM_TRIED for at in first[1:]],
              parameters, kept),
    )  # fmt: skip


def _for_training(module: nn.Module) -> nn.Module:
    """A copy with shapes only, in training mode."""
    copied = without_numbers(module)
    put_in_mode(copied, True, modules_in_eval_mode(module))
    return copied


def _chain(module: nn.Module, num_places: int, X: Any) -> fx.Graph:
    """The graph of a module with enough layer calls for so many devices: blocks are opened where there are few."""
    opened = set[str]()
    graph = traced(module, opened, X)
    while len(layer_calls(graph)) < MIN_LAYERS_PER_STAGE * num_places:
        inner = {str(node.target) for node in layer_calls(graph) if _is_block(module.get_submodule(str(node.target)))}
        try:
            deeper = traced(module, opened | inner, X) if inner else graph
            with torch.no_grad():  # in eval mode they may be other ones
                traced(copy.deepcopy(module).eval(), opened | inner, X)
        except CannotCut:
            break
        if deeper is graph or len(layer_calls(deeper)) <= len(layer_calls(graph)):
            break
        graph, opened = deeper, opened | inner
    if not layer_calls(graph):
        raise CannotCut(
            f"{type(module).__name__} is one layer by itself, which cannot be cut into {num_places} stages. Split the "
            f"layers or the data instead (--split layers, --split data)."
        )
    return graph


def _check_cut(module: nn.Module, starts: list[str], X: Any) -> None:
    """Whether it works."""
    module = _for_training(module)
    graph, stages = _graphs(module, starts, X)
    check_crossing(module, graph, stages, _positional(graph, X))


def _is_block(layer: nn.Module) -> bool:
    """Whether a layer is the user's own, made of others."""
    return not type(layer).__module__.startswith("torch.nn.") and any(True for _ in layer.children())


def _costs(module: nn.Module, graph: fx.Graph, X: Any) -> tuple[list[float], list[float]]:
    """The cost of each layer call with what comes after it, and of a cut before each but the first."""
    calls = layer_calls(graph)
    of_layers = [sum(p.numel() for p in module.get_submodule(str(n.target)).parameters()) + 1.0 for n in calls]
    try:
        costs = node_costs(module, graph, _positional(graph, X))
    except Exception:  # an operation that needs numbers: then the number of parameters has to do
        return of_layers, [0.0] * (len(calls) - 1)
    sums, crossings = [0.0 for _ in calls], list[float]()
    at = 0
    for node in graph.nodes:
        if at + 1 < len(calls) and node is calls[at + 1]:
            at += 1
        sums[at] += costs.get(node, (0.0, 0.0))[0]
    order = {node: number for number, node in enumerate(graph.nodes)}
    for call in calls[1:]:
        sides = {node: int(order[node] >= order[call]) for node in graph.nodes}
        live = crossing(graph, sides, 1)
        crossings.append(FLOPS_PER_ENTRY * sum(costs.get(node, (0.0, 0.0))[1] for node in live))
    return sums, crossings


def _positional(graph: fx.Graph, X: Any) -> list[Any]:
    """Samples without numbers, in the order of the inputs."""

    def empty(part: Any) -> Any:
        return torch.empty_like(part, device="meta") if isinstance(part, Tensor) else part

    if isinstance(X, dict):
        names = [str(node.target) for node in graph.nodes if node.op == "placeholder"]
        return [empty(X[name]) if name in X else None for name in names]
    return [empty(part) for part in (X if isinstance(X, (tuple, list)) else [X])]


def _graphs(module: nn.Module, starts: list[str], X: Any) -> tuple[fx.Graph, dict[fx.Node, int]]:
    """The graph of the module as it is, with the stage of each node."""
    opened, more = {ancestor for name in starts for ancestor in ancestors(name)}, set[str]()
    while True:
        try:
            graph, paths = traced_with_paths(module, opened, X)
        except CannotCut as problem:
            if not more:
                raise
            raise CannotCut(
                f"{', '.join(sorted(more))} is used in two stages, and cannot be traced, as it would have to be. Name "
                f"cut points that leave all its calls in one stage (stages=[...]), or split the data (--split data)."
            ) from problem
        stages = stages_of_nodes(module, graph, paths, starts)
        more = set(layers_with_weights_elsewhere(module, graph, stages)).difference(opened)
        if not more:
            return graph, stages
        opened |= more  # their weights become values, which can cross a cut


def cut_module(module: nn.Module, starts: Sequence[str], X: Any = None) -> CutModule:
    """Cuts a module before these layers, for samples like X. Tracing is not made for several threads: one does it."""
    in_eval_mode = modules_in_eval_mode(module)
    module = copy.deepcopy(module)
    num_stages, held = len(starts) + 1, dict[str, set[int]]()
    graphs, modes = {}, {}
    for is_training in (True, False):
        put_in_mode(module, is_training, in_eval_mode)
        modes[is_training] = {name: part.training for name, part in module.named_modules()}
        with nullcontext() if is_training else torch.no_grad():  # as it is evaluated
            graph, stages = _graphs(module, list(starts), X)
        for stage in range(num_stages):
            graphs[stage, is_training] = stage_graph(graph, stages, stage, num_stages)
        for node, number in stages.items():
            if node.op in ("call_module", "get_attr"):  # in several stages only where it has no weights
                held.setdefault(str(node.target), set()).add(number)
    names = [[name for name, numbers in held.items() if stage in numbers] for stage in range(num_stages)]
    names[-1] += _unused(module, held)
    return CutModule(graphs, names, modes)


def check_not_shared(cut: CutModule, sliced: Collection[str]) -> None:
    """Refuses weights in slices that cross a cut: they are those of a layer that two stages call."""
    for graph in cut.graphs.values():
        for node in graph.nodes:
            if node.op == "get_attr" and node.target in sliced:
                raise CannotCut(
                    f"The layer of {node.target} is called in two stages, and is in slices (--slices): it cannot be in "
                    f"both. Name cut points that leave its calls in one stage (stages=[...]), or leave --slices out."
                )


def _unused(module: nn.Module, held: Collection[str]) -> list[str]:
    """Modules with parameters or buffers that no stage uses: they belong to the model all the same."""

    def is_held(name: str) -> bool:
        return any(name == used or name.startswith(f"{used}.") for used in held)

    def unit(name: str) -> str:
        """The whole layer, where nothing of it is used: it may be in slices."""
        layer = name.rpartition(".")[0]
        return layer if layer and not any(used.startswith(f"{layer}.") for used in held) else name

    named = [name for name, _ in [*module.named_parameters(), *module.named_buffers()] if not is_held(name)]
    return list(dict.fromkeys(map(unit, named)))
