"""What several commands share: options with their help, prices, what goes to stdout."""
