"""From recorded runs to the rows and batches that VERL trains."""
