"""What a run will cost, before it is started, and where its time went, after it."""
