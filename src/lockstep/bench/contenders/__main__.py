"""One process of a contender: sets it up, then executes the commands that arrive on standard input."""

import json
import os
import sys
from functools import partial

from lockstep.bench.contenders import CONTENDERS, EXCHANGES, ContenderRank
from lockstep.bench.workload import Workload
from lockstep.core.child_process import die_with
from lockstep.core.errors import LockstepError


def main() -> int:
    """Answers commands until standard input ends; the exit status."""
    setup = json.loads(sys.argv[1])
    die_with(setup["parent"])
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is not an answer
    answer = partial(print, file=answers, flush=True)
    try:
        contender = CONTENDERS.get(setup["name"], EXCHANGES)
        runner = contender.make(Workload(**setup["workload"]), ContenderRank(*setup["rank"]))
        for line in sys.stdin:
            request = json.loads(line)
            answer(json.dumps(getattr(runner, request["command"])(**request["arguments"])))
        runner.close()
    except Exception as problem:
        message = (str(problem).splitlines() or [""])[0]
        kind = "" if isinstance(problem, LockstepError) else f"{type(problem).__name__}: "
        answer(json.dumps({"problem": f"{kind}{message}"}))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
