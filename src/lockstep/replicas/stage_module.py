"""The module of one stage, and what it is made from."""

from collections.abc import Callable
from typing import Any, NamedTuple, Self, cast

from torch import fx, nn


class CutModule(NamedTuple):
    """A module that was cut: what each stage computes and holds. Plain data, made once for all ranks."""

    graphs: dict[tuple[int, bool], fx.Graph]  # of each stage, in training and in eval mode
    names: list[list[str]]  # of the layers, parameters and buffers of each stage
    modes: dict[bool, dict[str, bool]]  # whether each part is in training mode when the whole is, and when it is not


class StageModule(nn.Module):
    """One stage of a module, with the layers' own names. It is called with what crosses the cut before it."""

    def __init__(self, module: nn.Module, cut: CutModule, stage: int) -> None:
        """Takes the layers of `module`, which is a copy of the rank's own."""
        super().__init__()
        self.training, self._modes = module.training, cut.modes
        _move(module, self, cut.names[stage])
        self._forwards = {mode: _function_of(cut.graphs[stage, mode]) for mode in (True, False)}

    def train(self, mode: bool = True) -> Self:
        """Puts each layer in the mode that it has in the whole module, whose `train` may be one of its own."""
        super().train(mode)
        for name, part in self.named_modules():
            if name:
                part.training = self._modes[mode].get(name, mode)
        return self

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
