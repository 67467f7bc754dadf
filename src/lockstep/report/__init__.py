"""How a run looks: on the terminal, in its folder, as a picture."""
