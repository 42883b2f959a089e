"""Workers: the claim loop, remote workers, and how they find the run."""
