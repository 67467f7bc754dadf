"""One way of splitting the work of a step per file. START HERE."""
