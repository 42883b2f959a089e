"""Where new candidates come from: critics, editors, merges, demonstrations."""
