"""The model in training: its weights, optimizer, objective, checkpoints, and the rows that its updates read."""
