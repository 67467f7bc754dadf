"""What everything else stands on: errors, devices, layout, serialization, tracing."""
