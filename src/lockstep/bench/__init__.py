"""Our step against others on the same model, data, batch and devices: `lockstep bench`."""
