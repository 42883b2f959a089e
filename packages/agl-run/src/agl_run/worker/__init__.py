"""Workers: the claim loop, remote workers, and the record that tells them about a running experiment."""
