"""What others publish of a GPU: its datasheet, its power and clock, and what it rents for, each with its source."""
