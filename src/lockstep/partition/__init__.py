"""What goes where, as plain data: a batch into shards, shards to ranks. No framework, no numpy."""
