"""What a run is about: data sets, models, how they are trained and judged."""
