"""Sources of new candidates: critics, editors, merges, demonstrations."""
