"""Published facts about GPUs: datasheets, power and clocks, and rental prices, each with its source."""
