"""What a rank holds: a flat vector in any framework, or a PyTorch module."""
