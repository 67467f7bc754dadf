"""What every rank does in a step, as plain data. No framework, no numpy."""
