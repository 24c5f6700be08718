"""Training: differentiate the certified forward graph region by region, and certify the backward."""
