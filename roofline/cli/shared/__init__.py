"""What several commands share: options with their help, prices, output to stdout."""
