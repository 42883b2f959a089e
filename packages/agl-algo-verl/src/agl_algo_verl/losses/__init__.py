"""The loss, the advantages and the corrections of a step, with the symbols of their papers."""
