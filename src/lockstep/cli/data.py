"""`lockstep data`: where each data set is; fetches or verifies it."""

from typing import Annotated

import typer

from lockstep.cli import options
from lockstep.cli.answers import plain_answers


@plain_answers
def data(
    name: Annotated[
        str | None, typer.Argument(help="fashion-mnist, fashion-mnist-mini, or a .npz file.", show_default=False)
    ] = None,
    fetch: Annotated[bool, typer.Option("--fetch", help="Fetch it if it is not on this machine.")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Read every byte and check it.")] = False,
    data_dir: options.DataDir = None,
) -> None:
    """Show where the data sets are; with a name, fetch or verify one."""
    from lockstep.data import DATASETS, load_dataset
    from lockstep.data.fashion_mnist import MINI
    from lockstep.data.sources import find_or_fetch, locate
    from lockstep.report.console import fetch_progress

    names = [name] if name else list(DATASETS)
    for each in names:
        if each == "fashion-mnist":
            if fetch:
                with fetch_progress() as progress:
                    find_or_fetch(data_dir, progress)
            folder = locate(data_dir)
            where = str(folder) if folder else "not on this machine; `lockstep data fashion-mnist --fetch` gets it"
            there = folder is not None
        else:
            where, there = (str(MINI) if each == "fashion-mnist-mini" else each), True
        about = f"  ({DATASETS[each]})" if each in DATASETS else ""
        typer.echo(f"{each}: {where}{about}")
        if there and (verify or each not in DATASETS):
            found = load_dataset(each, data_dir)
            shape = "x".join(map(str, found.sample_shape))
            typer.echo(
                f"  good: {len(found.X_train):,} training and {len(found.X_test):,} test samples of {shape}, "
                f"{found.num_classes} classes"
            )
