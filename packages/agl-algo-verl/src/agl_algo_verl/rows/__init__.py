"""From recorded runs to the rows and batches on which VERL trains."""
