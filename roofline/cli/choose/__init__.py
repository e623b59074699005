"""The commands that help to choose: cost, prices, plan, widths."""
