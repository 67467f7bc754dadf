"""Writes docs/api.md, the reference of the public API, from its docstrings: `make docs`.

`python tools/api_reference.py --check` only says whether the page is up to date.
"""

import inspect
import re
import sys
from pathlib import Path
from types import FunctionType
from typing import Any

import lockstep
from lockstep.config import TYPES, settings_in
from lockstep.core.settings import help_of, option_of

PAGE = Path(__file__).parent.parent / "docs" / "api.md"
FIRST = ["train", "train_batch", "evaluate_accuracy", "get_params", "split_batch", "allreduce", "devices", "try_gpu"]
SHOWN = {"batch_size", "lr", "model", "data", "loss", "optimizer", "devices", "epochs", "out"}  # in the signature
SCOPES = {"identity": "yes", "agreed": "no", "local": "no"}
CHANGES = {"epochs": "yes", "exchange": "`ring`, `native`"}  # may be others when a run is resumed


def page() -> str:
    """The whole page."""
    names = FIRST + [name for name in lockstep.__all__ if name not in FIRST]
    return "\n".join([HEAD, *(section(name) for name in names), settings()])


def section(name: str) -> str:
    """One public function or class."""
    thing: Any = getattr(lockstep, name)
    lines = [f"## `{name}`\n"]
    if inspect.isfunction(thing) or name == "Trainer":
        lines.append(f"```\n{name}{signature(thing)}\n```\n")
    lines.append(markdown(inspect.getdoc(thing) or ""))
    if inspect.isclass(thing):
        for method, member in vars(thing).items():
            if not method.startswith("_") and isinstance(member, (FunctionType, classmethod, property)):
                said = (inspect.getdoc(member) or "").partition("\n")[0]
                lines.append(f"- `{method}{arguments_of(member)}`: {said}")
        fields = re.findall(r"^    (\w+): [^#\n]+# (.*)$", inspect.getsource(thing), re.MULTILINE)
        lines += [f"- `{field}`: {said}" for field, said in fields]
        lines.append("")
    return "\n".join(lines)


def arguments_of(member: Any) -> str:
    """The names of a method's arguments; nothing for a property."""
    if isinstance(member, property):
        return ""
    function = member.__func__ if isinstance(member, classmethod) else member
    names = [str(each.replace(annotation=each.empty)) for each in inspect.signature(function).parameters.values()]
    return f"({', '.join(names[1:])})"


def signature(function: Any) -> str:
    """The signature; of `train`, without settings that have a table of their own, but for those that most runs have."""
    found = inspect.signature(function)
    options = {option_of(each) for each in settings_in()} - SHOWN
    kept = [
        parameter
        for parameter in found.parameters.values()
        if function is not lockstep.train or parameter.name not in options
    ]
    if function is lockstep.train:
        kept.append(inspect.Parameter("settings", inspect.Parameter.VAR_KEYWORD))
    text = str(found.replace(parameters=kept, return_annotation=inspect.Signature.empty))
    text = re.sub(r"<function (\w+) at 0x\w+>", r"\1", text)
    return re.sub(r"\b(lockstep\.core\.device|collections\.abc|typing|pathlib)\.", "", text)


def markdown(docstring: str) -> str:
    """A docstring, its examples as code."""
    out, is_code = [], False
    for line in docstring.splitlines():
        starts = line.startswith(">>>")
        if starts and not is_code:
            out.append("```pycon")
            is_code = True
        elif is_code and not line.strip():
            out.append("```")
            is_code = False
        out.append(line)
    return "\n".join(out + ["```"] * is_code) + "\n"


def settings() -> str:
    """The table of settings."""
    rows = [
        "## Settings of a run\n",
        "| `train(...)` | command line | type | default | what | changes the weights |",
        "|---|---|---|---|---|---|",
    ]
    for each in settings_in():
        name, kind = (
            option_of(each),
            str(getattr(TYPES[each.name], "__name__", TYPES[each.name])).replace("pathlib.", ""),
        )
        kind = "Path or None" if "Path" in kind else kind.replace(" | ", " or ")
        flag, changes = f"--{name.replace('_', '-')}", CHANGES.get(name, SCOPES[each.metadata["scope"]])
        rows.append(f"| `{name}` | `{flag}` | {kind} | `{each.default}` | {help_of(each)} | {changes} |")
    return "\n".join(rows) + "\n"


HEAD = """# API reference

Made from the docstrings by `make docs`. See also the [tutorial](tutorial.md) (the text's functions) and the
[guide](guide.md) (a model of your own).
"""


def main() -> int:
    """Writes the page, or checks it."""
    if "--check" in sys.argv:
        if PAGE.exists() and PAGE.read_text() == page():
            return 0
        print("docs/api.md is not up to date: make docs", file=sys.stderr)
        return 1
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
