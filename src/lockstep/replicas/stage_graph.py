"""A module as a graph of its layers, cut into stages.

PyTorch's symbolic tracing (`torch.fx`) gives the calls of layers, and the operations between them, in their order. A
stage is some of them, one after the other, with the same layers and the same operations, so with the same bits. What a
later stage needs crosses every cut on the way: skip connections, masks, several tensors, and weights that are used on
both sides of a cut, which belong to the first stage that uses them.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from lockstep.core.errors import ConfigError
from lockstep.replicas.crossing import CannotCross, flattened
from lockstep.replicas.untraceable import Kept, check_hooks, check_tensors, settings_of_thread, tensor_makers_recorded

HOW = "Name other cut points (stages=[...]), or split the data instead (--split data)"
FLOPS_PER_ENTRY = 40.0  # a float32 is written and read again in about the time of 40 multiplications and additions


class CannotCut(ConfigError):
    """A module that cannot be cut into stages."""


class LayerTracer(fx.Tracer):
    """Records calls of layers; those in `opened`, and containers, are traced into."""

    proxy_buffer_attributes = True

    def __init__(self, opened: Iterable[str], X: Any = None) -> None:
        """X are samples: inputs that they do not give have their defaults. None: all are given."""
        super().__init__()
        self._opened, self._path, self._settings, self._X = set(opened), [""], settings_of_thread(), X
        self.paths: dict[str, str] = {}  # by node: the module whose forward method it is in, or that it calls

    def create_args_for_root(self, *args: Any, **kwargs: Any) -> tuple[Any, list[Any]]:
        function, found = super().create_args_for_root(*args, **kwargs)
        num_given = len(self._X) if isinstance(self._X, (tuple, list)) else 1
        for number, proxy in enumerate(found[1:] if self._X is not None else []):
            name = str(proxy.node.target)
            is_given = name in self._X if isinstance(self._X, dict) else number < num_given
            if not is_given and proxy.node.args:  # a proxy would not be None, nor True or False
                found[1 + number] = proxy.node.args[0]
                self.graph.erase_node(proxy.node)
        return function, found

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        name = self.path_of_module(m)
        if not self.is_leaf_module(m, name):
            check_hooks(name, m._backward_hooks, m._backward_pre_hooks)
        self._path.append(name)
        try:
            return super().call_module(m, forward, args, kwargs)
        finally:
            self._path.pop()

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(*args, **kwargs)
        if node.op.startswith("call_") and settings_of_thread() != self._settings:
            raise ValueError(
                f"{self._path[-1] or 'it'} computes within torch.no_grad, autocast or the like, which stages would "
                f"not: do that in a layer of its own"
            )
        self.paths[node.name] = self._path[-1]
        return node

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name not in self._opened and type(m) is not nn.Sequential


def traced(module: nn.Module, opened: Iterable[str], X: Any = None) -> fx.Graph:
    """The graph of a module for samples like X, as it is: in training mode or in eval mode."""
    return traced_with_paths(module, opened, X)[0]


def traced_with_paths(module: nn.Module, opened: Iterable[str], X: Any = None) -> tuple[fx.Graph, dict[str, str]]:
    """The same, and for each node the module that it belongs to."""
    tracer, kept = LayerTracer(opened, X), Kept(module)
    try:
        own = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
        check_hooks("", *own)
        with tensor_makers_recorded(tracer):
            graph = tracer.trace(module)
        check_tensors(module, graph)
        kept.check_unchanged()
    except Exception as problem:  # symbolic tracing fails in many ways
        said = str(problem).strip().partition("\n")[0]
        kind = type(module).__name__
        raise CannotCut(
            f"{kind} cannot be cut into stages: its forward method cannot be traced ({said}). A cut has to lie between "
            f"layers that are called one after the other, without decisions that depend on tensors. {HOW}."
        ) from problem
    finally:
        kept.restore()
    return graph, tracer.paths


def ancestors(name: str) -> list[str]:
    """The modules that contain a module."""
    parts = name.split(".")
    return [".".join(parts[:at]) for at in range(1, len(parts))]


def layer_calls(graph: fx.Graph) -> list[fx.Node]:
    """The calls of layers, in their order: a stage may begin at each but the first. A layer's first call only."""
    found: dict[str, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "call_module":
            found.setdefault(str(node.target), node)
    return list(found.values())


def stages_of_nodes(
    module: nn.Module, graph: fx.Graph, paths: dict[str, str], starts: Sequence[str]
) -> dict[fx.Node, int]:
    """The stage of each node, where stage n + 1 begins with the call of layer `starts[n]`.

    A weight belongs to the first stage that uses it.
    """
    begins = [_first_node(graph, paths, name, module) for name in starts]
    stage, found = 0, dict[fx.Node, int]()
    for node in graph.nodes:
        while stage < len(begins) and node is begins[stage]:
            stage += 1
        found[node] = stage
    if stage < len(begins):
        raise CannotCut(
            f"The stages {', '.join(starts)} do not come in this order in the network: give them in the order in which "
            f"its forward method calls them."
        )
    computing = {found[node] for node in graph.nodes if node.op.startswith("call_")}
    if empty := [number for number in range(len(starts) + 1) if number not in computing]:
        raise CannotCut(
            f"The stages that begin with {', '.join(starts)} leave stage {empty[0]} without a layer. Name each layer "
            f"once, and not the first: the first stage begins there anyway."
        )
    first: dict[int, int] = {}  # id of a tensor -> the first stage that uses it
    for node in graph.nodes:
        for tensor in tensors_of(module, node):
            users = [found[user] for user in node.users] if node.op == "get_attr" else [found[node]]
            first[id(tensor)] = min([*users, first.get(id(tensor), len(starts))])
    for node in graph.nodes:
        if node.op == "get_attr":
            (tensor,) = tensors_of(module, node)
            found[node] = first[id(tensor)]
    return found


def layers_with_weights_elsewhere(module: nn.Module, graph: fx.Graph, stages: dict[fx.Node, int]) -> list[str]:
    """Layers that are called in a stage which does not own their weights: these are to be traced into."""
    owner: dict[int, int] = {}
    for node in graph.nodes:
        for tensor in tensors_of(module, node):
            owner[id(tensor)] = min(owner.get(id(tensor), stages[node]), stages[node])
    return [
        str(node.target)
        for node in graph.nodes
        if node.op == "call_module" and any(owner[id(t)] < stages[node] for t in tensors_of(module, node))
    ]


def tensors_of(module: nn.Module, node: fx.Node) -> list[Tensor]:
    """The parameters and buffers that a node uses by itself."""
    if node.op == "call_module":
        layer = module.get_submodule(str(node.target))
        return [*layer.parameters(), *layer.buffers()]
    if node.op == "get_attr":
        found: Any = module
        for name in str(node.target).split("."):
            found = getattr(found, name)
        return [found] if isinstance(found, Tensor) else []
    return []


def _first_node(graph: fx.Graph, paths: dict[str, str], name: str, module: nn.Module) -> fx.Node:
    """The call of a layer, or the first thing that is done within it."""
    for node in graph.nodes:
        path = paths.get(node.name, "")
        if node.op != "get_attr" and (path == name or path.startswith(f"{name}.")):
            return node
    known = [target for target in dict(module.named_modules()) if target]
    if name not in known:
        near = ", ".join(known[:8])
        raise CannotCut(f"There is no layer called {name!r} to begin a stage with. There are: {near}, ...")
    raise CannotCut(f"The forward method does not call {name}, so no stage can begin with it. {HOW}.")


def stage_graph(graph: fx.Graph, stages: dict[fx.Node, int], stage: int, num_stages: int) -> fx.Graph:
    """The nodes of one stage, as a graph of its own. Stage 0 has the inputs of the whole, the last its output.

    The inputs of others are what crosses the cut before them, in the order of the nodes.
    """
    made, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    arriving = crossing(graph, stages, stage) if stage else []
    for node in arriving:
        copies[node] = made.placeholder(node.name)
    for node in graph.nodes:
        if stages[node] == stage and node.op != "output":
            copies[node] = made.node_copy(node, copies.__getitem__)
    if stage == num_stages - 1:
        (output,) = [node for node in graph.nodes if node.op == "output"]
        made.node_copy(output, copies.__getitem__)
    else:
        made.output(tuple(copies[node] for node in crossing(graph, stages, stage + 1)))
    return made


def crossing(graph: fx.Graph, stages: dict[fx.Node, int], stage: int) -> list[fx.Node]:
    """What is made before a stage, and used in it or after it."""
    last = max(stages.values())
    return [
        node
        for node in graph.nodes
        if stages[node] < stage and any((last if u.op == "output" else stages[u]) >= stage for u in node.users)
    ]


def node_costs(module: nn.Module, graph: fx.Graph, inputs: Any) -> dict[fx.Node, tuple[float, float]]:
    """For each node the cost of computing it, and the entries of what it gives; computed on shapes, without numbers.

    In floating-point operations; what moves an entry through memory counts as many of them as take that long.
    """
    from torch.utils.flop_counter import FlopCounterMode

    found: dict[fx.Node, tuple[float, float]] = {}
    with FlopCounterMode(display=False) as counter:
        before = 0
        for node, result in evaluated(module, graph, inputs):
            entries = sum(leaf.numel() for leaf in _tensors_in(result))
            computes = node.op in ("call_module", "call_function", "call_method")
            flops, before = counter.get_total_flops() - before, counter.get_total_flops()
            found[node] = flops + (FLOPS_PER_ENTRY * entries if computes else 0), entries
    return found


def evaluated(module: nn.Module, graph: fx.Graph, inputs: Any) -> Iterator[tuple[fx.Node, Any]]:
    """What each node gives, node by node."""
    interpreter = fx.Interpreter(module, graph=graph)
    interpreter.args_iter, interpreter.env = iter(inputs), {}
    for node in graph.nodes:  # not `interpreter.run`: its progress bar starts a thread
        with torch.no_grad():
            result = interpreter.env[node] = interpreter.run_node(node)
        yield node, result


def check_crossing(module: nn.Module, graph: fx.Graph, stages: dict[fx.Node, int], inputs: Any) -> None:
    """Refuses values that cannot be handed to another device; as far as the module can be run without numbers."""
    last = max(stages.values())
    crosses = {node for stage in range(1, last + 1) for node in crossing(graph, stages, stage)}
    values = evaluated(module, graph, inputs)
    while True:
        try:
            node, value = next(values)
        except StopIteration:
            return
        except Exception:  # an operation that needs numbers: then the run will say it
            return
        try:
            flattened(value if node in crosses else None)
        except CannotCross as problem:
            raise CannotCut(f"{type(module).__name__} cannot be cut there: at {node.name}, {problem}.") from problem


def _tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [leaf for entry in value for leaf in _tensors_in(entry)]
    return []
