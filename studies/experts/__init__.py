"""How many tokens the experts of real steps get, and what that does to their products.

`measure` runs steps on a GPU; `table` sets their products beside forecasts.
"""
