"""The benchmark layer: data sets, models, measurements. The core never imports it."""
