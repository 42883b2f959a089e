"""Training with VERL's engine in this process: the algorithm, the models, and their updates."""
