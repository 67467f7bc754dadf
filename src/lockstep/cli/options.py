"""The options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

from lockstep.backends import BACKENDS

Devices = Annotated[
    str | None,
    typer.Option(
        help="A number (GPUs if there are that many, else logical CPU devices), or a list: cpu:0,cpu:1 or "
        "cuda:0,cuda:0. Without it: all GPUs, else a logical device for each core.",
        show_default=False,
    ),
]
Data = Annotated[
    str,
    typer.Option(
        help="The data set: fashion-mnist, fashion-mnist-mini, a .npz file, or package.file:function, which gives "
        "(X, y), ((X, y), (X_test, y_test)), a map-style data set or a pair of them."
    ),
]
DataDir = Annotated[
    Path | None, typer.Option(help="Folder with the data set's files, packed or not.", show_default=False)
]
Model = Annotated[
    str,
    typer.Option(
        help="The model: lenet (in every framework), lenet-bn, mlp, resnet18, transformer, or "
        "package.file:function, which makes a module."
    ),
]
Epochs = Annotated[int, typer.Option(help="Passes over the data.")]
Shards = Annotated[
    int,
    typer.Option(help="Parts that every batch is cut into. Changing it changes the bits; changing --devices does not."),
]
Seed = Annotated[int, typer.Option(help="Decides the starting weights, the order of samples, and dropout.")]
Backend = Annotated[
    str, typer.Option(help=f"The framework: {', '.join(BACKENDS)}. `lockstep devices` says which are here.")
]
Engine = Annotated[
    str,
    typer.Option(
        help="Who runs the devices: inprocess, a thread for each; processes, a process for each (torchrun starts them "
        "on several machines)."
    ),
]
Exchange = Annotated[
    str,
    typer.Option(
        help="The all-reduce: sharded, gather or tree. ring, and native (the framework's own, between processes), add "
        "in an order of their own and do not keep the bits."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output, nothing else.")]
