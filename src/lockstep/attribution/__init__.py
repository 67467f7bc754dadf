"""Where the time of a step went, from the spans of its ranks: plain data, on any machine."""
