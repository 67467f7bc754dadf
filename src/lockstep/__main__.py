"""`python -m lockstep` is `lockstep`."""

from lockstep.cli import main

if __name__ == "__main__":
    main()
