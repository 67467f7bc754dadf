"""What every other package uses: errors, devices, settings, layout, serialization, tracing."""
