"""PyTorch modules: the user's own, and those that come with Lockstep. Only this folder and its backend import it."""

FRAMEWORK = "torch"
