"""One address for the weights that VERL trains, whichever server has them."""
