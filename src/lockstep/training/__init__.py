"""A run: set up, trained, evaluated, saved and resumed."""
