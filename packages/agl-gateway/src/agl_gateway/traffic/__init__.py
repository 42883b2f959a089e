"""Records served traffic and divides it: conversations, the choice of those to record, and the arms of a split."""
