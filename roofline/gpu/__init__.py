"""What a GPU does. `catalogue/` has datasheets and prices; `laws/` say how the time of a kernel follows from its
sizes; `profile/` holds what is known of one GPU and answers how long a kernel takes, with a deviation; `fit/` makes
a profile of measurements, `projection/` one of a datasheet and another GPU's profile. `suites.py` reads what is
measured, which `studies/suites` makes. `links/` says what joins GPUs and how long collectives take there. `library/`
finds the profile or the host that a name means.
"""
