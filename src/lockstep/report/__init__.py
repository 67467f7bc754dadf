"""Reporting of a run: on the terminal, in its folder, as a plot."""
