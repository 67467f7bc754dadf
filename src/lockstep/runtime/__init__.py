"""Who runs a schedule: `inprocess`, a thread for each device; `processes`, a process for each."""
