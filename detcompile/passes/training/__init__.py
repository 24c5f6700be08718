"""The certified forward graph of a model is differentiated, region by region, and its backward certified too."""
