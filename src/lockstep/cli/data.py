"""`lockstep data`: where each dataset is; fetches or verifies it."""

from pathlib import Path
from typing import Annotated, Any

import typer

from lockstep.cli import options
from lockstep.cli.output import say


@options.with_settings("data_dir")
def data(
    name: Annotated[
        str | None, typer.Argument(help="fashion-mnist, fashion-mnist-mini, or a .npz file.", show_default=False)
    ] = None,
    fetch: Annotated[bool, typer.Option("--fetch", help="Fetch it if it is not on this machine.")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Read every byte and check it.")] = False,
    **settings: Any,
) -> None:
    """Show where the datasets are; with a name, fetch or verify one."""
    from lockstep.core.errors import DataError
    from lockstep.core.registry import pick
    from lockstep.data import DATASETS, load_dataset
    from lockstep.data.fashion_mnist import MINI
    from lockstep.data.sources import find_or_fetch, locate
    from lockstep.report.console import fetch_progress

    data_dir: Path | None = settings["data_dir"]
    if name is not None and not name.endswith(".npz"):
        pick(DATASETS, name, "dataset (or .npz file)")
    for each in [name] if name else DATASETS:
        folder = data_dir if each == "fashion-mnist" else None
        path: Path | None = Path(each) if each.endswith(".npz") else MINI
        if each == "fashion-mnist":
            with fetch_progress() as progress:
                path = find_or_fetch(folder, progress) if fetch or folder else locate()
        if path is None and verify:
            raise DataError("fashion-mnist is not on this machine. Get it: lockstep data fashion-mnist --fetch.")
        if path is None:
            say(f"{each}: not on this machine; `lockstep data fashion-mnist --fetch` gets it")
            continue
        about = f"  ({DATASETS[each]})" if each in DATASETS else ""
        if verify or each not in DATASETS:
            found_data = load_dataset(each, folder)
            shape = "x".join(map(str, found_data.sample_shape or ()))
            num_samples = f"{found_data.num_train:,} training and {found_data.num_test:,} test samples"
            about = f"\n  good: {num_samples} of {shape}, {found_data.num_classes} classes"
        say(f"{each}: {path}{about}")
