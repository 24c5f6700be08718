"""Programs that are kept from one start to the next, by all that decides them."""
