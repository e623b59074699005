"""A profile of a GPU that was not measured: from its datasheet and another's profile, refined by published times."""
