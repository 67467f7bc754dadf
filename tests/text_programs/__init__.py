"""The text's own program, restated in each framework: k replicas, a part of the batch for each, sums on device 0.

Every module has `train(start, batches, num_devices, lr)`: the weights of the first replica after one update for each
batch (X, y), all as numpy arrays. None of it uses Lockstep.
"""
