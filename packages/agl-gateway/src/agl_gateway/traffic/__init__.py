"""Records and divides served traffic: conversations, their sampling, and the arms of a split."""
