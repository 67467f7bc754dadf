"""`lockstep plan`: what k devices will bring, before a run is started."""

from pathlib import Path
from typing import Annotated, Any

import typer

from lockstep.cli import options
from lockstep.config import settings_in
from lockstep.core.settings import FAILURES, RECORDS, option_of

SETTINGS = [
    option_of(each)
    for each in settings_in()
    if each.metadata["group"] not in (RECORDS, FAILURES) and each.name not in ("num_shards", "split", "out")
]


@options.with_settings(*SETTINGS)
def plan(
    *,
    max_devices: Annotated[
        int | None, typer.Option(help="Largest number of devices. Default: those at hand.", show_default=False)
    ] = None,
    shards: Annotated[
        str | None,
        typer.Option(
            help="Numbers of shards to look at; the first is the run's own. Default: 8, and 1, 2, 4, 16.",
            show_default=False,
        ),
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(
            help="Look at these ways of splitting only: data, network, layers, or a product. Default: all.",
            show_default=False,
        ),
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(
            help="What if devices were connected by this: bytes a second and latency, like 25GB/s,10us.",
            show_default=False,
        ),
    ] = None,
    device_speed: Annotated[
        str | None,
        typer.Option(
            help="What if devices were so many times as fast as the one at hand: one number, or one for each, like "
            "1,0.5.",
            show_default=False,
        ),
    ] = None,
    device_memory: Annotated[
        str | None,
        typer.Option(
            help="What if devices had so much memory: one number, or one for each, like 80GB. Default: what they have.",
            show_default=False,
        ),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Run what this machine can run, and print the error of the prediction.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Append the result to this file, a line of JSON. Default: nothing is written.", show_default=False
        ),
    ] = None,
    seconds: Annotated[float, typer.Option(help="Measure for about so many seconds.")] = 40.0,
    quiet: options.Quiet = False,
    json: options.Json = False,
    **settings: Any,
) -> None:
    """Predict what more devices will bring: time, memory and limits of every way to split the work."""
    import shutil
    import sys

    from lockstep.analysis.check import CHECK_TIMES, checked, summary_of
    from lockstep.analysis.plan import PlanOptions, make_plan, own_shards, splits_in
    from lockstep.analysis.plan_table import COMPLETE, as_text
    from lockstep.analysis.results import check_writable, save
    from lockstep.config import RunConfig
    from lockstep.report.runlog import to_json

    def log(text: str) -> None:
        if not quiet:
            typer.echo(text, err=True)

    own_split = {} if split is None else {"split": split}
    config = RunConfig(**{**options.config_settings(settings), **own_shards(shards), **own_split})
    if out is not None:
        check_writable(out)
    asked = PlanOptions(max_devices, shards, link, device_speed, device_memory, splits_in(split), seconds)
    found, objects = make_plan(config, None, asked, log)
    if check:
        found = checked(found, config, objects, log, CHECK_TIMES * seconds)
    if out is not None:
        save(found, out)
    if json:
        typer.echo(to_json(found.plain()))
        return
    if sys.stdout.isatty():
        typer.echo(as_text(found, min(120, shutil.get_terminal_size((80, 24)).columns), is_styled=True))
    else:
        typer.echo(as_text(found, COMPLETE, has_all=True))
    if check:
        typer.echo(summary_of(found).sentence())
