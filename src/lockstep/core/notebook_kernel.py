"""Whether this process is the kernel of a notebook."""

import sys


def in_notebook() -> bool:
    """Whether what is printed here is shown in a notebook's cell."""
    if "ipykernel" not in sys.modules:
        return False
    from IPython import get_ipython

    return hasattr(get_ipython(), "kernel")
