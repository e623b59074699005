"""Projects profiles of unmeasured GPUs from datasheets and another GPU's profile, refined by published times."""
