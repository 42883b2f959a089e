"""Workers: the claim loop, remote workers, and the record from which these learn of a running experiment."""
