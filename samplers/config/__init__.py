"""From options to a sampler: names, presets, defaults and their origins, costs."""
