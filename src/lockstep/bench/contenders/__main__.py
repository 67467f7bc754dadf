"""One process of a contender: it sets itself up, then runs a trial for each line on its standard input."""

import json
import os
import sys
from typing import Any

from lockstep.bench.contenders import CONTENDERS, EXCHANGE, Place
from lockstep.bench.work import Work
from lockstep.core.child_process import die_with
from lockstep.core.errors import LockstepError


def main() -> int:
    """Answers until standard input ends; gives the exit status."""
    order = json.loads(sys.argv[1])
    die_with(order["parent"])
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is not an answer

    def answer(said: dict[str, Any]) -> None:
        answers.write(json.dumps(said) + "\n")
        answers.flush()

    try:
        contender = CONTENDERS.get(order["name"], EXCHANGE)
        runner = contender.make(Work(**order["work"]), Place(*order["place"]))
        answer({"ready": True})
        for line in sys.stdin:
            asked = json.loads(line)
            answer(getattr(runner, asked["do"])(**asked["with"]))
        runner.close()
    except Exception as problem:
        said = (str(problem).splitlines() or [""])[0]
        answer({"problem": said if isinstance(problem, LockstepError) else f"{type(problem).__name__}: {said}"})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
