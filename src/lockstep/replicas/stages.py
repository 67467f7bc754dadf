"""A module in stages: where it is cut, and the module of each stage."""

import copy
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx, nn

from lockstep.partition.chain import Chain, NamedChain
from lockstep.partition.stages import choose_stages, there_and_back
from lockstep.replicas.module_state import without_numbers
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
    module = without_numbers(module)
    graph = _chain(module, num_places)
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
    module, X = without_numbers(module), samples()
    graph = _chain(module, num_places)
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


def _chain(module: nn.Module, num_places: int) -> fx.Graph:
    """The graph of a module with enough layer calls for so many devices: blocks are opened where there are few."""
    opened = set[str]()
    graph = traced(module, opened)
    while len(layer_calls(graph)) < MIN_LAYERS_PER_STAGE * num_places:
        inner = {str(node.target) for node in layer_calls(graph) if _is_block(module.get_submodule(str(node.target)))}
        try:
            deeper = traced(module, opened | inner) if inner else graph
        except CannotCut:
            break
        if deeper is graph or len(layer_calls(deeper)) == len(layer_calls(graph)):
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
    module = without_numbers(module)
    graph, stages = _graphs(module, starts)
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


def _graphs(module: nn.Module, starts: list[str]) -> tuple[fx.Graph, dict[fx.Node, int]]:
    """The graph of the module as it is, with the stage of each node."""
    opened, more = {ancestor for name in starts for ancestor in ancestors(name)}, set[str]()
    while True:
        try:
            graph, paths = traced_with_paths(module, opened)
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


class CutModule(NamedTuple):
    """A module that was cut: what each stage computes and holds. Plain data, made once for all ranks."""

    graphs: dict[tuple[int, bool], fx.Graph]  # of each stage, in training and in eval mode
    names: list[list[str]]  # of the layers, parameters and buffers of each stage


def cut_module(module: nn.Module, starts: Sequence[str]) -> CutModule:
    """Cuts a module before these layers. Tracing is not made for several threads: it is done once, by one."""
    module = copy.deepcopy(module)
    num_stages, held = len(starts) + 1, dict[str, set[int]]()
    modes = {part: part.training for part in module.modules()}
    graphs = {}
    for is_training in (True, False):
        for part, mode in modes.items():
            part.training = mode and is_training
        with nullcontext() if is_training else torch.no_grad():  # as it is evaluated
            graph, stages = _graphs(module, list(starts))
        for stage in range(num_stages):
            graphs[stage, is_training] = stage_graph(graph, stages, stage, num_stages)
        for node, number in stages.items():
            if node.op in ("call_module", "get_attr"):  # in several stages only where it has no weights
                held.setdefault(str(node.target), set()).add(number)
    names = [[name for name, numbers in held.items() if stage in numbers] for stage in range(num_stages)]
    names[-1] += _unused(module, held)
    return CutModule(graphs, names)


def check_not_shared(cut: CutModule, sliced: Collection[str]) -> None:
    """Refuses weights in slices that cross a cut: they are those of a layer that two stages call."""
    for graph in cut.graphs.values():
        for node in graph.nodes:
            if node.op == "get_attr" and node.target in sliced:
                raise CannotCut(
                    f"The layer of {node.target} is called in two stages, and is in slices (--slices): it cannot be in "
                    f"both. Name cut points that leave its calls in one stage (stages=[...]), or leave --slices out."
                )


class StageModule(nn.Module):
    """One stage of a module, with the layers' own names. It is called with what crosses the cut before it."""

    def __init__(self, module: nn.Module, cut: CutModule, stage: int) -> None:
        """Takes the layers of `module`, which is a copy of the rank's own."""
        super().__init__()
        self.training = module.training
        _move(module, self, cut.names[stage])
        self._forwards = {mode: _function_of(cut.graphs[stage, mode]) for mode in (True, False)}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The last stage's output, or a tuple of what the next stage needs."""
        return self._forwards[self.training](self, *args, **kwargs)


def _function_of(graph: fx.Graph) -> Callable[..., Any]:
    """What a graph computes, as a function of the module that has its layers, parameters and buffers.

    An `fx.GraphModule` would have references of its own to buffers: another device's, once the stage has moved.
    """
    code = graph.python_code("self")
    names = dict(code.globals)
    exec(compile(code.src, "<a stage>", "exec"), names)
    return cast(Callable[..., Any], names["forward"])


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


def _move(source: nn.Module, target: nn.Module, names: list[str]) -> None:
    """Gives `target` the layers, parameters and buffers of `source` with these names, under the same names."""
    for name in sorted(names, key=lambda name: name.count(".")):
        *path, last = name.split(".")
        ours, theirs = target, source
        for part in path:
            theirs = getattr(theirs, part)
            if part not in ours._modules:
                ours.add_module(part, nn.Module())
            ours = ours._modules[part]
        if last in theirs._modules:
            ours.add_module(last, theirs._modules[last])
        elif last in theirs._parameters:
            ours.register_parameter(last, theirs._parameters[last])
        elif last in theirs._buffers:
            persistent = last not in theirs._non_persistent_buffers_set
            ours.register_buffer(last, theirs._buffers[last], persistent)
        else:  # a tensor that is none of these
            setattr(ours, last, getattr(theirs, last))
